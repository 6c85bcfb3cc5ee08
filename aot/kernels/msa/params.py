"""The launch parameters of a forward, the same on every architecture, in the order in which the launcher packs them."""

from typing import Any

from cutlass import BFloat16, Float32, Int32, Int64

from aot.kernel import Ptr


def forward_params(partial: type) -> dict[str, Any]:
    return {
        "q": Ptr(BFloat16, 16),
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
        "partial_out": Ptr(partial, 16),
        "partial_lse": Ptr(Float32),
        "partial_lse_temperature": Ptr(Float32),
        "out": Ptr(BFloat16, 16),
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
