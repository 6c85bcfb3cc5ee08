"""accuracy="chip": approximate functions err, but never by more than the PTX ISA allows (sections 9.7.3 and 9.7.4)."""

import numpy as np
import ptxsim
import pytest
from ptx import HEADER, lanes

RNG = np.random.default_rng(0)


def ulp(y):
    return 2.0 ** (np.maximum(np.frexp(y)[1] - 1, -126) - 23)


def relative(exponent):
    return lambda x, y: abs(y) * 2.0**exponent


FUNCTIONS = {
    "ex2.approx.f32": (np.exp2, lambda x, y: 2 * ulp(y)),
    "ex2.approx.ftz.f32": (np.exp2, lambda x, y: 2 * ulp(y)),
    "lg2.approx.f32": (np.log2, lambda x, y: 2.0**-22 * np.where((x > 0.5) & (x < 2), 1, abs(y))),
    "rcp.approx.ftz.f32": (lambda x: 1 / x, lambda x, y: ulp(y)),
    "sqrt.approx.f32": (np.sqrt, relative(-23)),
    "rsqrt.approx.f32": (lambda x: 1 / np.sqrt(x), relative(-22.9)),
    "sin.approx.f32": (np.sin, lambda x, y: np.where(abs(x) <= 2 * np.pi, 2.0**-20.5, 2.0**-14.7)),
    "cos.approx.f32": (np.cos, lambda x, y: np.where(abs(x) <= 2 * np.pi, 2.0**-20.5, 2.0**-14.7)),
    "tanh.approx.f32": (np.tanh, relative(-11)),
    "ex2.approx.f16": (np.exp2, relative(-9.9)),
    "ex2.approx.ftz.bf16": (np.exp2, relative(-7)),
    "tanh.approx.f16": (np.tanh, lambda x, y: 2.0**-10.987),
    "tanh.approx.bf16": (np.tanh, lambda x, y: 2.0**-8),
}


def number(bits, type_):
    """float64 of the bits of a type."""
    if type_ == "f16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16 if type_ == "bf16" else bits).view(np.float32).astype(np.float64)


def inputs(name):
    """Bits of 256 numbers: where the function is defined, and of moderate size."""
    values = RNG.normal(size=256) * RNG.choice([0.01, 1, 5], 256)
    values = abs(values) if name[:3] in ("lg2", "sqr", "rsq") else values
    if name.endswith(".f16"):
        return values.astype(np.float16).view(np.uint16)
    bits = values.astype(np.float32).view(np.uint32)
    return (bits >> 16).astype(np.uint16) if name.endswith("bf16") else bits


@pytest.mark.parametrize("name", FUNCTIONS)
def test_approximate_functions_err_within_what_is_documented(name):
    function, bound = FUNCTIONS[name]
    type_ = name.split(".")[-1]
    bits = inputs(name)
    differences = 0
    for part in bits.reshape(-1, 32):
        runs = [lanes(f"{name} %o0, %a0;", [part], [bits.dtype], accuracy=how, seed=seed)[0]
                for how, seed in (("exact", 0), ("chip", 0), ("chip", 1))]  # fmt: skip
        x = number(part, type_)
        want = function(x)
        got = number(runs[1], type_)
        assert np.all(abs(got - want) <= bound(x, want))
        np.testing.assert_array_equal(runs[1], runs[2])  # the input alone decides
        differences += (runs[0] != runs[1]).sum()
    assert differences > 20


@pytest.mark.parametrize(
    "packed, single", [("ex2.approx.ftz.bf16x2", "ex2.approx.ftz.bf16"), ("tanh.approx.f16x2", "tanh.approx.f16")]
)
def test_halves_of_a_pair_err_as_single_numbers_do(packed, single):
    lo, hi = (inputs(single)[:32] for _ in range(2))
    code = f"{packed} %o0, %a2; {single} %o1, %a0; {single} %o2, %a1;"
    pair = lo.astype(np.uint32) | hi.astype(np.uint32) << 16
    got = lanes(code, [lo, hi, pair], [np.uint32, np.uint16, np.uint16], accuracy="chip")
    np.testing.assert_array_equal(got[0], got[1] | got[2].astype(np.uint32) << 16)


def test_results_that_the_isa_lists_are_exact():
    x = np.resize(np.array([0, -0.0, np.inf, -np.inf, np.nan], np.float32), 32)
    text = (
        "ex2.approx.ftz.f32 %o0, %a0; rcp.approx.ftz.f32 %o1, %a0; tanh.approx.f32 %o2, %a0; lg2.approx.f32 %o3, %a0;"
    )
    got = lanes(text, [x], [np.float32] * 4, accuracy="chip")
    inf, nan = np.inf, np.nan
    for result, want in zip(got, ([1, 1, inf, 0, nan], [inf, -inf, 0, -0.0, nan], [0, -0.0, 1, -1, nan],
                                  [-inf, -inf, inf, nan, nan]), strict=True):  # fmt: skip
        want = np.resize(np.array(want, np.float32), 32)
        np.testing.assert_array_equal(result, want)
        known = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(result)[known], np.signbit(want)[known])


def test_what_rounds_as_ieee_does_not_err():
    x = abs(RNG.normal(size=32)).astype(np.float32)
    text = "rcp.rn.f32 %o0, %a0; sqrt.rn.f32 %o1, %a0;"
    for a, b in zip(*(lanes(text, [x], [np.float32] * 2, accuracy=how) for how in ("exact", "chip")), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["rcp.approx.f16", "sqrt.approx.bf16", "sin.approx.f16", "lg2.approx.bf16x2"])
def test_functions_that_halves_do_not_have_stop_the_run(name):
    register = "%r" if name.endswith("x2") else "%h"
    with pytest.raises(ptxsim.SimulationError, match=r"PTX line \d+: type"):
        lanes(f"{name} {register}0, {register}1;", [], [np.uint32])


def test_accuracies_that_do_not_exist_are_refused():
    module = ptxsim.load(f"{HEADER} .visible .entry k() {{ ret; }}")
    with pytest.raises(ValueError, match="accuracy is exact or chip, not good"):
        module.launch(grid=1, block=32, accuracy="good")
