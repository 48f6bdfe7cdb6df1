"""What works on this machine, as a dict. Imported by `info()` and `python -m hopper_attention.info` only."""

from __future__ import annotations

import platform
import re
import sys
from typing import Any

from hopper_attention import _core
from hopper_attention.planning import support_matrix

MINIMUM_DRIVERS = {12: 525, 13: 580}  # the first that run programs of these versions of CUDA
FAST_PATH = "DLPack C exchange API (0.1 us for each tensor)"
SLOW_PATH = "nb::ndarray through __dlpack__ (about 3.4 us for each tensor, 15 to 20 us for each call)"
_MAX_DEVICES = 64


def collect() -> dict[str, Any]:
    """Versions, driver, GPUs, kernels, tensor path; `ready`: whether CUDA tensors can be used; `message`: why not."""
    runtime, driver = _core.cuda_versions()
    kernels = _core.built_kernels()
    torch = torch_facts()
    devices, problem = cuda_devices()
    report = {
        "version": _core.version(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cuda_runtime": cuda_text(runtime),
        "cuda_driver": cuda_text(driver),
        "driver_module": driver_module(),
        "devices": devices,
        "kernels": [str(kernel) for kernel in kernels],
        "support": support_matrix(),
        "torch": torch["version"],
        "torch_cuda": torch["cuda"],
        "tensor_path": torch["tensor_path"],
    }
    report["message"] = obstacle(bool(kernels), runtime, driver, problem, torch) or "ready"
    report["ready"] = report["message"] == "ready"
    return report


def obstacle(has_kernels: bool, runtime: int, driver: int, problem: str, torch: dict[str, Any]) -> str:
    """The first thing that keeps CUDA tensors from running, with its fix, in one sentence; "" if there is none.

    runtime, driver: versions of CUDA, as in `_core.cuda_versions()`. problem: why no GPU can run the kernels, "" if one
    can.
    """
    if not has_kernels:
        return "This build has no kernels: reinstall without HOPPER_ATTENTION_HOST_ONLY to use a GPU; CPU tensors work."
    if not driver:
        least = MINIMUM_DRIVERS.get(runtime // 1000, max(MINIMUM_DRIVERS.values()))
        return f"No NVIDIA driver was found: install driver {least} or newer to use a GPU; CPU tensors work."
    if problem:
        return f"No GPU can be used here (see nvidia-smi and CUDA_VISIBLE_DEVICES): {problem}; CPU tensors work."
    if torch["version"] is not None and torch["problem"]:
        return f"torch cannot use the GPU: {torch['problem']}."
    return ""


def torch_facts() -> dict[str, Any]:
    """torch as installed: version or None, its CUDA version or None, how its tensors come in, what is wrong with it."""
    try:
        import torch
    except ImportError:
        return {"version": None, "cuda": None, "tensor_path": f"{SLOW_PATH}; torch is not installed", "problem": ""}
    except OSError as error:  # a shared library of torch is missing
        return {"version": "broken", "cuda": None, "tensor_path": SLOW_PATH, "problem": f"importing it fails: {error}"}
    fast = _core.has_exchange_api(torch.Tensor)
    path = FAST_PATH if fast else f"{SLOW_PATH}; torch >= 2.10 has the DLPack C exchange API, which takes 0.1 us"
    problem = ""
    if torch.version.cuda is None:
        problem = "it is a CPU build, install one with CUDA"
    elif not torch.cuda.is_available():
        problem = "torch.cuda.is_available() is False, see its warnings"
    return {"version": torch.__version__, "cuda": torch.version.cuda, "tensor_path": path, "problem": problem}


def cuda_devices() -> tuple[list[dict[str, Any]], str]:
    """Each GPU: name, SMs, compute capability, L2, whether it can run the kernels; and why none can, "" if one can."""
    devices: list[dict[str, Any]] = []
    problems: list[str] = []
    for ordinal in range(_MAX_DEVICES):
        try:
            facts = _core.device_info(ordinal)
        except RuntimeError as error:
            problems.append(str(error))
            break
        problem = ""
        try:
            _core.require_supported_device(ordinal)
        except RuntimeError as error:
            problem = str(error)
        problems.append(problem)
        devices.append(
            {
                "ordinal": ordinal,
                "name": facts.name,
                "sm_count": facts.sm_count,
                "compute_capability": f"{facts.compute_major}.{facts.compute_minor}",
                "l2_mib": facts.l2_bytes / 2**20,
                "memory_gbs": facts.memory_gbs,
                "usable": not problem,
                "problem": problem,
            }
        )
    return devices, "" if any(device["usable"] for device in devices) else problems[0]


def driver_module() -> str | None:
    """The version of the NVIDIA kernel module, "580.95.05"; None if none is loaded."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", file.readline())
    except OSError:
        return None
    return found.group(1) if found else None


def cuda_text(version: int) -> str | None:
    """13000 -> "13.0"; None for 0."""
    return f"{version // 1000}.{version % 1000 // 10}" if version else None


def lines(report: dict[str, Any]) -> list[str]:
    """The report for a person; the last line is `ready` or the sentence with the fix."""
    driver = report["cuda_driver"]
    text = [
        f"hopper-attention {report['version']}",
        f"  python       {report['python']}, {report['platform']}",
        f"  cuda         runtime {report['cuda_runtime'] or 'none'} (linked in), "
        + (f"driver for CUDA {driver}" if driver else "no driver")
        + (f" ({report['driver_module']})" if report["driver_module"] else ""),
    ]
    for device in report["devices"]:
        text.append(
            f"  gpu {device['ordinal']}        {device['name']}, {device['sm_count']} SMs, "
            f"compute capability {device['compute_capability']}, {device['l2_mib']:.0f} MiB L2, "
            f"memory of {device['memory_gbs']:.0f} GB/s" + (f": {device['problem']}" if device["problem"] else "")
        )
    if not report["devices"]:
        text.append("  gpu          none")
    torch = report["torch"]
    text.append(
        f"  torch        {torch or 'not installed'}"
        + (f", CUDA {report['torch_cuda']}" if report["torch_cuda"] else "")
    )
    text.append(f"  tensors      {report['tensor_path']}")
    text.append(f"  kernels      {len(report['kernels'])} built")
    for row in report["support"]:
        tile = row["tile"]
        dims, dims_v = ((sizes[0], sizes[-1]) for sizes in (row["head_dims"], row["head_dims_v"]))
        text_of_dims = f"d {dims[0]}-{dims[1]}" if dims == dims_v else f"d ({dims[0]}, {dims_v[0]})"
        mask = "masked" if row["masked"] else "full"
        built = "built" if row["built"] else "not built"
        text.append(f"    {row['dtype']:9} {text_of_dims}, {mask}: tile {tile.rows}x{tile.keys}, {built}")
    return [*text, report["message"]]


def main() -> int:
    """Prints the report."""
    sys.stdout.write("\n".join(lines(collect())) + "\n")
    return 0
