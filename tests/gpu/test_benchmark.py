"""The benchmark runs on small cases and reports every number."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from sparse_aot import bench

SIZES = ["--skv", "2048", "--head-kv", "2", "--qhead-per-kv", "4", "--topk", "8", "--warmup", "1", "--iters", "3"]


@pytest.mark.parametrize(
    "mode, patterns",
    [
        (["--sq", "2048"], ["uniform", "sink"]),
        (["--paged", "--sq", "1000", "--seqused-trim", "100"], ["uniform", "sink"]),
        (
            ["--paged", "packed", "--sq", "64,300", "--graph", "--q2k-pattern", "runs:16,noise:35"],
            ["runs:16", "noise:35"] * 2,
        ),
        (["--lens", "3x100:1000,7:128", "--graph", "--q2k-pattern", "sink"], ["sink"]),
    ],
    ids=["prefill", "paged", "chunks", "ragged"],
)
def test_benchmark_reports_times_and_agrees_with_its_baseline(mode, patterns, tmp_path, capsys):
    results = tmp_path / "results.json"
    assert bench.main([*SIZES, *mode, "--profile", "--json", str(results)]) == 0
    document = json.loads(results.read_text())
    assert [case["pattern"] for case in document["cases"]] == patterns
    for case in document["cases"]:
        assert all(
            case[name] > 0
            for name in ("csr_ms", "forward_ms", "tflops", "pairs", "overlap", "fan_out_mean", "gather_ms", "speedup")
        )
        assert case["total_ms"] == case["csr_ms"] + case["forward_ms"] and case["kernels_us"]
        assert (case["dense_ms"] is not None) == (mode == ["--sq", "2048"])
        for name in ("graph", "gather_graph"):
            median, least = case[f"{name}_ms"], case[f"{name}_min_ms"]
            assert 0 < least <= median if "--graph" in mode else median is None is least
    assert min(document["host_us"].values()) > 0
    assert "TFLOP/s" in capsys.readouterr().out
