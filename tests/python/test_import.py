"""Importing costs little and needs neither torch nor numpy nor a GPU nor a driver."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import time

import pytest

import hopper_attention

LIMIT_SECONDS = 0.3


def run(code: str) -> str:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_imports_neither_torch_nor_numpy():
    code = "import sys, hopper_attention; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    assert run(code) == "[]"


def test_loads_no_driver_and_no_torch_library():
    code = "import hopper_attention; print(open('/proc/self/maps').read())"
    assert not re.search(r"libcuda\.so|libtorch|libcudart", run(code))


def test_import_time():
    code = "import time; start = time.perf_counter(); import hopper_attention; print(time.perf_counter() - start)"
    assert min(float(run(code)) for _ in range(3)) < LIMIT_SECONDS


def test_whole_process_is_quick():
    def seconds(code):
        start = time.perf_counter()
        run(code)
        return time.perf_counter() - start

    assert (
        min(seconds("import hopper_attention") for _ in range(3)) - min(seconds("pass") for _ in range(3))
        < LIMIT_SECONDS
    )


def test_silent():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import hopper_attention"], capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", hopper_attention.__version__)
    try:
        installed = importlib.metadata.version("hopper-attention")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("run from a build tree: nothing is installed to compare with")
    assert hopper_attention.__version__ == installed


def test_public_names():
    for name in hopper_attention.__all__:
        assert getattr(hopper_attention, name) is not None
    assert set(hopper_attention.__all__) <= set(dir(hopper_attention))
    with pytest.raises(AttributeError, match="no attribute 'flash'"):
        _ = hopper_attention.flash


def test_submodules_come_when_they_are_used():
    code = (
        "import sys, hopper_attention as h; assert 'hopper_attention.reference' not in sys.modules; "
        "h.reference.functions.flash_attn_func; h.testing.force_plan; print('torch' in sys.modules)"
    )
    assert run(code) == "False"
