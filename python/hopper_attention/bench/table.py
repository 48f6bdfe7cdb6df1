"""A report as text: one table for each suite, with rich if it is installed and the output is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hopper_attention.bench import goals, record
from hopper_attention.bench.record import OURS, geometric_mean

GOALS = {
    "goal": "goal x fa3",
    "goal_best": "goal x best",
    "goal_read": "goal of read",
    "goal_us": "goal us",
    "goal_over_us": "goal us over floor",
}


@dataclass
class Table:
    """Title, column names, rows of text (the first column is the case), lines below."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str]


def number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def head(report: dict[str, Any]) -> list[str]:
    """What was measured on, and its ceilings."""
    machine, ceilings = report["machine"], report["ceilings"]
    names = ("driver", "cuda", "torch", "cudnn", "triton", "hopper_attention")
    lines = [
        f"{machine.get('device', 'unknown device')}, {report['date']}",
        ", ".join(f"{name} {machine.get(name)}" for name in names),
        f"kernel sources {(machine.get('kernel_sources_sha256') or 'unknown')[:8]}, command: {report['command']}",
    ]
    if ceilings:
        lines.append(
            f"ceilings of this run: bf16 matmul {ceilings['matmul_tflops']:.0f} TFLOP/s, "
            f"read {ceilings['read_gbs']:.0f} GB/s, copy {ceilings['copy_gbs']:.0f} GB/s"
        )
    return lines


def tables(report: dict[str, Any]) -> list[Table]:
    """All of a report."""
    found = [suite_table(report, suite, entries) for suite, entries in record.by_suite(report).items()]
    kernels = "Small kernels, and what an option costs"
    small, host = report.get("kernels"), report.get("host")
    found += [rows_table(kernels, small, goals.lines(goals.of_kernels(small)))] if small else []
    found += [rows_table("Host time of a call, us", host, goals.lines(goals.of_host(host)))] if host else []
    found += [rows_table("DRAM bytes, predicted and counted", report["traffic"])] if report.get("traffic") else []
    return found


def rows_table(title: str, rows: list[dict[str, Any]], notes: Sequence[str] = ()) -> Table:
    """Dicts with the same keys, as they are."""
    columns = list(rows[0])
    text = [[number(row[c]) if isinstance(row[c], float) else str(row[c]) for c in columns] for row in rows]
    return Table(title, columns, text, list(notes))


def suite_table(report: dict[str, Any], suite: str, entries: list[dict[str, Any]]) -> Table:
    """Our time and rate, its part of the ceiling, our speed over each peer's and over the best known."""
    peers = record.peers_of(entries)
    decode = record.is_decode(entries[0])
    with_best = any(record.over_best(entry) for entry in entries)
    wanted = {name: title for name, title in GOALS.items() if any(record.goal(entry, name) for entry in entries)}
    unit = "GB/s" if decode else "TFLOP/s"
    columns = ["case", "us", unit, "of read" if decode else "of matmul"] + ["us over floor"] * decode
    columns += [f"x {peer}" for peer in peers]
    columns += ["x best"] * with_best + [*wanted.values(), "spread", ""]
    rows = []
    for entry in entries:
        cells = [entry["case"]["name"], number(record.time_us(entry), ".1f"), number(record.rate(entry), ".0f")]
        cells.append(number(record.fraction(report, entry)))
        cells += [number(record.over_floor(report, entry), ".1f")] * decode
        cells += [number(record.speedup(entry, peer)) for peer in peers]
        cells += [number(record.over_best(entry))] * with_best
        cells += [number(record.goal(entry, name) or None) for name in wanted]
        rows.append([*cells, spread(entry), remark(entry)])
    return Table(f"{suite}: our speed, and over each peer's", columns, rows, summary(report, suite, entries, peers))


def spread(entry: dict[str, Any]) -> str:
    if record.time_us(entry) is None:
        return "-"
    return f"{100 * entry['results'][OURS]['spread']:.1f} %"


def remark(entry: dict[str, Any]) -> str:
    """Why a case has no figure, or what is special about it."""
    if entry["status"] != "ok":
        return f"{entry['status']}: {entry['reason']}"
    notes = [result["note"] for name, result in entry["results"].items() if name == OURS and result["note"]]
    wrong = [f"{name} {reason}" for name, reason in entry["left_out"].items() if reason.startswith("wrong")]
    return "; ".join(notes + wrong)


def summary(report: dict[str, Any], suite: str, entries: list[dict[str, Any]], peers: list[str]) -> list[str]:
    """Geometric means, worst cases, goals, cases that did not run."""
    lines = []
    for peer in peers:
        lines += mean_line(f"x {peer}", ratios(entries, peer))
    for mean in goals.MEANS:
        lines += mean_line(mean.label, mean.ratios(entries), mean.bound) if mean.suite == suite else []
    if suite == "scaling":
        lines += [str(verdict) for verdict in goals.of_scaling(entries)]
    lines += goals.lines(goals.of_suite(report, suite, entries))
    for peer, reason in left_out(entries).items():
        lines.append(f"{peer} nowhere: {reason}")
    not_ok = sum(entry["status"] != "ok" for entry in entries)
    return lines + ([f"{not_ok} of {len(entries)} cases without a figure of ours"] if not_ok else [])


def ratios(entries: list[dict[str, Any]], peer: str) -> dict[str, float | None]:
    """Our speed over a peer's, by the names of the cases."""
    return {entry["case"]["name"]: record.speedup(entry, peer) for entry in entries}


def mean_line(label: str, found: dict[str, float | None], bound: float = 0.0) -> list[str]:
    """One line for the geometric mean, its goal and the least of some ratios; none if there are no ratios."""
    known = {name: ratio for name, ratio in found.items() if ratio is not None}
    mean = geometric_mean(known.values())
    if mean is None:
        return []
    worst = min(known, key=lambda name: known[name])
    goal = f" (goal {bound:.2f})" if bound else ""
    return [f"{label}: geometric mean {mean:.3f}{goal} over {len(known)} cases, least {known[worst]:.3f} ({worst})"]


def left_out(entries: list[dict[str, Any]]) -> dict[str, str]:
    """Peers that ran no case of a suite, with the reason of the first."""
    measured = set(record.peers_of(entries))
    found: dict[str, str] = {}
    for entry in entries:
        for name, reason in entry["left_out"].items():
            if not name.startswith(OURS) and name not in measured:
                found.setdefault(name, reason)
    return found


def one_line(entry: dict[str, Any]) -> str:
    """A case as soon as it is measured."""
    name = f"{entry['case']['suite']} / {entry['case']['name']}"
    if entry["status"] != "ok":
        return f"{name}: {remark(entry)}"
    unit = "GB/s" if record.is_decode(entry) else "TFLOP/s"
    over = [f"x{record.speedup(entry, peer):.2f} {peer}" for peer in record.peers_of([entry])]
    best = record.over_best(entry)
    over += [f"x{best:.2f} best"] if best else []
    return f"{name}: {record.time_us(entry):.1f} us, {record.rate(entry):.0f} {unit}  {'  '.join(over)}"


def plain(table: Table) -> str:
    """Without rich: columns of text."""
    widths = [max(len(line[i]) for line in [table.columns, *table.rows]) for i in range(len(table.columns))]
    lines = [table.title]
    for row in [table.columns, *table.rows]:
        cells = [row[0].ljust(widths[0])] + [
            cell.rjust(width) if column else cell
            for cell, width, column in zip(row[1:], widths[1:], table.columns[1:], strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, *(f"  {note}" for note in table.notes)])


def show(report: dict[str, Any]) -> None:
    """Prints a report."""
    found = tables(report)
    if sys.stdout.isatty() and print_rich(head(report), found):
        return
    sys.stdout.write("\n\n".join(["\n".join(head(report)), *(plain(table) for table in found)]) + "\n")
    sys.stdout.flush()


def print_rich(lines: list[str], found: list[Table]) -> bool:
    """False if rich is not installed."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:
        return False
    console = Console()
    for line in lines:
        console.print(line, markup=False, highlight=False)
    for table in found:
        rich_table = RichTable(title=table.title, box=box.SIMPLE, title_justify="left")
        for index, column in enumerate(table.columns):
            rich_table.add_column(column, justify="right" if index and column else "left")
        for row in table.rows:
            rich_table.add_row(*(cell.replace("[", r"\[") for cell in row))
        console.print(rich_table)
        for note in table.notes:
            console.print(f"  {note}", markup=False, highlight=False)
    return True
