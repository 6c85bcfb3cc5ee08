"""mma.sync in every shape and type: the fragments of the PTX ISA against matrix products in NumPy."""

import numpy as np
import ptxsim
import pytest
from operands import fused_sum, random_matrix
from ptx import lanes

GROUP, THREAD = np.arange(32) // 4, np.arange(32) % 4
INTEGERS = {"s8": (-128, 128), "u8": (0, 256), "s4": (-8, 8), "u4": (0, 16)}
ACCUMULATORS = {"f32": np.float32, "f16": np.float16, "s32": np.int32, "f64": np.float64}


def matrix(rows, k, name, seed):
    """(values, words [rows, words of a row]) of a random matrix, K-major, with noise where bits are ignored."""
    rng = np.random.default_rng(seed)
    if name == "f64":
        values = rng.normal(size=(rows, k))
        return values, values
    if name in ("s4", "u4"):
        values = rng.integers(*INTEGERS[name], (rows, k))
        low, high = values[:, ::2] & 15, values[:, 1::2] & 15
        return values, (low | high << 4).astype(np.uint8).view(np.uint32)
    values, raw = random_matrix(rows, k, name, seed)
    words = raw.view(np.uint32)
    if name == "tf32":
        words = words | rng.integers(0, 1 << 13, words.shape).astype(np.uint32)
    return values.astype(np.int64) if name in INTEGERS else values, words


def run(shape, name, b_name, sum_, c, modifiers="", suffix="", product_of=None, **options):
    """D of one mma of random A and B, and product_of(A, B): their product, exactly or in float64, unless told."""
    m, k = int(shape[1 : shape.index("n")]), int(shape[shape.index("k") + 1 :])
    a, a_words = matrix(m, k, name, 1)
    b, b_words = matrix(8, k, b_name, 2)  # stored by column of B
    groups = m // 8  # of eight rows of A; the registers go through them first
    a_registers = [a_words[GROUP + 8 * g, THREAD + 4 * i] for i in range(a_words.shape[1] // 4) for g in range(groups)]
    b_registers = [b_words[GROUP, THREAD + 4 * i] for i in range(b_words.shape[1] // 4)]
    i = np.arange(m // 4)[:, None]
    rows, columns = GROUP + 8 * (i // 2), 2 * THREAD + i % 2
    c = c.astype(ACCUMULATORS[sum_])
    c_registers = c[rows, columns]
    if sum_ == "f16":
        c_registers = c_registers.reshape(2, 2, 32).transpose(0, 2, 1).copy().view(np.uint32)[..., 0]
    registers = [*a_registers, *b_registers, *c_registers]
    names = iter(range(len(registers)))
    operands = [", ".join(f"%a{next(names)}" for _ in part) for part in (a_registers, b_registers, c_registers)]
    d = ", ".join(f"%o{i}" for i in range(len(c_registers)))
    text = f"mma.sync.aligned.{shape}.row.col{modifiers}.{sum_}.{name}.{b_name}.{sum_}{suffix} {{{d}}}, "
    text += ", ".join(f"{{{part}}}" for part in operands) + ";"
    got = np.stack(lanes(text, registers, [c_registers.dtype] * len(c_registers), **options))
    if sum_ == "f16":
        got = got.view(np.float16).reshape(2, 32, 2).transpose(0, 2, 1).reshape(4, 32)
    result = np.zeros_like(c)
    result[rows, columns] = got
    if product_of:
        return result, product_of(a, b)
    exact = np.int64 if name in INTEGERS else np.float64
    return result, a.astype(exact) @ b.T.astype(exact)


HALF = [(f"m16n8k{k}", name, name, "f32") for k in (8, 16) for name in ("f16", "bf16")]
HALF += [(f"m16n8k{k}", "f16", "f16", "f16") for k in (8, 16)]
TF32 = [(f"m16n8k{k}", "tf32", "tf32", "f32") for k in (4, 8)]
FP8 = [(f"m16n8k{k}", a, b, sum_) for k in (16, 32) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")
       for sum_ in ("f32", "f16")]  # fmt: skip


@pytest.mark.parametrize("shape, name, b_name, sum_", HALF + TF32 + FP8)
def test_mma_of_reals_adds_the_product(shape, name, b_name, sum_):
    c = np.random.default_rng(3).normal(size=(16, 8))
    got, product = run(shape, name, b_name, sum_, c)
    tolerance = 1e-5 if sum_ == "f32" else 2e-2
    np.testing.assert_allclose(got, product + c.astype(ACCUMULATORS[sum_]), rtol=tolerance / 10, atol=tolerance)


@pytest.mark.parametrize("shape", ["m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"])
@pytest.mark.parametrize("suffix", ["", ".rn"])
def test_mma_of_float64_keeps_its_precision(shape, suffix):
    c = np.random.default_rng(3).normal(size=(8 if shape[1] == "8" else 16, 8))
    got, product = run(shape, "f64", "f64", "f64", c, suffix=suffix)
    np.testing.assert_allclose(got, product + c, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("satfinite", ["", ".satfinite"])
@pytest.mark.parametrize("a_sign, b_sign", ["ss", "su", "us", "uu"])
@pytest.mark.parametrize(
    "shape, bits",
    [("m8n8k16", 8), ("m16n8k16", 8), ("m16n8k32", 8), ("m8n8k32", 4), ("m16n8k32", 4), ("m16n8k64", 4)],
)
def test_mma_of_integers_wraps_or_saturates(shape, bits, a_sign, b_sign, satfinite):
    rng = np.random.default_rng(3)
    m = 8 if shape[1] == "8" else 16
    c = rng.choice([2**31 - 1, -(2**31), 0, 12345], (m, 8))
    got, product = run(shape, f"{a_sign}{bits}", f"{b_sign}{bits}", "s32", c, satfinite)
    want = product + c
    assert np.any(want != want.astype(np.int32))  # some sums overflow
    want = np.clip(want, -(2**31), 2**31 - 1) if satfinite else want
    np.testing.assert_array_equal(got, want.astype(np.int32))


@pytest.mark.parametrize("shape, name, b_name, sum_", HALF + TF32 + FP8)
def test_mma_cuts_its_sums_as_the_chip_does(shape, name, b_name, sum_):
    c = (np.random.default_rng(3).normal(size=(16, 8)) * 100).astype(ACCUMULATORS[sum_])

    def product_of(a, b):
        return fused_sum(a, b, c, name, b_name, 25, sum_ == "f16")

    got, want = run(shape, name, b_name, sum_, c, product_of=product_of, accuracy="chip")
    np.testing.assert_array_equal(got, want.astype(ACCUMULATORS[sum_]))
    nearest, product = run(shape, name, b_name, sum_, c)
    if sum_ == "f32":  # all are cut towards zero
        assert np.all(abs(got) <= abs(product + c) + 1e-4)
        assert np.any(got != nearest)


@pytest.mark.parametrize("accuracy", ["exact", "chip"])
def test_infinity_and_nan_go_through_mma(accuracy):
    c = np.zeros((16, 8))
    c[0, 0], c[1, 1] = np.inf, np.nan
    got, _ = run("m16n8k16", "f16", "f16", "f32", c, accuracy=accuracy)
    assert np.isposinf(got[0, 0])
    assert np.isnan(got[1, 1])
    assert np.isfinite(got).sum() == 126


@pytest.mark.parametrize(
    "form, message",
    [
        ("m8n8k4.row.col.f32.f16.f16.f32", "unknown combination"),
        ("m16n8k8.col.row.f32.f16.f16.f32", "layouts other"),
        ("m16n8k8.row.col.f32.e4m3.e4m3.f32", "unknown combination"),
        ("m16n8k16.row.col.f32.f16.bf16.f32", "unknown combination"),
        ("m16n8k16.row.col.s32.s8.e4m3.s32", "unknown combination"),
        ("m16n8k64.row.col.s32.s8.s8.s32", "unknown combination"),
        ("m16n8k16.row.col.f16.bf16.bf16.f16", "accumulators of type"),
        ("m16n8k16.row.col.f32.f16.f16.f16", "accumulators of type"),
        ("m16n8k32.row.col.f32.s8.s8.f32", "accumulators of type"),
        ("m16n8k8.row.col.satfinite.f32.tf32.tf32.f32", "`.satfinite`"),
        ("m16n8k4.row.col.f64.f64.f64.f64.rz", "unknown modifier"),
        ("m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e4m3.f32", "no four known types"),
        ("m16n8k32.row.col.kind::f8f6f4.f32.e4m3.e4m3.f32", "unknown modifier"),
        ("m16n8k256.row.col.s32.b1.b1.s32.and.popc", "unknown matrix shape"),
    ],
)
def test_forms_of_mma_that_do_not_exist_stop_the_run(form, message):
    words = "{%r0, %r1, %r2, %r3}, {%r0, %r1, %r2, %r3}, {%r0, %r1}, {%r0, %r1, %r2, %r3}"
    doubles = "{%d0, %d1, %d2, %d3}, {%d0, %d1}, %d0, {%d0, %d1, %d2, %d3}"
    with pytest.raises(ptxsim.SimulationError, match=rf"PTX line \d+: {message}"):
        lanes(f"mma.sync.aligned.{form} {doubles if 'f64' in form else words};", [], [np.uint32])
