"""cp.async.bulk.tensor against indexing in NumPy: ranks, swizzles, coordinates outside, stores and reductions."""

import itertools

import numpy as np
import ptxsim
import pytest

FLOAT32, UINT32 = 7, 2  # CUtensorMapDataType
SPAN = {0: 64, 1: 32, 2: 64, 3: 128}  # bytes of a box's rows under each CUtensorMapSwizzle


def swizzled(offsets, swizzle):
    return offsets ^ (offsets >> 7 & (1 << swizzle) - 1) << 4


def make_map(array, box, swizzle=0, type_=UINT32, **options):
    extents = array.shape[::-1]
    strides = array.strides[::-1][1:]
    return ptxsim.encode_tiled(type_, array.ctypes.data, extents, strides, box, swizzle=swizzle, **options)


def through_shared(array, box, at, swizzle=0, store=None, seed=0, mode=("tile", "tile"), **options):
    """The bytes of a box loaded into shared memory. ``store``: (array, coordinates) to store it to as well."""
    rank, nbytes = array.ndim, int(np.prod(box)) * 4 * (1 if mode[0] == "tile" else 4)
    image = np.zeros(nbytes, np.uint8)
    target, store_at = store or (array, at)
    params = [make_map(array, box, swizzle, **options), make_map(target, box, swizzle), image]
    coordinates = ["{" + ", ".join(map(str, place)) + "}" for place in (at, store_at)]
    body = f""".version 9.0
.target sm_100a
.address_size 64
.visible .entry k(.param .align 64 .b8 m0[128], .param .align 64 .b8 m1[128], .param .u64 out)
{{
.reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %d<8>;
.shared .align 1024 .b8 tile[{nbytes}]; .shared .align 8 .b64 bar;
mov.u32 %r0, %tid.x; setp.ne.u32 %p0, %r0, 0; @%p0 bra WAIT0;
mbarrier.init.shared.b64 [bar], 1; mov.b64 %d0, m0; mov.u32 %r1, tile;
mbarrier.arrive.expect_tx.shared.b64 _, [bar], {nbytes};
cp.async.bulk.tensor.{rank}d.shared::cta.global.{mode[0]}.mbarrier::complete_tx::bytes
  [%r1], [%d0, {coordinates[0]}], [bar];
WAIT0: bar.sync 0;
WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [bar], 0; @!%p1 bra WAIT;
{"@%p0 bra SKIP; mov.b64 %d1, m1; mov.u32 %r1, tile;" if store else "bra SKIP;"}
cp.async.bulk.tensor.{rank}d.global.shared::cta.{mode[1]}.bulk_group [%d1, {coordinates[1]}], [%r1];
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
SKIP: ld.param.b64 %d2, [out]; mul.wide.u32 %d3, %r0, 16; add.s64 %d2, %d2, %d3; mov.u32 %r2, tile;
mad.lo.s32 %r2, %r0, 16, %r2;
COPY: mov.u32 %r6, tile; sub.s32 %r6, %r2, %r6; setp.ge.u32 %p2, %r6, {nbytes}; @%p2 bra END;
ld.shared.v4.b32 {{%r3, %r4, %r5, %r6}}, [%r2]; st.global.v4.b32 [%d2], {{%r3, %r4, %r5, %r6}};
add.s32 %r2, %r2, 512; add.s64 %d2, %d2, 512; bra COPY;
END: ret;
}}"""
    ptxsim.load(body).launch(grid=1, block=32, params=params, memory=[array, target, image], seed=seed)
    return image


def box_of(array, box, at, fill=0):
    """The box, innermost dimension last, with ``fill`` outside the array."""
    shape = box[::-1]
    values = np.full(shape, fill, array.dtype)
    for index in itertools.product(*map(range, shape)):
        place = tuple(i + c for i, c in zip(index, at[::-1], strict=True))
        if all(0 <= p < n for p, n in zip(place, array.shape, strict=True)):
            values[index] = array[place]
    return values


def random_array(shape):
    return np.random.default_rng(0).integers(1, 1 << 31, shape).astype(np.uint32)


@pytest.mark.parametrize("swizzle", SPAN)
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_boxes_of_every_rank_and_swizzle_with_zeros_outside(rank, swizzle):
    array = random_array((3, 4, 5, 9, 40)[-rank:])
    box = [SPAN[swizzle] // 4, 8, 2, 2, 2][:rank]
    inside = [4, 1, 2, 1, 0][:rank]
    for at in (inside, [-3, -2, -1, 1, -1][:rank], [39, 8, 4, 3, 2][:rank], [100, 0, 0, 0, 0][:rank]):
        image = through_shared(array, box, at, swizzle, seed=len(at))
        want = box_of(array, box, at).view(np.uint8).ravel()
        offsets = swizzled(np.arange(len(want)), swizzle)
        np.testing.assert_array_equal(image[offsets], want)


def test_nan_fill():
    array = np.ones((4, 16), np.float32)
    image = through_shared(array, [16, 4], [8, 2], type_=FLOAT32, oob_fill=1).view(np.float32).reshape(4, 16)
    assert (image[:2, :8] == 1).all() and np.isnan(image[2:]).all() and np.isnan(image[:, 8:]).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("swizzle", SPAN)
def test_stores_undo_the_swizzle_and_clip(swizzle, seed):
    array, target = random_array((9, 40)), random_array((9, 40)) * 0
    box = [SPAN[swizzle] // 4, 8]
    through_shared(array, box, [4, 1], swizzle, store=(target, [-2, 4]), seed=seed)
    want = np.zeros_like(array)
    for y, x in np.ndindex(8, box[0]):
        if x - 2 >= 0 and y + 4 < 9:
            want[y + 4, x - 2] = array[1 + y, 4 + x]
    np.testing.assert_array_equal(target, want)


@pytest.mark.parametrize("swizzle", SPAN)
def test_gather4_and_scatter4_move_four_rows(swizzle):
    array, target = random_array((20, 40)), random_array((20, 40)) * 0
    width, rows, places = SPAN[swizzle] // 4, [7, 19, 0, 25], [3, 2, -1, 11]
    image = through_shared(
        array, [width, 1], [4, *rows], swizzle, store=(target, [2, *places]), mode=("tile::gather4", "tile::scatter4")
    )
    want = np.stack([array[r, 4 : 4 + width] if r < 20 else np.zeros(width, np.uint32) for r in rows])
    offsets = swizzled(np.arange(want.nbytes), swizzle)
    np.testing.assert_array_equal(image[offsets], want.view(np.uint8).ravel())
    expected = np.zeros_like(target)
    for row, values in zip(places, want, strict=True):
        if row >= 0:
            expected[row, 2 : 2 + width] = values
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"swizzle": 3}, "the swizzle spans 128"),
        ({"box": [3, 1]}, "multiple of 16"),
        ({"box": [64, 257]}, "1 to 256"),
        ({"strides": [20]}, "multiple of 16"),
        ({"address": 8}, "global address"),
        ({"element_strides": [1, 2]}, "element strides"),
        ({"extents": [0, 4]}, "extent of dimension 0"),
        ({"interleave": 1}, "interleaved"),
    ],
)
def test_the_driver_s_rules_are_enforced(change, message):
    call = {"address": 0, "extents": [64, 4], "strides": [256], "box": [64, 4]} | change
    with pytest.raises(ptxsim.SimulationError, match=message):
        ptxsim.encode_tiled(UINT32, **call)
