"""The merge of splits: out = sum_s w_s * partial_s, w_s = exp(lse_s - lse), whatever lists a row's splits.

A row has a team of lanes, a power of two of them; each loads one chunk of every split. A lane also holds splits: number
``i * lanes + place`` is element i of the lane with this place in its team.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from aot.kernels import softmax

BATCH = 4  # splits whose loads a lane has under way


@cute.jit
def team_max(value, lanes: cutlass.Constexpr[int]):
    """The largest over the lanes of a team."""
    for step in cutlass.range_constexpr(lanes.bit_length() - 1):
        value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=1 << step))
    return value


@cute.jit
def team_sum(value, lanes: cutlass.Constexpr[int]):
    """The sum over the lanes of a team."""
    for step in cutlass.range_constexpr(lanes.bit_length() - 1):
        value += cute.arch.shuffle_sync_bfly(value, offset=1 << step)
    return value


@cute.jit
def weigh(lse: cute.Tensor, lanes: cutlass.Constexpr[int]) -> Float32:
    """The logsumexp of a row's splits, of which a lane has some, -inf where there is none; these become the weights."""
    maximum = -Float32.inf
    for i in cutlass.range_constexpr(cute.size(lse)):
        lse[i] = lse[i] * softmax.LOG2_E
        maximum = cute.arch.fmax(maximum, lse[i])
    reference = softmax.finite(team_max(maximum, lanes))
    total = Float32(0.0)
    for i in cutlass.range_constexpr(cute.size(lse)):
        lse[i] = cute.math.exp2(lse[i] - reference, fastmath=True)
        total += lse[i]
    total = team_sum(total, lanes)
    for i in cutlass.range_constexpr(cute.size(lse)):
        lse[i] = lse[i] * softmax.reciprocal(total)
    return softmax.log_sum_exp(reference, total)


@cute.jit
def held(values: cute.Tensor, index: Int32, lanes: cutlass.Constexpr[int]):
    """All lanes: what the team holds as number ``index``."""
    source = cute.arch.lane_idx() // lanes * lanes + index % lanes
    result = cute.arch.shuffle_sync(values[0], source)
    for i in cutlass.range_constexpr(1, cute.size(values)):
        other = cute.arch.shuffle_sync(values[i], source)
        result = other if index // lanes == i else result
    return result


@cute.jit
def accumulate(acc: cute.Tensor, splits: cute.Tensor, weights: cute.Tensor, most, chunk_of, dtype, lanes):
    """Add up a team's weighted splits, of which no team of the warp has more than ``most``; ``chunk_of(split)`` is the
    lane's chunk of a split, in global memory.

    What weighs nothing is not read: a split that sees nothing may hold 0 * NaN.
    """
    for start in cutlass.range(0, most, BATCH, unroll=1):
        parts = cute.make_rmem_tensor((cute.size(acc), BATCH), dtype)
        parts.fill(0)
        scales = cute.make_rmem_tensor(BATCH, Float32)
        for i in cutlass.range_constexpr(BATCH):
            scales[i] = held(weights, start + i, lanes)
            split = held(splits, start + i, lanes)
            if scales[i] != 0.0:
                cute.autovec_copy(chunk_of(split), parts[None, i])
        for i in cutlass.range_constexpr(BATCH):
            for j in cutlass.range_constexpr(cute.size(acc)):
                acc[j] = acc[j] + scales[i] * parts[j, i].to(Float32)
