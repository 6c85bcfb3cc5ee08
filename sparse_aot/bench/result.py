"""What ``measure`` finds and ``report`` shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """One case. Times in ms, those of replays of a CUDA graph None unless asked for.

    ``pairs`` are those of ``Shape.flop``, which TFLOP/s count; ``selected_share`` is their share of topk a token.
    ``overlap``: share of topk that a token's blocks and the next one's have in common. Fan-out: queries a selected
    (KV head, block).
    """

    shape: dict
    pattern: str
    partial_dtype: str
    csr_ms: float
    forward_ms: float
    total_ms: float
    pairs: int
    selected_share: float
    tflops: float
    total_tflops: float
    overlap: float
    fan_out_mean: float
    fan_out_max: int
    work_items: int
    gather_ms: float
    gather_config: str
    speedup: float
    graph_ms: float | None
    graph_min_ms: float | None
    gather_graph_ms: float | None
    gather_graph_min_ms: float | None
    dense_ms: float | None
    dense_tflops: float | None
    max_difference: float
    kernels_us: dict[str, float]
