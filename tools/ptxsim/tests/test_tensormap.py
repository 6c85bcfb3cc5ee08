"""tensormap.replace makes the map that the host would have encoded, and fences stand between a change and its use."""

import numpy as np
import ptxsim
import pytest
from ptx import HEADER, aligned

FIELDS = {  # field: type of its value, whether it has an ordinal
    "global_address": ("b64", False),
    "rank": ("b32", False),
    "box_dim": ("b32", True),
    "global_dim": ("b32", True),
    "global_stride": ("b64", True),
    "element_stride": ("b32", True),
    "elemtype": ("b32", False),
    "interleave_layout": ("b32", False),
    "swizzle_mode": ("b32", False),
    "swizzle_atomicity": ("b32", False),
    "fill_mode": ("b32", False),
}
ELEMENT_TYPES = [0, 1, 2, 3, 4, 5, 6, 7, 10, 8, 9, 11, 12, 13, 14, 15]  # the ISA's numbers to CUtensorMapDataType
ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%d1], 128;"
RELEASE = "fence.proxy.tensormap::generic.release.gpu;"


def edit(field, value, ordinal=0, space="shared::cta", where="%r8"):
    type_, ordered = FIELDS[field]
    values = f"{ordinal}, {value}" if ordered else f"{value}"
    return f"@!%p0 tensormap.replace.tile.{field}.{space}.b1024.{type_} [{where}], {values};"


def run(
    edits,
    source,
    width=128,
    mode="shared",
    fences=(RELEASE, ACQUIRE),
    use="2d",
    seed=0,
    second="",
    off=(),
    **map_options,
):
    """Changes a map, in shared memory and then copied or in global memory itself, and loads ``width`` bytes through it.

    Returns the changed map and what was loaded. Global memory: %d1, a map in it, of ``source`` unless told otherwise.
    """
    options = {
        "data_type": 2,
        "extents": source.shape[::-1],
        "strides": [source.strides[0]],
        "box": [8, 4],
    } | map_options
    options = {"address": source.ctypes.data} | options
    old = np.frombuffer(ptxsim.encode_tiled(**options), np.uint8)
    place, out = aligned(old), aligned(np.zeros(width, np.uint8))
    if mode == "shared":
        work = "\n".join([*edits, "bar.warp.sync -1;", COPY])
    else:
        work = "\n".join(
            [*(e.replace("shared::cta", "global").replace("%r8", "%d1") for e in edits), f"@!%p0 {fences[0]}"]
        )
    coordinates = ", ".join(["0"] * int(use[0]))
    body = f"""{HEADER}.visible .entry k(.param .u64 p0, .param .u64 p1)
{{
.reg .pred %p<8>; .reg .b16 %h0; .reg .b32 %r<30>; .reg .b64 %d<9>;
.shared .align 128 .b8 map[128]; .shared .align 1024 .b8 tile[1024]; .shared .align 8 .b64 bar;
mov.u32 %r0, %tid.x; setp.ne.u32 %p0, %r0, 0; ld.param.b64 %d1, [p0]; ld.param.b64 %d2, [p1]; mov.u32 %r8, map;
mad.wide.u32 %d3, %r0, 4, %d1; mad.lo.s32 %r1, %r0, 4, %r8; setp.ge.u32 %p4, %r0, 32; @%p4 bra READY;
ld.global.b32 %r2, [%d3]; st.shared.b32 [%r1], %r2; bar.warp.sync -1;
@!%p0 mbarrier.init.shared.b64 [bar], 1;
{work}
{fences[1]}
READY: bar.sync 0; mov.u32 %r3, tile; {second}
@!%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], {width};
@!%p0 cp.async.bulk.tensor.{use}.shared::cta.global.tile.mbarrier::complete_tx::bytes
  [%r3], [%d1, {{{coordinates}}}], [bar];
WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra WAIT;
LOOP: setp.ge.u32 %p5, %r0, {width}; @%p5 ret; add.s32 %r4, %r3, %r0; cvt.u64.u32 %d4, %r0; add.s64 %d4, %d4, %d2;
ld.shared.b8 %h0, [%r4]; st.global.b8 [%d4], %h0; add.s32 %r0, %r0, 64; bra LOOP;
}}"""
    ptxsim.load(body).launch(grid=1, block=64, params=[place, out], memory=[place, out, source], seed=seed, off=off)
    return place, out


COPY = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%d1], [map], 128;"


def sources():
    return aligned(np.random.default_rng(3).integers(1, 1 << 31, (12, 16)).astype(np.uint32))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["shared", "global"])
def test_a_changed_map_is_the_one_that_the_host_encodes(mode, seed):
    source = sources()
    new = {
        "data_type": 4,
        "address": source.ctypes.data + 64,
        "extents": [8, 3, 2],
        "strides": [128, 64],
        "box": [4, 2, 2],
        "swizzle": 1,
    }
    edits = [
        edit("elemtype", 4),
        edit("global_address", source.ctypes.data + 64),
        edit("rank", 2),
        edit("swizzle_mode", 1),
        edit("fill_mode", 0),
        edit("interleave_layout", 0),
        edit("swizzle_atomicity", 0),
        *(edit("global_dim", n, i) for i, n in enumerate(new["extents"])),
        *(edit("global_stride", n, i) for i, n in enumerate(new["strides"])),
        *(edit("box_dim", n, i) for i, n in enumerate(new["box"])),
        *(edit("element_stride", 1, i) for i in range(3)),
    ]
    place, out = run(edits, source, mode=mode, use="3d", seed=seed)
    want = np.frombuffer(ptxsim.encode_tiled(**new), np.uint8).copy()
    changed = np.flatnonzero(place != want)
    assert len(changed) == 1 and place[changed] == 1  # that it was changed
    flat = source.view(np.uint64).ravel()[8:]
    box = [[[flat[16 * y + 8 * z + x] for x in range(4)] for y in range(2)] for z in range(2)]
    offsets = np.arange(128)
    offsets ^= offsets >> 7 & 1
    np.testing.assert_array_equal(out[offsets], np.array(box, np.uint64).view(np.uint8).ravel())


@pytest.mark.parametrize("number", range(16))
def test_element_types_have_the_isa_s_numbers(number):
    source, type_ = aligned(np.ones((4, 256), np.uint32)), ELEMENT_TYPES[number]
    unit_bytes = [1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4, 1, 8, 12][type_]  # of 2 or 16 elements below 8 bits
    units = 128 // {13: 2, 14: 16, 15: 16}.get(type_, 1)
    options = {"extents": [128, 4], "strides": [1024], "box": [128, 1]}
    place, _ = run([edit("elemtype", number)], source, units * unit_bytes, off=["uninitialized"], **options)
    want = np.frombuffer(ptxsim.encode_tiled(type_, source.ctypes.data, **options), np.uint8)
    assert (place != want).sum() == 1


@pytest.mark.parametrize(
    "edits, message",
    [
        ([edit("global_address", 8)], "^descriptor: what tensormap.replace made of a tensor map: the global address"),
        ([edit("global_stride", 20)], "^tensor map: stride of dimension 1"),
        ([edit("box_dim", 0, 1)], "^tensor map: box extent of dimension 1 is 0"),
        ([edit("global_dim", 0, 1)], "^descriptor: .* extent of dimension 1 is 0"),
        ([edit("box_dim", 3)], "^descriptor: .* the box is 12 bytes wide"),
        ([edit("rank", 0)], "^descriptor: tensor map of rank 1 used with 2 coordinates"),
        ([edit("element_stride", 2, 1)], "element strides other than 1"),
        ([edit("interleave_layout", 1)], "interleaved layouts"),
        ([edit("swizzle_mode", 4)], "swizzle mode 4"),
        ([edit("swizzle_atomicity", 1)], "atoms"),
        ([edit("swizzle_mode", "%r5")], "must be an integer constant"),
        ([edit("global_dim", 4, 5)], "unknown ordinal"),
        ([edit("global_dim", 4).replace("b32", "b64").replace("4;", "%d5;")], "new value of type .b64"),
        (["@!%p0 st.shared.b32 [map+8], %r0;", edit("rank", 1)], "^descriptor: no tensor map of the simulator"),
    ],
)
def test_maps_that_can_not_be_are_refused(edits, message):
    with pytest.raises(ptxsim.SimulationError, match=message):
        run(edits, sources())


def test_an_extent_of_zero_is_no_fault_until_it_is_used():
    place, _ = run([edit("global_dim", 0, 1), edit("global_dim", 12, 1)], sources())
    assert place.any()


OTHER_CHANGE = edit("global_dim", 9, 1, "global", "%d1")
IN_OTHER_WARP = f"setp.ne.u32 %p6, %r0, 32; @!%p6 {ACQUIRE} "


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "mode, fences, second, message",
    [
        ("shared", (RELEASE, ""), "", "generic.acquire lies"),
        ("global", (RELEASE, ""), "", "generic.acquire lies"),
        ("global", ("", ACQUIRE), "", "generic.release lies"),
        ("global", (ACQUIRE, RELEASE), "", "generic.acquire lies"),
        ("shared", (RELEASE, ACQUIRE), OTHER_CHANGE, "generic.release lies"),
        ("shared", (RELEASE, ACQUIRE), OTHER_CHANGE + RELEASE, "generic.acquire lies"),
        ("shared", (RELEASE, ""), IN_OTHER_WARP, "generic.acquire lies"),
        ("shared", (RELEASE, ACQUIRE), OTHER_CHANGE + RELEASE + ACQUIRE, None),
        ("shared", (RELEASE, ""), IN_OTHER_WARP + "bar.sync 0;", None),
    ],
)  # fmt: skip
def test_a_change_is_released_and_acquired_before_its_use(mode, fences, second, message, seed):
    arguments = ([edit("global_dim", 10, 1)], sources(), 128, mode, fences)
    if message is None:
        run(*arguments, second=second, seed=seed)
        return
    with pytest.raises(ptxsim.SimulationError, match=f"^proxy_fence: the tensor map at .*{message}"):
        run(*arguments, second=second, seed=seed)


def test_replacing_in_shared_memory_is_a_write_that_others_must_wait_for():
    read = "@!%p4 bra ON; ld.shared.b32 %r9, [map]; ON:"
    run([], sources(), second=read)
    with pytest.raises(ptxsim.SimulationError, match=r"^race: (read|write) not ordered"):
        run([], sources(), second=edit("rank", 1) + read)
