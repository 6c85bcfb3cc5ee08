import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from aot.kernel import Kernel, Ptr

VALUES = 160


class Spill(Kernel):
    """Keeps 160 values live in a block of 1024 threads, where a thread has 64 registers."""

    def __init__(self) -> None:
        self.threads = 1024
        self.params = {"x": Ptr(Float32), "rounds": Int32}

    @cute.kernel
    def kernel(self, p):
        column = cute.make_tensor(p.x + cute.arch.thread_idx()[0], cute.make_layout(VALUES, stride=self.threads))
        values = cute.make_rmem_tensor(VALUES, Float32)
        for i in cutlass.range_constexpr(VALUES):
            values[i] = column[i]
        for _ in range(p.rounds):
            for i in cutlass.range_constexpr(VALUES):
                values[i] *= values[(7 * i + 3) % VALUES]
        for i in cutlass.range_constexpr(VALUES):
            column[i] = values[i]
