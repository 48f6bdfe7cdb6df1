"""What a user runs first on a machine with a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
from gpu.support import MAIN  # noqa: E402

pytestmark = pytest.mark.gpu


def run(module: str) -> str:
    done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_info_ends_in_ready():
    assert run("hopper_attention.info").splitlines()[-1] == "ready"
    facts = hopper_attention.info()
    assert facts["ready"] and any(device["usable"] for device in facts["devices"])


def test_demo_checks_its_answer_on_the_gpu():
    text = run("hopper_attention.demo")
    assert "GPU: " in text and "passed: " in text and "TFLOP/s" in text


def test_warmup_loads_every_kernel():
    hopper_attention.warmup()
    hopper_attention.warmup("cuda:0")
    with pytest.raises(RuntimeError):
        hopper_attention.warmup(f"cuda:{torch.cuda.device_count()}")


@pytest.mark.parametrize("kernel", MAIN, ids=str)
def test_what_was_built_is_supported_here(kernel):
    dtype, (head_dim, head_dim_v) = kernel
    assert hopper_attention.is_supported(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v) == (True, "")


def test_the_plan_of_this_gpu_explains_itself():
    dtype, (head_dim, _) = MAIN[0]
    plan = hopper_attention.plan(
        dtype=dtype, head_dim=head_dim, batch=1, max_seqlen_q=4096, max_seqlen_k=4096, heads_q=16, heads_kv=16
    )
    properties = torch.cuda.get_device_properties(0)
    assert plan.ctas == properties.multi_processor_count
    assert f"{properties.multi_processor_count} SMs" in plan.explain()
