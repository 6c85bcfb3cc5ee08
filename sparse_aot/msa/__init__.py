"""Block-sparse attention, as in MiniMax's public MSA: CSR and schedule, prefill."""

import sparse_aot.msa._values  # noqa: F401 - registers the family's kernels
from sparse_aot.msa._csr import build_k2q_csr, prepare_sparse_fwd_schedule_and_split
from sparse_aot.msa._prefill import sparse_atten_func
from sparse_aot.msa._schedule import Schedule

__all__ = ["Schedule", "build_k2q_csr", "prepare_sparse_fwd_schedule_and_split", "sparse_atten_func"]
