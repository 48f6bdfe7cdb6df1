"""docs/algorithm.md names functions and kernel files: they exist under these names."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "algorithm.md").read_text()
ROWS = re.findall(r"^\| [^|]+ \| (`[^|]+) \| (`[^|]+) \|$", TEXT, re.MULTILINE)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`reference\.([a-z0-9_.]+)", TEXT))))
def test_reference_name_exists(name):
    found = importlib.import_module("hopper_attention.reference")
    for part in name.split("."):
        if not hasattr(found, part):
            importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)


def test_the_table_of_kernel_names_was_found():
    assert len(ROWS) >= 7


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1])
def test_kernel_names_stand_in_the_files_named_beside_them(row):
    quoted = re.findall(r"`([^`]+)`", row[1])
    files = [ROOT / "src" / "kernels" / name for name in quoted if name.endswith(".h")]
    assert files
    source = "".join(file.read_text() for file in files)
    for name in quoted:
        if not name.endswith(".h"):
            assert name.split("::")[-1] in source
