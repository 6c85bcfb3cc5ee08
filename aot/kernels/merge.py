"""The merge of splits: out = sum_s w_s * partial_s, w_s = exp(lse_s - lse), whatever lists a row's splits.

A warp has a row. Lane i holds split i % splits, of at most ``splits`` ones (a power of two, at most 32).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from aot.kernels import softmax


@cute.jit
def weigh(lse: Float32, exists: Boolean, splits: cutlass.Constexpr[int]):
    """(weight of the lane's split, logsumexp of all splits), given the logsumexp of the lane's split."""
    value = lse * softmax.LOG2_E
    value = value if exists else -Float32.inf
    maximum = value
    for step in cutlass.range_constexpr(splits.bit_length() - 1):
        maximum = cute.arch.fmax(maximum, cute.arch.shuffle_sync_bfly(maximum, offset=1 << step))
    reference = softmax.finite(maximum)
    weight = cute.math.exp2(value - reference, fastmath=True)
    total = weight
    for step in cutlass.range_constexpr(splits.bit_length() - 1):
        total += cute.arch.shuffle_sync_bfly(total, offset=1 << step)
    return weight * softmax.reciprocal(total), softmax.log_sum_exp(reference, total)


@cute.jit
def accumulate(acc: cute.Tensor, first: Int64, number: Int32, weight: Float32, chunk_of, dtype, lanes, splits):
    """Add the weighted splits up: every lane ends with its chunk of the whole sum in ``acc``, float32.

    The lane's split is entry ``first + number``, and ``chunk_of(entry)`` is the lane's chunk, in global memory, of what
    a split left; ``lanes`` lanes cover a row. Where they are half of the warp, each half takes half of the splits.
    """
    lane = cute.arch.lane_idx()
    shares = 32 // lanes  # parts of the warp among which the splits are dealt out
    share = splits // shares
    parts = cute.make_rmem_tensor((cute.size(acc), share), dtype)
    weights = cute.make_rmem_tensor(share, Float32)
    for i in cutlass.range_constexpr(share):
        split = lane // lanes * share + i
        entry = first + cute.arch.shuffle_sync(number, split)
        weights[i] = cute.arch.shuffle_sync(weight, split)
        cute.autovec_copy(chunk_of(entry), parts[None, i])
    for i in cutlass.range_constexpr(share):
        weighs = weights[i] != 0.0  # a split that sees nothing may hold 0 * NaN
        for j in cutlass.range_constexpr(cute.size(acc)):
            part = parts[j, i].to(Float32)
            acc[j] = acc[j] + weights[i] * (part if weighs else Float32(0.0))
    if const_expr(shares == 2):
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] += cute.arch.shuffle_sync_bfly(acc[i], offset=lanes)
