"""What every prefill is made from, on any architecture: storage, dtypes and launch parameters."""

from cutlass import BFloat16, Float32, Int32, Int64

from aot.kernel import Kernel, Ptr
from aot.kernels.mask import BLK_KV
from aot.kernels.msa.partials import HEAD_DIM
from aot.kernels.storage import ATOM_ROWS, CHUNK_BYTES, DTYPES, Storage

OUT = BFloat16  # what attention returns, whatever it reads


class Prefill(Kernel):
    """Base of the prefill kernels. Dtypes by name: of Q and KV as stored, of the products, and of partial results."""

    def __init__(self, q: str, kv: str, qk: str, pv: str, g: int, partial: str, temperature: bool):
        self.q, self.kv = Storage(DTYPES[q], HEAD_DIM), Storage(DTYPES[kv], HEAD_DIM)
        self.qk, self.pv = DTYPES[qk], DTYPES[pv]
        self.g = g
        self.partial = DTYPES[partial]
        self.temperature = temperature
        self.maps = {
            "q": self.q.map(ATOM_ROWS, groups=max(g // ATOM_ROWS, 1)),
            "k": self.kv.map(BLK_KV),
            "v": self.kv.map(BLK_KV),
        }
        self.params = {
            "q": Ptr(self.q.dtype, CHUNK_BYTES),
            "k2q_row_ptr": Ptr(Int32),
            "qsplit_indices": Ptr(Int32),
            "scheduler_metadata": Ptr(Int32),
            "work_count": Ptr(Int32),
            "work_counter": Ptr(Int32),
            "cu_seqlens_q": Ptr(Int32),
            "cu_seqlens_k": Ptr(Int32),
            "seqused_k": Ptr(Int32),
            "page_table": Ptr(Int32),
            "walk_blocks": Ptr(Int32),
            "walk_counts": Ptr(Int32),
            "walk_totals": Ptr(Int64, 8),
            "partial_out": Ptr(self.partial, 16),
            "partial_lse": Ptr(Float32),
            "partial_lse_temperature": Ptr(Float32),
            "out": Ptr(OUT, 16),
            "lse": Ptr(Float32),
            "lse_temperature": Ptr(Float32),
            "q_stride_token": Int64,
            "q_stride_head": Int64,
            "out_stride_token": Int64,
            "out_stride_head": Int64,
            "lse_stride_token": Int64,
            "lse_stride_head": Int64,
            "page_table_stride": Int64,
            "max_pages": Int32,
            "kv_extent": Int32,
            "batch": Int32,
            "total_q": Int32,
            "head_kv": Int32,
            "total_rows": Int32,
            "topk": Int32,
            "work_capacity": Int32,
            "causal": Int32,
            "softmax_scale": Float32,
            "lse_temperature_scale": Float32,
        }
