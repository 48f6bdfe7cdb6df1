"""The scorecard: docs/data/reliability.json -> docs/reliability.md, and its short form in tests/gpu_report.json.

Also writes docs/features.md, which shows the table of features.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "docs" / "data" / "reliability.json"
PAGE = ROOT / "docs" / "reliability.md"
FEATURES = ROOT / "docs" / "features.md"
REPORT = ROOT / "tests" / "gpu_report.json"
NO_SECTIONS = {"__init__", "harness", "scorecard"}


@dataclass(frozen=True)
class Row:
    """What a section shows. unit: what one of its cases is."""

    section: str
    what: str
    unit: str = "cases"


@dataclass(frozen=True)
class Hazard:
    """Something that went wrong elsewhere; what the library does about it; sections and test files that show it.

    The first section gives figure, command and date, without one the tests do. figures: which of the section's are shown.
    """

    what: str
    done: str
    sections: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()


ROWS = [
    Row("random_cases", "Random calls of all functions with all features against float64, three gates", "random calls"),
    Row("random_cases_fa3", "FlashAttention-3 on those of these calls that it can run, and ours on the same",
        "calls of both"),
    Row("pairs", "Every pair of values of all features in some call, against float64", "calls"),
    Row("poison", "Poison in all memory that a call must not use: the bits of the clean run; guard bands intact; "
                  "inputs unchanged", "random calls"),
    Row("malformed_metadata", "Lengths, offsets, page ids and metadata that lie: nothing outside the buffers, no "
                              "hang, next call right", "malformed calls"),
    Row("wrong_calls", "Wrong arguments: the right exception before the launch, the argument named, next call right",
        "wrong calls"),
    Row("reruns", "The same call again under a memory hog and busy streams, bit by bit", "reruns"),
    Row("batch_invariance", "A sequence alone and among others, bit by bit", "sequences"),
    Row("graphs", "CUDA graphs replayed with other lengths, pages and padding equal eager calls bit by bit; no "
                  "synchronisation, no allocation", "graphs"),
    Row("threads", "Eight threads with streams of their own; a stream that waits for its producer", "calls"),
    Row("two_gpus", "Tensors on device 1 while device 0 is current; the current device is restored", "calls"),
    Row("big_tensors", "Over 2^31 elements and 2^32 bytes in a tensor, page id times stride over 2^31, batch 65,536",
        "calls"),
    Row("sanitizer", "compute-sanitizer: memcheck, racecheck, synccheck, initcheck, each shown to find a planted bug",
        "cases of the four tools"),
    Row("soak", "Changing shapes, graphs and eager mixed, four streams, some judged against float64: no mismatch, no "
                "hang, no growth of memory", "calls"),
    Row("binary_facts", "What the built library contains: warpgroup MMA in every attention kernel, no spills, one "
                        "object per architecture", "kernels"),
    Row("gates", "Seeded defects that the gates must reject", "defects"),
    Row("without_gpu", "The package without a GPU: import, CPU tensors, messages", "tests"),
]  # fmt: skip

HAZARDS = [
    Hazard("Unused memory reaches the result: a stale NaN in V times 0",
           "V rows outside the visible keys are zeroed at both ends; the mask selects instead of adding",
           ("poison",), ("test_memory.py", "test_paged.py", "test_kvcache.py"), ("poisoned keys",)),
    Hazard("Empty rows, sequences and batches", "0 and -inf; empty grids are not launched",
           ("random_cases", "pairs"), ("test_varlen.py", "test_grid.py")),
    Hazard("Malformed metadata on the device", "Clamped on the device, always; `check_metadata` names what is wrong",
           ("malformed_metadata", "sanitizer"), ("test_malformed.py",)),
    Hazard("32-bit offsets", "64-bit offsets everywhere; limits of TMA are checked on the host", ("big_tensors",)),
    Hazard("Strides", "Equal to the contiguous copy, or an exception that names tensor, dim and stride",
           ("random_cases", "wrong_calls"), ("test_memory.py",)),
    Hazard("Alignment for TMA", "An exception before the launch", ("wrong_calls",), ("test_wrong_arguments.py",)),
    Hazard("Wrong arguments", "An exception before the launch; the process lives; the next call is right",
           ("wrong_calls",), ("test_wrong_arguments.py",)),
    Hazard("Feature combinations that nobody ran", "All run: one table drives `is_supported`, the "
           "[page of features](features.md) and the test", ("pairs", "random_cases")),
    Hazard("Schedulers and odd batches", "Linear grids; a batch of any size", ("random_cases", "big_tensors"),
           ("test_grid.py", "test_random_batches.py")),
    Hazard("Split boundaries", "Splits are bounded and end at key blocks", ("random_cases",),
           ("test_plans.py", "test_combine.py")),
    Hazard("Pipeline phases and hangs", "One function decides whether a tile has work, used by every warp",
           ("malformed_metadata", "soak"), ("test_grid.py", "test_plans.py")),
    Hazard("Bits that change from run to run", "No atomics in the order of a reduction",
           ("reruns", "batch_invariance"), ("test_repeat.py", "test_invariance.py")),
    Hazard("CUDA graphs", "Grids from bounds, lengths read on the device, counters that end at 0", ("graphs", "soak"),
           ("test_graphs.py",)),
    Hazard("Programmatic dependent launch that compiles to nothing", "Every attention kernel waits for the kernel before "
           "it, which is looked for in the machine code", ("binary_facts",), (),
           ("attention kernels", "that wait for the kernel before (ACQBULK)")),
    Hazard("Workspace reuse", "Written before it is read", ("poison", "reruns"), ("test_memory.py",),
           ("guarded workspaces",)),
    Hazard("Streams, devices, threads", "The stream is passed, the device is guarded and restored",
           ("threads", "two_gpus", "soak"), ("test_repeat.py",)),
    Hazard("Races, reads of memory never written", "Barriers with phases; every shared byte is written before it is "
           "read", ("sanitizer",), (), ("planted bugs found", "racecheck errors", "initcheck errors")),
    Hazard("Death of the process", "The library imports no `exit`, `abort`, `__assert_fail`; a failed launch is an "
           "exception", ("binary_facts", "wrong_calls"), (), ("imports that end the process",)),
    Hazard("Wrong GPU or none", "Import works; the call says which capability it needs and which it found; CPU tensors "
           "run the reference", ("without_gpu",), ("../test_import.py", "../test_cpu_dispatch.py")),
    Hazard("Warpgroup MMA serialised by the compiler, spills", "Both fail the build, and are looked for in the "
           "library", ("binary_facts",), (), ("with HGMMA", "spills", "notes of serialised WGMMA")),
    Hazard("Saturation and accumulation in fp8", "There is no fp8 on the GPU; every function refuses it and names the "
           "tensor", ("wrong_calls",), (), ("with fp8",)),
    Hazard("Tests that cannot fail", "The gates reject seeded defects", ("gates",),
           ("test_defects.py", "../test_gates.py")),
]  # fmt: skip

HEAD = """<!-- Written by tools/reliability --page. Do not edit: change tests/python/reliability/scorecard.py or run sections. -->

# Reliability

What must not go wrong, and how we know. Results are judged against a float64 reference of the same half-precision
inputs by three gates together (`hopper_attention.testing.gates`): the largest error of an element, at most 2.5 units of
the dtype times the sum of the magnitudes that were added; the RMS error, at most 1.25 times that of plain PyTorch in the
same dtype; the log-sum-exp, absolute and with the exact pattern of -inf, in units of its bound of 2e-4 + 2^-19 of its
size. Everything else is compared bit by bit.

`tools/reliability SECTION` runs a row again on a machine with a Hopper GPU; `tools/reliability` runs all of them.
"""


def section_names() -> list[str]:
    """The sections in the order of the page, then those without a row."""
    found = {path.stem for path in Path(__file__).parent.glob("[!_]*.py")} - NO_SECTIONS
    ordered = [row.section for row in ROWS if row.section in found]
    return ordered + sorted(found - set(ordered))


def load(path: Path = DATA) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def add(path: Path, entries: dict[str, Any]) -> None:
    """Sections into a file that keeps its others. Whole or not at all, whatever happens meanwhile."""
    found = {**load(path), **entries}
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def value_text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def short(entry: dict[str, Any], unit: str = "cases", names: Collection[str] | None = None) -> str:
    """A section in one line; names: those of its figures that are shown, else all."""
    cases, count, failures = entry["cases"], entry["count"], len(entry["failures"])
    said = f"{cases:,} of {count:,} {unit}" if cases < count else f"{cases:,} {unit}"
    shown = {name: value for name, value in entry["figures"].items() if names is None or name in names}
    figures = [f"{name} {value_text(value)}" for name, value in shown.items()]
    return "; ".join([f"{said}, {failures or 'no'} failure{'s' * (failures != 1)}", *figures])


def of_report(entries: dict[str, Any]) -> dict[str, Any]:
    """What tests/gpu_report.json says under "reliability"."""
    keys = ("cases", "count", "figures", "seconds", "command", "date", "kernel_sources_sha256", "device")
    return {
        name: {**{key: entry[key] for key in keys}, "failures": len(entry["failures"])}
        for name, entry in sorted(entries.items())
    }


def page(entries: dict[str, Any], report: dict[str, Any]) -> str:
    """The text of docs/reliability.md."""
    lines = [
        HEAD,
        "## Scorecard\n",
        "| what | figure | command | date, kernel sources, card |",
        "| --- | --- | --- | --- |",
    ]
    names = {row.section for row in ROWS}
    rows = [*ROWS, *(Row(name, name.replace("_", " ")) for name in sorted(set(entries) - names))]
    for row in rows:
        entry = entries.get(row.section)
        what = f'<a id="{row.section}"></a>{row.what}'
        if entry is None:
            lines.append(f"| {what} | not run | `tools/reliability {row.section}` | |")
            continue
        lines.append(f"| {what} | {short(entry, row.unit)} | `{entry['command']}` | {when(entry)} |")
    tests = f"{report['passed']:,} passed, {report['failed']} failed; {report['judged_calls']:,} calls judged"
    worst = "".join(f"; worst {name} {value:.3g}" for name, value in report["worst"].items())
    lines.append(f"| Tests that need a GPU | {tests}{worst} | `tools/gpu_report` | {when(report)} |")
    if "remark" in report:  # by hand
        lines.append(f"\n{report['remark']}")
    failing = {name: entry for name, entry in entries.items() if entry["failures"]}
    tests_failing = [failure["test"] for failure in report.get("failures", ())]
    if failing or tests_failing:
        lines.append("\n## Failures\n")
    if tests_failing:
        named = ", ".join(f"`{name}`" for name in tests_failing[:3])
        lines.append(f"- `tools/gpu_report`: {len(tests_failing)} tests, {named}.")
    if failing:
        for name, entry in sorted(failing.items()):
            first = entry["failures"][0].strip().splitlines()[0][:300]
            lines.append(f"- `{name}`: {len(entry['failures'])}, the first: `{first.replace('`', '')}`")
    lines.append("\n## Hazards\n")
    lines.append("| hazard | what the library does | figure | command | date, kernel sources, card | shown by |")
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for hazard in HAZARDS:
        shown = [f"[{name}](#{name})" for name in hazard.sections]
        shown += [tests_text(name, report.get("files", {})) for name in hazard.tests]
        cells = [hazard.what, hazard.done, *evidence(hazard, entries, report), ", ".join(shown)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def when(entry: dict[str, Any]) -> str:
    card = re.search(r"\bG?H\d+|CPU", entry.get("device", ""))
    return f"{entry['date']}, `{entry['kernel_sources_sha256'][:8]}`" + (f", {card[0]}" if card else "")


def evidence(hazard: Hazard, entries: dict[str, Any], report: dict[str, Any]) -> tuple[str, str, str]:
    """Figure, command and date of a hazard."""
    if not hazard.sections:
        counts = [report["files"][f"tests/python/gpu/{name}"] for name in hazard.tests]
        passed, failed = (sum(count[key] for count in counts) for key in ("passed", "failed"))
        return f"{passed:,} tests passed, {failed} failed", "`tools/gpu_report`", when(report)
    section = hazard.sections[0]
    if section not in entries:
        return "not run", f"`tools/reliability {section}`", ""
    unit = next(row.unit for row in ROWS if row.section == section)
    entry = entries[section]
    return short(entry, unit, hazard.figures), f"`{entry['command']}`", when(entry)


def tests_text(name: str, files: dict[str, dict[str, int]]) -> str:
    """A test file, with how many of its tests a GPU passed."""
    path = f"tests/python/gpu/{name}".replace("gpu/../", "")
    counts = files.get(path)
    if counts is None:
        return f"`{path}`"
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    return f"`{path}` ({counts['passed']} passed{failed})"


def write(taken: Path | None = None) -> None:
    """The page and the short form; with the sections of another file first."""
    if taken is not None:
        add(DATA, load(taken))
    entries = load()
    report = load(REPORT)
    report["reliability"] = of_report(entries)
    REPORT.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(page(entries, report), encoding="utf-8")
    FEATURES.write_text(features_page(), encoding="utf-8")


def features_page() -> str:
    """The text of docs/features.md, from the table of the sources; the package need not be built."""
    spec = importlib.util.spec_from_file_location("features", ROOT / "python" / "hopper_attention" / "features.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.page()
