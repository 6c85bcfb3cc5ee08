"""Integer, logic, shift and bit-field instructions, against the formulas of the PTX ISA."""

import numpy as np
import pytest
from ptx import lanes, random_bits

TYPES = {"u16": np.uint16, "s16": np.int16, "u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64}
A32 = random_bits(np.uint32, 1)
B32 = random_bits(np.uint32, 2)
C32 = random_bits(np.uint32, 3)


def python(values):
    return [int(v) for v in values]


def wrap(values, dtype):
    bits = np.dtype(dtype).itemsize * 8
    return np.array([v & (1 << bits) - 1 for v in values], np.uint64).astype(f"u{bits // 8}").view(dtype)


def truncated(a, b):
    return abs(a) // abs(b) * (-1 if (a < 0) != (b < 0) else 1)


BINARY = {
    "add": lambda a, b, bits: a + b,
    "sub": lambda a, b, bits: a - b,
    "mul.lo": lambda a, b, bits: a * b,
    "mul.hi": lambda a, b, bits: a * b >> bits,
    "div": lambda a, b, bits: truncated(a, b) if b else -1,
    "rem": lambda a, b, bits: a - b * truncated(a, b) if b else -1,
    "min": lambda a, b, bits: min(a, b),
    "max": lambda a, b, bits: max(a, b),
}


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("op", BINARY)
def test_arithmetic_wraps_to_its_width(op, type_):
    dtype = TYPES[type_]
    a, b = random_bits(dtype, 1), random_bits(dtype, 2)
    (got,) = lanes(f"{op}.{type_} %o0, %a0, %a1;", [a, b], [dtype])
    bits = np.dtype(dtype).itemsize * 8
    np.testing.assert_array_equal(
        got, wrap([BINARY[op](x, y, bits) for x, y in zip(python(a), python(b), strict=True)], dtype)
    )


@pytest.mark.parametrize("type_, wide", [("u16", np.uint32), ("s16", np.int32), ("u32", np.uint64), ("s32", np.int64)])
def test_wide_products_keep_every_bit(type_, wide):
    a, b, c = random_bits(TYPES[type_], 1), random_bits(TYPES[type_], 2), random_bits(wide, 3)
    got = lanes(f"mul.wide.{type_} %o0, %a0, %a1; mad.wide.{type_} %o1, %a0, %a1, %a2;", [a, b, c], [wide, wide])
    product = [x * y for x, y in zip(python(a), python(b), strict=True)]
    np.testing.assert_array_equal(got[0], wrap(product, wide))
    np.testing.assert_array_equal(got[1], wrap([p + z for p, z in zip(product, python(c), strict=True)], wide))


def test_carry_chains_make_128_bit_sums():
    a, b, c, d = (random_bits(np.uint64, s) for s in range(4))
    code = "add.cc.u64 %o0, %a0, %a2; addc.u64 %o1, %a1, %a3; sub.cc.u64 %o2, %a0, %a2; subc.u64 %o3, %a1, %a3;"
    got = lanes(code, [a, b, c, d], [np.uint64] * 4)
    for lane in range(32):
        x, y = int(a[lane]) | int(b[lane]) << 64, int(c[lane]) | int(d[lane]) << 64
        assert int(got[0][lane]) | int(got[1][lane]) << 64 == (x + y) % (1 << 128)
        assert int(got[2][lane]) | int(got[3][lane]) << 64 == (x - y) % (1 << 128)


def test_saturating_sums_clamp():
    a, b = A32.view(np.int32), B32.view(np.int32)
    got = lanes("add.sat.s32 %o0, %a0, %a1; sub.sat.s32 %o1, %a0, %a1;", [a, b], [np.int32] * 2)
    np.testing.assert_array_equal(got[0], np.clip(a.astype(np.int64) + b, -(2**31), 2**31 - 1))
    np.testing.assert_array_equal(got[1], np.clip(a.astype(np.int64) - b, -(2**31), 2**31 - 1))


def test_relu_clamps_minima_and_maxima_at_zero():
    a, b = A32.view(np.int32), B32.view(np.int32)
    got = lanes("min.relu.s32 %o0, %a0, %a1; max.relu.s32 %o1, %a0, %a1;", [a, b], [np.int32] * 2)
    np.testing.assert_array_equal(got[0], np.maximum(np.minimum(a, b), 0))
    np.testing.assert_array_equal(got[1], np.maximum(np.maximum(a, b), 0))


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_shifts_clamp_their_amount(bits):
    u, s = np.dtype(f"u{bits // 8}"), np.dtype(f"i{bits // 8}")
    a = random_bits(u, 1)
    n = np.arange(0, 96, 3, dtype=np.uint32)
    code = f"shl.b{bits} %o0, %a0, %a1; shr.u{bits} %o1, %a0, %a1; shr.s{bits} %o2, %a0, %a1;"
    got = lanes(code, [a, n], [u, u, s])
    np.testing.assert_array_equal(
        got[0], wrap([x << k if k < bits else 0 for x, k in zip(python(a), python(n), strict=True)], u)
    )
    np.testing.assert_array_equal(got[1], wrap([x >> k for x, k in zip(python(a), python(n), strict=True)], u))
    np.testing.assert_array_equal(got[2], wrap([x >> k for x, k in zip(python(a.view(s)), python(n), strict=True)], s))


@pytest.mark.parametrize("table", [0x00, 0x3F, 0x96, 0xE8, 0xC5, 0xFF])
def test_lop3_looks_up_each_bit(table):
    (got,) = lanes(f"lop3.b32 %o0, %a0, %a1, %a2, {table};", [A32, B32, C32], [np.uint32])
    want = np.zeros(32, np.uint32)
    for bit in range(32):
        index = (A32 >> bit & 1) << 2 | (B32 >> bit & 1) << 1 | C32 >> bit & 1
        want |= (table >> index & 1).astype(np.uint32) << np.uint32(bit)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("mode", ["", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"])
def test_prmt_picks_bytes(mode):
    rows = {  # PTX ISA: bytes picked for selectors 0 to 3, highest first
        ".f4e": ["3210", "4321", "5432", "6543"],
        ".b4e": ["5670", "6701", "7012", "0123"],
        ".rc8": ["0000", "1111", "2222", "3333"],
        ".ecl": ["3210", "3211", "3222", "3333"],
        ".ecr": ["0000", "1110", "2210", "3210"],
        ".rc16": ["1010", "3232", "1010", "3232"],
    }
    (got,) = lanes(f"prmt.b32{mode} %o0, %a0, %a1, %a2;", [A32, B32, C32], [np.uint32])
    for lane in range(32):
        source = [int(A32[lane]) >> 8 * i & 255 for i in range(4)] + [int(B32[lane]) >> 8 * i & 255 for i in range(4)]
        if mode:
            picked = [source[int(d)] for d in reversed(rows[mode][int(C32[lane]) & 3])]
        else:
            nibbles = [int(C32[lane]) >> 4 * i & 15 for i in range(4)]
            picked = [255 * (source[n & 7] >> 7) if n & 8 else source[n & 7] for n in nibbles]
        assert int(got[lane]) == sum(b << 8 * i for i, b in enumerate(picked))


@pytest.mark.parametrize("side", ["l", "r"])
@pytest.mark.parametrize("mode", ["wrap", "clamp"])
def test_funnel_shifts_move_between_words(side, mode):
    n = np.arange(0, 64, 2, dtype=np.uint32)
    (got,) = lanes(f"shf.{side}.{mode}.b32 %o0, %a0, %a1, %a2;", [A32, B32, n], [np.uint32])
    for lane in range(32):
        both = int(B32[lane]) << 32 | int(A32[lane])
        k = int(n[lane]) & 31 if mode == "wrap" else min(int(n[lane]), 32)
        assert int(got[lane]) == ((both << k >> 32) if side == "l" else both >> k) & 0xFFFFFFFF


def test_bit_counts_and_searches():
    a, s = A32, A32.view(np.int32)
    code = "popc.b32 %o0, %a0; clz.b32 %o1, %a0; brev.b32 %o2, %a0; bfind.u32 %o3, %a0; bfind.s32 %o4, %a1;"
    got = lanes(code, [a, s], [np.uint32] * 5)
    for lane, x in enumerate(python(a)):
        signed = int(s[lane])
        magnitude = ~signed if signed < 0 else signed
        assert got[0][lane] == x.bit_count()
        assert got[1][lane] == 32 - x.bit_length()
        assert got[2][lane] == int(f"{x:032b}"[::-1], 2)
        assert got[3][lane] == (x.bit_length() - 1) % (1 << 32)
        assert got[4][lane] == (magnitude.bit_length() - 1) % (1 << 32)


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_fields_are_extracted_and_inserted(bits):
    u, s = np.dtype(f"u{bits // 8}"), np.dtype(f"i{bits // 8}")
    a, b = random_bits(u, 1), random_bits(u, 2)
    rng = np.random.default_rng(0)
    position, length = (rng.integers(0, bits + 8, 32).astype(np.uint32) for _ in range(2))
    code = f"bfe.u{bits} %o0, %a0, %a2, %a3; bfe.s{bits} %o1, %a0, %a2, %a3; bfi.b{bits} %o2, %a0, %a1, %a2, %a3;"
    got = lanes(code, [a, b, position, length], [u, s, u])
    for lane in range(32):
        x, y, p, n = int(a[lane]), int(b[lane]), int(position[lane]), int(length[lane])
        sign = x >> min(p + n - 1, bits - 1) & 1 if n else 0
        extracted = [x >> p + i & 1 if i < n and p + i < bits else None for i in range(bits)]
        assert int(got[0][lane]) == sum((bit or 0) << i for i, bit in enumerate(extracted))
        want = sum((sign if bit is None else bit) << i for i, bit in enumerate(extracted))
        assert int(got[1][lane]) % (1 << bits) == want
        for i in range(n):
            if p + i < bits:
                y = y & ~(1 << p + i) | (x >> i & 1) << p + i
        assert int(got[2][lane]) == y


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("compare", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons_set_predicates(compare, type_):
    dtype = TYPES[type_]
    a, b = random_bits(dtype, 1), random_bits(dtype, 2)
    b[::3] = a[::3]
    code = f"setp.{compare}.{type_} %p0|%p1, %a0, %a1; selp.b32 %o0, 1, 2, %p0; selp.b32 %o1, 1, 2, %p1;"
    got = lanes(code, [a, b], [np.uint32] * 2)
    want = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}[compare]
    np.testing.assert_array_equal(got[0], np.where(want, 1, 2))
    np.testing.assert_array_equal(got[1], np.where(want, 2, 1))


def test_predicates_combine():
    code = """setp.lt.u32 %p0, %a0, 16; setp.gt.and.u32 %p1, %a0, 7, %p0; setp.eq.or.u32 %p2, %a0, 31, !%p0;
              xor.pred %p3, %p1, %p2; not.pred %p4, %p3; selp.b32 %o0, 1, 0, %p1; selp.b32 %o1, 1, 0, %p2;
              selp.b32 %o2, 1, 0, %p3; selp.b32 %o3, 1, 0, %p4;"""
    lane = np.arange(32, dtype=np.uint32)
    got = lanes(code, [lane], [np.uint32] * 4)
    between, high = (lane > 7) & (lane < 16), lane >= 16
    for result, want in zip(got, (between, high, between ^ high, ~(between ^ high)), strict=True):
        np.testing.assert_array_equal(result, want)
