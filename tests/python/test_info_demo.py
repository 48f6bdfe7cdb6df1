"""`python -m hopper_attention.info` and `.demo` work everywhere and say what is missing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import hopper_attention
from hopper_attention import _core, report

NO_TORCH = "raise ImportError('no torch in this test')\n"


def run(module, *, tmp_path=None, gpu=False):
    """Output of `python -m module`; with tmp_path as if torch were not installed."""
    environment = dict(os.environ)
    if not gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if tmp_path is not None:
        (tmp_path / "torch.py").write_text(NO_TORCH, encoding="utf-8")
        environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment.get("PYTHONPATH", "")]).rstrip(
            os.pathsep
        )
    done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_info_without_a_gpu_ends_in_the_fix():
    last = run("hopper_attention.info").splitlines()[-1]
    assert last != "ready" and last.endswith(".") and "CPU tensors work" in last


def test_info_without_torch(tmp_path):
    text = run("hopper_attention.info", tmp_path=tmp_path)
    assert "torch        not installed" in text and "nb::ndarray" in text


def test_info_names_versions_kernels_and_the_tensor_path():
    text = run("hopper_attention.info")
    assert hopper_attention.__version__ in text
    assert f"{len(hopper_attention.built_kernels())} built" in text
    try:
        import torch
    except ImportError:
        return
    fast = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert torch.__version__ in text and ("DLPack C exchange API (0.1 us" in text) == fast


def test_info_as_a_dict():
    facts = hopper_attention.info()
    assert facts["ready"] == (facts["message"] == "ready")
    assert len(facts["kernels"]) == len(hopper_attention.built_kernels())
    assert report.lines(facts)[-1] == facts["message"]


FINE = {"version": "2.13.0", "cuda": "13.0", "tensor_path": "", "problem": ""}
OLD_GPU = "the kernels need a Hopper GPU (compute capability 9.0): cuda:0 is NVIDIA A100 with compute capability 8.0"
OLD_DRIVER = (
    "the NVIDIA driver is too old: found one for CUDA 12.4, CUDA 13.0 or newer (release 580 or newer) is required"
)


@pytest.mark.parametrize(
    ("expected", "kernels", "driver", "problem", "torch"),
    [
        ("", True, 13000, "", FINE),
        ("", True, 13000, "", {**FINE, "version": None}),
        ("HOPPER_ATTENTION_HOST_ONLY", False, 13000, "", FINE),
        ("install driver 580", True, 0, "", FINE),
        ("CUDA_VISIBLE_DEVICES", True, 13000, "no CUDA device was found", FINE),
        ("compute capability 8.0", True, 13000, OLD_GPU, FINE),
        ("found one for CUDA 12.4", True, 12040, OLD_DRIVER, FINE),
        ("CPU build", True, 13000, "", {**FINE, "problem": "it is a CPU build, install one with CUDA"}),
    ],
    ids=["ready", "ready without torch", "host only", "no driver", "no device", "old GPU", "old driver", "CPU torch"],
)
def test_the_obstacle_is_one_sentence(expected, kernels, driver, problem, torch):
    found = report.obstacle(kernels, 13050, driver, problem, torch)
    assert expected in found and bool(found) == bool(expected)
    assert not found or (found.endswith(".") and "\n" not in found)


@pytest.mark.parametrize(("runtime", "driver"), [(12080, 525), (13000, 580), (13050, 580)])
def test_the_driver_to_install_follows_from_the_cuda_of_the_build(runtime, driver):
    assert f"install driver {driver} " in report.obstacle(True, runtime, 0, "", FINE)


def test_a_report_with_gpus_prints():
    gpu = {
        "ordinal": 0,
        "name": "NVIDIA H200",
        "sm_count": 132,
        "compute_capability": "9.0",
        "l2_mib": 60.0,
        "memory_gbs": 4917.0,
        "usable": True,
        "problem": "",
    }
    facts = {
        **report.collect(),
        "devices": [gpu],
        "cuda_driver": "13.0",
        "driver_module": "580.95.05",
        "message": "ready",
    }
    text = "\n".join(report.lines(facts))
    assert "NVIDIA H200, 132 SMs" in text and "driver for CUDA 13.0 (580.95.05)" in text and text.endswith("\nready")


def test_a_report_without_gpus_or_torch_prints():
    facts = {**report.collect(), "devices": [], "cuda_driver": None, "driver_module": None, "torch": None}
    text = report.lines({**facts, "torch_cuda": None})
    assert "  gpu          none" in text and "  torch        not installed" in text
    assert any(line.endswith("no driver") for line in text)
    text = report.lines({**facts, "torch": "2.13.0", "torch_cuda": "13.0"})
    assert "  torch        2.13.0, CUDA 13.0" in text


class Cards:
    """A machine with these GPUs, of which `usable` can run the kernels, in the place of `_core`."""

    def __init__(self, count, usable):
        self.count, self.usable = count, usable

    def device_info(self, ordinal):
        if ordinal >= self.count:
            raise RuntimeError(f"there is no cuda:{ordinal}")
        return _core.device_info("H100")

    def require_supported_device(self, ordinal):
        if ordinal not in self.usable:
            raise RuntimeError(f"cuda:{ordinal} is no Hopper GPU")


@pytest.mark.parametrize(
    ("count", "usable", "problem"),
    [
        (0, (), "there is no cuda:0"),
        (1, (), "cuda:0 is no Hopper GPU"),
        (2, (), "cuda:0 is no Hopper GPU"),
        (2, (1,), ""),
        (2, (0, 1), ""),
    ],
    ids=["no GPU", "one of another kind", "two of another kind", "the second can", "both can"],
)
def test_gpus_and_why_none_can_be_used(monkeypatch, count, usable, problem):
    monkeypatch.setattr(report, "_core", Cards(count, usable))
    devices, found = report.cuda_devices()
    assert found == problem
    assert [device["ordinal"] for device in devices] == list(range(count))
    assert [device["usable"] for device in devices] == [ordinal in usable for ordinal in range(count)]
    for device in devices:
        assert device["problem"] == ("" if device["usable"] else f"cuda:{device['ordinal']} is no Hopper GPU")
        assert device["compute_capability"] == "9.0" and device["sm_count"] == 132 and device["l2_mib"] == 50.0


@pytest.mark.parametrize(("version", "text"), [(0, None), (12040, "12.4"), (13000, "13.0"), (13010, "13.1")])
def test_versions_of_cuda(version, text):
    assert report.cuda_text(version) == text


@pytest.mark.parametrize(
    ("cuda", "available", "problem"),
    [
        (None, False, "it is a CPU build, install one with CUDA"),
        ("13.0", False, "torch.cuda.is_available() is False, see its warnings"),
        ("13.0", True, ""),
    ],
    ids=["CPU build", "no GPU seen", "fine"],
)
def test_what_is_wrong_with_torch(monkeypatch, cuda, available, problem):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    found = report.torch_facts()
    assert found["problem"] == problem and found["cuda"] == cuda and found["version"] == torch.__version__


@pytest.mark.parametrize("torch_installed", [True, False])
def test_demo_without_a_gpu(tmp_path, torch_installed):
    text = run("hopper_attention.demo", tmp_path=None if torch_installed else tmp_path)
    assert "Not on a GPU: " in text and "on the reference" in text
    assert ": right" in text and "wrong" not in text
    assert "plan: prefill kernel" in text and "H100" in text


@pytest.mark.gpu
def test_demo_on_a_gpu():
    text = run("hopper_attention.demo", gpu=True)
    assert "passed: elementwise" in text and "plan: prefill kernel" in text
    assert "hopper-attention " in text and "torch SDPA" in text and "TFLOP/s" in text
    assert run("hopper_attention.info", gpu=True).splitlines()[-1] == "ready"
