"""quack's softmax and rmsnorm against float32."""

import argparse
import os

os.environ["QUACK_CACHE_ENABLED"] = "0"  # a kernel is compiled here, by the process that runs it

import torch
from quack.rmsnorm import rmsnorm
from quack.softmax import softmax

parser = argparse.ArgumentParser()
parser.add_argument("--op", choices=["softmax", "rmsnorm"], required=True)
parser.add_argument("--rows", type=int, default=4)
parser.add_argument("--columns", type=int, required=True)
parser.add_argument("--dtype", default="bfloat16")
arguments = parser.parse_args()

torch.manual_seed(0)
dtype = getattr(torch, arguments.dtype)
x = torch.randn(arguments.rows, arguments.columns, device="cuda", dtype=dtype)
exact = x.float().cpu()
if arguments.op == "softmax":
    result, expected = softmax(x), exact.softmax(-1)
else:
    weight = torch.randn(arguments.columns, device="cuda")
    result = rmsnorm(x, weight)
    expected = exact * (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.cpu()
tolerance = {"rtol": 1e-2 if dtype != torch.float32 else 1e-5, "atol": 1e-6 if arguments.op == "softmax" else 1e-2}
torch.testing.assert_close(result.float().cpu(), expected, **tolerance)
