"""Forward and combine in the simulator, against the float32 reference within the tolerances of the specification."""

import time

import numpy as np
import pytest
import torch
from kernels import simulated, tensor_map
from reference import assert_lse_close, assert_out_close, make_case

from sparse_aot import _csr_host, build_k2q_csr

HEAD_DIM = 128
FORWARD = {"sm_90a": "sm90_fwd:ForwardSm90", "sm_100f": "sm100_fwd:ForwardSm100"}


def attention(
    case,
    arch="sm_90a",
    partial="float32",
    temperature=None,
    ctas=3,
    forward_module=None,
    edit_map=None,
    walks=None,
    **options,
):
    """The launches of sparse_atten_func: out, lse, lse_temperature, and what the launches executed.

    forward_module: other PTX for the forward. edit_map: (parameter, change of its TensorMap). walks: whether the
    schedule's plan must ask for a walk; None: either.
    """
    total_q, hq, _ = case.q.shape
    head_kv, topk, g = case.q2k.shape[0], case.topk, case.qhead_per_kv
    row_ptr, _, schedule = build_k2q_csr(
        case.q2k, case.cu_seqlens_q, case.cu_seqlens_k, total_k=case.total_k, qhead_per_kv=g, return_schedule=True
    )
    blocks, selected = schedule.walk_totals
    assert walks is None or _csr_host.walks(blocks, selected, 128 // g) == walks
    splits = head_kv * total_q * topk
    paged = case.k.ndim == 4
    fwd = simulated(FORWARD[arch], arch, g=g, partial=partial, temperature=temperature is not None)
    maps = dict(fwd.kernel.params)
    if edit_map:
        maps[edit_map[0]] = edit_map[1](maps[edit_map[0]])

    def heads_map(kind, q):
        token, head = q.stride(0) * 2, q.stride(1) * 2
        extents = [kind.box[0], kind.box[1], 2, hq // kind.box[1], total_q]
        return tensor_map(kind, q, extents, [head, 128, kind.box[1] * head, token])

    def cache_map(kind, x):
        tokens, pages = (x.shape[2], x.shape[0]) if paged else (x.shape[0], 1)
        page, head, token = (x.stride(0), x.stride(1), x.stride(2)) if paged else (128, x.stride(1), x.stride(0))
        return tensor_map(kind, x, [64, tokens, 2, head_kv, pages], [token * 2, 128, head * 2, page * 2])

    storage = {"float32": torch.float32, "bfloat16": torch.bfloat16}[partial]
    values = {
        "q_map": heads_map(maps["q_map"], case.q) if g >= 8 else bytes(128),
        "k_map": cache_map(maps["k_map"], case.k),
        "v_map": cache_map(maps["v_map"], case.v),
        "q": case.q,
        "k2q_row_ptr": row_ptr,
        "qsplit_indices": schedule.qsplit_indices,
        "split_counts": schedule.split_counts,
        "split_entries": schedule.split_entries,
        "scheduler_metadata": schedule.scheduler_metadata,
        "work_count": schedule.work_count,
        "walk_blocks": schedule.walk_blocks,
        "walk_counts": schedule.walk_counts,
        "walk_totals": schedule.walk_totals if fwd.kernel.walks else None,
        "work_counter": np.zeros(1, np.int32),
        "cu_seqlens_q": case.cu_seqlens_q,
        "cu_seqlens_k": case.cu_seqlens_k,
        "seqused_k": case.seqused_k,
        "page_table": case.page_table,
        "partial_out": torch.full((splits, g, HEAD_DIM), torch.nan, dtype=storage),
        "partial_lse": torch.full((splits, g), torch.nan),
        "partial_lse_temperature": None if temperature is None else torch.full((splits, g), torch.nan),
        "out": torch.full((total_q, hq, HEAD_DIM), torch.nan, dtype=torch.bfloat16),
        "lse": torch.full((total_q, hq), torch.nan),
        "lse_temperature": None if temperature is None else torch.full((total_q, hq), torch.nan),
        "q_stride_token": case.q.stride(0),
        "q_stride_head": case.q.stride(1),
        "page_table_stride": case.page_table.stride(0) if paged else 0,
        "max_pages": case.page_table.shape[1] if paged else 0,
        "batch": len(case.cu_seqlens_q) - 1,
        "total_q": total_q,
        "head_kv": head_kv,
        "total_rows": case.total_rows,
        "topk": topk,
        "work_capacity": schedule.work_capacity,
        "causal": int(case.causal),
        "softmax_scale": HEAD_DIM**-0.5,
        "lse_temperature_scale": temperature or 1.0,
        "out_stride_token": hq * HEAD_DIM,
        "out_stride_head": HEAD_DIM,
        "lse_stride_token": hq,
        "lse_stride_head": 1,
        "qhead_per_kv": g,
    }
    combine = simulated("smxx_combine:Combine", arch, partial=partial, topk=topk)
    statistics = [fwd.launch(values, grid=ctas, memory=[case.k, case.v], module=forward_module, **options)]
    work = total_q * hq
    statistics.append(combine.launch(values, grid=-(-work // combine.kernel.work_per_cta), **options))
    return values["out"], values["lse"], values["lse_temperature"], statistics


def check(case, **options):
    temperature = options.get("temperature")
    out, lse, lse_temperature, _ = attention(case, **options)
    want = case.reference(lse_temperature_scale=temperature or 1.0)
    assert_lse_close(lse, want.lse)
    assert_out_close(out, want)
    if temperature is not None:
        assert_lse_close(lse_temperature, want.lse_temperature)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("partial, temperature", [("float32", None), ("bfloat16", 0.7)])
@pytest.mark.parametrize("g", [1, 2, 4, 8, 16])
def test_a_walk_matches_the_reference(g, partial, temperature, seed):
    """All tokens select the blocks up to their diagonal, so that groups of them share most."""
    lens_q, lens_k = [256, 128], [600, 700]
    last = np.concatenate([(np.arange(q) + k - q) // 128 for q, k in zip(lens_q, lens_k, strict=True)])
    q2k = np.maximum(last[None, :, None] - np.arange(4), -1).repeat(2, axis=0).astype(np.int32)
    case = make_case(lens_q=lens_q, lens_k=lens_k, qhead_per_kv=g, topk=4, q2k=q2k, layout="paged", causal=True)
    check(case, walks=True, partial=partial, temperature=temperature, seed=seed)


@pytest.mark.parametrize("arch", FORWARD)
def test_the_speed_line_is_met(capsys, arch):
    """256 queries, 1,024 keys, one KV head, G 4, topk 4: forward and combine with all checks in under 20 s."""
    case = make_case(lens_q=[256], lens_k=[1024], head_kv=1, qhead_per_kv=4, topk=4)
    start = time.perf_counter()
    statistics = attention(case, arch)[3]
    seconds = time.perf_counter() - start
    simulated_seconds = sum(s.seconds for s in statistics)
    rate = sum(s.thread_instructions for s in statistics) / simulated_seconds
    with capsys.disabled():
        print(
            f"\nptxsim {arch}: forward, combine in {simulated_seconds:.2f} s, {rate / 1e6:.0f} M instructions a second"
        )
    assert seconds < 20
