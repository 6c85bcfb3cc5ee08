"""The benchmark's command line, selection patterns, baseline and report, as far as they need no GPU."""

import dataclasses
import itertools
import os
import subprocess
import sys

import pytest

from sparse_aot import bench
from sparse_aot.bench import options
from sparse_aot.bench.options import parse

torch = pytest.importorskip("torch")

from selections import any_selection  # noqa: E402

from sparse_aot.bench import cases, report  # noqa: E402
from sparse_aot.bench.result import Result  # noqa: E402

LENS = {
    "chunks": ((700, 5000), (700, 5000)),
    "prefill": ((900, 900),),
    "one key": ((1, 1),),
    "ragged": ((130, 1000), (1, 4000), (257, 300)),
}
PATTERNS = ["uniform", "sink", "runs:1", "runs:16", "runs:100", "runs:128", "noise:0", "noise:35", "noise:100"]


def shape(**changes):
    sizes = {"lens": LENS["chunks"], "topk": 16, "head_kv": 2, "qhead_per_kv": 4}
    return cases.Shape("test", **sizes | {"causal": True, "paged": None, "trim": 0} | changes)


def select(pattern, of=None, seed=1):
    return cases.select(of or shape(), pattern, seed, device="cpu")


# ----------------------------------------------------------------------------------------------------- selections


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("topk", [4, 16, 32])
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_patterns_select_distinct_blocks_within_reach(lens, topk, causal, pattern):
    of = shape(topk=topk, lens=lens, causal=causal)
    q2k = select(pattern, of)
    assert q2k.shape == (2, of.total_q, topk) and q2k.dtype == torch.int32 and q2k.is_contiguous()
    last = torch.cat([(torch.arange(q) + k - q if causal else torch.full((q,), k - 1)) // 128 for q, k in lens])
    assert (q2k <= last[None, :, None]).all() and (q2k >= -1).all()
    ordered = q2k.sort(-1).values
    assert not ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(), "a block named twice"
    assert not ((q2k[..., 1:] >= 0) & (q2k[..., :-1] < 0)).any(), "a block after the end of a row"
    if causal:
        assert ((q2k >= 0).sum(-1) == (last + 1).clamp(max=topk)).all(), "as many blocks as there are, up to topk"
        assert (q2k == last[None, :, None]).any(-1).all(), "the query's own block"
    if pattern != "uniform":
        assert (q2k == 0).any(-1).all()


def test_sink_differs_by_token_and_head_and_uniform_is_the_latest_blocks():
    sink = select("sink")
    assert (sink[0, 100] != sink[0, 101]).any() and (sink[0] != sink[1]).any()
    assert select("uniform")[1, 699].tolist() == [*range(39, 23, -1)]


@pytest.mark.parametrize("pattern", ["sink", "runs:4", "noise:35"])
def test_a_selection_follows_from_its_seed(pattern):
    assert torch.equal(select(pattern), select(pattern)) and not torch.equal(select(pattern), select(pattern, seed=2))


@pytest.mark.parametrize("length", [1, 4, 100, 128])
def test_tokens_of_a_run_select_the_same_and_those_of_the_next_run_others(length):
    of = shape(lens=((600, 5000),))
    q2k = select(f"runs:{length}", of)
    position = torch.arange(of.total_q) + 5000 - 600
    run = position // 128 * 128 + position % 128 // length  # none reaches into the next block
    same = run[1:] == run[:-1]
    equal = (q2k[:, 1:] == q2k[:, :-1]).all(-1)
    assert equal[:, same].all() and not equal[:, ~same].any()


def test_noise_of_0_is_a_run_of_a_block_and_noise_of_100_is_sink():
    assert torch.equal(select("noise:0"), select("runs:128"))
    assert torch.equal(select("noise:100"), select("sink"))


@pytest.mark.parametrize("percent", [15, 35])
def test_noise_replaces_its_percentage_of_what_a_run_shares_by_the_token_s_own(percent):
    deep = shape(lens=((2048, 64 * 1024),))
    field, noisy, own = (select(f"noise:{number}", deep) for number in (0, percent, 100))
    assert ((noisy == field) | (noisy == own)).all()
    differ = field != own
    replaced = (noisy == own)[differ].float().mean()
    assert abs(float(replaced) - percent / 100) < 0.01


@pytest.mark.parametrize("pattern, shared", [("noise:15", 0.85**2), ("noise:35", 0.65**2), ("noise:100", 0)])
def test_neighbours_overlap_as_the_noise_says(pattern, shared):
    """14 of 16 blocks come from ranges of 18: one that the tokens don't share is the same by chance in 1 of 18."""
    of = shape(lens=((1024, 32 * 1024),), head_kv=4)
    want = (2 + 14 * (shared + (1 - shared) / 18)) / 16
    assert abs(cases.overlap(of, select(pattern, of)) - want) < 0.01


@pytest.mark.parametrize("length", [128, 16, 4])
def test_neighbours_overlap_as_the_length_of_runs_says(length):
    of = shape(lens=((1024, 32 * 1024),), head_kv=4)
    want = 1 - (14 * 17 / 18) / 16 / length
    assert abs(cases.overlap(of, select(f"runs:{length}", of)) - want) < 0.01


def test_overlap_counts_blocks_that_exist_of_neighbours_in_one_sequence():
    q2k = torch.tensor([[[0, 1, 2, -1], [2, 0, 5, -1], [2, 5, 0, 1], [2, 5, 0, 1]]], dtype=torch.int32)
    assert cases.overlap(shape(topk=4, lens=((3, 1000), (1, 1000))), q2k) == (2 + 3) / 2 / 4
    assert cases.overlap(shape(topk=4, lens=((1, 1000),) * 4), q2k) == 0


@pytest.mark.parametrize("seed", range(4))
def test_only_blocks_that_exist_are_counted_each_once(seed):
    selection = any_selection(seed)
    sequence = [index for index, queries in enumerate(selection.lens_q) for _ in range(queries)]
    existing = {
        (head, token, block)
        for head, rows in enumerate(selection.q2k.tolist())
        for token, (row, of) in enumerate(zip(rows, sequence, strict=False))
        for block in row
        if 0 <= block < -(-selection.lens_k[of] // 128)
    }
    pairs = cases.count_pairs(torch.from_numpy(selection.build()["k2q_row_ptr"]))
    assert pairs == len(existing) < (selection.q2k >= 0).sum()
    assert shape().flop(pairs) == pairs * (2 * 4 * 128 * 128 * 2)  # G rows times 128 keys times D, twice, 2 a product


def test_early_tokens_count_the_blocks_that_they_have():
    """1,024 tokens have up to 8 blocks: the tokens of block b select b + 1 of them, whatever topk is."""
    for pattern in PATTERNS:
        assert (select(pattern, shape(lens=((1024, 1024),))) >= 0).sum() == 2 * sum(128 * (b + 1) for b in range(8))


# --------------------------------------------------------------------------------------------------- command line


def test_named_cases_have_the_sizes_they_are_named_after():
    (default,) = cases.shapes(parse([]))
    assert (default.lens, default.topk) == (((32768, 32768),), 16)
    assert (default.head_kv, default.qhead_per_kv) == (4, 16)
    ring, ulysses = cases.shapes(parse(["--customer-case", "both"]))
    assert (ring.total_q, ring.heads, ring.head_kv) == (48 * 1024, 16, 1)
    assert (ulysses.total_q, ulysses.heads, ulysses.head_kv) == (384 * 1024, 2, 1)
    sweep = cases.shapes(parse(["--customer-case", "qhead_sweep"]))
    assert [of.total_q * of.qhead_per_kv for of in sweep] == [768 * 1024] * 5


def test_every_number_of_queries_is_a_case_and_lens_is_one():
    chunks = cases.shapes(parse(["--sq", "128,512", "--skv", "4096", "--b", "2"]))
    assert [of.lens for of in chunks] == [((128, 4096),) * 2, ((512, 4096),) * 2]
    (ragged,) = cases.shapes(parse(["--lens", "2x512:4096,100:700", "--paged", "packed", "--seqused-trim", "50"]))
    assert ragged.lens == ((512, 4046), (512, 4046), (100, 650)) and ragged.capacities == [4096, 4096, 700]
    assert (ragged.total_q, ragged.max_q, ragged.total_rows, ragged.paged) == (1124, 512, 70, "packed")


def test_lens_are_printed_as_they_are_given():
    for text in ("5:7", "16x512:4096", "1:2,2x3:4,1:2"):
        assert options.lens_text(options.lens(text)) == text


def test_patterns_are_a_list():
    assert parse([]).q2k_pattern == ["uniform", "sink"]
    assert parse(["--q2k-pattern", "runs:16,both,noise:35"]).q2k_pattern == ["runs:16", "uniform", "sink", "noise:35"]
    assert [parse(paged).paged for paged in ([], ["--paged"], ["--paged", "packed"])] == [None, "interleaved", "packed"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--topk", "5"], "--topk"),
        (["--seqused-trim", "100"], "--paged"),
        (["--paged", "--seqused-trim", "32768"], "--seqused-trim is 32768"),
        (["--skv", "1000"], "must not exceed"),
        (["--sq", "128,2000", "--skv", "1000"], "2000 of 1000"),
        (["--lens", "100:200,300:200"], "300 of 200"),
        (["--lens", "0x5:5"], "[COUNTx]Q:K"),
        (["--lens", "5:0"], "[COUNTx]Q:K"),
        (["--lens", "5"], "[COUNTx]Q:K"),
        (["--b", "0"], "positive"),
        (["--sq", "5,0"], "positive"),
        (["--paged", "flat"], "--paged"),
        *(
            (["--q2k-pattern", name], name)
            for name in ("runs", "runs:0", "runs:129", "noise:101", "sink:3", "runs:x", "")
        ),
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


# ------------------------------------------------------------------------------------------------------- baseline


def gather_against_reference():
    """In a process of its own with Triton's interpreter, which has no products of bfloat16: the inputs are halves."""
    from reference import sparse_attention

    from sparse_aot.bench.baselines import CONFIGS, Gather, _gather_kernel

    def half(array):  # in the same strides
        return torch.empty_strided(array.shape, array.stride(), dtype=torch.half).copy_(array)

    for paged, causal, trim, group in [(None, True, 0, 4), ("packed", True, 70, 16), ("interleaved", False, 0, 2)]:
        of = shape(lens=((2, 700), (3, 300), (1, 5)), topk=4, causal=causal, paged=paged, trim=trim)
        of = dataclasses.replace(of, qhead_per_kv=group)
        inputs = cases.make_inputs(of, "noise:30", 1, "cpu")
        inputs = dataclasses.replace(inputs, **{name: half(getattr(inputs, name)) for name in "qkv"})
        of_call = {name: getattr(inputs, name) for name in ("cu_seqlens_q", "cu_seqlens_k", "page_table", "seqused_k")}
        want = sparse_attention(inputs.q, inputs.k, inputs.v, inputs.q2k, causal=causal, **of_call)
        gather = Gather(of, inputs)
        for keys in {keys for keys, _, _ in CONFIGS}:
            gather.out.fill_(float("nan"))
            _gather_kernel.fn[gather.grid](*gather.arguments, **gather.constants, KEYS=keys)
            assert ((gather.out - want.out).abs() <= want.tolerance).all(), (paged, causal, keys)
            torch.testing.assert_close(gather.lse, want.lse)


def test_the_gather_kernel_computes_what_the_reference_does():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    call = "import test_bench; test_bench.gather_against_reference()"
    command = [sys.executable, "-c", call]
    ran = subprocess.run(command, env=environment, cwd=os.path.dirname(__file__), capture_output=True, text=True)
    if "only 0-dimensional arrays" in ran.stderr:
        pytest.skip("this Triton's interpreter does not work with this NumPy")
    assert ran.returncode == 0, ran.stderr


# --------------------------------------------------------------------------------------------------------- report


def result(pattern="runs:16", lens=((512, 4096),), **changes):
    values = dict.fromkeys((field.name for field in dataclasses.fields(Result)), 1.0)
    values |= {name: None for name in values if "graph" in name or "dense" in name}
    values |= {"shape": dataclasses.asdict(shape(lens=lens)), "pattern": pattern, "partial_dtype": "bfloat16"}
    values |= {
        "kernels_us": {},
        "gather_config": "64 keys a step, 4 warps, 3 stages",
        "total_ms": 2.0,
        "gather_ms": 9.0,
    }
    return Result(**values | changes)


GRAPH = {"graph_ms": 0.5, "graph_min_ms": 0.4, "gather_graph_ms": 8.0, "gather_graph_min_ms": 7.0}


def test_a_case_is_printed_with_its_overlap_and_what_was_measured(capsys):
    report.print_case(result(lens=((512, 4096),) * 16 + ((3, 5),), overlap=0.71))
    text = capsys.readouterr().out
    assert "16x512:4096,3:5 queries:keys" in text and "0.71" in text and "64 keys a step" in text
    assert "graph" not in text.lower()
    report.print_case(result(**GRAPH))
    text = capsys.readouterr().out
    assert "sum, CUDA graph        0.500    0.400 at least" in text and "16.00 = speed-up" in text


def test_lines_over_overlap_have_the_cases_of_one_shape_by_overlap():
    measured = [result("noise:35", overlap=0.56), result("runs:16", overlap=0.96, **GRAPH), result("sink", overlap=0.3)]
    measured += [result("runs:4", lens=((512, 512),))]  # alone: no line
    assert report.over_overlap(measured) == {"test 512:4096": [(0.56, 2.0, 9.0), (0.96, 0.5, 8.0)]}


def test_lines_over_chunk_size_have_the_cases_of_one_pattern_and_context():
    measured = [result(lens=((queries, 4096),) * 2) for queries in (512, 128)]
    measured += [result("sink"), result(lens=((128, 512),)), result(lens=((128, 4096), (7, 4096)))]
    assert report.over_chunk(measured) == {"runs:16, 4096 keys": [(128, 2.0, 9.0), (512, 2.0, 9.0)]}


@pytest.mark.parametrize("lines", [False, True], ids=["bars", "bars and lines"])
def test_the_picture_has_a_panel_for_every_set_of_lines(lines, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    chunks = itertools.product((128, 512), ("runs:16", "noise:35"))
    measured = [result(pattern, lens=((queries, 4096),)) for queries, pattern in chunks] if lines else [result("sink")]
    measured = [dataclasses.replace(case, overlap=index / 9) for index, case in enumerate(measured)]
    report.write_plot(str(tmp_path / "plot.png"), {"device": "none", "command": "sparse-aot bench"}, measured)
    from matplotlib import pyplot

    assert matplotlib.get_backend().lower() == "agg"
    assert len(pyplot.gcf().axes) == (3 if lines else 1)
    pyplot.close("all")
    assert (tmp_path / "plot.png").stat().st_size > 1000
