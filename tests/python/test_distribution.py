"""What the installed wheel contains, and what it says of itself."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import hopper_attention


@pytest.fixture(scope="module")
def distribution():
    try:
        found = importlib.metadata.distribution("hopper-attention")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("run from a build tree: nothing is installed")
    if found.locate_file("hopper_attention") != Path(hopper_attention.__file__).parent:
        pytest.skip("the imported package is not the installed one")
    return found


def names(distribution):
    return {str(file) for file in distribution.files}


def test_library_module_headers_stub_and_cmake_package(distribution):
    suffix = ".abi3.so" if sys.version_info >= (3, 12) else sysconfig.get_config_var("EXT_SUFFIX")
    expected = {
        "libhopper_attention.so",
        f"_core{suffix}",
        "_core.pyi",
        "py.typed",
        "include/hopper_attention/forward.h",
        "include/hopper_attention/types.h",
        "include/hopper_attention/errors.h",
        "lib/cmake/hopper_attention/hopper_attentionConfig.cmake",
        "lib/cmake/hopper_attention/hopper_attentionConfigVersion.cmake",
    }
    assert {f"hopper_attention/{name}" for name in expected} <= names(distribution)


def test_license_and_third_party_notices(distribution):
    info = next(name for name in names(distribution) if name.endswith("/METADATA")).removesuffix("METADATA")
    for name, words in [("LICENSE", "BSD 3-Clause"), ("THIRD_PARTY_NOTICES", "CUTLASS")]:
        assert words in distribution.locate_file(f"{info}licenses/{name}").read_text(encoding="utf-8")


def test_nothing_but_the_package(distribution):
    for name in names(distribution):
        assert name.startswith(("hopper_attention/", "hopper_attention-")), name
        assert not name.endswith((".a", ".cu", ".o")), name


def test_one_wheel_for_python_from_3_12_on(distribution):
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    tag = "cp312-abi3-" if sys.version_info >= (3, 12) else f"{python}-{python}-"
    assert f"Tag: {tag}" in distribution.read_text("WHEEL")


def test_numpy_is_the_only_dependency(distribution):
    assert [need for need in distribution.requires if "extra ==" not in need] == ["numpy"]


def test_the_library_beside_the_module_is_the_one_that_is_loaded():
    code = "import hopper_attention; print(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    loaded = {line.split()[-1] for line in maps.splitlines() if line.endswith("/libhopper_attention.so")}
    assert {os.path.realpath(path) for path in loaded} == {
        os.path.realpath(Path(hopper_attention.__file__).parent / "libhopper_attention.so")
    }


def test_cmake_dir_names_the_prefix():
    command = [sys.executable, "-m", "hopper_attention.cmake_dir"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert (Path(done.stdout.strip()) / "cmake_dir.py").exists()
