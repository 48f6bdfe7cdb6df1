"""The committed `_core.pyi` describes the built module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import hopper_attention
from hopper_attention import _core

HOW = "python -m nanobind.stubgen -q -m hopper_attention._core -o python/hopper_attention/_core.pyi"
PACKAGE = Path(hopper_attention.__file__).parent


def without_blank_lines(text):
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def test_the_stub_is_current(tmp_path):
    pytest.importorskip("nanobind", reason="nanobind's stub generator is needed")
    made = tmp_path / "_core.pyi"
    subprocess.run(
        [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "hopper_attention._core", "-o", str(made)],
        check=True,
        timeout=60,
    )
    committed = (PACKAGE / "_core.pyi").read_text(encoding="utf-8")
    assert without_blank_lines(committed) == without_blank_lines(made.read_text(encoding="utf-8")), (
        f"write it anew: {HOW}"
    )


def test_the_stub_names_everything_public():
    committed = (PACKAGE / "_core.pyi").read_text(encoding="utf-8")
    for name in dir(_core):
        if not name.startswith("_"):
            assert f"def {name}(" in committed or f"class {name}:" in committed, name


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").exists()
