"""quack's softmax and rmsnorm against float32, forward and backward."""

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
parser.add_argument("--backward", action="store_true")
arguments = parser.parse_args()

torch.manual_seed(0)
dtype = getattr(torch, arguments.dtype)
x = torch.randn(arguments.rows, arguments.columns, device="cuda", dtype=dtype, requires_grad=arguments.backward)
weight = torch.randn(arguments.columns, device="cuda", requires_grad=arguments.backward)

exact = x.detach().float().cpu().requires_grad_(arguments.backward)
exact_weight = weight.detach().cpu().requires_grad_(arguments.backward)
if arguments.op == "softmax":
    result, expected = softmax(x), exact.softmax(-1)
else:
    result = rmsnorm(x, weight)
    expected = exact * (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * exact_weight
tolerance = {"rtol": 1e-2 if dtype != torch.float32 else 1e-5, "atol": 1e-6 if arguments.op == "softmax" else 1e-2}
torch.testing.assert_close(result.detach().float().cpu(), expected.detach(), **tolerance)

if arguments.backward:
    gradient = torch.randn(result.shape, device="cuda", dtype=dtype)
    result.backward(gradient)
    expected.backward(gradient.float().cpu())
    torch.testing.assert_close(x.grad.float().cpu(), exact.grad, rtol=2e-2, atol=2e-2)
    if arguments.op == "rmsnorm":
        torch.testing.assert_close(weight.grad.float().cpu(), exact_weight.grad, rtol=2e-2, atol=2e-2)
