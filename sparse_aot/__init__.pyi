"""What type checkers and editors see of the compiled functions; the docstrings are in the functions themselves.

An array is anything that speaks DLPack, and what comes back is of the type that went in: both are ``Any`` here.
"""

from typing import Any

from sparse_aot import sim as sim

__version__: str

class BundleError(RuntimeError): ...

class CudaError(RuntimeError):
    code: int
    def __init__(self, code: int, message: str) -> None: ...

class Schedule:
    @property
    def enabled(self) -> bool: ...
    @property
    def scheduler_metadata(self) -> Any: ...
    @property
    def work_count(self) -> Any: ...
    @property
    def qsplit_indices(self) -> Any: ...
    @property
    def split_counts(self) -> Any: ...
    @property
    def split_entries(self) -> Any: ...
    @property
    def walk_blocks(self) -> Any: ...
    @property
    def walk_counts(self) -> Any: ...
    @property
    def walk_flags(self) -> Any: ...
    @property
    def rest_indices(self) -> Any: ...
    @property
    def target_q_per_cta(self) -> int: ...
    @property
    def work_capacity(self) -> int: ...
    @property
    def qhead_per_kv(self) -> int: ...
    @property
    def total_rows(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def csr_digest(self) -> int | None: ...

def build_k2q_csr(
    q2k_indices: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    blk_kv: int = 128,
    *,
    total_k: int,
    max_seqlen_k: int | None = None,
    max_seqlen_q: int | None = None,
    total_rows: int | None = None,
    qhead_per_kv: int = 1,
    return_schedule: bool = False,
    stream: Any = None,
) -> tuple[Any, ...]: ...
def prepare_sparse_fwd_schedule_and_split(
    *,
    k2q_row_ptr: Any,
    k2q_q_indices: Any,
    k2q_qsplit_indices: Any,
    split_counts: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    total_q: int,
    max_seqlen_q: int | None = None,
    topk: int,
    head_kv: int,
    qhead_per_kv: int,
    blk_kv: int,
    device: Any,
    enabled: bool,
    stream: Any = None,
) -> Schedule: ...
def sparse_atten_func(
    q: Any,
    k: Any,
    v: Any,
    k2q_row_ptr: Any,
    k2q_q_indices: Any,
    topk: int | None = None,
    *,
    topK: int | None = None,
    blk_kv: int = 128,
    causal: bool = False,
    softmax_scale: float | None = None,
    lse_temperature_scale: float = 1.0,
    return_temperature_lse: bool = False,
    partial_dtype: Any = "bfloat16",
    return_softmax_lse: bool = False,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Any = None,
    seqused_k: Any = None,
    schedule: Schedule | None = None,
    qk_dtype: Any = None,
    pv_dtype: Any = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    usable_SM_count: int | None = None,
    out: Any = None,
    lse: Any = None,
    stream: Any = None,
) -> Any: ...
def preload(device: int | None = None) -> int: ...
