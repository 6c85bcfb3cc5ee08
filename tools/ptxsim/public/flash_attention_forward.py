"""flash-attention's forward of CuTe DSL, its split-KV combine included, against float32."""

import argparse
import math

import torch
from flash_attn.cute.interface import flash_attn_func

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--queries", type=int, required=True)
parser.add_argument("--keys", type=int, required=True)
parser.add_argument("--heads", type=int, default=2)
parser.add_argument("--heads_kv", type=int, default=1)
parser.add_argument("--dim", type=int, default=128)
parser.add_argument("--causal", action="store_true")
parser.add_argument("--splits", type=int, default=1)
arguments = parser.parse_args()

torch.manual_seed(0)


def random(length, heads):
    return torch.randn(arguments.batch, length, heads, arguments.dim, device="cuda", dtype=torch.bfloat16)


q, k, v = random(arguments.queries, arguments.heads), *(random(arguments.keys, arguments.heads_kv) for _ in "kv")
out, lse = flash_attn_func(q, k, v, causal=arguments.causal, num_splits=arguments.splits, return_lse=True)

group = arguments.heads // arguments.heads_kv
exact_q, exact_k, exact_v = (x.float().cpu().repeat_interleave(g, dim=2) for x, g in ((q, 1), (k, group), (v, group)))
scores = torch.einsum("bqhd,bkhd->bhqk", exact_q, exact_k) / math.sqrt(arguments.dim)
if arguments.causal:
    visible = torch.ones(arguments.queries, arguments.keys).tril(arguments.keys - arguments.queries).bool()
    scores = scores.masked_fill(~visible, -math.inf)
expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), exact_v)
torch.testing.assert_close(out.float().cpu(), expected, rtol=1e-2, atol=1e-2)
torch.testing.assert_close(lse.float().cpu(), scores.logsumexp(-1), rtol=1e-3, atol=1e-3)
