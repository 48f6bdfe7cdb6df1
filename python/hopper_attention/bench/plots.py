"""Figures of a report. matplotlib is imported when they are drawn."""

from __future__ import annotations

import pathlib
from typing import Any

from hopper_attention.bench import record
from hopper_attention.bench.record import OURS
from hopper_attention.bench.suites import count

COLORS = {OURS: "#76b900", "fa3": "#1f5fa8", "cudnn": "#d1495b", "flash": "#8d6a9f", "triton": "#e08e0b"}


def draw(report: dict[str, Any], folder: str) -> list[str]:
    """Writes prefill.png and decode.png, as far as the report has figures for them; returns their paths.

    Raises ImportError if matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    target = pathlib.Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    suites = record.by_suite(report)
    found = []
    for suite, function in (("prefill", prefill), ("decode", decode)):
        entries = [entry for entry in suites.get(suite, []) if has_time(entry)]
        if entries:
            path = str(target / f"{suite}.png")
            function(report, entries, path)
            found.append(path)
    return found


def has_time(entry: dict[str, Any]) -> bool:
    return any(record.time_us(entry, name) for name in entry["results"])


def subtitle(report: dict[str, Any]) -> str:
    machine = report["machine"]
    return f"{machine.get('device')}, driver {machine.get('driver')}, {report['date'][:10]}"


def prefill(report: dict[str, Any], entries: list[dict[str, Any]], path: str) -> None:
    """TFLOP/s over sequence length: a column for each head dim, a row for full and for causal."""
    from matplotlib import pyplot

    head_dims = sorted({entry["case"]["head_dim"] for entry in entries})
    names = [OURS, *record.peers_of(entries)]
    size = (4 * len(head_dims), 7)
    figure, axes = pyplot.subplots(2, len(head_dims), figsize=size, sharey=True, sharex=True, squeeze=False)
    for column, head_dim in enumerate(head_dims):
        for row, causal in enumerate((False, True)):
            axis = axes[row][column]
            chosen = [e for e in entries if e["case"]["head_dim"] == head_dim and e["case"]["causal"] == causal]
            for name in names:
                points = [(e["case"]["seqlen_q"], record.rate(e, name)) for e in chosen if record.rate(e, name)]
                if points:
                    axis.plot(*zip(*sorted(points), strict=True), marker="o", label=name, color=COLORS.get(name))
            axis.set_title(f"head dim {head_dim}, {'causal' if causal else 'full'}")
            lengths_axis(axis, {e["case"]["seqlen_q"] for e in entries})
            axis.grid(alpha=0.3)
        axes[1][column].set_xlabel("sequence length (16k tokens in total)")
    axes[0][0].set_ylim(bottom=0)  # last: it ends the search for limits of all axes, which share them
    for row in axes:
        row[0].set_ylabel("TFLOP/s")
    handles = {label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels())}  # noqa: B905
    axes[0][0].legend(handles.values(), handles.keys())
    figure.suptitle(f"Attention forward, bf16. {subtitle(report)}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def decode(report: dict[str, Any], entries: list[dict[str, Any]], path: str) -> None:
    """GB/s of K and V over context: a line for each batch and head ratio, a point where there is one context, FA3's
    dashed and hollow; plain one-query cases.
    """
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(11, 6))
    lines = decode_lines(entries)
    for number, (shape, chosen) in enumerate(lines.items()):
        color = pyplot.get_cmap("tab20")(number % 20)
        label = f"{shape[1]}/{shape[2]} heads, d{shape[0]}, batch {shape[3]}"
        for name, style, face in ((OURS, "-", color), ("fa3", "--", "none")):
            points = [(e["case"]["seqlen_k"], record.rate(e, name)) for e in chosen if record.rate(e, name)]
            if points:
                text = label if name == OURS else None
                drawn = {"marker": "o", "markerfacecolor": face, "label": text, "color": color}
                axis.plot(*zip(*sorted(points), strict=True), style, **drawn)
    axis.plot([], [], "--", marker="o", markerfacecolor="none", color="black", label="FA3, same color")
    ceiling = report["ceilings"].get("read_gbs")
    if ceiling:
        axis.axhline(ceiling, color="gray", linestyle=":", label="read rate of this run")
    lengths_axis(axis, {e["case"]["seqlen_k"] for chosen in lines.values() for e in chosen})
    axis.set(xlabel="keys of each sequence", ylabel="GB/s of K and V", title=f"Decode, bf16. {subtitle(report)}")
    axis.grid(alpha=0.3)
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def decode_lines(entries: list[dict[str, Any]]) -> dict[tuple[int, int, int, int], list[dict[str, Any]]]:
    """Plain one-query cases in pages of 16 by (head dim, heads of q, of k, batch), sorted."""
    lines: dict[tuple[int, int, int, int], list[dict[str, Any]]] = {}
    for entry in entries:
        case = entry["case"]
        plain = case["page_size"] == 16 and case["seqlen_q"] == 1 and not case["lengths"]
        if plain and tuple(case["window"]) == (-1, -1):
            shape = (case["head_dim"], case["heads_q"], case["heads_k"], case["batch"])
            lines.setdefault(shape, []).append(entry)
    return dict(sorted(lines.items()))


def lengths_axis(axis: Any, lengths: set[int]) -> None:
    """A logarithmic x axis with a tick for each length, as 512, 1k, 2k."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(lengths), [count(length) for length in sorted(lengths)])
