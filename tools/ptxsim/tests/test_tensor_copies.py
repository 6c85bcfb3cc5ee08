"""tcgen05.cp and tcgen05.shift: which lanes of tensor memory get which rows."""

import numpy as np
import ptxsim
import pytest
from operands import k_major_offsets
from ptx import kernel
from tcgen05 import ALLOC, FREE, QUARTER, SHARED, WAIT, cluster_sync, commit, copy_to_shared, descriptor, vector

COLUMNS = 16


def run(operation, held, image, ctas, **options):
    """What [ctas, 128 lanes, 16 columns] of tensor memory hold after an operation; %d4: a descriptor of the image."""
    lanes = held.copy()
    image = np.ascontiguousarray(image)
    sync = cluster_sync(ctas)
    body = f"""
      {ALLOC.format(ctas)} setp.ne.u32 %p0, %t, 0; @!%p0 mbarrier.init.shared.b64 [bar], 1;
      fence.mbarrier_init.release.cluster; {copy_to_shared(image.shape[1])}
      bar.sync 0; ld.shared.b32 %r1, [held]; {QUARTER}
      mad.lo.s32 %r16, %r10, 128, %t; mad.wide.u32 %d1, %r16, {4 * COLUMNS}, %q1;
      {" ".join(f"ld.global.b32 %r{30 + i}, [%d1+{4 * i}];" for i in range(COLUMNS))}
      tcgen05.st.sync.aligned.32x32b.x{COLUMNS}.b32 [%r3], {vector(30, COLUMNS)};
      tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; {sync} tcgen05.fence::after_thread_sync;
      setp.ne.or.u32 %p2, %r10, 0, %p0; @%p2 bra WAIT; mov.b16 %h0, 3;
      and.b32 %r19, %r11, 0xffffff; shr.u32 %r19, %r19, 4; cvt.u64.u32 %d3, %r19;
      or.b64 %d4, %d3, {descriptor(2048, 128, 0)}; {operation.format(ctas)}
      {commit(ctas)} {WAIT} tcgen05.fence::after_thread_sync;
      tcgen05.ld.sync.aligned.32x32b.x{COLUMNS}.b32 {vector(30, COLUMNS)}, [%r3]; tcgen05.wait::ld.sync.aligned;
      {" ".join(f"st.global.b32 [%d1+{4 * i}], %r{30 + i};" for i in range(COLUMNS))}
      {FREE.format(ctas)} {sync}"""
    arrays = [image, lanes]
    module = kernel(body, 2, f".shared .align 1024 .b8 tile[{image.shape[1]}]; {SHARED}")
    module.launch(grid=ctas, block=128, cluster=ctas, params=arrays, memory=arrays, **options)
    return lanes


def random_words(*shape):
    return np.random.default_rng(0).integers(0, 1 << 32, shape, dtype=np.uint32)


COPIES = {  # rows, columns, lanes of each row's copies: the ISA's shapes; where it is silent, CUTLASS's copy traits
    "128x256b": (128, 8, lambda row: [row]),
    "128x128b": (128, 4, lambda row: [row]),
    "4x256b": (4, 8, lambda row: [32 * row]),
    "64x128b.warpx2::02_13": (64, 4, lambda row: [row, row + 64]),
    "64x128b.warpx2::01_23": (64, 4, lambda row: [row // 32 * 64 + row % 32 + 32 * i for i in range(2)]),
    "32x128b.warpx4": (32, 4, lambda row: [row + 32 * i for i in range(4)]),
}


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize("shape", COPIES)
def test_cp_puts_rows_where_its_shape_says(shape, ctas):
    rows, columns, lanes_of = COPIES[shape]
    source = random_words(ctas, rows, columns)
    image = np.zeros((ctas, 4096), np.uint8)
    for rank in range(ctas):
        raw = source[rank].view(np.uint8)
        image[rank, k_major_offsets(raw, 0, 2048, 128)] = raw
    held = random_words(ctas, 128, COLUMNS)
    want = held.copy()
    for row in range(rows):
        for lane in lanes_of(row):
            want[:, lane, 4 : 4 + columns] = source[:, row]
    for seed in range(2):
        got = run(
            f"add.s32 %r20, %r1, 4; tcgen05.cp.cta_group::{{}}.{shape} [%r20], %d4;", held, image, ctas, seed=seed
        )
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize("lane", [0, 32, 96])
def test_shift_moves_31_rows_of_32_bytes_down(lane, ctas):
    held = random_words(ctas, 128, COLUMNS)
    want = held.copy()
    want[:, lane : lane + 31, 4:12] = held[:, lane + 1 : lane + 32, 4:12]
    operation = f"tcgen05.shift.cta_group::{{}}.down [%r1+{(lane << 16) + 4}];"
    for seed in range(2):
        got = run(operation, held, np.zeros((ctas, 512), np.uint8), ctas, seed=seed)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "operation, message",
    [
        (f"tcgen05.shift.cta_group::1.down [%r1+{8 << 16}];", "^alignment: the rows from lane 8 on"),
        (f"tcgen05.shift.cta_group::1.down [%r1+{128 << 16}];", "^tensor_bounds: lane 128"),
        ("tcgen05.shift.cta_group::1.down [%r1+508];", "^tensor_bounds: lane 0, columns 508"),
        ("tcgen05.shift.cta_group::1.down [%r1+64];", "^uninitialized"),
        ("tcgen05.shift.cta_group::1.up [%r1];", "unknown direction"),
        ("tcgen05.cp.cta_group::1.64x128b [%r1], %d4;", "unknown form"),
        ("tcgen05.cp.cta_group::1.64x128b.warpx4 [%r1], %d4;", "unknown form"),
        ("tcgen05.cp.cta_group::1.32x128b.warpx2::02_13 [%r1], %d4;", "unknown form"),
        ("tcgen05.cp.cta_group::1.128x128b.warpx2::01_23 [%r1], %d4;", "unknown form"),
    ],
)
def test_wrong_copies_and_shifts_are_stopped(operation, message):
    with pytest.raises(ptxsim.SimulationError, match=message):
        run(operation, random_words(1, 128, COLUMNS), np.zeros((1, 4096), np.uint8), 1)
