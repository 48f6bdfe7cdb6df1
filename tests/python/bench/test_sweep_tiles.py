"""tools/sweep_tiles without a GPU: its cases, which tiles it tries, what it prints, the costs that it fits."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace

import pytest

import hopper_attention
from hopper_attention.bench import run, suites
from tool_modules import TOOLS, tool_module

pytestmark = pytest.mark.skipif(not TOOLS.exists(), reason="tools/ is not beside these tests")


@pytest.fixture(scope="module")
def sweep():
    return tool_module("sweep_tiles")


def options(sweep, monkeypatch, *given):
    monkeypatch.setattr(sys, "argv", ["sweep_tiles", *given])
    return sweep.arguments()


def test_cases_have_as_many_tokens_and_every_mask(sweep, monkeypatch):
    found = sweep.cases(options(sweep, monkeypatch, "--head-dims", "64,128", "--quick"))
    assert len(found) == 2 * (3 + 3 + 3 + 1) and len({case.name for case in found}) == len(found)
    assert {case.batch * case.seqlen_q for case in found} == {suites.GRID_TOKENS}
    assert [case.window for case in found if "window" in case.name][:3] == [(127, 0), (1023, 0), (4095, 0)]
    with pytest.raises(SystemExit, match="none of full, causal, window, softcap"):
        sweep.cases(options(sweep, monkeypatch, "--masks", "tree"))


def test_heads_may_be_given(sweep, monkeypatch):
    given = ["--head-dims", "128", "--lengths", "512,32768", "--masks", "causal,softcap", "--heads", "32/8,8/1"]
    found = sweep.cases(options(sweep, monkeypatch, *given))
    assert [case.name for case in found] == [
        *(f"bf16 d128 causal {length} {heads}" for heads in ("32/8", "8/1") for length in ("512", "32k")),
        "bf16 d128 softcap 50",
    ]
    assert [(case.batch, case.heads_q, case.heads_k) for case in found[1:3]] == [(1, 32, 8), (32, 8, 1)]
    for wrong in ("32", "8/3", "0/0"):
        with pytest.raises(SystemExit):
            options(sweep, monkeypatch, "--heads", wrong)


def test_what_the_plans_tiles_lose(sweep):
    def entry(name, plan, **us):
        return {"case": {"name": name}, "plan": plan, "results": {tile: {"us": time} for tile, time in us.items()}}

    entries = [
        entry("even", "a", a=100.0, b=150.0),
        entry("worse", "a", a=121.0, b=100.0, fa3=50.0),
        entry("refused", "c", a=100.0),
    ]
    assert (
        sweep.lost(entries)
        == "the plan's choices over the fastest: 1.100 in the mean of 2 cases, at most 1.210 (worse)"
        "; 1 without a time of the plan's choice"
    )
    assert sweep.lost(entries[2:]).startswith("no case")


def kernel(rows, head_dim, calls="dense", dtype="bfloat16", slab_keys=0):
    tile = SimpleNamespace(
        rows=rows, keys=128, stages=2, head_dim=head_dim, head_dim_v=head_dim, calls=calls, slab_keys=slab_keys
    )
    return SimpleNamespace(dtype=dtype, tile=tile)


def test_tiles_are_those_that_such_a_call_can_take(sweep, monkeypatch):
    built = [kernel(128, 128), kernel(192, 128, "all"), kernel(16, 128), kernel(128, 128, "capped"), kernel(128, 256)]
    built += [kernel(64, 128, "ragged"), kernel(128, 128, "paired"), kernel(320, 128, slab_keys=72)]
    monkeypatch.setattr(hopper_attention, "built_kernels", lambda: [*built, kernel(256, 128, dtype="float16")])
    case = suites.Case("tiles", "", 1, 512, 512, 8, 2, 96)
    assert [tile.rows for tile in sweep.tiles(case, "128x128")] == [128, 192] and sweep.packings(case) == [1, 4]
    assert [tile.rows for tile in sweep.tiles(case, "320x128 packed")] == [128, 192, 320]
    assert [tile.calls for tile in sweep.tiles(case, "128x128 shared packed")] == ["dense", "all", "paired"]
    capped = suites.Case("tiles", "", 1, 512, 512, 8, 8, 96, softcap=50.0)
    assert [(tile.rows, tile.calls) for tile in sweep.tiles(capped, "192x80")] == [(192, "all"), (128, "capped")]
    assert sweep.packings(capped) == [1]
    with pytest.raises(SystemExit, match="no kernel for bfloat16 and head dim 512"):
        sweep.tiles(suites.Case("tiles", "", 1, 512, 512, 8, 8, 512), "128x128")


def test_widths_are_forced_beside_what_the_plan_takes(sweep, monkeypatch):
    chosen = options(sweep, monkeypatch, "--widths", "4,16,99")
    planned, *forced = sweep.in_widths(suites.Case("tiles", "", 2, 512, 512, 16, 16, 128), chosen.widths)
    assert (planned.name, planned.choice) == (sweep.PLANNED, {})
    assert [(one.name, one.choice) for one in forced] == [
        ("4 heads", {"heads_per_pass": 4}),
        ("16 heads", {"heads_per_pass": 16}),
    ]
    seen = []
    monkeypatch.setattr(sweep, "force_plan", lambda **choice: seen.append(choice) or contextlib.nullcontext())
    assert forced[1].forced(lambda: "made")() == "made" and seen == [{"heads_per_pass": 16}]
    results = {"planned": {"us": 100.0}, "4 heads": {"us": 90.0}}
    entry = {"case": {"name": "one"}, "plan": sweep.PLANNED, "results": results, "left_out": {}}
    assert "planned* 100.0 us (0.90)" in sweep.line(entry)
    assert "1.111 in the mean of 1 cases" in sweep.lost([entry])


def test_the_plans_choice_is_named_as_the_tiles_are(sweep, monkeypatch):
    real = hopper_attention.plan
    monkeypatch.setattr(hopper_attention, "plan", lambda **given: real(**given, device="H200"))
    for case in sweep.cases(options(sweep, monkeypatch, "--quick")):
        rows, _, keys = sweep.planned(case).removesuffix(" packed").partition("x")
        assert int(rows) % 64 == 0 and int(keys) % 8 == 0, case.name
    window = next(c for c in sweep.cases(options(sweep, monkeypatch, "--head-dims", "64")) if "window 127" in c.name)
    assert sweep.planned(window).endswith(" packed")
    prompt = suites.Case("tiles", "", 1, 2048, 2048, 8, 8, 128, causal=True)
    assert sweep.planned(prompt) == "128x128 shared"


def test_a_line_marks_the_plans_choice_and_is_relative_to_the_fastest_of_ours(sweep):
    results = {"128x128": {"us": 200.0}, "192x128": {"us": 100.0}, "fa3": {"us": 50.0}, "64x128": {}}
    entry = {"case": {"name": "one"}, "plan": "128x128", "results": results, "left_out": {"64x128": "wrong: x"}}
    text = sweep.line(entry)
    assert text.split(maxsplit=1)[1] == (
        "fa3 50.0 us (2.00), 192x128 100.0 us (1.00), 128x128* 200.0 us (0.50), 64x128: wrong: x"
    )
    assert "nothing was measured" in sweep.line({**entry, "results": {}})


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_blocks_and_tiles_of_a_head(sweep, mask):
    case = {"seqlen_q": 300, "window": (-1, -1), "causal": mask == "causal"}
    assert sweep.work(case, 128, 128) == ((3 * 3, 3) if mask == "full" else (1 + 2 + 3, 3))
    slabs = 5 * [4] if mask == "full" else [1, 2, 3, 4, 4]
    assert sweep.work(case, 192, 80) == (pytest.approx(sum(slabs) / 3), 2), "slabs may see whole blocks less"
    slabs = 5 * [3] if mask == "full" else [1, 2, 2, 3, 3]
    assert sweep.work(case, 128, 100) == (sum(slabs) / 2, 3), "each slab visits what it sees, and a missing one nothing"
    assert sweep.work({**case, "window": (50, 0)}, 100, 100) == (1 + 2 + 2, 3)


def test_costs_are_found_again(sweep, monkeypatch):
    """Times made of 700 ns for a block and 2,000 for a tile; packed tiles, other peers and softcap do not count."""
    monkeypatch.setattr(run, "machine", lambda: {"sm_count": 100})
    entries = []
    for seqlen in (512, 2048, 8192):
        case = suites.grid_case("tiles", 128, True, seqlen).as_dict()
        blocks, tiles = sweep.work(case, 128, 128)
        us = (700 * blocks + 2000 * tiles) * case["batch"] * case["heads_q"] / 100 / 1e3
        results = {"128x128": {"us": us}, "128x128 packed": {"us": 1.0}, "fa3": {"us": 1.0}}
        entries += [{"case": case, "results": results}, {"case": {**case, "softcap": 50.0}, "results": results}]
    ((name, cost),) = sweep.fitted(entries).items()
    assert name == "bf16 d128 128x128" and cost["error"] < 1e-9
    assert (cost["block_ns"], cost["tile_ns"]) == pytest.approx((700, 2000))
