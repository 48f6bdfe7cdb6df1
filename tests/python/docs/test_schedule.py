"""The picture of docs/schedule.md shows what the page says, with the constants of a tile of the table."""

from __future__ import annotations

import importlib.util
import re
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def schedule():
    spec = importlib.util.spec_from_file_location("schedule", ROOT / "docs/figures/schedule.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def spans(schedule):
    return schedule.simulate()


def of(spans, lane, *kinds):
    return sorted((s for s in spans if s.lane == lane and s.kind in kinds), key=lambda s: s.begin)


def test_nothing_happens_twice_at_a_time_in_one_lane(schedule, spans):
    for lane in schedule.LANES:
        for a, b in combinations(sorted((s for s in spans if s.lane == lane), key=lambda s: s.begin), 2):
            assert a.end <= b.begin + 1e-9, (a, b)


def test_the_tensor_cores_do_one_product_at_a_time(spans):
    products = sorted((s for s in spans if s.kind in ("S", "PV")), key=lambda s: s.begin)
    assert all(a.end <= b.begin + 1e-9 for a, b in zip(products, products[1:], strict=False))


def test_every_block_is_multiplied_twice_by_every_warpgroup(schedule, spans):
    for w in range(schedule.WARPGROUPS):
        labels = [s.label for s in of(spans, f"warpgroup {w}: WGMMA", "S", "PV")]
        one_tile = ["S3", "S2", "PV3", "S1", "PV2", "S0", "PV1", "PV0"]
        assert labels == one_tile * schedule.TILES


def test_softmax_runs_under_p_v_of_the_block_before(schedule, spans):
    for w in range(schedule.WARPGROUPS):
        products = of(spans, f"warpgroup {w}: WGMMA", "PV")
        overlapping = [
            s
            for s in of(spans, f"warpgroup {w}: CUDA cores", "softmax")
            if any(p.begin < s.end and s.begin < p.end for p in products)
        ]
        assert len(overlapping) == schedule.TILES * (schedule.BLOCKS - 1)


def test_loads_of_the_next_tile_begin_before_the_epilogue(schedule, spans):
    first_epilogue = min(s.begin for s in spans if s.kind == "epilogue")
    loads = sorted(s.begin for s in spans if s.kind == "load" and s.lane.startswith("ring"))
    assert loads[2 * schedule.BLOCKS] < first_epilogue


def test_the_ring_is_that_of_the_table(schedule):
    table = (ROOT / "src/kernels/tile_config.h").read_text(encoding="utf-8")
    tiles = [tuple(map(int, found)) for found in re.findall(r"\{(\d+), (\d+), (\d+), (\d+), (\d+)\}", table)]
    assert any(rows == 64 * schedule.WARPGROUPS and stages == schedule.STAGES for rows, _, _, _, stages in tiles)


def test_the_page_names_barriers_and_constants_of_the_kernel():
    page = (ROOT / "docs/schedule.md").read_text(encoding="utf-8")
    sources = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "src/kernels").glob("*.h"))
    quoted = set(re.findall(r"`([A-Za-z_]+)(?:\[\w+\])?`", page)) - {"w", "setmaxnreg", "stmatrix", "if"}
    assert {"q_empty", "landed", "kRowsUnderPv", "step"} <= quoted
    assert sorted(name for name in quoted if not re.search(rf"\b{name}\b", sources)) == []


def test_the_picture_is_there(spans):
    svg = (ROOT / "docs/figures/schedule.svg").read_text(encoding="utf-8")
    for label in {span.label for span in spans} - {""}:
        assert f">{label}</text>" in svg
