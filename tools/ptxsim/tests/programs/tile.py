"""A tile by a tensor map to shared memory, and on by threads; with ``--no-wait`` when the copy is issued, not done."""

import sys

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack

ROWS, COLUMNS = 32, 64


@cute.kernel
def copy(atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, layout: cute.Layout, waits: cutlass.Constexpr):
    thread = cute.arch.thread_idx()[0]
    shared = cutlass.utils.SmemAllocator()
    barrier = shared.allocate_array(cutlass.Int64, 1)
    tile = shared.allocate_tensor(cutlass.Float32, layout, byte_alignment=128)
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    grouped = [cute.group_modes(tensor, 0, 2) for tensor in (tile, source)]
    there, here = cpasync.tma_partition(atom, 0, cute.make_layout(1), *grouped)
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, ROWS * COLUMNS * 4)
        cute.copy(atom, here, there, tma_bar_ptr=barrier)
    if cutlass.const_expr(waits):
        cute.arch.mbarrier_wait(barrier, 0)
    else:
        cute.arch.sync_threads()
    for row in cutlass.range_constexpr(ROWS):
        target[row, thread] = tile[row, thread]


@cute.jit
def run(source: cute.Tensor, target: cute.Tensor, waits: cutlass.Constexpr):
    layout = cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1))
    atom, tensor = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), source, layout, (ROWS, COLUMNS))
    copy(atom, tensor, target, layout, waits).launch(grid=(1, 1, 1), block=(COLUMNS, 1, 1))


if __name__ == "__main__":
    source = torch.randn(ROWS, COLUMNS, device="cuda")
    target = torch.zeros_like(source)
    run(from_dlpack(source, assumed_align=16), from_dlpack(target), "--no-wait" not in sys.argv)
    assert torch.equal(target, source)
