"""The kernels of CSR and walk plan in the simulator, against tests/reference.py and the host code, bit for bit."""

import numpy as np
import pytest
from kernels import simulated
from reference import csr, offsets, ragged, random_q2k

from sparse_aot import build_k2q_csr

ENTRY_TILE = 4096
ROW_TILE = 256
SCAN_DIGITS = 32
WALK_ROWS = 128


def ceil_div(a, b):
    return -(-a // b)


def ints(*shape, dtype=np.int32):
    return np.full(shape, -0x5A5A5A5B, dtype)


def operands(q2k, cu_q, cu_k):
    """What the kernels take, by name, up to the first pass of the sort; results hold garbage."""
    head_kv, total_q, topk = q2k.shape
    total_rows = int(ceil_div(np.diff(cu_k), 128).sum())
    size, batch = total_q * topk, len(cu_q) - 1
    tiles = ceil_div(size, ENTRY_TILE)
    key_bits = total_rows.bit_length()
    passes = ceil_div(key_bits, 11)
    bits = ceil_div(key_bits, passes)
    digits = 1 << bits
    return {
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "q2k_indices": q2k,
        "q2k_stride_head": total_q * topk,
        "q2k_stride_token": topk,
        "row_of": ints(total_rows),
        "sequence_base": ints(batch),
        "row_sequence": ints(total_rows),
        "row_block": ints(total_rows),
        "row_ptr": ints(head_kv, total_rows + 1),
        "split_counts": ints(total_q, head_kv),
        "split_entries": ints(head_kv, total_q, topk),
        "counts": ints(head_kv, tiles, digits),
        "totals": ints(head_kv, digits),
        "indices_out": ints(head_kv, size),
        "entries_out": None,
        "keys": ints(head_kv, size),
        "values": ints(head_kv, size),
        "walk_totals": None,
        "topk": topk,
        "total_q": total_q,
        "head_kv": head_kv,
        "batch": batch,
        "total_rows": total_rows,
        "size": size,
        "tiles": tiles,
        "bits": bits,
        "digits": digits,
        "passes": passes,
    }


def build(q2k, cu_q, cu_k, seed):
    """The launches of build_k2q_csr without a schedule; returns row_ptr, q_indices, qsplit_indices, split_counts."""
    v = operands(q2k, cu_q, cu_k)
    head_kv, tiles, bits, total_rows = v["head_kv"], v["tiles"], v["bits"], v["total_rows"]
    keys, values = ([v[name], ints(*v[name].shape)] for name in ("keys", "values"))

    def run(factory, work, **arguments):
        simulated(factory, **arguments).launch(v, grid=work, seed=seed)

    run("smxx_csr:CsrRows", 3)
    run("smxx_csr:CsrKeys", head_kv * tiles, topk=v["topk"])
    for p in range(v["passes"]):
        source, target = p % 2, 1 - p % 2
        v |= {"shift": p * bits, "keys": keys[source], "keys_in": keys[source], "values_in": values[source]}
        v |= {"keys_out": keys[target], "values_out": values[target]}
        if p > 0:
            run("smxx_sort:RadixCount", head_kv * tiles)
        run("smxx_sort:RadixScan", head_kv * ceil_div(v["digits"], SCAN_DIGITS))
        run("smxx_sort:RadixScatter", head_kv * tiles)
    v |= {"keys": v["keys_out"], "tiles": ceil_div(total_rows + 1, ROW_TILE)}
    run("smxx_csr:CsrRowPtr", head_kv * v["tiles"])
    return v["row_ptr"], v["indices_out"], v["values_out"], v["split_counts"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "batch, max_q, max_k, head_kv, topk",
    [(3, 300, 2000, 2, 4), (70, 20, 700, 1, 16), (2, 40, 200_000, 1, 8)],
    ids=["small", "batch-above-a-warp", "two-radix-passes"],
)
def test_build_is_exact_under_every_interleaving(batch, max_q, max_k, head_kv, topk, seed):
    rng = np.random.default_rng(batch)
    lens_q, lens_k = ragged(rng, batch, max_q, max_k)
    q2k = random_q2k(rng, lens_q, lens_k, head_kv, topk)
    cu_q, cu_k = offsets(lens_q), offsets(lens_k)
    row_ptr, q_indices, qsplit_indices, split_counts = build(q2k, cu_q, cu_k, seed)
    want = csr(q2k, cu_q, cu_k)
    np.testing.assert_array_equal(row_ptr, want.row_ptr)
    np.testing.assert_array_equal(q_indices, want.q_indices)
    np.testing.assert_array_equal(qsplit_indices, want.qsplit_indices)
    np.testing.assert_array_equal(split_counts, want.split_counts)


def walk_plan(q2k, cu_q, cu_k, g, seed, arch="sm_90a"):
    """The launches up to the walk plan; returns its arrays."""
    v = operands(q2k, cu_q, cu_k)
    tokens = WALK_ROWS // g
    groups = ceil_div(v["total_q"], tokens)
    v |= {"tokens_per_group": tokens, "groups": groups, "walk_totals": ints(2, dtype=np.int64)}
    v["walk_blocks"] = ints(v["head_kv"], groups, 128, 2 + ceil_div(tokens, 32))
    v["walk_counts"] = ints(v["head_kv"], groups)
    simulated("smxx_csr:CsrRows", arch).launch(v, grid=3, seed=seed)
    simulated("smxx_csr:CsrKeys", arch, topk=v["topk"]).launch(v, grid=v["head_kv"] * v["tiles"], seed=seed)
    simulated("smxx_walk:WalkPlan", arch).launch(v, grid=v["head_kv"] * groups, seed=seed)
    return v["walk_blocks"], v["walk_counts"], v["walk_totals"]


@pytest.mark.parametrize("g", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(
    "batch, max_q, max_k, head_kv, topk",
    [(3, 300, 2000, 2, 4), (70, 20, 700, 1, 16), (1, 150, 60_000, 1, 32), (1, 100, 20_000, 2, 8)],
    ids=["small", "batch-above-a-warp", "overflow", "partly-overflow"],
)
def test_walk_plan_equals_the_one_of_the_host(batch, max_q, max_k, head_kv, topk, g):
    rng = np.random.default_rng(batch)
    lens_q, lens_k = ragged(rng, batch, max_q, max_k) if batch > 1 else ([max_q], [max_k])
    q2k = random_q2k(rng, lens_q, lens_k, head_kv, topk)
    cu_q, cu_k = offsets(lens_q), offsets(lens_k)
    plan = build_k2q_csr(q2k, cu_q, cu_k, total_k=int(cu_k[-1]), qhead_per_kv=g, return_schedule=True)[2]
    got = walk_plan(q2k, cu_q, cu_k, g, seed=g)
    for array, want in zip(got, (plan.walk_blocks, plan.walk_counts, plan.walk_totals), strict=True):
        np.testing.assert_array_equal(array, want)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f"])
@pytest.mark.parametrize("distinct", [127, 128, 129, 250, 300])
def test_union_of_about_128_blocks_under_every_interleaving(distinct, arch):
    rng = np.random.default_rng(distinct)
    q2k = rng.permutation(300)[rng.permutation(512) % distinct].astype(np.int32).reshape(1, 16, 32)
    cu_q, cu_k = offsets([16]), offsets([300 * 128])
    plan = build_k2q_csr(q2k, cu_q, cu_k, total_k=300 * 128, qhead_per_kv=8, return_schedule=True)[2]
    assert plan.walk_counts[0, 0] == min(distinct, 129)
    for seed in range(4):
        got = walk_plan(q2k, cu_q, cu_k, 8, seed, arch)
        for array, want in zip(got, (plan.walk_blocks, plan.walk_counts, plan.walk_totals), strict=True):
            np.testing.assert_array_equal(array, want)
