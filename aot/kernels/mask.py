"""Which keys of a block a query token sees."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

BLK_KV = 128
NO_DIAGONAL = 1 << 29  # as causal_shift: every token is before the diagonal


@cute.jit
def visible_keys(token: Int32, key_limit: Int32, causal_shift: Int32) -> Int32:
    """How many of the block's first keys ``token`` sees; <= 0: none, >= 128: all.

    ``key_limit`` is len_k minus the block's first key; ``token + causal_shift`` is one past the last key that the
    bottom-right aligned diagonal leaves, again counted from the block's first key (see pages.py).
    """
    return min(key_limit, token + causal_shift)


@cute.jit
def mask_columns(scores: cute.Tensor, visible, first_column: Int32):
    """Set to -inf what lies at or past a row's ``visible`` keys; ``scores`` is a thread's part of a warpgroup's
    accumulator, (2 rows, (2, 16)): two neighbouring columns of each of the sixteen groups of eight."""
    for group in cutlass.range_constexpr(BLK_KV // 8):
        for i in cutlass.range_constexpr(2):
            for row in cutlass.range_constexpr(2):
                if first_column + (8 * group + i) >= visible[row]:
                    scores[row, (i, group)] = -Float32.inf


@cute.jit
def mask_row(scores: cute.Tensor, visible: Int32):
    """Set to -inf what lies at or past the row's ``visible`` keys; ``scores`` is the whole row.

    One bit a column, which the compiler moves to predicates by the handful: compared with ``visible`` itself,
    neighbouring columns become a chain of selects. And no branch around it: the compiler would predicate all of it.
    """
    for first in cutlass.range_constexpr(0, BLK_KV, 16):
        seen = Int32((1 << min(max(visible - first, 0), 16)) - 1)
        for i in cutlass.range_constexpr(16):
            scores[first + i] = scores[first + i] if seen & (1 << i) != 0 else -Float32.inf
