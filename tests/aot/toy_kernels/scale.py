import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from aot.kernel import Kernel, Ptr

from .values import OFFSET


class Scale(Kernel):
    """x[i] = x[i] * factor + OFFSET, with a parameter of every scalar type."""

    def __init__(self, threads: int, smem_bytes: int = 0) -> None:
        self.threads = threads
        self.smem_bytes = smem_bytes
        self.work_per_cta = threads
        self.params = {"count": Int32, "x": Ptr(Float32), "first": Int64, "factor": Float32}

    @cute.kernel
    def kernel(self, p):
        i = cute.arch.block_idx()[0] * self.threads + cute.arch.thread_idx()[0]
        vector = cute.make_tensor(p.x + p.first, cute.make_layout(1))
        if i < p.count:
            vector[i] = vector[i] * p.factor + OFFSET
