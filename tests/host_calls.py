"""Small calls on arrays of NumPy: also for tests that are a process of their own."""

import numpy as np
import pytest

from sparse_aot import build_k2q_csr, sparse_atten_func

ml_dtypes = pytest.importorskip("ml_dtypes")

TOTAL_Q, TOTAL_K, HEAD_KV, G, TOPK = 20, 300, 2, 2, 4
CU_SEQLENS_Q, CU_SEQLENS_K = np.array([0, 9, 20], np.int32), np.array([0, 140, 300], np.int32)


def build(seed=0, **options):
    """(k2q_row_ptr, k2q_q_indices, schedule) of a random selection; all have the same shapes."""
    q2k = np.random.default_rng(seed).integers(-1, 2, (HEAD_KV, TOTAL_Q, TOPK), dtype=np.int32)
    options = {"total_k": TOTAL_K, "qhead_per_kv": G, "return_schedule": True} | options
    return build_k2q_csr(q2k, CU_SEQLENS_Q, CU_SEQLENS_K, **options)


def attend(row_ptr, q_indices, schedule, g=G):
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((n, heads, 128), dtype=np.float32).astype(ml_dtypes.bfloat16)
        for n, heads in ((TOTAL_Q, HEAD_KV * g), (TOTAL_K, HEAD_KV), (TOTAL_K, HEAD_KV))
    )
    return sparse_atten_func(
        q, k, v, row_ptr, q_indices, TOPK, cu_seqlens_q=CU_SEQLENS_Q, cu_seqlens_k=CU_SEQLENS_K, schedule=schedule
    ).view(np.uint16)
