"""The README's examples run as they stand."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent.parent / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("framework", ["torch", "cupy", "jax"])
def test_the_readme_example_runs_and_gives_finite_results(framework):
    pytest.importorskip(framework)
    torch = pytest.importorskip("torch")
    (example,) = (text for text in EXAMPLES if text.startswith(f"import {framework}\n"))
    names = {}
    exec(compile(example, f"{README.name}: {framework}", "exec"), names)
    out = torch.from_dlpack(names["out"])
    assert out.shape == names["q"].shape and out.isfinite().all() and out.any()
