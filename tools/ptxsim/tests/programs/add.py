"""c = a + b, one element a thread. ``--overrun``: threads behind the end add too; ``--host``: b stays on the host."""

import sys

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack

THREADS = 128


@cute.kernel
def add(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, count: cutlass.Constexpr):
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if i < count:
        c[i] = a[i] + b[i]


@cute.jit
def run(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, count: cutlass.Constexpr):
    add(a, b, c, count).launch(grid=(cute.ceil_div(cute.size(a), THREADS), 1, 1), block=(THREADS, 1, 1))


if __name__ == "__main__":
    a, b = torch.randn(1000, device="cuda"), torch.randn(1000)
    if "--host" not in sys.argv:
        b = b.cuda()
    c = torch.empty_like(a)
    run(from_dlpack(a), from_dlpack(b), from_dlpack(c), 1024 if "--overrun" in sys.argv else 1000)
    assert c.is_cuda and not c.cpu().is_cuda
    torch.testing.assert_close(c.cpu(), a.cpu() + b.cpu())
    print("arguments:", *sys.argv[1:])
