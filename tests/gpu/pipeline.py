"""Runs a ``reference.Case`` through the package and compares; shared by the GPU tests."""

from __future__ import annotations

import torch
from reference import BLOCK, Case, assert_lse_close, assert_out_close

from sparse_aot import build_k2q_csr, sparse_atten_func

CANARY = 1.5  # of a bf16 or float32 buffer


def build(case: Case, **changes):
    """CSR and schedule, without a host read: (k2q_row_ptr, k2q_q_indices, schedule)."""
    options = {
        "total_k": case.total_k,
        "max_seqlen_k": case.max_seqlen_k,
        "max_seqlen_q": case.max_seqlen_q,
        "total_rows": case.total_rows,
        "qhead_per_kv": case.qhead_per_kv,
        "return_schedule": True,
    }
    return build_k2q_csr(case.q2k, case.cu_seqlens_q, case.cu_seqlens_k, BLOCK, **options | changes)


def attend(case: Case, plan, **options):
    """``sparse_atten_func`` on what ``build`` returned."""
    row_ptr, q_indices, schedule = plan
    defaults = {**case.arguments, "return_softmax_lse": True, "schedule": schedule}
    return sparse_atten_func(case.q, case.k, case.v, row_ptr, q_indices, case.topk, **defaults | options)


def run(case: Case, **options):
    """The whole pipeline: (out, lse)."""
    return attend(case, build(case), **options)


def check(case: Case, tokens=None, **options) -> None:
    """The pipeline agrees with the reference, for all tokens or only for ``tokens``."""
    out, lse = run(case, **options)
    want = case.reference(tokens)
    assert_out_close(out if tokens is None else out[tokens], want)
    assert_lse_close(lse if tokens is None else lse[tokens], want.lse)


class Guarded:
    """A tensor with canaries around it, to see writes outside of it.

    ``margin`` rows before and after it in dimension 0 and ``pad`` beyond its end in dimension 1.
    """

    def __init__(self, shape, dtype, margin: int = 64, pad: int = 0):
        outer = (shape[0] + 2 * margin, shape[1] + pad, *shape[2:])
        self.outer = torch.full(outer, CANARY if dtype.is_floating_point else 0x5A5A5A5A, dtype=dtype, device="cuda")
        self.before = self.outer.clone()
        self.tensor = self.outer[margin : margin + shape[0], : shape[1]]

    def assert_intact(self) -> None:
        outside = self.outer.clone()
        rows = self.tensor.storage_offset() // self.outer.stride(0)
        outside[rows : rows + self.tensor.shape[0], : self.tensor.shape[1]] = self.before.flatten()[0]
        assert torch.equal(outside, self.before), "written outside of the buffer"
