"""What every prefill is made from, on any architecture: storage, dtypes and the launch parameters that it reads."""

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
        self.gathers = g < ATOM_ROWS  # queries come by cp.async, not by the tensor copy engine
        self.maps = {} if self.gathers else {"q": self.q.map(ATOM_ROWS, groups=g // ATOM_ROWS)}
        self.maps |= {"k": self.kv.map(BLK_KV), "v": self.kv.map(BLK_KV)}
        self.params = {
            "row_ptr": Ptr(Int32),
            "entry_words": Ptr(Int32),
            "scheduler_metadata": Ptr(Int32),
            "work_count": Ptr(Int32),
            "work_counter": Ptr(Int32),
            "cu_seqlens_q": Ptr(Int32),
            "cu_seqlens_k": Ptr(Int32),
            "seqused_k": Ptr(Int32),
            "page_table": Ptr(Int32),
            "partial_out": Ptr(self.partial, 16),
            "partial_lse": Ptr(Float32),
            "page_table_stride": Int64,
            "max_pages": Int32,
            "kv_extent": Int32,
            "batch": Int32,
            "total_q": Int32,
            "head_kv": Int32,
            "total_rows": Int32,
            "topk": Int32,
            "head_partials": Int32,
            "work_capacity": Int32,
            "causal": Int32,
            "softmax_scale": Float32,
        }
        if self.gathers:
            self.params |= {"q": Ptr(self.q.dtype, CHUNK_BYTES), "q_stride_token": Int64, "q_stride_head": Int64}
        if temperature:
            self.params |= {"partial_lse_temperature": Ptr(Float32), "lse_temperature_scale": Float32}
