"""What goes in decides the type of what comes out; the bits are the same for torch, CuPy and JAX."""

import sys
import time

import pytest

torch = pytest.importorskip("torch")

from places import attend, build, run  # noqa: E402
from reference import BLOCK, make_case  # noqa: E402

from sparse_aot import build_k2q_csr, sparse_atten_func  # noqa: E402

ARRAYS = ("q", "k", "v", "q2k", "cu_seqlens_q", "cu_seqlens_k", "page_table", "seqused_k")
SCHEDULE_ARRAYS = ("scheduler_metadata", "work_count", "qsplit_indices", "split_counts")


def contiguous_case(layout, seed=1):
    case = make_case(
        lens_q=[130, 0, 77], lens_k=[1500, 200, 640], qhead_per_kv=4, topk=8, layout=layout, causal=True, trim=True,
        seed=seed, device="cuda",
    )  # fmt: skip
    if case.page_table is not None:
        case.page_table = case.page_table.contiguous()  # JAX arrays have no strides
    return case


def converted(case, convert):
    for name in ARRAYS:
        if getattr(case, name) is not None:
            setattr(case, name, convert(getattr(case, name)))
    return case


def assert_same_bits(case, kind, array_type):
    """The pipeline on ``case`` gives arrays of ``array_type`` that hold what torch tensors give."""
    want = run(contiguous_case("flat" if case.page_table is None else "paged"))
    row_ptr, q_indices, schedule = build(case)
    results = attend(case, (row_ptr, q_indices, schedule))
    for array in (row_ptr, q_indices, *results, *(getattr(schedule, name) for name in SCHEDULE_ARRAYS)):
        assert isinstance(array, array_type), f"{kind} in, {type(array)} out"
    for got, expected in zip(results, want, strict=True):
        assert torch.equal(torch.from_dlpack(got), expected)


@pytest.mark.parametrize("layout", ["flat", "paged"])
def test_torch_in_torch_out(layout):
    assert_same_bits(contiguous_case(layout), "torch", torch.Tensor)


@pytest.mark.parametrize("layout", ["flat", "paged"])
def test_cupy_in_cupy_out(layout):
    cupy = pytest.importorskip("cupy")
    torch.cuda.synchronize()
    case = converted(contiguous_case(layout), cupy.from_dlpack)
    assert_same_bits(case, "CuPy", cupy.ndarray)


def test_cupy_work_goes_on_its_current_stream():
    cupy = pytest.importorskip("cupy")
    want = run(contiguous_case("flat"))
    case = converted(contiguous_case("flat"), cupy.from_dlpack)
    plan = build(case)
    q, case.q = case.q, cupy.zeros_like(case.q)
    out, lse = attend(case, plan)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(50):  # keep the stream busy before q is there
            cupy.random.random(20_000_000)
        case.q[...] = q
        attend(case, plan, out=out, lse=lse)
    stream.synchronize()
    assert torch.equal(torch.from_dlpack(out), want[0]) and torch.equal(torch.from_dlpack(lse), want[1])


@pytest.mark.parametrize("layout", ["flat", "paged"])
def test_jax_in_jax_out(layout):
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    torch.cuda.synchronize()
    case = converted(contiguous_case(layout), jax.dlpack.from_dlpack)
    assert_same_bits(case, "JAX", jax.Array)


def test_jax_results_that_are_still_being_computed_are_waited_for():
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    want = run(contiguous_case("flat"))
    case = converted(contiguous_case("flat"), jax.dlpack.from_dlpack)

    @jax.jit
    def slowly(q, a):
        for _ in range(20):
            a = a @ a
        return q + (a[0, 0] * 0).astype(q.dtype)

    case.q = slowly(case.q, jax.numpy.zeros((8192, 8192)))
    out, _ = run(case)
    assert torch.equal(torch.from_dlpack(out), want[0])


def test_jax_arrays_of_the_host_run_in_the_simulator_and_agree_with_the_device():
    jax = pytest.importorskip("jax")
    want = run(contiguous_case("paged"))
    case = converted(contiguous_case("paged"), lambda array: jax.dlpack.from_dlpack(array.cpu()))
    results = run(case)
    assert all(isinstance(result, jax.Array) for result in results)
    for got, expected in zip(results, want, strict=True):
        torch.testing.assert_close(torch.from_dlpack(got), expected.cpu(), rtol=2**-7, atol=2**-8)


def test_one_call_may_mix_frameworks():
    cupy = pytest.importorskip("cupy")
    case = contiguous_case("paged")
    want = run(case)
    torch.cuda.synchronize()
    case.page_table, case.seqused_k = cupy.from_dlpack(case.page_table), cupy.from_dlpack(case.seqused_k)
    out, _ = run(case)
    assert isinstance(out, torch.Tensor) and torch.equal(out, want[0])


def test_a_minimal_dlpack_object_is_accepted():
    class Only:
        """Nothing but the protocol."""

        def __init__(self, tensor):
            self.tensor = tensor

        def __dlpack__(self, **options):
            return self.tensor.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

    case = contiguous_case("paged")
    want = run(case)
    plan = build(case)
    out, lse = torch.empty_like(want[0]), torch.empty_like(want[1])
    for name in ARRAYS:
        if name != "q2k":
            setattr(case, name, Only(getattr(case, name)))
    attend(case, plan, out=out, lse=lse)
    torch.cuda.synchronize()
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])


def test_host_arrays_next_to_device_arrays_are_refused():
    case = contiguous_case("flat")
    plan = build(case)
    case.k = case.k.cpu()
    with pytest.raises((ValueError, TypeError), match=r"\bk\b"):
        attend(case, plan)


def test_the_package_imports_no_framework(tmp_path):
    import subprocess

    script = "import sparse_aot, sys; print([m for m in ('torch', 'cupy', 'jax') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_preload_leaves_nothing_to_load_for_the_first_call():
    import sparse_aot

    sparse_aot.preload()
    case = contiguous_case("flat")
    torch.cuda.synchronize()
    start = time.perf_counter()
    row_ptr, q_indices, schedule = build_k2q_csr(
        case.q2k, case.cu_seqlens_q, case.cu_seqlens_k, BLOCK, total_k=case.total_k, total_rows=case.total_rows,
        qhead_per_kv=case.qhead_per_kv, return_schedule=True,
    )  # fmt: skip
    sparse_atten_func(
        case.q, case.k, case.v, row_ptr, q_indices, case.topk, causal=True, cu_seqlens_q=case.cu_seqlens_q,
        cu_seqlens_k=case.cu_seqlens_k, max_seqlen_q=case.max_seqlen_q, max_seqlen_k=case.max_seqlen_k,
        schedule=schedule, seqused_k=case.seqused_k,
    )  # fmt: skip
    torch.cuda.synchronize()
    assert time.perf_counter() - start < 0.1
