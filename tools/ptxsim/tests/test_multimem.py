"""multimem on the one device that there is, and atomics of 16-bit floating-point types."""

import numpy as np
import ptxsim
import pytest
from ptx import REDUCTIONS, aligned, kernel, random_bits

BYTES = {
    "u32": 4,
    "s32": 4,
    "b32": 4,
    "u64": 8,
    "s64": 8,
    "b64": 8,
    "f32": 4,
    "f64": 8,
    "f16": 2,
    "bf16": 2,
    "f16x2": 4,
    "bf16x2": 4,
}
VECTORS = {
    "": ["f32", "f64", "bf16x2"],
    ".v2": ["f16", "f32", "bf16x2"],
    ".v4": ["bf16", "f32", "f16x2"],
    ".v8": ["f16"],
}
FLOAT_VECTORS = [(vector, type_) for vector, types in VECTORS.items() for type_ in types]
NUMPY = {"u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64, "b32": np.uint32, "b64": np.uint64}
BYTES = {name: np.dtype(t).itemsize for name, t in NUMPY.items()}
BYTES |= {"f32": 4, "f64": 8, "f16": 2, "bf16": 2, "f16x2": 4, "bf16x2": 4}
LETTER = {2: "h", 4: "r", 8: "d"}


def registers(vector, type_, first=10):
    names = [f"%{LETTER[BYTES[type_]]}{first + i}" for i in range(int(vector[2:] or 1))]
    return names[0] if not vector else "{" + ", ".join(names) + "}"


def apply(line, memory, vector, type_, operand=None):
    """Memory and result after ``line``: {a} is a lane's address there, {d} and {b} registers of result and operand."""
    step = BYTES[type_] * int(vector[2:] or 1)
    memory, operand = aligned(memory), aligned(memory if operand is None else operand)
    result = aligned(np.zeros_like(memory))
    body = f"""mad.wide.u32 %d0, %t, {step}, %q0; mad.wide.u32 %d1, %t, {step}, %q1; mad.wide.u32 %d2, %t, {step}, %q2;
      ld.global{vector}.b{8 * BYTES[type_]} {registers(vector, type_, 20)}, [%d1];
      ld.global{vector}.b{8 * BYTES[type_]} {registers(vector, type_)}, [%d1];
      {line.format(a="%d0", d=registers(vector, type_), b=registers(vector, type_, 20))}
      st.global{vector}.b{8 * BYTES[type_]} [%d2], {registers(vector, type_)};"""
    arrays = [memory, operand, result]
    kernel(body, 3).launch(grid=1, block=32, params=arrays, memory=arrays)
    return memory, result


def random_memory(vector, type_, seed=0):
    n = BYTES[type_] * int(vector[2:] or 1) * 32
    return np.random.default_rng(seed).integers(0, 256, n).astype(np.uint8)


@pytest.mark.parametrize("vector, type_", [*FLOAT_VECTORS, *(("", t) for t in NUMPY)])
def test_a_store_and_a_load_of_one_device_are_plain(vector, type_):
    memory, operand = random_memory(vector, type_), random_memory(vector, type_, 1)
    got, _ = apply(f"multimem.st.release.gpu.global{vector}.{type_} [{{a}}], {{b}};", memory, vector, type_, operand)
    np.testing.assert_array_equal(got, operand)
    op = "xor" if type_[0] == "b" and type_[1].isdigit() else "max" if type_ == "s64" else "add"
    half = ".acc::f32" if "16" in type_ else ""
    line = f"multimem.ld_reduce.relaxed.sys.global.{op}{half}{vector}.{type_} {{d}}, [{{a}}];"
    same, got = apply(line, memory, vector, type_, operand)
    np.testing.assert_array_equal(got, memory)
    np.testing.assert_array_equal(same, memory)


INTEGER_REDUCTIONS = [
    *(("add", t) for t in ("u32", "s32", "u64")),
    *((op, t) for op in ("min", "max") for t in ("u32", "s32", "u64", "s64")),
    *((op, t) for op in ("and", "or", "xor") for t in ("b32", "b64")),
]


@pytest.mark.parametrize("op, type_", INTEGER_REDUCTIONS)
def test_integer_reductions(op, type_):
    x, y = random_bits(NUMPY[type_], 1), random_bits(NUMPY[type_], 2)
    got, _ = apply(f"multimem.red.relaxed.gpu.global.{op}.{type_} [{{a}}], {{b}};", x, "", type_, y)
    np.testing.assert_array_equal(got, REDUCTIONS[op](x, y))


def half_operands(vector, type_):
    """Two operands with sums that are subnormal, NaN or too large among them."""
    torch = pytest.importorskip("torch")
    kind = torch.float16 if type_.startswith("f16") else torch.bfloat16
    n = BYTES[type_] * int(vector[2:] or 1) * 16
    x, y = (torch.randn(n, generator=torch.Generator().manual_seed(i)).to(kind) for i in (1, 2))
    x[:6], y[:6] = (
        torch.tensor(v).to(kind) for v in ([1e-7, -0.0, np.inf, np.inf, np.nan, 6e4], [2e-7, 0.0, -np.inf, 1, 1, 6e4])
    )
    return x, y


def bits(tensor):
    return tensor.view(pytest.importorskip("torch").int16).numpy().copy()


def assert_same(got, want):
    torch = pytest.importorskip("torch")
    got = torch.from_numpy(got.view(np.int16).copy()).view(want.dtype)
    assert ((got == want) | (got.isnan() & want.isnan())).all()


@pytest.mark.parametrize("vector, type_", [("", "f16x2"), (".v4", "f16"), (".v8", "bf16"), (".v2", "bf16x2")])
def test_additions_of_halves_round_once(vector, type_):
    x, y = half_operands(vector, type_)
    got, _ = apply(f"multimem.red.add{vector}.{type_} [{{a}}], {{b}};", bits(x), vector, type_, bits(y))
    assert_same(got, (x.float() + y.float()).to(x.dtype))


@pytest.mark.parametrize("type_", ["f16", "bf16", "f16x2", "bf16x2"])
def test_atomics_of_halves_return_what_was_there(type_):
    x, y = half_operands("", type_)
    got, old = apply(f"atom.global.add.noftz.{type_} {{d}}, [{{a}}], {{b}};", bits(x), "", type_, bits(y))
    assert_same(got, (x.float() + y.float()).to(x.dtype))
    np.testing.assert_array_equal(old, bits(x))


@pytest.mark.parametrize(
    "line, message",
    [
        ("multimem.ld_reduce.add.e4m3x4 %r0, [%q0];", "type .e4m3x4 is not supported"),
        ("multimem.ld_reduce.add.s64 %d0, [%q0];", "no such reduction of type .s64"),
        ("multimem.ld_reduce.min.f32 %r0, [%q0];", "no such reduction of type .f32"),
        ("multimem.ld_reduce.f32 %r0, [%q0];", "no such reduction of type .f32"),
        ("multimem.red.max.f16x2 [%q0], %r0;", "no such reduction of type .f16x2"),
        ("multimem.red.and.u32 [%q0], %r0;", "no such reduction of type .u32"),
        ("multimem.st.v2.f64 [%q0], {%d0, %d1};", "no such vector of type .f64"),
        ("multimem.st.f16 [%q0], %h0;", "no such vector of type .f16"),
        ("multimem.st.v8.f32 [%q0], {%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7};", "no such vector of type .f32"),
        ("multimem.st.shared.f32 [%r0], %r1;", "multicast addresses are global"),
        ("multimem.cp.async.bulk [%q0], [%r0], 16;", "unknown multimem operation"),
    ],
)  # fmt: skip
def test_forms_that_the_isa_does_not_have_are_refused(line, message):
    with pytest.raises(ptxsim.SimulationError, match=message):
        kernel(line).launch(grid=1, block=32, params=[0])


def test_a_multicast_address_is_no_shared_one():
    body = "mov.u32 %r0, cell; cvt.u64.u32 %d0, %r0; cvta.shared.u64 %d1, %d0; multimem.st.f32 [%d1], %r0;"
    with pytest.raises(ptxsim.SimulationError, match=r"^global_bounds"):
        kernel(body, shared=".shared .b32 cell;").launch(grid=1, block=32, params=[0])
