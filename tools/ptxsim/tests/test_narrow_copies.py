"""Copies of elements below 8 bits: tensor maps that pack or pad them, tcgen05.cp that unpacks them; pairs of CTAs."""

import numpy as np
import ptxsim
import pytest
from operands import container_bytes, random_matrix, raw_bytes, shared_image, swizzled
from ptx import HEADER, aligned, kernel
from tcgen05 import ALLOC, FREE, QUARTER, SHARED, WAIT, commit, copy_to_shared, descriptor

U4_ALIGN8, U4_ALIGN16, U6_ALIGN16 = 13, 14, 15  # CUtensorMapDataType
DATA = {U4_ALIGN16: 8, U6_ALIGN16: 12}  # bytes of sixteen elements, which take sixteen bytes in shared memory
BITS = {U4_ALIGN8: 4, U4_ALIGN16: 4, U6_ALIGN16: 6}


def memory(type_, rows, elements) -> np.ndarray:
    """Random packed elements [rows, bytes]."""
    rng = np.random.default_rng(0)
    return aligned(rng.integers(0, 256, (rows, elements * BITS[type_] // 8)).astype(np.uint8))


def load(array, type_, elements, box, at, swizzle=0, count_padding=False, store="", target=None, **options):
    """Shared memory after a box was loaded; ``store``: then the tile at %r1 goes out by %d1, the map of ``target``."""
    shared = box[0] * box[1] // 16 * (16 if type_ in DATA else 8)
    counted = shared if count_padding else box[0] * box[1] * BITS[type_] // 8
    image = np.zeros(shared, np.uint8)
    target = array if target is None else target
    maps = [
        ptxsim.encode_tiled(type_, x.ctypes.data, [elements, len(x)], [x.shape[1]], box, swizzle=swizzle)
        for x in (array, target)
    ]
    body = f"""{HEADER}.visible .entry k(.param .align 64 .b8 m[128], .param .align 64 .b8 m1[128],
  .param .u64 out)
{{
.reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %d<8>; .shared .align 1024 .b8 tile[{shared}]; .shared .align 8 .b64 bar;
mov.u32 %r0, %tid.x; setp.ne.u32 %p0, %r0, 0; @%p0 bra READY;
mbarrier.init.shared.b64 [bar], 1; mov.b64 %d0, m; mov.u32 %r1, tile;
mbarrier.arrive.expect_tx.shared.b64 _, [bar], {counted};
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
  [%r1], [%d0, {{{at[0]}, {at[1]}}}], [bar];
READY: bar.sync 0;
WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [bar], 0; @!%p1 bra WAIT;
@%p0 bra COPIES; mov.b64 %d1, m1; {store} cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; COPIES:
ld.param.b64 %d2, [out]; mul.wide.u32 %d3, %r0, 4; add.s64 %d2, %d2, %d3; mov.u32 %r2, tile;
mad.lo.s32 %r2, %r0, 4, %r2; mov.u32 %r4, %r0;
COPY: setp.ge.u32 %p2, %r4, {shared // 4}; @%p2 bra END; ld.shared.b32 %r5, [%r2]; st.global.b32 [%d2], %r5;
add.s32 %r2, %r2, 128; add.s64 %d2, %d2, 128; add.s32 %r4, %r4, 32; bra COPY;
END: ret;
}}"""
    module = ptxsim.load(body)
    module.launch(grid=1, block=32, params=[*maps, image], memory=[array, target, image], **options)
    return image


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("swizzle", [0, 3])
@pytest.mark.parametrize("type_", DATA)
def test_padded_types_spread_sixteen_elements_over_sixteen_bytes(type_, swizzle, seed):
    array = memory(type_, 10, 384)
    for at in ([128, 1], [0, 7], [256, -2], [384, 0], [-128, 0]):
        image = load(array, type_, 384, [128, 8], at, swizzle, seed=seed, off=["uninitialized"])
        want = np.zeros((8, 8, DATA[type_]), np.uint8)  # row, chunk, byte
        for row in range(8):
            if 0 <= row + at[1] < 10 and 0 <= at[0] < 384:
                first = at[0] * BITS[type_] // 8
                want[row] = array[row + at[1], first : first + 8 * DATA[type_]].reshape(8, -1)
        row, chunk, byte = np.meshgrid(*map(np.arange, want.shape), indexing="ij")
        np.testing.assert_array_equal(image[swizzled(128 * row + 16 * chunk, swizzle) + byte], want)


@pytest.mark.parametrize("swizzle", range(4))
def test_packed_elements_are_copied_as_they_are(swizzle):
    array = memory(U4_ALIGN8, 10, 320)
    width = {0: 96, 1: 64, 2: 128, 3: 256}[swizzle]
    for at in ([32, 1], [-6, 4], [290, -1]):
        image = load(array, U4_ALIGN8, 320, [width, 8], at, swizzle)
        wide = np.zeros((40, 160 + 2 * 160), np.uint8)
        wide[10:20, 160:320] = array
        want = wide[10 + at[1] :][:8, 160 + at[0] // 2 :][:, : width // 2]
        np.testing.assert_array_equal(image[swizzled(np.arange(image.size), swizzle)], want.ravel())


def test_packed_elements_are_stored():
    array = memory(U4_ALIGN8, 8, 64)
    target = aligned(np.zeros((10, 32), np.uint8))
    store = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d1, {16, 3}], [%r1];"
    load(array, U4_ALIGN8, 64, [64, 8], [0, 0], store=store, target=target)
    want = np.zeros_like(target)
    want[3:10, 8:] = array[:7, :-8]
    np.testing.assert_array_equal(target, want)


@pytest.mark.parametrize("type_", DATA)
def test_padding_is_neither_written_nor_counted(type_):
    array = memory(type_, 8, 128)
    with pytest.raises(ptxsim.SimulationError, match=r"^uninitialized"):
        load(array, type_, 128, [128, 8], [0, 0])
    with pytest.raises(ptxsim.SimulationError, match=r"^deadlock"):
        load(array, type_, 128, [128, 8], [0, 0], count_padding=True, off=["uninitialized"])


@pytest.mark.parametrize("type_, at", [(U4_ALIGN16, 64), (U6_ALIGN16, -16), (U4_ALIGN8, 3)])
def test_first_coordinates_must_be_multiples(type_, at):
    with pytest.raises(ptxsim.SimulationError, match=r"^descriptor: the first coordinate"):
        load(memory(type_, 8, 128), type_, 128, [128, 8], [at, 0])


@pytest.mark.parametrize(
    "type_, operation, message",
    [
        (U4_ALIGN16, "cp.async", "can be loaded, not stored"),
        (U6_ALIGN16, "cp.async", "not modelled"),
        (U4_ALIGN8, "cp.reduce.async", "no reduction"),
    ],
)
def test_stores_and_reductions_that_do_not_exist(type_, operation, message):
    add = ".add" if "reduce" in operation else ""
    store = f"{operation}.bulk.tensor.2d.global.shared::cta{add}.tile.bulk_group [%d1, {{0, 0}}], [%r1];"
    with pytest.raises(ptxsim.SimulationError, match=message):
        load(memory(type_, 8, 128), type_, 128, [128, 8], [0, 0], store=store)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"address": 16}, "multiple of 32"),
        ({"extents": [192, 8]}, "multiple of 128"),
        ({"strides": [112]}, "multiple of 32"),
        ({"box": [64, 8]}, "it must be 128"),
        ({"swizzle": 2}, "128 bytes, or none"),
        ({"oob_fill": 1}, "NaN fill"),
        ({"data_type": U4_ALIGN8, "extents": [129, 8]}, "multiple of 2"),
        ({"data_type": U4_ALIGN8, "box": [16, 8]}, "multiple of 16"),
        ({"data_type": U4_ALIGN8, "box": [256, 8], "swizzle": 2}, "spans 64"),
    ],
)
def test_rules_of_narrow_tensor_maps(change, message):
    call = {"data_type": U4_ALIGN16, "address": 0, "extents": [128, 8], "strides": [128], "box": [128, 8]} | change
    with pytest.raises(ptxsim.SimulationError, match=message):
        ptxsim.encode_tiled(**call)


@pytest.mark.parametrize("swizzle", [0, 3])
@pytest.mark.parametrize("shape, rows, elements", [("128x256b", 128, 32), ("128x128b", 128, 16), ("4x256b", 4, 32)])
@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2"])
def test_tcgen05_cp_gives_every_element_a_byte(name, shape, rows, elements, swizzle):
    values, _ = random_matrix(max(rows, 8), elements, name, 0)
    tile, *offsets = shared_image(values, name, swizzle, False)
    out = np.zeros((128, elements // 4), np.uint32)
    source = "b4x16_p64" if name == "e2m1" else "b6x16_p32"
    columns = ", ".join(f"%r{30 + i}" for i in range(elements // 4))
    body = f"""
      {ALLOC.format(1)} setp.ne.u32 %p0, %t, 0; @!%p0 mbarrier.init.shared.b64 [bar], 1; {copy_to_shared(tile.size)}
      bar.sync 0; ld.shared.b32 %r1, [held]; {QUARTER} @%p0 bra WAIT;
      and.b32 %r19, %r11, 0xffffff; shr.u32 %r19, %r19, 4; cvt.u64.u32 %d3, %r19;
      or.b64 %d4, %d3, {descriptor(*offsets, swizzle)}; tcgen05.cp.cta_group::1.{shape}.b8x16.{source} [%r1], %d4;
      {commit(1)} {WAIT} tcgen05.fence::after_thread_sync;
      tcgen05.ld.sync.aligned.32x32b.x{elements // 4}.b32 {{{columns}}}, [%r3]; tcgen05.wait::ld.sync.aligned;
      mad.wide.u32 %d5, %t, {elements}, %q1;
      {" ".join(f"st.global.b32 [%d5+{4 * i}], %r{30 + i};" for i in range(elements // 4))}
      {FREE.format(1)}"""
    arrays = [tile, out]
    module = kernel(body, 2, f".shared .align 1024 .b8 tile[{tile.size}]; {SHARED}")
    module.launch(grid=1, block=128, params=arrays, memory=arrays, off=["uninitialized"])
    lanes = 32 * np.arange(4) if rows == 4 else np.arange(rows)
    np.testing.assert_array_equal(out.view(np.uint8)[lanes], container_bytes(values, name)[:rows])


def test_layouts_of_narrow_types():
    """The helpers of these tests, by hand."""
    values = np.array([[0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]], np.float32)
    assert raw_bytes(values, "e2m1")[0, :4].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert raw_bytes(np.tile(values, 2), "e2m1_packed")[0, 8:12].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert container_bytes(values, "e2m1")[0, :4].tolist() == [0, 4, 8, 12]
    ones = np.full((1, 16), 1.0, np.float32)
    assert raw_bytes(ones, "e3m2")[0, :3].tolist() == [0x0C, 0xC3, 0x30]  # 0b001100 four times
    assert raw_bytes(ones, "e2m3")[0, :3].tolist() == [0x08, 0x82, 0x20]


@pytest.mark.parametrize("barrier_rank", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_multicast_to_a_pair_signals_one_of_it(barrier_rank, seed):
    """Each CTA of a pair multicasts its half of a tile; the barrier of one of them counts all that both receive."""
    array = aligned(np.arange(256, dtype=np.uint32).reshape(2, 128))
    out = np.zeros((2, 256), np.uint32)
    tensor_map = ptxsim.encode_tiled(2, array.ctypes.data, [128, 2], [512], [128, 1])
    body = f"""{HEADER}.visible .entry k(.param .align 64 .b8 m[128], .param .u64 out)
{{
.reg .pred %p<8>; .reg .b16 %h0; .reg .b32 %r<12>; .reg .b64 %d<8>;
.shared .align 1024 .b8 tile[1024]; .shared .align 8 .b64 bar;
mov.u32 %r0, %tid.x; mov.u32 %r3, %cluster_ctarank; setp.ne.u32 %p0, %r0, 0; mov.u32 %r1, tile; mov.u32 %r2, bar;
@!%p0 mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
setp.ne.u32 %p1, %r3, {barrier_rank}; or.pred %p2, %p0, %p1;
@!%p2 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 2048;
mapa.shared::cluster.u32 %r4, %r2, {barrier_rank}; mad.lo.s32 %r5, %r3, 512, %r1; mov.b64 %d0, m; mov.b16 %h0, 3;
@!%p0 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.cta_group::2
  [%r5], [%d0, {{0, %r3}}], [%r4], %h0;
@%p1 bra DONE;
WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra WAIT;
DONE: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
ld.param.b64 %d2, [out]; mad.lo.s32 %r6, %r3, 128, %r0; mul.wide.u32 %d3, %r6, 8; add.s64 %d2, %d2, %d3;
mad.lo.s32 %r7, %r0, 8, %r1; ld.shared.v2.b32 {{%r8, %r9}}, [%r7]; st.global.v2.b32 [%d2], {{%r8, %r9}};
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
ret;
}}"""
    module = ptxsim.load(body)
    module.launch(grid=2, block=128, cluster=2, params=[tensor_map, out], memory=[array, out], seed=seed)
    np.testing.assert_array_equal(out, np.tile(array.ravel(), (2, 1)))
