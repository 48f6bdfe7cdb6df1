"""Python samples of README and docs run as they stand; those that name a GPU only where there is one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS_GPU = re.compile(r"device=[\"']cuda|\.cuda\(")
CONDITIONAL = "torch.cuda.is_available()"  # the sample itself asks what there is


def samples():
    """Every sample, named by page and line, marked as needing a GPU if it puts tensors there unasked."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in SAMPLE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            marks = [pytest.mark.gpu] if NEEDS_GPU.search(match[1]) and CONDITIONAL not in match[1] else []
            yield pytest.param(match[1], id=f"{page.relative_to(ROOT)}:{line}", marks=marks)


SAMPLES = list(samples())


def test_samples_of_the_readme_and_the_first_page_were_found():
    pages = {sample.id.split(":")[0] for sample in SAMPLES}
    assert {"README.md", "docs/index.md"} <= pages
    assert any(not sample.marks for sample in SAMPLES) and any(sample.marks for sample in SAMPLES)


@pytest.mark.parametrize("sample", SAMPLES)
def test_sample_runs(sample, tmp_path):
    for package in ("torch", "transformers", "jax"):
        if re.search(rf"^\s*(import|from) {package}\b", sample, re.MULTILINE):
            pytest.importorskip(package, reason=f"the sample uses {package}")
    script = tmp_path / "sample.py"
    script.write_text(sample, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, env=os.environ, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
