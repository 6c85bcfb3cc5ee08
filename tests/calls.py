"""One call of ``sparse_atten_func`` on arrays that pass for CUDA arrays; inside a process with the stub driver only."""

from dataclasses import dataclass, field

import numpy as np
from stub_driver import DeviceArray, torch_on_cuda

from sparse_aot import build_k2q_csr, sparse_atten_func

DIM = 128
BLK_KV = 128


@dataclass
class Call:
    """The arguments of a call that is right: 40 and 24 queries over 300 and 100 keys."""

    head_kv: int = 2
    g: int = 4
    topk: int = 4
    layout: str = "flat"
    foreign: bool = False  # DeviceArray instead of torch
    with_schedule: bool = True
    arguments: dict = field(init=False)

    def __post_init__(self):
        self.torch = torch_on_cuda()
        total_q = 64
        cu_seqlens_q, cu_seqlens_k = self.int32([0, 40, 64]), self.int32([0, 300, 400])
        q2k = self.int32(np.zeros((self.head_kv, total_q, self.topk)))
        row_ptr, q_indices, schedule = build_k2q_csr(
            q2k, cu_seqlens_q, cu_seqlens_k, total_k=400, total_rows=4, qhead_per_kv=self.g, return_schedule=True
        )
        k, v = getattr(self, self.layout)()
        self.arguments = {
            "q": self.bfloat16(total_q, self.head_kv * self.g, DIM),
            "k": k,
            "v": v,
            "k2q_row_ptr": row_ptr,
            "k2q_q_indices": q_indices,
            "topk": self.topk,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            "max_seqlen_q": 40,
            "max_seqlen_k": 300,
            "schedule": schedule if self.with_schedule else None,
        }
        if self.layout != "flat" and self.layout != "fused":
            self.arguments["page_table"] = self.int32([[3, 1, 0], [2, -1, -1]])
            self.arguments["seqused_k"] = self.int32([290, 100])

    def run(self, **changes):
        return sparse_atten_func(**self.arguments | changes)

    def int32(self, values):
        host = np.array(values, dtype=np.int32)
        return DeviceArray(host) if self.foreign else self.torch.from_numpy(host)

    def bfloat16(self, *shape):
        if self.foreign:
            return DeviceArray(np.zeros(shape, dtype=np.int16), bfloat16=True)
        return self.torch.zeros(shape, dtype=self.torch.bfloat16)

    def flat(self):
        """Two contiguous tensors."""
        return self.bfloat16(400, self.head_kv, DIM), self.bfloat16(400, self.head_kv, DIM)

    def fused(self):
        """K and V of a token side by side in one row of 2 * DIM."""
        rows = self.bfloat16(400, self.head_kv, 2 * DIM)
        return rows[..., :DIM], rows[..., DIM:]

    def paged(self):
        """Two contiguous caches."""
        return (self.bfloat16(5, self.head_kv, BLK_KV, DIM) for _ in range(2))

    def interleaved(self):
        """K and V of a page one after the other in one cache."""
        cache = self.bfloat16(5, 2, self.head_kv, BLK_KV, DIM)
        return cache[:, 0], cache[:, 1]

    def token_major(self):
        """Pages in which the heads of a token are neighbours."""
        return (self.bfloat16(5, BLK_KV, self.head_kv, DIM).transpose(1, 2) for _ in range(2))

    def packed_rows(self):
        """Pages in which K and V of a token are side by side in one row of 2 * DIM."""
        cache = self.bfloat16(5, self.head_kv, BLK_KV, 2 * DIM)
        return cache[..., :DIM], cache[..., DIM:]
