"""``sparse-aot demo``: selection, CSR and schedule, attention on a small ragged batch, each checked by brute force."""

import time
import warnings

import numpy as np

from sparse_aot import build_k2q_csr, sim, sparse_atten_func
from sparse_aot._core import _driver
from sparse_aot._core.bundle import BundleError, get_bundle
from sparse_aot.verify import find_damage

BLK_KV = 128
LENGTHS_Q = (150, 0, 90)
LENGTHS_K = (700, 128, 333)
HEAD_KV = 2
G = 4
TOPK = 4
HEAD_DIM = 128


def run_demo():
    """Run what this machine can; returns the exit status, which is 0 only where the attention ran."""
    bundle = get_bundle()
    damage = list(find_damage(bundle))
    if damage:
        raise BundleError(damage[0])
    print(
        f"bundle: {len(bundle.configurations)} cubins for {', '.join(bundle.architectures)}, hashes and layouts right"
    )

    rng = np.random.default_rng(0)
    cu_seqlens_q = np.cumsum((0, *LENGTHS_Q), dtype=np.int32)
    cu_seqlens_k = np.cumsum((0, *LENGTHS_K), dtype=np.int32)
    total_q = int(cu_seqlens_q[-1])
    q2k_indices = rng.integers(-1, 6, size=(HEAD_KV, total_q, TOPK), dtype=np.int32)
    selection = select(q2k_indices, cu_seqlens_q, cu_seqlens_k)
    row_ptr, q_indices, schedule = build_k2q_csr(
        q2k_indices,
        cu_seqlens_q,
        cu_seqlens_k,
        total_k=int(cu_seqlens_k[-1]),
        qhead_per_kv=G,
        return_schedule=True,
    )
    check_csr(row_ptr, q_indices, schedule, selection, cu_seqlens_k)
    print(
        f"host: CSR of {row_ptr.shape[1] - 1} blocks and {int(row_ptr[:, -1].sum())} entries in "
        f"{int(schedule.work_count[0])} work items, equal to brute force"
    )
    problem = rng, q2k_indices, selection, cu_seqlens_q, cu_seqlens_k
    if _driver.device_count():
        if report_attention(repr(_driver.describe_devices()[0]), find_framework(), problem):
            return 0
    else:
        print("no CUDA device")
    if not sim.is_installed():
        print(f"attention: not run, and the simulator is not installed: {sim.INSTALLATION}")
        return 1
    print("attention runs in the simulator")
    warnings.simplefilter("ignore", sim.SimulationWarning)
    ran = []
    for arch in bundle.architectures:
        sim.options.arch = arch
        ran.append(report_attention(arch, find_host_framework(), problem))
    return 0 if any(ran) else 1


def report_attention(where, framework, problem):
    """Run the attention and print how it went; whether it ran, for which it takes kernels and a framework."""
    to_device, to_host, name = framework
    if name is None:
        print(f"attention: {where}: not run, {to_host}")
        return False
    start = time.perf_counter()
    try:
        error = check_attention(*problem, to_device, to_host)
    except NotImplementedError as reason:
        print(f"attention: {where}: not run, {reason}")
        return False
    seconds = time.perf_counter() - start
    print(f"attention: {where}, {name} arrays, largest error {error:.1e} against float32, {seconds:.1f} s")
    return True


def select(q2k_indices, cu_seqlens_q, cu_seqlens_k):
    """{(KV head, token): (sequence, [its distinct blocks])} of the blocks that exist."""
    blocks = -(-np.diff(cu_seqlens_k) // BLK_KV)
    selection = {}
    for head, token in np.ndindex(q2k_indices.shape[:2]):
        sequence = int(np.searchsorted(cu_seqlens_q, token, side="right")) - 1
        named = np.unique(q2k_indices[head, token])
        selection[head, token] = sequence, [int(b) for b in named if 0 <= b < blocks[sequence]]
    return selection


def check_csr(row_ptr, q_indices, schedule, selection, cu_seqlens_k):
    """CSR and schedule hold exactly the selection; AssertionError where they do not."""
    blocks = -(-np.diff(cu_seqlens_k) // BLK_KV)
    rows = [(s, b) for b in range(blocks.max()) for s in range(len(blocks)) if b < blocks[s]]
    for head in range(HEAD_KV):
        for row, (sequence, block) in enumerate(rows):
            found = q_indices[head, row_ptr[head, row] : row_ptr[head, row + 1]].tolist()
            wanted = [t for (h, t), (s, bs) in selection.items() if h == head and s == sequence and block in bs]
            if found != sorted(wanted):
                raise AssertionError(f"CSR row {row} of KV head {head}: {found}, expected {sorted(wanted)}")
    covered = np.zeros_like(q_indices)
    for head, row, first, count, sequence, block in schedule.scheduler_metadata[: schedule.work_count[0]].tolist():
        if rows[row] != (sequence, block) or not 0 < count <= schedule.target_q_per_cta:
            raise AssertionError(f"work item {head, row, first, count, sequence, block}")
        start = row_ptr[head, row] + first
        covered[head, start : start + count] += 1
    if not (covered == (q_indices >= 0)).all():
        raise AssertionError("the work items do not cover every CSR entry once")
    slots = {}
    for head, word in ((h, w) for h in range(HEAD_KV) for w in schedule.qsplit_indices[h, : row_ptr[h, -1]].tolist()):
        slots.setdefault((head, word & 0xFFFFFF), []).append(word >> 24)
    for (head, token), (_, selected) in selection.items():
        if sorted(slots.get((head, token), [])) != list(range(len(selected))):
            raise AssertionError(f"split slots of token {token}, KV head {head}")


def find_framework():
    """(bfloat16 or int32 NumPy array to device array, that to float32 NumPy array, name) or (None, why not, None)."""
    try:
        import torch

        if torch.cuda.is_available():
            return (
                lambda x: torch.from_numpy(x).cuda().to(torch.int32 if x.dtype == np.int32 else torch.bfloat16),
                lambda x: x.float().cpu().numpy(),
                "torch",
            )
    except ImportError:
        pass
    try:
        import cupy

        bfloat16 = np.dtype("bfloat16")  # CuPy registers it where it supports it
        return (
            lambda x: cupy.asarray(x if x.dtype == np.int32 else x.astype(bfloat16)),
            lambda x: x.get().astype(np.float32),
            "CuPy",
        )
    except (ImportError, TypeError):
        return None, "it takes torch or CuPy to put arrays on the CUDA device", None


def find_host_framework():
    """The same for arrays on the host."""
    try:
        import ml_dtypes

        return (
            lambda x: x if x.dtype == np.int32 else x.astype(ml_dtypes.bfloat16),
            lambda x: x.astype(np.float32),
            "NumPy",
        )
    except ImportError:
        pass
    try:
        import torch

        return (
            lambda x: torch.from_numpy(x).to(torch.int32 if x.dtype == np.int32 else torch.bfloat16),
            lambda x: x.float().numpy(),
            "torch",
        )
    except ImportError:
        return None, "it takes ml_dtypes or torch to make bfloat16 arrays on the host", None


def check_attention(rng, q2k_indices, selection, cu_seqlens_q, cu_seqlens_k, to_device, to_host):
    """The largest difference to the reference; AssertionError where it is more than bfloat16 explains."""
    total_q, total_k = int(cu_seqlens_q[-1]), int(cu_seqlens_k[-1])
    shapes = (total_q, HEAD_KV * G, HEAD_DIM), (total_k, HEAD_KV, HEAD_DIM), (total_k, HEAD_KV, HEAD_DIM)
    q, k, v = (to_device(rng.standard_normal(shape, dtype=np.float32)) for shape in shapes)
    cu_q, cu_k = to_device(cu_seqlens_q), to_device(cu_seqlens_k)
    row_ptr, q_indices, schedule = build_k2q_csr(
        to_device(q2k_indices), cu_q, cu_k, total_k=total_k, qhead_per_kv=G, return_schedule=True
    )
    out = sparse_atten_func(
        q,
        k,
        v,
        row_ptr,
        q_indices,
        TOPK,
        causal=True,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=max(LENGTHS_Q),
        max_seqlen_k=max(LENGTHS_K),
        schedule=schedule,
    )
    expected = attend(to_host(q), to_host(k), to_host(v), selection, cu_seqlens_q, cu_seqlens_k)
    error = float(np.abs(to_host(out) - expected).max())
    if not error < 0.05:
        raise AssertionError(f"attention: the largest error against the float32 reference is {error}")
    return error


def attend(q, k, v, selection, cu_seqlens_q, cu_seqlens_k):
    """Causal block-sparse attention in float32."""
    out = np.zeros_like(q)
    for (head, token), (s, blocks) in selection.items():
        length = cu_seqlens_k[s + 1] - cu_seqlens_k[s]
        last = token - cu_seqlens_q[s] + length - (cu_seqlens_q[s + 1] - cu_seqlens_q[s])
        keys = np.array(
            [j for b in blocks for j in range(b * BLK_KV, (b + 1) * BLK_KV) if j < length and j <= last], int
        )
        if not keys.size:
            continue
        keys += cu_seqlens_k[s]
        heads = slice(head * G, (head + 1) * G)
        scores = q[token, heads] @ k[keys, head].T / np.sqrt(HEAD_DIM)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[token, heads] = weights @ v[keys, head] / weights.sum(axis=1, keepdims=True)
    return out
