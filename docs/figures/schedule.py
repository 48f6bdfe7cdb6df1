"""Draws docs/figures/schedule.svg: who does what when in one CTA of the attention kernel with two consumer warpgroups.

python docs/figures/schedule.py [FILE.svg|FILE.png]      needs matplotlib

The order follows from the waits of the kernel, which `simulate` repeats one by one (src/kernels/attention_kernel.h,
tma_loader.h, mainloop.h, epilogue.h). Durations are schematic: they are chosen so that the picture can be read, not
measured.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

STAGES = 5
WARPGROUPS = 2
BLOCKS = 4  # key blocks of each tile
TILES = 2

LOAD_ISSUE, LOAD = 0.25, 1.6  # from one load to the next; from issue to arrival
PRODUCT = 1.0  # S = Q K^T or O += P V, alone on the tensor cores
SOFTMAX_UNDER_PV, SOFTMAX_REST = 1.0, 0.6
HIDE, FINALIZE, STORE = 0.35, 0.5, 1.3


class Span(NamedTuple):
    """`label` from `begin` to `end` in `lane`; `kind` is its colour."""

    lane: str
    kind: str
    label: str
    begin: float
    end: float


class Simulation:
    """Processes are generators that yield a duration, or a function that says whether they may go on."""

    def __init__(self):
        self.now = 0.0
        self.spans: list[Span] = []
        self.at: dict[object, float] = {}  # when an event happened
        self.turn = 0
        self.tensor_cores_free = 0.0

    def happened(self, *events: object):
        return lambda: all(self.at.get(event, float("inf")) <= self.now for event in events)

    def draw(self, lane: str, kind: str, label: str, begin: float, end: float) -> None:
        self.spans.append(Span(lane, kind, label, begin, end))

    def run(self, processes: list[Generator]) -> None:
        waiting = [[process, 0.0, None] for process in processes]  # process, not before, condition
        while waiting:
            progress = False
            for entry in list(waiting):
                process, ready, condition = entry
                if ready > self.now or (condition is not None and not condition()):
                    continue
                progress = True
                try:
                    step = next(process)
                except StopIteration:
                    waiting.remove(entry)
                    continue
                entry[1], entry[2] = (self.now, step) if callable(step) else (self.now + step, None)
            if not progress and waiting:
                times = [ready for _, ready, _ in waiting if ready > self.now]
                times += [time for time in self.at.values() if time > self.now]
                if not times:
                    raise RuntimeError("the schedule hangs")
                self.now = min(times)

    def product(self, warpgroup: int, kind: str, label: str) -> float:
        """Issues a group of WGMMAs; returns when it is done. The tensor cores work in the order of issue."""
        begin = max(self.now, self.tensor_cores_free)
        self.tensor_cores_free = begin + PRODUCT
        self.draw(f"warpgroup {warpgroup}: WGMMA", kind, label, begin, begin + PRODUCT)
        return begin + PRODUCT


def ring_order() -> list[tuple[int, str, int]]:
    """(tile, K or V, block) in the order of the ring: keys one block ahead of values, blocks from the right."""
    order = []
    for tile in range(TILES):
        order.append((tile, "K", BLOCKS - 1))
        for n in range(BLOCKS - 1, 0, -1):
            order += [(tile, "K", n - 1), (tile, "V", n)]
        order.append((tile, "V", 0))
    return order


def hidden(kind: str, block: int) -> bool:
    """Whether rows of this block are to be zeroed: V of the last block of a tile, as under a mask."""
    return kind == "V" and block == BLOCKS - 1


def load_keys_values(sim: Simulation):
    order = ring_order()
    for use, item in enumerate(order):
        if use >= STAGES:
            yield sim.happened(*((w, "released", order[use - STAGES]) for w in range(WARPGROUPS)))
        arrival = "landed" if hidden(*item[1:]) else "full"
        sim.at[arrival, item] = sim.now + LOAD
        sim.draw(f"ring slot {use % STAGES}", "load", "", sim.now, sim.now + LOAD)
        sim.at["loaded", use] = sim.now + LOAD
        yield LOAD_ISSUE


def load_queries(sim: Simulation):
    for tile in range(TILES):
        for w in range(WARPGROUPS):
            if tile > 0:
                yield sim.happened((w, "q empty", tile - 1))
            sim.at["q full", w, tile] = sim.now + LOAD
            sim.draw(f"Q slab {w}", "load", "", sim.now, sim.now + LOAD)
            yield LOAD_ISSUE


def hide_values(sim: Simulation):
    for item in ring_order():
        if hidden(*item[1:]):
            yield sim.happened(("landed", item))
            sim.draw("producer warp 2", "hide", "0", sim.now, sim.now + HIDE)
            yield HIDE
            sim.at["full", item] = sim.now


def consume(sim: Simulation, w: int):
    cuda_cores = f"warpgroup {w}: CUDA cores"

    def done(event):
        sim.at[event] = sim.now

    def softmax(tile, block, length):
        sim.draw(cuda_cores, "softmax", f"{block}" if length > 0.5 else "", sim.now, sim.now + length)
        return length

    for tile in range(TILES):
        yield sim.happened(("q full", w, tile))
        last = BLOCKS - 1
        yield sim.happened(("full", (tile, "K", last)))
        yield sim.product(w, "S", f"S{last}") - sim.now
        done((w, "released", (tile, "K", last)))
        yield softmax(tile, last, SOFTMAX_UNDER_PV + SOFTMAX_REST)
        for n in range(last - 1, -1, -1):
            yield sim.happened(("full", (tile, "K", n)))
            yield lambda: sim.turn == w
            s_done = sim.product(w, "S", f"S{n}")
            yield sim.happened(("full", (tile, "V", n + 1)))
            pv_done = sim.product(w, "PV", f"PV{n + 1}")
            sim.turn = (w + 1) % WARPGROUPS
            yield s_done - sim.now
            done((w, "released", (tile, "K", n)))
            yield softmax(tile, n, SOFTMAX_UNDER_PV)
            yield max(pv_done - sim.now, 0.0)
            done((w, "released", (tile, "V", n + 1)))
            yield softmax(tile, n, SOFTMAX_REST)
        done((w, "q empty", tile))
        sim.draw(f"Q slab {w}", "used", f"Q of tile {tile}", sim.at["q full", w, tile], sim.now)
        yield sim.happened(("full", (tile, "V", 0)))
        yield sim.product(w, "PV", "PV0") - sim.now
        done((w, "released", (tile, "V", 0)))
        sim.draw(cuda_cores, "epilogue", "O", sim.now, sim.now + FINALIZE)
        yield FINALIZE
        if tile > 0:
            yield sim.happened((w, "stored", tile - 1))
        sim.draw(f"O slab {w}", "store", "store", sim.now, sim.now + STORE)
        sim.at[w, "stored", tile] = sim.now + STORE


def simulate() -> list[Span]:
    """All spans of the picture."""
    sim = Simulation()
    sim.run([load_keys_values(sim), load_queries(sim), hide_values(sim), *(consume(sim, w) for w in range(WARPGROUPS))])
    for use, item in enumerate(ring_order()):
        end = max(sim.at[w, "released", item] for w in range(WARPGROUPS))
        sim.draw(f"ring slot {use % STAGES}", item[1], f"{item[1]}{item[2]}", sim.at["loaded", use], end)
    return sim.spans


LANES = [
    *(f"ring slot {slot}" for slot in range(STAGES)),
    *(f"Q slab {w}" for w in range(WARPGROUPS)),
    "producer warp 2",
    *(f"warpgroup {w}: {unit}" for w in range(WARPGROUPS) for unit in ("WGMMA", "CUDA cores")),
    *(f"O slab {w}" for w in range(WARPGROUPS)),
]
COLOURS = {
    "load": ("#ffffff", "being loaded (TMA)"),
    "K": ("#9ecae1", "K block, full"),
    "V": ("#a1d99b", "V block, full"),
    "used": ("#dadaeb", "Q slab, full"),
    "hide": ("#e7969c", "rows of V outside the mask zeroed"),
    "S": ("#6baed6", "S n = Q K n^T"),
    "PV": ("#74c476", "O += P n V n"),
    "softmax": ("#fdae6b", "softmax of block n"),
    "epilogue": ("#bcbddc", "O / row sum, LSE"),
    "store": ("#d9d9d9", "O to global memory (TMA)"),
}


def draw(spans: list[Span], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "schedule", "svg.fonttype": "none", "font.size": 8})
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(figsize=(13, 5.6))
    for span in spans:
        y = len(LANES) - 1 - LANES.index(span.lane)
        hatch = "////" if span.kind == "load" else None
        axes.broken_barh(
            [(span.begin, span.end - span.begin)], (y - 0.4, 0.8), facecolors=COLOURS[span.kind][0],
            edgecolor="#555555", linewidth=0.6, hatch=hatch,
        )  # fmt: skip
        axes.text((span.begin + span.end) / 2, y, span.label, ha="center", va="center", fontsize=7, clip_on=True)
    second_tile = min(s.begin for s in spans if s.kind == "S" and s.label == f"S{BLOCKS - 1}" and s.begin > 5)
    axes.axvline(second_tile, color="#555555", linestyle=":", linewidth=1)
    axes.text(second_tile, len(LANES) - 0.35, " tile 1 begins on the tensor cores", fontsize=8, va="bottom")
    axes.set_yticks(range(len(LANES)), LANES[::-1])
    axes.set_xlim(0, max(span.end for span in spans) + 0.2)
    axes.set_ylim(-0.6, len(LANES) + 0.2)
    axes.set_xticks([])
    axes.set_xlabel("time (schematic)")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(
        handles=[
            Patch(facecolor=colour, edgecolor="#555555", label=text, hatch="////" if kind == "load" else None)
            for kind, (colour, text) in COLOURS.items()
        ],
        loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=5, frameon=False,
    )  # fmt: skip
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    draw(simulate(), Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
