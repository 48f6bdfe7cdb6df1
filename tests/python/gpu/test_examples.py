"""The examples of an engine's steps, in fresh processes, on the GPU: not only that they end well, as anywhere else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from gpu import support  # noqa: E402
from gpu.processes import run_together  # noqa: E402

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).parents[3] / "examples"
# What each says of the sizes it takes on a GPU alone, and of how many errors.
SAYS = {
    "paged_decode_graph.py": ("20 steps for 3 sequences", 1),
    "chunked_prefill.py": ("10 chunks of 512 tokens", 3),
    "cascade_attention.py": ("64 sequences on a prefix of 8192", 2),
    "speculative_decoding.py": ("accepted lengths: [3006, ", 1),
    "attention_torch.py": ("(1, 1024, 16, 128) torch.bfloat16", 1),
}
MOST = 0.05  # of an element in bf16; those that have tighter bounds hold themselves to them


def test_examples_run_on_the_gpu():
    if not support.supported(128, 0, "bf16"):
        pytest.skip("this build has no bf16 kernels for head dim 128")
    device = torch.cuda.get_device_name() if support.DEVICE == "cuda" else "the CPU reference"
    problems = []
    for name, (status, text) in run_together({name: [str(EXAMPLES / name)] for name in SAYS}).items():
        sizes, count = SAYS[name]
        errors = [float(value) for value in re.findall(r": ([-+.\de]+)$", text, re.MULTILINE)]
        right = status == 0 and f"running on {device}\n" in text and sizes in text
        if not right or len(errors) != count or not max(errors) < MOST:
            problems.append(f"{name}: exit status {status}\n{text}")
    assert not problems, "\n".join(problems)


def test_no_example_is_forgotten():
    """The others need no torch: attention_numpy.py has no GPU, attention_cuda_python.py needs cuda-core."""
    others = {"attention_numpy.py", "attention_cuda_python.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*SAYS, *others}
