"""Small hand-written kernels: text around an instruction, run on a warp or a CTA."""

from __future__ import annotations

import numpy as np
import ptxsim

HEADER = ".version 9.0\n.target sm_100a\n.address_size 64\n"
WIDTHS = {1: "b8", 2: "b16", 4: "b32", 8: "b64"}
# By name, of two arrays of one dtype.
REDUCTIONS = {
    "add": lambda x, y: x + y,
    "min": np.minimum,
    "max": np.maximum,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "inc": lambda x, y: np.where(x >= y, np.zeros_like(x), x + np.ones_like(x)),
    "dec": lambda x, y: np.where((x == 0) | (x > y), y, x - np.ones_like(x)),
}


def kernel(body: str, params: int = 1, shared: str = "") -> ptxsim.Module:
    """A kernel of pointer parameters p0, p1, ..., which %q0, %q1, ... hold; %t is the thread, %l the lane."""
    names = ", ".join(f".param .u64 p{i}" for i in range(params))
    loads = "\n".join(f"ld.param.b64 %q{i}, [p{i}];" for i in range(params))
    return ptxsim.load(
        f"""{HEADER}
.visible .entry k({names})
{{
.reg .pred %p<20>;
.reg .b16 %h<40>;
.reg .b32 %r<300>;
.reg .b64 %d<80>;
.reg .b64 %q<{params + 1}>;
.reg .b32 %t, %l;
{shared}
mov.u32 %t, %tid.x;
mov.u32 %l, %laneid;
{loads}
{body}
ret;
}}
"""
    )


def lanes(instructions: str, inputs, outputs, **options) -> list[np.ndarray]:
    """Run ``instructions`` on one warp: %a0, %a1, ... are the inputs, [32] each, and %o0, %o1, ... become the outputs.

    inputs: arrays of 32 elements; outputs: dtypes. Registers have the width of the element, bytes are in .b16.
    """
    inputs = [np.ascontiguousarray(x) for x in inputs]
    results = [np.zeros(32, t) for t in outputs]
    declarations, before, after = [], [], []
    for names, arrays, code, first in (("%a", inputs, before, 0), ("%o", results, after, len(inputs))):
        for i, array in enumerate(arrays):
            size = array.dtype.itemsize
            declarations.append(f".reg .{WIDTHS[max(size, 2)]} {names}{i};")
            code.append(f"mad.wide.u32 %d{first + i}, %t, {size}, %q{first + i};")
            if code is before:
                code.append(f"ld.global.{WIDTHS[size]} {names}{i}, [%d{first + i}];")
            else:
                code.append(f"st.global.{WIDTHS[size]} [%d{first + i}], {names}{i};")
    body = "\n".join([*declarations, *before, instructions, *after])
    arrays = inputs + results
    kernel(body, len(arrays)).launch(grid=1, block=32, params=arrays, memory=arrays, **options)
    return results


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at an address that is a multiple of 256, as device allocations are."""
    storage = np.empty(array.nbytes + 256, np.uint8)
    start = -storage.ctypes.data % 256
    copy = storage[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def random_bits(dtype, seed=0) -> np.ndarray:
    """32 elements of random bits, with the values where carries and signs change among them."""
    rng = np.random.default_rng(seed)
    bits = np.dtype(dtype).itemsize * 8
    values = (
        rng.integers(0, 1 << bits, 32, dtype=np.uint64)
        if bits < 64
        else rng.integers(0, 1 << 63, 32, dtype=np.uint64) * 2 + 1
    )
    corners = [0, 1, (1 << bits) - 1, 1 << bits - 1, (1 << bits - 1) - 1]
    values[: len(corners)] = np.array(corners, np.uint64)
    unsigned = values.astype(f"u{bits // 8}")
    return rng.permutation(unsigned).view(dtype)
