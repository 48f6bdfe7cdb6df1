"""Every file of examples/ runs here: on the GPU where there is one, else as far as it goes, saying so."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import hopper_attention

EXAMPLES = Path(__file__).parents[3] / "examples"
STEPS = {  # how many errors each prints, and the largest that is right
    "paged_decode_graph.py": (1, 0.02),
    "chunked_prefill.py": (3, 0.02),
    "cascade_attention.py": (2, 0.02),
    "speculative_decoding.py": (1, 0.02),
}
SAYS_SO = "nothing was run on a GPU: "


def run(*command, timeout=300):
    """Output of a command that must succeed."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=timeout, env=os.environ
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def errors_of(output):
    """The numbers at the ends of the lines."""
    return [float(value) for value in re.findall(r": ([-+\d.e]+)$", output, re.MULTILINE)]


def test_all_examples_are_tested_here():
    assert {path.name for path in EXAMPLES.iterdir()} - {"__pycache__"} == {
        "attention_numpy.py",
        "attention_torch.py",
        "attention_cuda_python.py",
        *STEPS,
        "cpp",
    }


def test_numpy():
    errors = errors_of(run(sys.executable, EXAMPLES / "attention_numpy.py"))
    assert len(errors) == 5 and max(errors) < 1e-5


def test_torch():
    pytest.importorskip("torch")
    output = run(sys.executable, EXAMPLES / "attention_torch.py")
    assert errors_of(output)[0] < 0.05 and "(1, 1024, 16, 128) torch.bfloat16" in output


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_an_engine(name):
    pytest.importorskip("torch")
    errors = errors_of(run(sys.executable, EXAMPLES / name))
    count, largest = STEPS[name]
    assert len(errors) == count and max(errors) < largest


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_an_engine_check_their_own_results(name, tmp_path):
    """With attention that is off by a little the example ends in an error."""
    pytest.importorskip("torch")
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    spoiled = tmp_path / name
    spoil = (
        "import hopper_attention as spoiled_library\n"
        "right = spoiled_library.flash_attn_with_kvcache, spoiled_library.merge_states\n"
        "def kvcache(q, k, *rest, **given):\n"
        "    out = right[0](q, k, *rest, **given)\n"
        "    out[..., 0] += 0.1 * q.shape[1]\n"
        "    return out\n"
        "def merge(*given, **options):\n"
        "    out, lse = right[1](*given, **options)\n"
        "    return out + 0.1, lse\n"
        "spoiled_library.flash_attn_with_kvcache, spoiled_library.merge_states = kvcache, merge\n"
    )
    spoiled.write_text(spoil + text, encoding="utf-8")
    done = subprocess.run([sys.executable, str(spoiled)], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "AssertionError" in done.stderr, done.stdout + done.stderr


def test_cuda_python():
    """Runs on a GPU with cuda-core installed; anywhere else it must say why it did not."""
    output = run(sys.executable, EXAMPLES / "attention_cuda_python.py")
    if SAYS_SO not in output:
        errors = errors_of(output)
        assert len(errors) == 2 and errors[0] < 5e-3 and errors[1] < 2e-4
    else:
        assert len(output.splitlines()) == 1 and len(output) > len(SAYS_SO) + 10


@pytest.fixture
def cuda_python():
    spec = importlib.util.spec_from_file_location("attention_cuda_python", EXAMPLES / "attention_cuda_python.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cuda_python_passes_pointers_and_stream_as_they_are(cuda_python, recorder):
    """The call of the example, with launches recorded instead of made."""
    shapes = {"q": (1, 5, 8, 128), "k": (1, 7, 2, 128), "v": (1, 7, 2, 128), "out": (1, 5, 8, 128), "lse": (1, 8, 5)}
    tensors = [
        cuda_python.RawTensor((i + 1) << 30, shape, 32 if name == "lse" else 16)
        for i, (name, shape) in enumerate(shapes.items())
    ]
    cuda_python.attention(*tensors, stream=0x5EED)
    seen = recorder.last_launch()
    assert seen["stream"] == 0x5EED and seen["causal"] is True
    for i, (name, shape) in enumerate(shapes.items()):
        tensor = seen["softmax_lse" if name == "lse" else name]
        assert tensor["data"] == (i + 1) << 30 and tuple(tensor["shape"]) == shape and tensor["device"] == 0
        assert tuple(tensor["stride"]) == tuple(s // 2 for s in np.empty(shape, np.float16).strides)


def cmake_prefix():
    """Where find_package(hopper_attention) looks; skips where the package is not installed from a wheel."""
    package = Path(hopper_attention.__file__).parent
    if not list(package.glob("**/hopper_attentionConfig.cmake")):
        pytest.skip("run from a build tree: there is no installed CMake package")
    return package


@pytest.mark.slow
def test_cpp(tmp_path):
    prefix = cmake_prefix()
    cmake = shutil.which("cmake")
    if cmake is None or shutil.which("c++") is None:
        pytest.skip("cmake and a C++ compiler are needed")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    run(cmake, *generator, "-S", EXAMPLES / "cpp", "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}")
    run(cmake, "--build", tmp_path)
    output = run(tmp_path / "attention")
    assert "plan: prefill kernel, bf16" in output and "3 heads of k are refused: " in output
    assert SAYS_SO in output or "on the GPU: error of out" in output
    output = run(tmp_path / "paged_decode")
    assert "plan: decode kernel, bf16" in output and "workspace" in output
    assert SAYS_SO in output or "steps on the GPU: error of out" in output
