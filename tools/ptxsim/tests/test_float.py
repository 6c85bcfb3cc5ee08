"""Floating-point arithmetic and conversions, against NumPy and exhaustively decoded narrow formats."""

from fractions import Fraction

import numpy as np
import ptxsim
import pytest
import torch
from operands import every_value
from ptx import lanes

RNG = np.random.default_rng(0)
A, B, C = (RNG.normal(size=32).astype(np.float32) for _ in range(3))
SPECIAL = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3.4e38, 65504, 65520, 448, 464, 465, 6, 7,
                    2**-9, 2**-10, 1.5 * 2**-10, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 5.0000001, 1e-5, 1e9, -1e9, 0.1],
                   np.float32)  # fmt: skip


def same(got, want):
    """Equal, zeros by their sign too, except that any NaN equals any NaN."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got[~nan].view(np.uint64), want[~nan].view(np.uint64))


def narrow(x, dtype) -> np.ndarray:
    """The bits of ``x`` rounded to a torch dtype."""
    rounded = torch.from_numpy(np.ascontiguousarray(x)).to(dtype)
    return rounded.view({1: torch.uint8, 2: torch.uint16}[dtype.itemsize]).numpy().copy()


def widen(bits, dtype) -> np.ndarray:
    """float32 of the bits of a torch dtype."""
    bits = np.asarray(bits).astype({1: np.uint8, 2: np.uint16}[dtype.itemsize])
    return torch.from_numpy(bits).view(dtype).float().numpy()


@pytest.mark.parametrize("dtype, type_", [(np.float32, "f32"), (np.float64, "f64")])
def test_arithmetic_rounds_once(dtype, type_):
    a, b = (x.astype(dtype) for x in (A, B))
    code = f"""add.rn.{type_} %o0, %a0, %a1; sub.rn.{type_} %o1, %a0, %a1; mul.rn.{type_} %o2, %a0, %a1;
               div.rn.{type_} %o3, %a0, %a1; neg.{type_} %o4, %a0; abs.{type_} %o5, %a0;"""
    got = lanes(code, [a, b], [dtype] * 6)
    for result, want in zip(got, (a + b, a - b, a * b, a / b, -a, abs(a)), strict=True):
        same(result, want)


def test_multiply_then_add_rounds_twice_and_fma_once():
    code = "mul.rn.f32 %o0, %a0, %a1; add.rn.f32 %o0, %o0, %a2; fma.rn.f32 %o1, %a0, %a1, %a2;"
    got = lanes(code, [A, B, C], [np.float32] * 2)
    same(got[0], A * B + C)
    same(got[1], (A.astype(np.float64) * B + C).astype(np.float32))  # float64 holds the product and nearly the sum


def rounded(round_, formula, *operands):
    """float32 of a formula that is evaluated exactly, lane by lane, under a rounding."""

    def one(*x):
        with np.errstate(over="ignore", invalid="ignore"):
            nearest = np.float32(formula(*(float(v) for v in x)))
            if not np.isfinite(x).all():
                return nearest
            exact = formula(*(Fraction(float(v)) for v in x))
            value = float(nearest)
            wrong = {"rn": False, "rm": value > exact, "rp": value < exact, "rz": abs(value) > abs(exact)}[round_]
            direction = {"rn": 0, "rm": -np.inf, "rp": np.inf, "rz": 0}[round_]
            return np.nextafter(nearest, np.float32(direction)) if wrong else nearest

    return np.array([one(*x) for x in zip(*operands, strict=True)], np.float32)


ADD, SUB, MUL, FMA = (lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b, c: a * b + c)


def flushed(x):
    """Subnormals to zeros of their sign."""
    return np.where(abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)


@pytest.mark.parametrize("round_", ["rm", "rp", "rz"])
def test_directed_rounding(round_):
    code = f"""add.{round_}.ftz.f32 %o0, %a0, %a1; mul.{round_}.sat.f32 %o1, %a0, %a1;
               fma.{round_}.ftz.sat.f32 %o2, %a0, %a1, %a2;"""
    got = lanes(code, [A, B, C], [np.float32] * 3)
    same(got[0], rounded(round_, ADD, A, B))
    same(got[1], np.clip(rounded(round_, MUL, A, B), 0, 1))
    same(got[2], np.clip(rounded(round_, FMA, A, B, C), 0, 1))


@pytest.mark.parametrize("ftz", ["", ".ftz"])
@pytest.mark.parametrize("round_", ["rn", "rm", "rp", "rz"])
def test_pairs_of_float32_round_as_told(round_, ftz):
    tiny = np.array([1e-40, -1e-40, 3e-39, -2e-38, 1.2e-38, 0, -0.0, 1], np.float32)
    x = np.concatenate([A, B[:24], tiny])
    y = np.concatenate([B, C[:24], RNG.permutation(tiny)])
    z = np.concatenate([C, A[:24], tiny[::-1]])
    pairs = [v.reshape(32, 2).view(np.uint64)[:, 0].copy() for v in (x, y, z)]
    code = " ".join(f"{op}.{round_}{ftz}.f32x2 %o{i}, %a0, %a1;" for i, op in enumerate(["add", "sub", "mul"]))
    got = lanes(f"{code} fma.{round_}{ftz}.f32x2 %o3, %a0, %a1, %a2;", pairs, [np.uint64] * 4)
    a, b, c = (flushed(v) if ftz else v for v in (x, y, z))
    for result, formula in zip(got, (ADD, SUB, MUL, FMA), strict=True):
        want = rounded(round_, formula, a, b, c) if formula is FMA else rounded(round_, formula, a, b)
        np.testing.assert_array_equal(result.view(np.float32), flushed(want) if ftz else want)


@pytest.mark.parametrize("dtype, name", [(torch.bfloat16, "bf16"), (torch.float16, "f16")])
@pytest.mark.parametrize("sat", ["", ".sat"])
@pytest.mark.parametrize("round_", ["", ".rn", ".rm", ".rp", ".rz"])
def test_float32_arithmetic_with_half_operands(round_, sat, dtype, name):
    a, b = narrow(A, dtype), narrow(SPECIAL[::-1], dtype)
    c = np.where(np.arange(32) % 2, C, SPECIAL)
    code = f"""add{round_}{sat}.f32.{name} %o0, %a0, %a2; sub{round_}{sat}.f32.{name} %o1, %a0, %a2;
               fma{round_ or ".rn"}{sat}.f32.{name} %o2, %a0, %a1, %a2;"""
    got = lanes(code, [a, b, c], [np.float32] * 3)
    x, y, way = widen(a, dtype), widen(b, dtype), round_[1:] or "rn"
    wanted = (rounded(way, ADD, x, c), rounded(way, SUB, x, c), rounded(way, FMA, x, y, c))
    for result, want in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(result, np.where(want > 0, np.minimum(want, 1), 0) if sat else want)


@pytest.mark.parametrize("text", ["mul.rn.f32.bf16 %r0, %r1, %r1;", "fma.rn.ftz.f32.f16 %r0, %h0, %h1, %r1;"])
def test_mixed_forms_that_do_not_exist_stop_the_run(text):
    with pytest.raises(ptxsim.SimulationError, match=r"PTX line \d+: unknown modifier"):
        lanes(text, [], [np.uint32])


def test_ftz_flushes_inputs_and_results_to_zeros_of_their_sign():
    tiny = np.resize(np.array([1e-40, -1e-40, 1.2e-38, -1.2e-38], np.float32), 32)
    half = np.full(32, 0.5, np.float32)
    code = "mul.ftz.f32 %o0, %a0, %a1; mul.f32 %o1, %a0, %a1; add.ftz.f32 %o2, %a0, 0f00000000;"
    got = lanes(code, [tiny, half], [np.float32] * 3)
    same(got[0], np.copysign(np.float32(0), tiny))
    same(got[1], tiny * half)
    same(got[2], np.where(abs(tiny) < 1.1754944e-38, np.float32(0), tiny))


def test_minimum_and_maximum_of_nan_and_zeros():
    a = np.resize(np.array([1, np.nan, 2, 0.0, -0.0, np.nan], np.float32), 32)
    b = np.resize(np.array([2, 1, np.nan, -0.0, 0.0, np.nan], np.float32), 32)
    got = lanes(
        "max.f32 %o0, %a0, %a1; min.f32 %o1, %a0, %a1; max.NaN.f32 %o2, %a0, %a1; max.f32 %o3, %a0, %a1, %a0;",
        [a, b], [np.float32] * 4,
    )  # fmt: skip
    same(got[0], np.resize(np.array([2, 1, 2, 0.0, 0.0, np.nan], np.float32), 32))
    same(got[1], np.resize(np.array([1, 1, 2, -0.0, -0.0, np.nan], np.float32), 32))
    same(got[2], np.resize(np.array([2, np.nan, np.nan, 0.0, 0.0, np.nan], np.float32), 32))
    same(got[3], got[0])


@pytest.mark.parametrize(
    "op, want",
    [
        ("ex2.approx.ftz", np.exp2),
        ("lg2.approx", lambda x: np.log2(abs(x))),
        ("rcp.approx.ftz", lambda x: 1 / x),
        ("sqrt.approx", lambda x: np.sqrt(abs(x))),
        ("rsqrt.approx", lambda x: 1 / np.sqrt(abs(x))),
        ("tanh.approx", np.tanh),
        ("sin.approx", np.sin),
        ("cos.approx", np.cos),
    ],
)
def test_approximate_functions_are_close(op, want):
    x = abs(A) if op.split(".")[0] in ("lg2", "sqrt", "rsqrt") else A
    (got,) = lanes(f"{op}.f32 %o0, %a0;", [x], [np.float32])
    np.testing.assert_allclose(got, want(x.astype(np.float64)), rtol=3e-7)


@pytest.mark.parametrize("compare", ["eq", "ne", "lt", "ge", "equ", "neu", "ltu", "geu", "num", "nan"])
def test_comparisons_of_nan(compare):
    a, b = SPECIAL, SPECIAL[::-1].copy()
    (got,) = lanes(f"setp.{compare}.f32 %p0, %a0, %a1; selp.b32 %o0, 1, 0, %p0;", [a, b], [np.uint32])
    unordered = np.isnan(a) | np.isnan(b)
    ordered = {"eq": a == b, "ne": a != b, "lt": a < b, "ge": a >= b}
    if compare in ("num", "nan"):
        want = unordered == (compare == "nan")
    elif compare.endswith("u"):
        want = ordered[compare[:-1]] | unordered
    else:
        want = ordered[compare] & ~unordered
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype, name", [(torch.bfloat16, "bf16"), (torch.float16, "f16")])
def test_half_arithmetic(dtype, name):
    raw = [narrow(x, dtype) for x in (A, B, C)]
    code = f"""add.rn.{name} %o0, %a0, %a1; mul.rn.{name} %o1, %a0, %a1;
               fma.rn.{name} %o2, %a0, %a1, %a2; max.{name} %o3, %a0, %a1;"""
    got = lanes(code, raw, [np.uint16] * 4)
    a, b, c = (widen(x, dtype).astype(np.float64) for x in raw)
    for result, want in zip(got, (a + b, a * b, a * b + c, np.maximum(a, b)), strict=True):
        same(widen(result, dtype), widen(narrow(want, dtype), dtype))


def test_packed_arithmetic_works_on_both_halves():
    lo, hi = (narrow(x, torch.bfloat16).astype(np.uint32) for x in (A, B))
    packed = lo | hi << 16
    pair = np.stack([A, B], 1).view(np.uint64)[:, 0].copy()
    code = "fma.rn.bf16x2 %o0, %a0, %a0, %a0; fma.rn.f32x2 %o1, %a1, %a1, %a1; mul.rn.f32x2 %o2, %a1, %a1;"
    got = lanes(code, [packed, pair], [np.uint32, np.uint64, np.uint64])
    for half, x in ((got[0] & 0xFFFF, lo), (got[0] >> 16, hi)):
        w = widen(x, torch.bfloat16).astype(np.float64)
        same(widen(half, torch.bfloat16), widen(narrow(w * w + w, torch.bfloat16), torch.bfloat16))
    w = np.stack([A, B], 1).astype(np.float64)
    same(got[1].view(np.float32), (w * w + w).astype(np.float32).ravel())
    same(got[2].view(np.float32), (w * w).astype(np.float32).ravel())


# ------------------------------------------------------------------------------------------------- conversions


@pytest.mark.parametrize("dtype, name", [(torch.bfloat16, "bf16"), (torch.float16, "f16")])
def test_float32_to_half_and_back(dtype, name):
    for x in (A, SPECIAL):
        got = lanes(f"cvt.rn.{name}.f32 %o0, %a0; cvt.f32.{name} %o1, %o0;", [x], [np.uint16, np.float32])
        want = widen(narrow(x, dtype), dtype)
        same(widen(got[0], dtype), want)
        same(got[1], want)


def test_the_first_source_of_a_packed_conversion_is_the_upper_half():
    (got,) = lanes("cvt.rn.bf16x2.f32 %o0, %a0, %a1;", [A, B], [np.uint32])
    hi, lo = (narrow(x, torch.bfloat16).astype(np.uint32) for x in (A, B))
    want = hi << 16 | lo
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "name, dtype, largest", [("e4m3x2", torch.float8_e4m3fn, 448), ("e5m2x2", torch.float8_e5m2, 57344)]
)
def test_fp8_conversions_saturate_and_round_to_even(name, dtype, largest):
    for x in (A, SPECIAL, SPECIAL * 100, A * 2**-7):
        (got,) = lanes(f"cvt.rn.satfinite.{name}.f32 %o0, %a0, %a1;", [x, -x], [np.uint16])
        for bits, source in ((got >> 8, x), (got & 255, -x)):
            same(widen(bits, dtype), widen(narrow(np.clip(source, -largest, largest), dtype), dtype))


@pytest.mark.parametrize("name, dtype", [("e4m3x2", torch.float8_e4m3fn), ("e5m2x2", torch.float8_e5m2)])
def test_every_fp8_value_converts_to_half(name, dtype):
    for first in range(0, 256, 64):
        codes = np.arange(first, first + 64, dtype=np.uint8)
        (got,) = lanes(f"cvt.rn.f16x2.{name} %o0, %a0;", [codes.view(np.uint16)], [np.uint32])
        same(got.view(np.uint16).view(np.float16), widen(codes, dtype))


def test_e2m1_conversions():
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = np.concatenate([values, -values])
    x = np.concatenate(
        [table, [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 100, -0.25, -0.75, -5, -100, 0.3, 2.4, 5.1, -1.3]]
    ).astype(np.float32)
    code = ".reg .b8 %e; cvt.rn.satfinite.e2m1x2.f32 %e, %a0, %a1; cvt.u32.u8 %o0, %e; cvt.rn.f16x2.e2m1x2 %o1, %e;"
    got = lanes(code, [x, -x], [np.uint32, np.uint32])
    nearest = []
    for v in x:
        distance = abs(values - min(abs(v), 6))
        best = [i for i in range(8) if distance[i] == distance.min()]
        nearest.append(min(best, key=lambda i: i % 2) | (8 if np.signbit(v) else 0))  # ties to the even code
    nearest = np.array(nearest)
    np.testing.assert_array_equal(got[0] >> 4, nearest)
    np.testing.assert_array_equal(got[0] & 15, nearest ^ 8)
    np.testing.assert_array_equal((got[1] >> 16).astype(np.uint16).view(np.float16), table[nearest].astype(np.float16))


@pytest.mark.parametrize(
    "name, format_, element_bits", [("e2m1x2", "e2m1", 4), ("e2m3x2", "e2m3", 8), ("e3m2x2", "e3m2", 8)]
)
@pytest.mark.parametrize("relu", ["", ".relu"])
def test_conversions_of_narrow_pairs(name, format_, element_bits, relu):
    """From float32, from pairs of f16, and back to f16: nearest value, ties to even codes, saturating."""
    table = every_value(format_)
    positive = table[: len(table) // 2].astype(np.float64)
    middles = ((positive[1:] + positive[:-1]) / 2).astype(np.float32)
    rng = np.random.default_rng(0)

    def code(values):
        wanted = np.maximum(values, 0) if relu else values
        distance = abs(abs(wanted.astype(np.float64))[:, None] - positive)
        best = distance == distance.min(1, keepdims=True)
        even = best & (np.arange(len(positive)) % 2 == 0)
        chosen = np.where(best.sum(1) > 1, even.argmax(1), best.argmax(1))
        return chosen | np.where(np.signbit(wanted), len(positive), 0)

    bits = 2 * element_bits
    text = f""".reg .b{bits} %e; cvt.rn.satfinite{relu}.{name}.f32 %e, %a0, %a1; cvt.u32.u{bits} %o0, %e;
               cvt.rn{relu}.f16x2.{name} %o1, %e;
               cvt.rn.satfinite{relu}.{name}.f16x2 %e, %a2; cvt.u32.u{bits} %o2, %e;"""
    for start in range(0, len(middles), 16):
        ties = np.resize(middles[start : start + 16], 16)
        x = np.concatenate([ties, np.resize([1000, 1e-6, 0, 0.3], 4), rng.normal(size=12) * positive[-1]])
        x = (rng.permutation(x) * rng.choice([-1, 1], 32)).astype(np.float16).astype(np.float32)
        x = x + np.float32(0) if relu else x  # what becomes of a negative zero is not said
        y = rng.permutation(x)
        hi, lo = (v.astype(np.float16).view(np.uint16).astype(np.uint32) for v in (x, y))
        got = lanes(text, [x, y, hi << 16 | lo], [np.uint32] * 3)
        for pair in (got[0], got[2]):
            np.testing.assert_array_equal(pair >> element_bits, code(x))
            np.testing.assert_array_equal(pair & (1 << element_bits) - 1, code(y))
        for half, values in ((got[1] >> 16, x), (got[1] & 0xFFFF, y)):
            same(half.astype(np.uint16).view(np.float16), table[code(values)])


def test_bf16_pairs_become_e2m1():
    x, y = (narrow(v * 3, torch.bfloat16) for v in (A, B))
    code = """.reg .b8 %e, %f; .reg .b32 %x, %y;
              cvt.rn.satfinite.e2m1x2.bf16x2 %e, %a0; cvt.u32.u8 %o0, %e; shl.b32 %y, %a0, 16;
              and.b32 %x, %a0, 0xffff0000; cvt.rn.satfinite.e2m1x2.f32 %f, %x, %y; cvt.u32.u8 %o1, %f;"""
    got = lanes(code, [x.astype(np.uint32) << 16 | y], [np.uint32, np.uint32])
    np.testing.assert_array_equal(got[0], got[1])


def test_ue8m0_scales_round_as_told():
    x = abs(np.concatenate([A[:16], 2.0 ** np.arange(-8, 8)]).astype(np.float32))
    code = """cvt.rz.satfinite.ue8m0x2.f32 %o0, %a0, %a0; cvt.rp.satfinite.ue8m0x2.f32 %o1, %a0, %a0;
              cvt.rn.bf16x2.ue8m0x2 %o2, %o1;"""
    got = lanes(code, [x], [np.uint16, np.uint16, np.uint32])
    np.testing.assert_array_equal(got[0] & 255, np.floor(np.log2(x)) + 127)
    np.testing.assert_array_equal(got[1] >> 8, np.ceil(np.log2(x)) + 127)
    np.testing.assert_array_equal(((got[2] & 0xFFFF) << 16).view(np.float32), 2.0 ** np.ceil(np.log2(x)))


def test_ue8m0_at_the_ends_of_its_range():
    x = np.resize(np.array([0, 1e-45, 2.0**-127, 2.0**-127 * 1.5, 2.0**-126, 2.0**127, 2.0**127 * 1.5, np.inf, np.nan,
                            -4.0], np.float32), 32)  # fmt: skip
    code = """cvt.rz.satfinite.ue8m0x2.f32 %o0, %a0, %a0; cvt.rp.satfinite.ue8m0x2.f32 %o1, %a0, %a0;
              cvt.rp.ue8m0x2.f32 %o2, %a0, %a0;"""
    down, up, open_ = (bits[:10] & 255 for bits in lanes(code, [x], [np.uint16] * 3))
    assert down.tolist() == [0, 0, 0, 0, 1, 254, 254, 254, 255, 129]
    assert up.tolist() == [0, 0, 0, 1, 1, 254, 254, 254, 255, 129]
    assert open_.tolist() == [0, 0, 0, 1, 1, 254, 255, 255, 255, 129]


@pytest.mark.parametrize(
    "type_, dtype", [("u8", np.uint8), ("s8", np.int8), ("u32", np.uint32), ("s32", np.int32), ("s64", np.int64)]
)
@pytest.mark.parametrize("round_", ["rni", "rzi", "rmi", "rpi"])
def test_float_to_integer_saturates(type_, dtype, round_):
    x = np.concatenate(
        [A[:20] * 100, [0.5, 1.5, 2.5, -0.5, -1.5, 1e20, -1e20, np.inf, -np.inf, np.nan, 255.5, -128.5]]
    ).astype(np.float32)
    register = "b32" if np.dtype(dtype).itemsize < 4 else f"b{8 * np.dtype(dtype).itemsize}"
    out = np.uint32 if register == "b32" else np.uint64
    (got,) = lanes(f"cvt.{round_}.{type_}.f32 %o0, %a0;", [x], [out])
    info = np.iinfo(dtype)
    for lane, v in enumerate(x.astype(np.float64)):
        if np.isnan(v):
            want = 0 if info.bits < 64 else info.min
        else:
            rounded = (
                v if np.isinf(v) else {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[round_](v)
            )
            want = (
                int(np.clip(rounded, info.min, info.max))
                if abs(rounded) < 2**62
                else (info.max if rounded > 0 else info.min)
            )
        assert int(got[lane]) == want % (1 << 8 * np.dtype(out).itemsize)


def test_integer_conversions_extend_and_truncate():
    x = np.random.default_rng(0).integers(-(2**31), 2**31, 32).astype(np.int32)
    code = """cvt.s64.s32 %o0, %a0; cvt.u64.u32 %o1, %a0; cvt.s32.s8 %o2, %a0; cvt.u32.u16 %o3, %a0;
              cvt.sat.u8.s32 %o4, %a0; cvt.rn.f32.s32 %o5, %a0;"""
    got = lanes(code, [x], [np.int64, np.uint64, np.int32, np.uint32, np.uint32, np.float32])
    want = [x.astype(np.int64), x.view(np.uint32).astype(np.uint64), x.astype(np.int8).astype(np.int32),
            x.view(np.uint32) & 0xFFFF, np.clip(x, 0, 255), x.astype(np.float32)]  # fmt: skip
    for result, value in zip(got, want, strict=True):
        np.testing.assert_array_equal(result, value)


def test_mov_packs_lowest_first():
    code = "mov.b64 %o0, {%a0, %a1}; mov.b64 {%o2, %o1}, %o0; mov.b32 {%h0, %h1}, %a0; mov.b32 %o3, {%h1, %h0};"
    a, b = (np.random.default_rng(s).integers(0, 1 << 32, 32).astype(np.uint32) for s in (1, 2))
    got = lanes(code, [a, b], [np.uint64, np.uint32, np.uint32, np.uint32])
    np.testing.assert_array_equal(got[0], a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32))
    np.testing.assert_array_equal(got[1], b)
    np.testing.assert_array_equal(got[2], a)
    np.testing.assert_array_equal(got[3], a >> 16 | a << 16)
