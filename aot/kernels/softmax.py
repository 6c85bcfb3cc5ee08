"""Softmax over a block of keys and its logsumexp, in pieces for threads that hold parts of two rows or a whole one."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

LN2 = 0.6931471805599453
LOG2_E = 1.4426950408889634


def scale_log2(p) -> Float32:
    """What a score is multiplied by for its exponential to the base 2."""
    return p.softmax_scale * LOG2_E


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
    """The largest score of each of a thread's two rows, -inf for a row that sees nothing. ``scores`` is (2 rows,
    columns); the rows go side by side to keep the pipes busy."""
    maxima = cute.make_rmem_tensor((2, 2), Float32)
    maxima.fill(-Float32.inf)
    for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        for row in cutlass.range_constexpr(2):
            maxima[row, i % 2] = cute.arch.fmax(maxima[row, i % 2], scores[row, i])
    return (
        quad_max(cute.arch.fmax(maxima[0, 0], maxima[0, 1])),
        quad_max(cute.arch.fmax(maxima[1, 0], maxima[1, 1])),
    )


@cute.jit
def finite(maximum: Float32) -> Float32:
    """A row's maximum as the reference of its exponentials: 0 where it sees nothing, so that they are 0 and not NaN."""
    return Float32(0.0) if maximum == -Float32.inf else maximum


@cute.jit
def row_sums_exp2(scores: cute.Tensor, references, scale_log2: Float32, keep: cutlass.Constexpr[bool]):
    """The sum of ``exp2((scores - reference) * scale_log2)`` of each row; with ``keep`` they replace the scores."""
    first, second = part_sums_exp2(scores, references, scale_log2, keep)
    return quad_sum(first), quad_sum(second)


@cute.jit
def part_sums_exp2(scores: cute.Tensor, references, scale_log2: Float32, keep: cutlass.Constexpr[bool]):
    """``row_sums_exp2`` of a thread's own part of its two rows."""
    offsets = -references[0] * scale_log2, -references[1] * scale_log2
    sums = cute.make_rmem_tensor((2, 2), Float32)
    sums.fill(0.0)
    for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        for row in cutlass.range_constexpr(2):
            weight = cute.math.exp2(scores[row, i] * scale_log2 + offsets[row], fastmath=True)
            sums[row, i % 2] = sums[row, i % 2] + weight
            if cutlass.const_expr(keep):
                scores[row, i] = weight
    return sums[0, 0] + sums[0, 1], sums[1, 0] + sums[1, 1]


@cute.jit
def reciprocal(x: Float32) -> Float32:
    """1 / x, or 0 for the sum of a row that sees nothing; NaN stays NaN."""
    return Float32(0.0) if x == 0.0 else cute.arch.rcp_approx(x)


@cute.jit
def row_maximum(scores: cute.Tensor) -> Float32:
    """``row_maxima`` for a thread that holds a whole row."""
    maxima = cute.make_rmem_tensor(4, Float32)
    maxima.fill(-Float32.inf)
    for i in cutlass.range_constexpr(0, cute.size(scores), 8):
        for j in cutlass.range_constexpr(4):
            pair = cute.arch.fmax(scores[i + j], scores[i + j + 4])
            maxima[j] = cute.arch.fmax(maxima[j], pair)
    return cute.arch.fmax(cute.arch.fmax(maxima[0], maxima[1]), cute.arch.fmax(maxima[2], maxima[3]))


@cute.jit
def row_sum_exp2(scores: cute.Tensor, reference: Float32, scale_log2: Float32, keep: cutlass.Constexpr[bool]):
    """``row_sums_exp2`` for a thread that holds a whole row, or a part of one: two columns to an instruction."""
    scale, offset = (scale_log2, scale_log2), (-reference * scale_log2, -reference * scale_log2)
    even, odd = (Float32(0.0), Float32(0.0)), (Float32(0.0), Float32(0.0))
    for i in cutlass.range_constexpr(0, cute.size(scores), 4):
        for j in cutlass.range_constexpr(2):
            column = i + 2 * j
            exponents = cute.arch.fma_packed_f32x2((scores[column], scores[column + 1]), scale, offset)
            weights = tuple(cute.math.exp2(exponent, fastmath=True) for exponent in exponents)
            if cutlass.const_expr(j == 0):
                even = cute.arch.add_packed_f32x2(even, weights)
            else:
                odd = cute.arch.add_packed_f32x2(odd, weights)
            if cutlass.const_expr(keep):
                scores[column], scores[column + 1] = weights
    total = cute.arch.add_packed_f32x2(even, odd)
    return total[0] + total[1]


@cute.jit
def log_sum_exp(maximum_log2: Float32, total: Float32) -> Float32:
    """Natural-log logsumexp from a maximum in the log2 domain and the sum of ``exp2(x - maximum)``; -inf if empty."""
    lse = -Float32.inf
    if total != 0.0:
        lse = (maximum_log2 + cute.math.log2(total, fastmath=True)) * LN2
    return lse
