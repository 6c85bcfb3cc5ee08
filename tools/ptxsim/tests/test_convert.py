"""cvt to and from the narrow formats: every rounding against the formula of the PTX ISA, in float64."""

import numpy as np
import ptxsim
import pytest
from operands import NARROW
from ptx import lanes

# Bits of the exponent and of the mantissa, the exponent's bias, the largest finite number.
FORMATS = {
    "f16": (5, 10, 15, 65504.0),
    "bf16": (8, 7, 127, 2.0**128 - 2.0**120),
    "tf32": (8, 10, 127, 2.0**128 - 2.0**117),
    "e4m3": (4, 3, 7, 448.0),
    "e5m2": (5, 2, 15, 57344.0),
    "e2m1": (*NARROW["e2m1"], 6.0),
    "e2m3": (*NARROW["e2m3"], 7.5),
    "e3m2": (*NARROW["e3m2"], 28.0),
}
WITHOUT_NAN = ("e2m1", "e2m3", "e3m2")
RNG = np.random.default_rng(0)


def values(code, name) -> np.ndarray:
    """float64 of codes; exponents of all ones are Inf and NaN where the format has them."""
    exponent_bits, mantissa_bits, bias, largest = FORMATS[name]
    code = np.asarray(code).astype(np.int64)
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = (code & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    value = np.where(exponent > 0, 1 + mantissa, mantissa) * 2.0 ** (np.maximum(exponent, 1) - bias)
    beyond = np.where((mantissa > 0) | (name == "e4m3"), np.nan, np.inf)
    value = np.where(value > largest, beyond, value)
    return np.where(code >> exponent_bits + mantissa_bits & 1, -value, value)


def rounded(x, name, how, random=0.0, saturate=True, relu=False) -> np.ndarray:
    """What cvt makes of float32s, as float64. random: the random bits as a fraction, for how = "rs"."""
    _, mantissa_bits, bias, largest = FORMATS[name]
    x = np.asarray(x, np.float64)
    magnitude = np.where(np.isfinite(x), abs(x), 0)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, 1 - bias)
    quantum = 2.0 ** (exponent - mantissa_bits)
    count = magnitude / quantum
    count = {"rn": np.rint(count), "rz": np.floor(count), "rna": np.floor(count + 0.5), "rs": np.floor(count + random)}
    result = np.where(np.isinf(x), np.inf, count[how] * quantum)
    if saturate or how == "rz":
        result = np.where((result > largest) & (saturate | np.isfinite(x)), largest, result)
    else:
        result = np.where(result > largest, np.inf, result)
    result = np.copysign(result, x)
    if relu:
        result = np.where(result < 0, 0, result)
    return np.where(np.isnan(x), largest if name in WITHOUT_NAN else np.nan, result)


def interesting(name) -> np.ndarray:
    """32 float32s: around the format's range, ties, subnormals, what is too large, and the special values."""
    _, mantissa_bits, bias, largest = FORMATS[name]
    unit = 2.0 ** (1 - bias - mantissa_bits)  # the smallest number
    with np.errstate(over="ignore", invalid="ignore"):
        special = np.array([0, -0.0, np.inf, -np.inf, np.nan, largest, largest * (1 + 2.0 ** -(mantissa_bits + 1)),
                            -largest * 1.5, unit, unit / 2, -unit * 1.5, unit * 1e-6, 1 + 2.0 ** -(mantissa_bits + 1),
                            1 + 3 * 2.0 ** -(mantissa_bits + 1), -1e-45, 3.3e38], np.float32)  # fmt: skip
    scale = 2.0 ** RNG.integers(max(1 - bias - mantissa_bits, -126), min(bias, 100), 16)
    return RNG.permutation(np.concatenate([special, (RNG.normal(size=16) * scale).astype(np.float32)]))


def same(code, name, want, relu=False):
    """Codes whose values are the wanted ones; zeros by their sign too, but with .relu."""
    got = values(code, name)
    np.testing.assert_array_equal(got, want)
    if not relu:
        known = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(got)[known], np.signbit(want)[known])


@pytest.mark.parametrize("satfinite", ["", ".satfinite"])
@pytest.mark.parametrize("how, relu", [("rna", ""), ("rn", ""), ("rz", ""), ("rn", ".relu"), ("rz", ".relu")])
def test_float32_becomes_tf32_in_the_upper_19_bits(how, relu, satfinite):
    x = interesting("tf32")
    (got,) = lanes(f"cvt.{how}{satfinite}{relu}.tf32.f32 %o0, %a0;", [x], [np.uint32])
    assert not np.any(got & 0x1FFF)
    same(got >> 13, "tf32", rounded(x, "tf32", how, saturate=bool(satfinite), relu=bool(relu)), relu)


@pytest.mark.parametrize("satfinite", ["", ".satfinite"])
@pytest.mark.parametrize("name", ["f16", "bf16"])
@pytest.mark.parametrize("how", ["rn", "rz"])
def test_float32_becomes_half_under_both_roundings(name, how, satfinite):
    x, y = interesting(name), interesting(name)
    code = f"cvt.{how}{satfinite}.{name}.f32 %o0, %a0; cvt.{how}{satfinite}.{name}x2.f32 %o1, %a0, %a1;"
    got = lanes(code, [x, y], [np.uint16, np.uint32])
    for bits, source in ((got[0], x), (got[1] >> 16, x), (got[1] & 0xFFFF, y)):
        same(bits, name, rounded(source, name, how, saturate=bool(satfinite)))


def test_sat_limits_half_to_one():
    x = interesting("f16")
    (got,) = lanes("cvt.rn.sat.f16.f32 %o0, %a0;", [x], [np.uint16])
    same(got, "f16", rounded(np.where(x > 0, np.minimum(x, 1), 0), "f16", "rn"))  # NaN becomes zero


# --------------------------------------------------------------------------------------- stochastic rounding


def fractions_of_pairs(random, bits):
    """The random bits of (a, b): upper and lower half of the operand."""
    mask = (1 << bits) - 1
    return [(part & mask) / (mask + 1) for part in (random >> 16, random)]


@pytest.mark.parametrize("satfinite", ["", ".satfinite"])
@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("name, bits", [("f16", 13), ("bf16", 16)])
def test_stochastic_rounding_of_pairs_carries_out_of_the_discarded_bits(name, bits, relu, satfinite):
    random = RNG.integers(0, 1 << 32, 32).astype(np.uint32)
    random[:3] = 0, 0xFFFFFFFF, 0x80008000
    a, b = interesting(name), interesting(name)
    (got,) = lanes(f"cvt.rs{relu}{satfinite}.{name}x2.f32 %o0, %a0, %a1, %a2;", [a, b, random], [np.uint32])
    for code, x, fraction in zip((got >> 16, got & 0xFFFF), (a, b), fractions_of_pairs(random, bits), strict=True):
        same(code, name, rounded(x, name, "rs", fraction, bool(satfinite), bool(relu)), relu)


def fractions_of_four(random, element_bits):
    """The random bits of (a, b, e, f). Bytes: f, e in the low bytes of the lower and the upper half, b, a in the high
    ones. Of the wider formats b and f get a half of the operand, a and e the same half in reverse."""
    if element_bits == 4:
        return [(random >> shift & 0xFF) / 256 for shift in (24, 8, 16, 0)]
    halves = [random >> 16, random & 0xFFFF]
    reverse = [np.array([int(f"{h:016b}"[::-1], 2) for h in half]) for half in halves]
    return [x / 65536 for x in (reverse[0], halves[0], reverse[1], halves[1])]


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"])
def test_stochastic_rounding_of_four(name, relu):
    element_bits = 4 if name == "e2m1" else 8
    result = np.uint16 if name == "e2m1" else np.uint32
    for _ in range(4):
        random = RNG.integers(0, 1 << 32, 32).astype(np.uint32)
        random[:3] = 0, 0xFFFFFFFF, 0x80008000
        sources = [interesting(name) for _ in range(4)]
        text = f"cvt.rs{relu}.satfinite.{name}x4.f32 %o0, {{%a0, %a1, %a2, %a3}}, %a4;"
        (got,) = lanes(text, [*sources, random], [result])
        for i, (x, fraction) in enumerate(zip(sources, fractions_of_four(random, element_bits), strict=True)):
            code = got >> element_bits * (3 - i) & (1 << element_bits) - 1
            same(code, name, rounded(x, name, "rs", fraction, True, bool(relu)), relu)


def test_stochastic_rounding_is_right_on_average():
    x = np.full(32, 1 + 0.3 / 8, np.float32)  # e4m3 has 1 and 1.125
    total = 0
    for seed in range(32):
        random = np.random.default_rng(seed).integers(0, 1 << 32, 32).astype(np.uint32)
        (got,) = lanes("cvt.rs.satfinite.e4m3x4.f32 %o0, {%a0, %a0, %a0, %a0}, %a1;", [x, random], [np.uint32])
        total += values(got.view(np.uint8), "e4m3").sum()
    assert abs(total / (32 * 128) - x[0]) < 4 * 0.125 * (0.3 * 0.7 / (32 * 128)) ** 0.5


# ------------------------------------------------------------------------------- pairs from and to bf16 and f16


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("source", ["bf16", "f16"])
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"])
def test_halves_become_narrow_pairs(name, source, relu):
    element_bits = 4 if name == "e2m1" else 8
    raw = RNG.integers(0, 1 << 32, 32).astype(np.uint32)
    raw[:8] = 0x00008000, 0x7F807F80, 0xFF80FF80, 0x7FC07FC0, 0x7C00FC00, 0x7E007E00, 0x3F803F80, 0x00010001
    raw[8:20] = RNG.integers(0x3800, 0x4400, 12) * 0x10001
    text = f"""cvt.rn.satfinite{relu}.{name}x2.{source}x2 %e, %a0; cvt.u32.u{2 * element_bits} %o0, %e;"""
    (got,) = lanes(f".reg .b{2 * element_bits} %e; {text}", [raw], [np.uint32])
    for half, shift in ((raw >> 16, element_bits), (raw & 0xFFFF, 0)):
        x = values(half, source)
        code = got >> shift & (1 << element_bits) - 1
        same(code, name, rounded(x, name, "rn", relu=bool(relu)), relu)


def scales():
    """Two packed ue8m0 an element: those of 2^-8 to 2^8, the ends of the range, and NaN."""
    scale = RNG.integers(119, 136, (32, 2)).astype(np.uint8)
    scale[:4] = [[0, 254], [254, 0], [255, 127], [127, 255]]
    return scale, np.where(scale == 255, np.nan, 2.0 ** (scale.astype(np.float64) - 127))


@pytest.mark.parametrize("modifiers", ["", ".satfinite", ".relu", ".satfinite.relu"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "s2f6"])
def test_narrow_pairs_become_bf16_times_their_scales(name, scaled, modifiers):
    element_bits = 4 if name == "e2m1" else 8
    codes = RNG.permutation(np.arange(256)).astype(np.uint8)[:64].reshape(32, 2)  # lower element first
    codes[:4] = np.array([[0x7F, 0x80], [0xFF, 0x00], [0x7C, 0x7E], [0x81, 0x01]])
    codes &= 0xF if name == "e2m1" else 0x3F if name in NARROW else 0xFF
    scale, factor = scales()
    raw = codes.view(np.uint16)[:, 0] if element_bits == 8 else (codes[:, 0] | codes[:, 1] << 4).astype(np.uint8)
    operand = "cvt.u8.u16 %e, %a0;" if element_bits == 4 else "mov.b16 %e, %a0;"
    text = f".reg .b{2 * element_bits} %e; {operand} cvt.rn{modifiers}{'.scaled::n2::ue8m0' if scaled else ''}"
    text += f".bf16x2.{name}x2 %o0, %e{', %a1' if scaled else ''};"
    (got,) = lanes(text, [raw, scale.view(np.uint16)[:, 0].copy()], [np.uint32])
    x = codes.view(np.int8) / 64.0 if name == "s2f6" else values(codes, name)
    want = rounded(x * factor if scaled else x, "bf16", "rn", 0, "satfinite" in modifiers, "relu" in modifiers)
    for e in range(2):
        same(got >> 16 * e & 0xFFFF, "bf16", want[:, e], "relu" in modifiers)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("source", ["f32", "bf16x2"])
def test_numbers_over_their_scales_become_fixed_point(source, relu, scaled):
    x = (RNG.normal(size=(32, 2)) * 1.5).astype(np.float32)  # lower element first
    x[4:10, 0] = np.inf, -np.inf, np.nan, 1.5 / 64, 2.5 / 64, -0.0
    x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32) if source == "bf16x2" else x
    scale, factor = scales()
    packed = x[:, 1].view(np.uint32) & 0xFFFF0000 | x[:, 0].view(np.uint32) >> 16
    inputs = [x[:, 1].copy(), x[:, 0].copy(), packed, scale.view(np.uint16)[:, 0].copy()]
    operands = "%a0, %a1" if source == "f32" else "%a2"
    text = f"cvt.rn.satfinite{relu}{'.scaled::n2::ue8m0' if scaled else ''}.s2f6x2.{source} %o0, {operands}"
    (got,) = lanes(f"{text}{', %a3' if scaled else ''};", inputs, [np.uint16])
    quotient = x / factor if scaled else x.astype(np.float64)
    want = np.clip(np.rint(np.where(np.isnan(quotient), 2, quotient) * 64), 0 if relu else -128, 127)
    np.testing.assert_array_equal(got.view(np.int8).reshape(32, 2), want)


@pytest.mark.parametrize("how", ["rz", "rp"])
@pytest.mark.parametrize("satfinite", ["", ".satfinite"])
def test_bf16_pairs_become_scales(how, satfinite):
    raw = RNG.integers(0, 1 << 15, (32, 2)).astype(np.uint16)
    raw[:4] = [[0, 0x7F80], [0x7FC0, 0x7F7F], [0x0040, 0x0041], [0x0080, 0x8000 | 0x4000]]
    (got,) = lanes(f"cvt.{how}{satfinite}.ue8m0x2.bf16x2 %o0, %a0;", [raw.view(np.uint32)[:, 0].copy()], [np.uint16])
    x = abs(values(raw, "bf16"))
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.clip({"rz": np.floor, "rp": np.ceil}[how](np.log2(x)), -127, None) + 127
    want = np.where(np.isnan(x), 255, np.minimum(exponent, 254 if satfinite else 255))
    np.testing.assert_array_equal(got.view(np.uint8).reshape(32, 2), want)


@pytest.mark.parametrize(
    "text",
    [
        "cvt.rn.e4m3x2.f32 %h0, %r0, %r1;",  # .satfinite is mandatory
        "cvt.rz.satfinite.e4m3x2.f32 %h0, %r0, %r1;",
        "cvt.rn.satfinite.e4m3x2.e5m2x2 %h0, %h1;",
        "cvt.rn.satfinite.e4m3x4.f32 %r3, {%r0, %r1, %r2, %r3}, %r4;",
        "cvt.rs.satfinite.e4m3x2.f32 %h0, %r0, %r1, %r2;",
        "cvt.rs.f16x2.f32 %r3, %r0, %r1;",
        "cvt.rs.satfinite.e2m1x4.f32 %h0, {%r0, %r1}, %r2;",
        "cvt.rs.bf16.f32 %h0, %r0;",
        "cvt.rna.f16.f32 %h0, %r0;",
        "cvt.rna.relu.tf32.f32 %r1, %r0;",
        "cvt.rm.tf32.f32 %r1, %r0;",
        "cvt.tf32.f32 %r1, %r0;",
        "cvt.rn.satfinite.s32.f32 %r1, %r0;",
        "cvt.rn.satfinite.scaled::n2::ue8m0.e4m3x2.f32 %h0, %r0, %r1, %h2;",
        "cvt.rn.scaled::n2::ue8m0.bf16x2.s2f6x2 %r0, %h0;",
        "cvt.rn.bf16x2.s2f6x2 %r0, %h0, %h1;",
        "cvt.rn.f16x2.s2f6x2 %r0, %h0;",
        "cvt.rn.satfinite.ue8m0x2.f32 %h0, %r0, %r1;",
        "cvt.rn.sat.bf16x2.f32 %r3, %r0, %r1;",
    ],
)
def test_conversions_that_the_isa_does_not_list_stop_the_run(text):
    with pytest.raises(ptxsim.SimulationError, match=r"PTX line \d+: (?s:.*)cvt\."):
        lanes(text, [], [np.uint32])
