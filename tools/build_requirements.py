"""The pinned build requirements that pyproject.toml lists; run, prints those of a build with kernels, one a line."""

from __future__ import annotations

import os
import re
from pathlib import Path


def pins(key: str) -> list[str]:
    """The strings of the list `key` in pyproject.toml. Read by hand: Python 3.10 has no tomllib."""
    text = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf"^{key} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise KeyError(f"pyproject.toml has no list {key}")
    return re.findall(r'"([^"]+)"', found[1])


def kernel_requirements(cutlass_given: bool) -> list[str]:
    """What compiles kernels; the compiler's wheels are left out where CUDACXX names a compiler."""
    return ([] if cutlass_given else pins("cutlass")) + ([] if os.environ.get("CUDACXX") else pins("cuda-compiler"))


if __name__ == "__main__":
    print("\n".join(pins("requires") + kernel_requirements(bool(os.environ.get("HOPPER_ATTENTION_CUTLASS_INCLUDE")))))
