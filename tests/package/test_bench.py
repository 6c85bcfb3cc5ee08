"""The benchmark's command line and selection patterns, as far as they need no GPU."""

import pytest

from sparse_aot import bench, build_k2q_csr
from sparse_aot.bench.options import parse

torch = pytest.importorskip("torch")

from sparse_aot.bench import cases  # noqa: E402


def shape(**changes):
    sizes = {"batch": 2, "sq": 700, "skv": 5000, "topk": 16, "head_kv": 2, "qhead_per_kv": 4}
    return cases.Shape("test", **sizes | {"causal": True, "paged": False, "trim": 0} | changes)


@pytest.mark.parametrize("pattern", ["uniform", "sink"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("topk, sq, skv", [(4, 700, 5000), (16, 700, 5000), (32, 900, 900), (8, 1, 1)])
def test_patterns_select_distinct_blocks_within_reach(topk, sq, skv, causal, pattern):
    of = shape(topk=topk, sq=sq, skv=skv, causal=causal)
    q2k = cases.select(of, pattern, seed=1, device="cpu")
    assert q2k.shape == (2, of.total_q, topk) and q2k.dtype == torch.int32 and q2k.is_contiguous()
    position = torch.arange(of.total_q) % sq
    last = (position + skv - sq) // 128 if causal else torch.full_like(position, -(-skv // 128) - 1)
    assert (q2k <= last[None, :, None]).all() and (q2k >= -1).all()
    ordered = q2k.sort(-1).values
    assert not ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(), "a block named twice"
    if causal:
        assert ((q2k >= 0).sum(-1) == (last + 1).clamp(max=topk)).all(), "as many blocks as there are, up to topk"
        assert (q2k == last[None, :, None]).any(-1).all(), "the query's own block"
    if pattern == "sink":
        assert (q2k == 0).any(-1).all()


def test_sink_differs_by_token_and_head_and_uniform_is_the_latest_blocks():
    sink = cases.select(shape(), "sink", seed=1, device="cpu")
    assert (sink[0, 100] != sink[0, 101]).any() and (sink[0] != sink[1]).any()
    uniform = cases.select(shape(), "uniform", seed=1, device="cpu")
    assert uniform[1, 699].tolist() == [*range(39, 23, -1)]


def test_named_cases_have_the_sizes_they_are_named_after():
    (default,) = cases.shapes(parse([]))
    assert (default.batch, default.sq, default.skv, default.topk) == (1, 32768, 32768, 16)
    assert (default.head_kv, default.qhead_per_kv) == (4, 16)
    ring, ulysses = cases.shapes(parse(["--customer-case", "both"]))
    assert (ring.sq, ring.heads, ring.head_kv) == (48 * 1024, 16, 1)
    assert (ulysses.sq, ulysses.heads, ulysses.head_kv) == (384 * 1024, 2, 1)
    sweep = cases.shapes(parse(["--customer-case", "qhead_sweep"]))
    assert [of.sq * of.qhead_per_kv for of in sweep] == [768 * 1024] * 5


@pytest.mark.parametrize("pattern", ["uniform", "sink"])
def test_products_of_blocks_that_do_not_exist_are_not_counted(pattern):
    """1,024 tokens have up to 8 blocks: the tokens of block b select b + 1 of them, whatever topk is."""
    of = shape(batch=1, sq=1024, skv=1024, topk=16)
    q2k = cases.select(of, pattern, seed=1, device="cpu")
    row_ptr, _ = build_k2q_csr(q2k, *[torch.tensor([0, 1024], dtype=torch.int32)] * 2, total_k=1024)
    pairs = int(row_ptr[:, -1].sum())
    if pattern == "uniform":
        assert pairs == 2 * sum(128 * (block + 1) for block in range(8))
    assert pairs == (q2k >= 0).sum()
    assert of.flop(pairs) == pairs * (2 * 4 * 128 * 128 * 2)  # G rows times 128 keys times D, twice, 2 a product


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--topk", "5"], "--topk"),
        (["--seqused-trim", "100"], "--paged"),
        (["--skv", "1000"], "--sq must not exceed"),
        (["--b", "0"], "positive"),
    ],
)
def test_wrong_options_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(capsys):
    assert bench.main([]) == 1
    assert "needs" in capsys.readouterr().err
