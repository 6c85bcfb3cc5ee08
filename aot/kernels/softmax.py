"""Softmax over one block of keys: the block is the whole row of this split, so nothing is ever rescaled."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32


@cute.jit
def quad_max(x: Float32) -> Float32:
    """Maximum over the four lanes that share a row of a warpgroup's accumulator."""
    x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=1))
    return cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=2))


@cute.jit
def quad_sum(x: Float32) -> Float32:
    """Sum over the four lanes that share a row of a warpgroup's accumulator."""
    x = x + cute.arch.shuffle_sync_bfly(x, offset=1)
    return x + cute.arch.shuffle_sync_bfly(x, offset=2)


@cute.jit
def row_maxima(scores: cute.Tensor):
    """The largest score of each of a thread's two rows, 0 for a row that sees nothing, so that ``exp2`` of its scores
    is 0 and not NaN. ``scores`` is (2 rows, columns); the rows go side by side to keep the pipes busy."""
    maxima = cute.make_rmem_tensor((2, 2), Float32)
    maxima.fill(-Float32.inf)
    for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        for row in cutlass.range_constexpr(2):
            maxima[row, i % 2] = cute.arch.fmax(maxima[row, i % 2], scores[row, i])
    first, second = (
        quad_max(cute.arch.fmax(maxima[0, 0], maxima[0, 1])),
        quad_max(cute.arch.fmax(maxima[1, 0], maxima[1, 1])),
    )
    return (
        Float32(0.0) if first == -Float32.inf else first,
        Float32(0.0) if second == -Float32.inf else second,
    )


@cute.jit
def row_sums_exp2(scores: cute.Tensor, references, scale_log2: Float32, keep: cutlass.Constexpr[bool]):
    """The sum of ``exp2((scores - reference) * scale_log2)`` of each row; with ``keep`` they replace the scores."""
    offsets = -references[0] * scale_log2, -references[1] * scale_log2
    sums = cute.make_rmem_tensor((2, 2), Float32)
    sums.fill(0.0)
    for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        for row in cutlass.range_constexpr(2):
            weight = cute.math.exp2(scores[row, i] * scale_log2 + offsets[row], fastmath=True)
            sums[row, i % 2] = sums[row, i % 2] + weight
            if cutlass.const_expr(keep):
                scores[row, i] = weight
    return quad_sum(sums[0, 0] + sums[0, 1]), quad_sum(sums[1, 0] + sums[1, 1])
