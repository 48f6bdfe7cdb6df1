"""One case -> one entry of the report: inputs, answers judged, then everyone timed in turn."""

from __future__ import annotations

import datetime
import pathlib
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hopper_attention.bench import record, timing
from hopper_attention.bench.case import Case
from hopper_attention.bench.peers import Implementation, Prepared

if TYPE_CHECKING:
    from hopper_attention.bench import check

Measure = Callable[[Mapping[str, list[Callable[[], Any]]], float, bool], "timing.Measured"]


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
        compare(case, implementations, inputs.make(case, device), entry, seconds, without_ours, measure)
    if device != "cpu":
        torch.cuda.empty_cache()  # here nothing holds the tensors of the case any more
    return entry


def compare(
    case: Case,
    implementations: list[Implementation],
    sets: list[Any],
    entry: dict[str, Any],
    seconds: float | None,
    without_ours: bool,
    measure: Measure,
) -> None:
    """Fills the entry of a case: who is right is timed, and judged once more by what its replays wrote."""
    prepared: dict[str, Prepared] = {}
    for implementation in implementations:
        name = implementation.name
        if case.peers and not name.startswith(record.OURS) and name.split(",")[0] not in case.peers:
            continue
        one = try_one(case, implementation, sets, entry)
        if one is not None:
            prepared[name] = one
        elif name == record.OURS and not without_ours:
            break
    if entry["status"] != "ok" and not without_ours:
        return
    calls = {name: one.calls for name, one in prepared.items()}
    measured = measure(calls, case.seconds if seconds is None else seconds, case.fill)
    for name, samples in measured.samples.items():
        entry["results"][name].update(us=statistics.median(samples), spread=timing.spread(samples), samples=samples)
        if name in measured.last:
            judge_replays(name, prepared[name], measured.last[name], case, sets, entry)
    for name, error in measured.failures.items():
        give_up(entry, name, error)


def try_one(case: Case, implementation: Implementation, sets: list[Any], entry: dict[str, Any]) -> Prepared | None:
    """Makes the call on the first set and judges it. None, with the reason in the entry, if it is not to be timed."""
    name = implementation.name
    refusal = implementation.refusal(case)
    if refusal:
        entry["left_out"][name] = refusal
        return None
    try:
        prepared = implementation.prepare(case, sets)
        verdict = judge(name, prepared, prepared.calls[0](), case, sets, 0)
    except Exception as error:
        give_up(entry, name, error)
        return None
    facts = {"elementwise": verdict.elementwise, "rms": verdict.rms, "lse": verdict.lse, "message": verdict.message}
    entry["results"][name] = {"check": {"passed": verdict.passed, **facts}, "note": prepared.note}
    if not verdict.passed:
        call_wrong(entry, name, verdict.message)
        return None
    return prepared


def judge(name: str, prepared: Prepared, returned: Any, case: Case, sets: list[Any], index: int) -> check.Verdict:
    """Whether what the call on one of the sets returned is right."""
    from hopper_attention.bench import check

    out, lse = prepared.result(returned)
    allowance = 1.0 if name.startswith(record.OURS) else check.PEER_ALLOWANCE
    return check.judge(prepared.case or case, (prepared.sets or sets)[index], out, lse, allowance)


def judge_replays(
    name: str, prepared: Prepared, returned: Any, case: Case, sets: list[Any], entry: dict[str, Any]
) -> None:
    """Writes down whether the timed replays wrote the right result for the last set: out and LSE were NaN before."""
    try:
        verdict = judge(name, prepared, returned, case, sets, -1)
    except Exception as error:
        entry["results"][name]["check"].update(passed=False, replayed=False, message=f"replayed: {first_line(error)}")
        give_up(entry, name, error)
        return
    entry["results"][name]["check"]["replayed"] = verdict.passed
    if not verdict.passed:
        entry["results"][name]["check"].update(passed=False, message=f"replayed: {verdict.message}")
        call_wrong(entry, name, f"replayed: {verdict.message}")


def call_wrong(entry: dict[str, Any], name: str, message: str) -> None:
    """A wrong answer of ours, whatever its options, makes the case wrong; one of a peer leaves it out."""
    entry["left_out"][name] = f"wrong: {message}"
    if name.startswith(record.OURS):
        entry["status"], entry["reason"] = "wrong", message


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
        "kernel_sources_sha256": kernel_sources(pathlib.Path(hopper_attention.__file__).parent),
        "python": sys.version.split()[0],
    }


def kernel_sources(package: pathlib.Path) -> str | None:
    """Hash of the sources that the kernels of the package were built from, as tools/kernel_sources_hash prints it."""
    try:
        return (package / "kernel_sources.sha256").read_text(encoding="utf-8").strip()
    except OSError:
        return None


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
