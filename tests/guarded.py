"""Buffers that show what was written beside them."""

import torch

CANARY = 1.5  # of a buffer of floating-point numbers
INT_CANARY = 0x5A5A5A5A


class Guarded:
    """``tensor``, with canaries around it.

    margins: for each dimension from the first on, how many elements lie before and after the tensor's; none in the
    others. order: of the dimensions in memory, the slowest first.
    """

    def __init__(self, shape, dtype, device, margins=((64, 64),), order=None):
        margins = (*margins, *((0, 0),) * (len(shape) - len(margins)))
        order = range(len(shape)) if order is None else order
        self.canary = CANARY if dtype.is_floating_point else INT_CANARY
        outer = [before + size + after for size, (before, after) in zip(shape, margins, strict=True)]
        memory = torch.full([outer[dim] for dim in order], self.canary, dtype=dtype, device=device)
        self.outer = memory.permute(*(list(order).index(dim) for dim in range(len(shape))))
        self.inside = tuple(slice(before, before + size) for size, (before, _) in zip(shape, margins, strict=True))
        self.tensor = self.outer[self.inside]

    def assert_intact(self) -> None:
        outside = self.outer.clone()
        outside[self.inside] = self.canary
        assert (outside == self.canary).all(), "written outside of the buffer"
