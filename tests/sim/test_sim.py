"""Calls on host arrays: what they need and refuse, and that arrays on a device never meet the simulator."""

import json
import re
import zipfile

import numpy as np
import pytest
from calls import Call
from places import needs_simulator
from stub_driver import REAL_BUNDLE, DeviceArray, PlainArray, on_stub, run_python

from sparse_aot import BundleError, build_k2q_csr, sim, sparse_atten_func
from sparse_aot._core.bundle import Bundle

ml_dtypes = pytest.importorskip("ml_dtypes")
pytestmark = [
    needs_simulator,
    pytest.mark.skipif(not (REAL_BUNDLE / "ptx.zip").exists(), reason="no bundle built in this checkout"),
]

CU_SEQLENS_Q = np.array([0, 9, 20], np.int32)
CU_SEQLENS_K = np.array([0, 140, 300], np.int32)
Q2K = np.tile(np.array([1, -1, 0, 5], np.int32), (2, 20, 1))


def operands():
    """q, k and v."""
    rng = np.random.default_rng(0)
    shapes = (20, 4, 128), (300, 2, 128), (300, 2, 128)
    return tuple(rng.standard_normal(shape, dtype=np.float32).astype(ml_dtypes.bfloat16) for shape in shapes)


def call(convert=lambda array: array, **changes):
    """One call of NumPy arrays, each of which goes through ``convert`` first."""
    q, k, v = map(convert, operands())
    cu_q, cu_k = convert(CU_SEQLENS_Q), convert(CU_SEQLENS_K)
    row_ptr, q_indices, schedule = build_k2q_csr(
        convert(Q2K), cu_q, cu_k, total_k=300, qhead_per_kv=2, return_schedule=True
    )
    arguments = {"causal": True, "schedule": schedule, "return_softmax_lse": True, "max_seqlen_q": 11} | changes
    return sparse_atten_func(
        q, k, v, row_ptr, q_indices, 4, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_k=160, **arguments
    )


def foreign(array, kind=DeviceArray):
    """An array of a type that has ``__dlpack__`` and a ``from_dlpack`` in its module, and nothing else."""
    bfloat16 = array.dtype == ml_dtypes.bfloat16
    return kind(array.view(np.int16) if bfloat16 else array, bfloat16=bfloat16, device=(1, 0))


def test_results_are_of_the_type_that_went_in():
    out, lse = call()
    assert type(out) is type(lse) is np.ndarray
    assert (out.dtype, out.shape, lse.dtype, lse.shape) == (ml_dtypes.bfloat16, (20, 4, 128), np.float32, (20, 4))
    assert np.isfinite(lse).all()
    foreign_out, foreign_lse = call(foreign)
    assert type(foreign_out) is type(foreign_lse) is DeviceArray
    np.testing.assert_array_equal(foreign_out.host, out.view(np.int16))
    np.testing.assert_array_equal(foreign_lse.host, lse)


@pytest.mark.parametrize("scheduled", [True, False])
def test_arrays_that_nothing_makes_take_buffers_for_the_results(scheduled):
    """Only what is returned has to be of their type: the workspace and a schedule made inside the call do not."""
    expected_out, expected_lse = call()
    out, lse = np.zeros((20, 4, 128), ml_dtypes.bfloat16), np.zeros((20, 4), np.float32)
    q, k, v = (foreign(array, PlainArray) for array in operands())
    cu_q, cu_k = foreign(CU_SEQLENS_Q, PlainArray), foreign(CU_SEQLENS_K, PlainArray)
    row_ptr, q_indices, schedule = build_k2q_csr(
        Q2K, CU_SEQLENS_Q, CU_SEQLENS_K, total_k=300, qhead_per_kv=2, return_schedule=True
    )
    arguments = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 11, "max_seqlen_k": 160, "causal": True}
    arrays = q, k, v, foreign(row_ptr, PlainArray), foreign(q_indices, PlainArray), 4
    given = foreign(out, PlainArray), foreign(lse, PlainArray)
    got = sparse_atten_func(
        *arrays,
        **arguments,
        schedule=schedule if scheduled else None,
        out=given[0],
        lse=given[1],
        return_softmax_lse=True,
    )
    assert got == given
    if scheduled:  # else the call does not walk, which rounds in another order
        np.testing.assert_array_equal(out.view(np.int16), expected_out.view(np.int16))
    np.testing.assert_allclose(out.astype(np.float32), expected_out.astype(np.float32), atol=0.02)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-3)
    with pytest.raises(TypeError, match="q: expected an array of a type that results can be made of"):
        sparse_atten_func(*arrays, **arguments, schedule=schedule, lse=given[1])


def test_read_only_arrays_are_right_arguments():
    class Refusing(np.ndarray):
        """Exported as NumPy before 2.1 does it."""

        def __dlpack__(self, **options):
            if not self.flags.writeable:
                raise BufferError("Cannot export readonly array since signalling readonly is unsupported by DLPack.")
            return super().__dlpack__(**options)

    def freeze(array):
        array = array.copy().view(Refusing)
        array.flags.writeable = False
        return array

    expected = call()
    for result, wanted in zip(call(freeze), expected, strict=True):
        np.testing.assert_array_equal(result, wanted)
    for name, result in zip(("out", "lse"), expected, strict=True):
        with pytest.raises(ValueError, match=f"{name}: expected a writable array, got a read-only one"):
            call(**{name: freeze(result)})


def test_fewer_multiprocessors_get_fewer_ctas_and_give_the_same_bits(monkeypatch):
    grids = []
    run = sim.run

    def record(entry, grid, *arguments):
        grids.append((entry["operation"], grid))
        return run(entry, grid, *arguments)

    monkeypatch.setattr(sim, "run", record)
    expected = call()
    for wanted, grid in ((1, 1), (3, 3), (500, sim.options.multiprocessors)):
        grids.clear()
        for result, all_of_them in zip(call(usable_SM_count=wanted), expected, strict=True):
            np.testing.assert_array_equal(result, all_of_them)
        assert dict(grids)["fwd"] == grid


def test_csr_and_schedule_of_host_arrays_stay_host_code_unless_asked(monkeypatch):
    launches = []
    monkeypatch.setattr(sim, "run", lambda entry, *arguments: launches.append(entry["operation"]))
    build_k2q_csr(Q2K, CU_SEQLENS_Q, CU_SEQLENS_K, total_k=300, return_schedule=True)
    assert launches == []
    monkeypatch.setattr(sim.options, "csr", True)
    build_k2q_csr(Q2K, CU_SEQLENS_Q, CU_SEQLENS_K, total_k=300, return_schedule=True)
    assert launches[0] == "csr_rows" and launches[-1] == "schedule_fill"


def test_the_environment_sets_the_options(monkeypatch):
    assert sim.Options.from_environment() == sim.Options("sm_90a", csr=False, seed=0)
    for name, value in (("ARCH", "sm_100f"), ("CSR", "1"), ("SEED", "7")):
        monkeypatch.setenv(f"SPARSE_AOT_SIM_{name}", value)
    assert sim.Options.from_environment() == sim.Options("sm_100f", csr=True, seed=7)


@pytest.mark.parametrize(
    "field, value",
    [("arch", None), ("seed", "abc"), ("seed", -1), ("multiprocessors", 0), ("max_steps", 0.5), ("off", "race")],
)
def test_options_that_cannot_be_are_named(monkeypatch, field, value):
    monkeypatch.setattr(sim.options, field, value)
    with pytest.raises(ValueError, match=f"sim.options.{field}: expected .*, got {value!r}"):
        call()
    with pytest.raises(AttributeError):
        sim.options.architecture = "sm_100f"


def test_a_seed_that_is_none_does_not_keep_the_package_from_being_imported(monkeypatch):
    monkeypatch.setenv("SPARSE_AOT_SIM_SEED", "abc")
    assert sim.Options.from_environment().seed == "abc"  # and a call names it


@pytest.mark.parametrize("lengths", [(0, 300), (20, 0)], ids=["no queries", "no keys"])
def test_empty_numpy_arrays_are_right_arguments(lengths):
    total_q, total_k = lengths
    q, k = (np.zeros((n, heads, 128), ml_dtypes.bfloat16) for n, heads in ((total_q, 4), (total_k, 2)))
    cu_q, cu_k = np.array([0, total_q], np.int32), np.array([0, total_k], np.int32)
    q2k = np.zeros((2, total_q, 4), np.int32)
    row_ptr, q_indices, schedule = build_k2q_csr(q2k, cu_q, cu_k, total_k=total_k, qhead_per_kv=2, return_schedule=True)
    options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": total_q, "max_seqlen_k": total_k}
    out = sparse_atten_func(q, k, k, row_ptr, q_indices, 4, schedule=schedule, **options)
    assert out.shape == q.shape and not out.astype(np.float32).any()


def test_a_subclass_of_ndarray_is_a_numpy_array_and_another_byte_order_is_refused():
    class Subclass(np.ndarray):
        pass

    out, _ = call(lambda array: array.view(Subclass))
    np.testing.assert_array_equal(out, call()[0])
    with pytest.raises(ValueError, match=r"q: expected an array that can be read over DLPack: .*byte order"):
        call(
            lambda array: (
                array.astype(array.dtype.newbyteorder(">")) if array.ndim == 3 and array.dtype != np.int32 else array
            )
        )


def test_an_interrupt_ends_a_simulation():
    """Many idle CTAs make a launch that takes seconds; it ends soon after Ctrl-C, not when it is through."""
    code = """
import os, signal, threading, time
from test_sim import call
from sparse_aot import sim
call()  # which loads what there is to load
sim.options.multiprocessors = 1024
start = time.monotonic()
call()
whole = time.monotonic() - start
sent = []
def interrupt():
    sent.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)
threading.Timer(whole / 8, interrupt).start()
try:
    while True:  # whatever else the machine does, the interrupt finds a simulation
        call()
except KeyboardInterrupt:
    print((time.monotonic() - sent[0]) / whole)
"""
    done = run_python(code, PYTHONWARNINGS="ignore")
    assert float(done.stdout) < 0.5, done.stderr


def test_an_architecture_that_the_bundle_does_not_have_is_refused(monkeypatch):
    monkeypatch.setattr(sim.options, "arch", "sm_75")
    with pytest.raises(NotImplementedError, match=r"the simulator for sm_75: no kernels for it.*sm_100f, sm_90a"):
        call()


def test_without_the_simulator_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(sim, "find_simulator", lambda: None)
    with pytest.raises(NotImplementedError, match=r"arrays on the host: .*pip install ./tools/ptxsim"):
        call()


def damaged_bundle(folder, change):
    """The real manifest beside a ``ptx.zip`` with one member, changed; (the bundle, the member's entry)."""
    manifest = json.loads((REAL_BUNDLE / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest))
    entry = manifest["configurations"][0]
    name = f"{entry['arch']}/{entry['name']}"
    if change is None:
        data = bytearray((REAL_BUNDLE / "ptx.zip").read_bytes())
        data[200:1000] = bytes(800)
        (folder / "ptx.zip").write_bytes(data)
        return Bundle(folder), entry
    with zipfile.ZipFile(REAL_BUNDLE / "ptx.zip") as original, zipfile.ZipFile(folder / "ptx.zip", "w") as archive:
        for member, text in change(f"{name}.ptx", original.read(f"{name}.ptx")):
            archive.writestr(member, text)
    return Bundle(folder), entry


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda member, text: [(member, text.replace(b"add", b"sub", 1))], "is not what .*cubin was assembled from"),
        (lambda member, text: [("another.ptx", text)], "no PTX of"),
        (None, "no PTX of"),
    ],
    ids=["changed", "missing", "damaged"],
)
def test_ptx_that_is_not_of_the_bundle_is_refused(tmp_path, monkeypatch, change, message):
    monkeypatch.setattr(sim, "modules", {})
    sim.find_simulator()
    with pytest.raises(BundleError, match=f"{tmp_path / 'ptx.zip'}: .*{message}"):
        sim.load(*damaged_bundle(tmp_path, change))


def test_ptx_comes_with_the_simulator_where_the_bundle_has_none(tmp_path, monkeypatch):
    (tmp_path / "manifest.json").write_text((REAL_BUNDLE / "manifest.json").read_text())
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "ptx.zip").write_bytes((REAL_BUNDLE / "ptx.zip").read_bytes())
    monkeypatch.setattr(sim, "modules", {})
    bundle = Bundle(tmp_path)
    with pytest.raises(BundleError, match=f"{tmp_path / 'ptx.zip'}: no PTX for the simulator; .*aot build"):
        sim.load(bundle, bundle.configurations[0])
    monkeypatch.setattr(sim.find_simulator().__spec__, "submodule_search_locations", [str(tmp_path / "site")])
    sim.load(bundle, bundle.configurations[0])
    assert list(sim.modules) == [f"{bundle.configurations[0]['arch']}/{bundle.configurations[0]['name']}"]


def test_the_readme_example_runs(monkeypatch):
    readme = (REAL_BUNDLE.parent / "README.md").read_text()
    (example,) = re.findall(r"```python\n(import numpy as np\n.*?)```", readme, re.DOTALL)
    monkeypatch.setattr(sim.options, "arch", sim.options.arch)  # the example changes it
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["out"].dtype == ml_dtypes.bfloat16 and names["out"].shape == names["q"].shape
    assert np.isfinite(names["out"].astype(np.float32)).all()


@on_stub
def test_arrays_on_a_device_never_load_the_simulator():
    """In a process that may have it from another test: none of the functions that would load it is called."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("choose_device", "find_simulator", "load", "run", "encode_tiled"):
            patch.setattr(sim, name, None)
        Call().run()
