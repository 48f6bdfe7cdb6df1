"""One case -> one entry of the report: inputs, answers judged, then everyone timed in turn."""

from __future__ import annotations

import datetime
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hopper_attention.bench import record, timing
from hopper_attention.bench.peers import Implementation
from hopper_attention.bench.suites import Case

Measure = Callable[[Mapping[str, list[Callable[[], Any]]], float], "timing.Measured"]


class DeviceLost(RuntimeError):
    """The GPU can no longer be used by this process."""


def run_case(
    case: Case,
    implementations: list[Implementation],
    *,
    device: str = "cuda",
    seconds: float | None = None,
    without_ours: bool = False,
    measure: Measure = timing.measure,
) -> dict[str, Any]:
    """The entry of a case. If ours cannot run it, peers are measured only with `without_ours`.

    Raises DeviceLost, with the entry as it is as its argument, if the GPU does not answer any more.
    """
    import torch

    from hopper_attention.bench import inputs

    entry: dict[str, Any] = {
        "case": case.as_dict(),
        "flops": case.flops(),
        "kv_bytes": case.kv_bytes(),
        "status": "ok",
        "reason": "",
        "results": {},
        "left_out": {},
    }
    with torch.inference_mode():
        sets = inputs.make(case, device)
        calls = {}
        for implementation in implementations:
            name = implementation.name
            if case.peers and not name.startswith(record.OURS) and name not in case.peers:
                continue
            one_each = try_one(case, implementation, sets, entry)
            if one_each is not None:
                calls[name] = one_each
            elif name == record.OURS and not without_ours:
                break
        if entry["status"] == "ok" or without_ours:
            measured = measure(calls, case.seconds if seconds is None else seconds)
            for name, samples in measured.samples.items():
                median = statistics.median(samples)
                result = entry["results"][name]
                result.update(us=median, spread=timing.spread(samples), samples=samples)
            for name, error in measured.failures.items():
                give_up(entry, name, error)
    del sets, calls
    if device != "cpu":
        torch.cuda.empty_cache()
    return entry


def try_one(
    case: Case, implementation: Implementation, sets: list[Any], entry: dict[str, Any]
) -> list[Callable[[], Any]] | None:
    """Makes one call and judges it. Its calls, or None with the reason in the entry if they are not to be timed."""
    from hopper_attention.bench import check

    name, ours = implementation.name, implementation.name.startswith(record.OURS)
    refusal = implementation.refusal(case)
    if refusal:
        entry["left_out"][name] = refusal
        return None
    try:
        prepared = implementation.prepare(case, sets)
        out, lse = prepared.result(prepared.calls[0]())
        verdict = check.judge(case, sets[0], out, lse, 1.0 if ours else check.PEER_ALLOWANCE)
    except Exception as error:
        give_up(entry, name, error)
        return None
    facts = {"elementwise": verdict.elementwise, "rms": verdict.rms, "lse": verdict.lse, "message": verdict.message}
    entry["results"][name] = {"check": {"passed": verdict.passed, **facts}, "note": prepared.note}
    if not verdict.passed:
        entry["left_out"][name] = f"wrong: {verdict.message}"
        if ours:
            entry["status"], entry["reason"] = "wrong", verdict.message
        return None
    return prepared.calls


def give_up(entry: dict[str, Any], name: str, error: Exception) -> None:
    """Writes down why an implementation was not timed. Raises DeviceLost if the GPU is gone."""
    reason = first_line(error)
    entry["left_out"][name] = reason
    if name == record.OURS:
        entry["status"] = "skipped" if isinstance(error, NotImplementedError) else "failed"
        entry["reason"] = reason
    elif name.startswith(record.OURS) and not isinstance(error, NotImplementedError):
        entry["status"], entry["reason"] = "failed", f"{name}: {reason}"
    import torch

    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError as lost:
            entry["status"], entry["reason"] = "failed", f"{name}: {first_line(lost)}"
            raise DeviceLost(entry) from error


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def machine() -> dict[str, Any]:
    """Device, driver and versions, so that a figure can be put beside another."""
    import torch

    import hopper_attention

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "device": properties.name,
        "sm_count": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver": driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "triton": triton_version,
        "hopper_attention": hopper_attention.__version__,
        "python": sys.version.split()[0],
    }


def driver() -> str | None:
    """The driver's version, from the kernel module or else from nvidia-smi."""
    from hopper_attention.report import driver_module

    found = driver_module()
    if found:
        return found
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"[\d.]+", text)
    return match.group(0) if match else None


def new_report(arguments: list[str]) -> dict[str, Any]:
    """A report without cases."""
    return {
        "schema": record.SCHEMA,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "hopper_attention.bench", *arguments]),
        "machine": {},
        "ceilings": {},
        "cases": [],
        "host": [],
        "traffic": [],
        "kernels": [],
    }
