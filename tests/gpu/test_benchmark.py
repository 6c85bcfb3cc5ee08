"""The benchmark runs on a small case and reports every number."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from sparse_aot import bench


@pytest.mark.parametrize("mode", [["--sq", "2048"], ["--paged", "--sq", "1000", "--seqused-trim", "100"]], ids=str)
def test_benchmark_reports_times_and_agrees_with_its_baseline(mode, tmp_path, capsys):
    results = tmp_path / "results.json"
    sizes = ["--skv", "2048", "--head-kv", "2", "--qhead-per-kv", "4", "--topk", "8", "--warmup", "1", "--iters", "3"]
    assert bench.main([*mode, *sizes, "--profile", "--json", str(results)]) == 0
    document = json.loads(results.read_text())
    assert [case["pattern"] for case in document["cases"]] == ["uniform", "sink"]
    for case in document["cases"]:
        assert all(
            case[name] > 0
            for name in ("csr_ms", "forward_ms", "tflops", "pairs", "fan_out_mean", "gather_ms", "speedup")
        )
        assert case["total_ms"] == case["csr_ms"] + case["forward_ms"] and case["kernels_us"]
        assert (case["dense_ms"] is None) == ("--paged" in mode)
    assert min(document["host_us"].values()) > 0
    assert "TFLOP/s" in capsys.readouterr().out
