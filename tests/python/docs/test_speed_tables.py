"""The tables of README.md, docs/speed.md and docs/speed-h100.md are what the reports in docs/data say."""

from __future__ import annotations

from pathlib import Path

import pytest

from hopper_attention.bench import suites
from tool_modules import tool_module

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tables():
    return tool_module("speed_tables")


def test_the_pages_have_the_tables_of_the_reports(tables):
    found, h100 = tables.reports(), tables.reports("h100")
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert len(tables.BLOCK.findall(text)) == text.count("<!-- speed: ") == text.count("<!-- end -->") > 2
        assert tables.renewed(text, found, h100) == text, f"{page.name}: run tools/speed_tables"


def test_each_card_has_reports_of_its_own(tables):
    for folder, card in ((".", "H200"), ("h100", "H100")):
        found = tables.reports(folder)
        assert set(found) == set(tables.SUITES)
        assert all(card in report["machine"]["device"] for report in found.values()), folder


def test_the_page_has_every_suite(tables):
    for page, prefix in (("speed.md", ""), ("speed-h100.md", tables.H100)):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert all(suite == "prefill" or f"<!-- speed: {prefix}suite {suite} -->" in text for suite in suites.SUITES)
    assert set(suites.SUITES) <= set(tables.SUITES)


def test_a_suite_without_a_report_is_named(tables):
    assert tables.block({}, "suite engine") == "No report of suite engine is there.\n"
    assert "- **engine**: no report, none judged\n" in tables.block({}, "not reached")


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_page_without_a_report_or_without_its_cases_says_so(tables, name):
    assert tables.block({}, name) == tables.no_report(name)
    report = {**tables.reports()["engine"], "cases": []}
    assert tables.block({name: report}, name) == f"No report of suite {name} is there.\n"


def test_a_case_of_ours_that_fails_is_named_as_missed(tables):
    report = tables.reports()["prefill"]
    broken = {**report, "cases": [dict(entry) for entry in report["cases"]]}
    broken["cases"][0].update(status="wrong", results={})
    line = next(line for line in tables.block({"prefill": broken}, "not reached").splitlines() if "prefill" in line)
    assert " of 38: " in line and f"{broken['cases'][0]['case']['name']}: x best known without a figure" in line


def test_figures_are_where_their_case_is(tables):
    found = tables.reports()
    entries = {entry["case"]["name"]: entry for entry in found["decode"]["cases"]}
    us = entries["b64 4k, 32/8, d128"]["results"]["ours"]["us"]
    lines = tables.decode(found["decode"]).splitlines()
    column = lines[0].split(" | ").index("4k")
    (row,) = [line for line in lines if line.startswith("| 32/8, d128 | 64 |")]
    assert row.split(" | ")[column].startswith(f"{us:.1f} / ")
