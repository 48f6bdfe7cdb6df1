"""tools/random_calls without a GPU: the same seed gives the same calls, each of them one that the benchmark can make."""

from __future__ import annotations

import sys

import pytest

from tool_modules import TOOLS, tool_module

pytestmark = pytest.mark.skipif(not TOOLS.exists(), reason="tools/ is not beside these tests")


@pytest.fixture(scope="module")
def tool():
    return tool_module("random_calls")


def test_a_seed_gives_the_same_calls(tool):
    found = tool.calls(3, 160)
    assert found == tool.calls(3, 160)
    assert found != tool.calls(4, 160)
    assert {kind for kind, _ in found} == set(tool.TURNS) == set(tool.KINDS) - {"arrivals", "texts"}
    assert [case for kind, case in found if kind == "mixed"] == [case for _, case in tool.calls(3, 160, ("mixed",))]


def test_calls_are_valid_and_of_bounded_size(tool):
    for kind, case in tool.calls(1, 700):
        assert len(case.q_lengths) == len(case.k_lengths) == case.batch
        assert case.heads_q % case.heads_k == 0 and case.name.startswith(f"{kind} b{case.batch} ")
        assert 0 < case.flops() and sum(case.q_lengths) * case.heads_q <= tool.MOST_ROWS
        # Queries of a causal call without keys would be all that is measured.
        if case.causal and case.call != "dense":
            assert all(q <= k for q, k in zip(case.q_lengths, case.k_lengths, strict=True))
        if kind == "mixed":
            assert case.page_size > 0 and len(set(case.q_lengths)) > 1
        if kind == "decode":
            assert max(case.q_lengths) <= 8


def test_steps_of_few_sequences_are_asked_for_by_name(tool):
    found = [case for _, case in tool.calls(2, 200, ("arrivals",))]
    assert len(found) > 150
    singles = [sum(q == 1 for q in case.q_lengths) for case in found]
    assert set(singles) == {0, 1, 2, 3} and all(case.batch > few for case, few in zip(found, singles, strict=True))
    assert {case.head_dim for case in found} == {64, 96, 128, 192, 256}


def test_texts_of_different_lengths_are_asked_for_by_name(tool):
    found = [case for _, case in tool.calls(2, 200, ("texts",))]
    assert len(found) > 150
    assert all(case.k_lengths == case.q_lengths for case in found)
    assert sum(len(set(case.k_lengths)) > 1 for case in found) > 0.9 * len(found)
    assert all(1 <= n <= 1024 for case in found for n in case.k_lengths)
    assert {case.page_size for case in found} == {0, 16} and {case.causal for case in found} == {False, True}


def test_rows_of_query(tool):
    found = tool.calls(1, 300, least_rows=33, most_rows=64)
    assert found == [(kind, case) for kind, case in tool.calls(1, 300) if 33 <= tool.query_rows(case) <= 64]
    assert 10 < len(found) < 150


def test_what_is_printed(tool):
    def row(kind, name, ratio, status="ok"):
        return {
            "kind": kind,
            "name": name,
            "over_fastest": ratio,
            "us": {"ours": 2.0},
            "status": status,
            "reason": "NaN",
        }

    rows = [row("dense", "a", 1.2), row("dense", "b", 0.8), row("mixed", "c", 0.9), row("mixed", "d", None)]
    text = tool.show([*rows, row("mixed", "e", 2.0, "wrong")], 0.95)
    assert text.splitlines() == [
        "dense: 0.980 of the fastest other in 2 calls, slower in 1, least 0.80",
        "mixed: 0.900 of the fastest other in 1 calls, slower in 1, least 0.90",
        " 0.80  b: ours 2.0",
        " 0.90  c: ours 2.0",
        "wrong: e: NaN",
    ]


def test_unknown_kinds_are_named(tool, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["random_calls", "--list", "--kinds", "decode,prose"])
    assert tool.main() == 2
    assert "no prose; there are dense, varlen, chunk, decode, mixed" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["random_calls", "--list", "--rows", "33"])
    assert tool.main() == 2
    assert "two numbers, as 33-64, are needed, found 33" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["random_calls", "--list", "--number", "16", "--kinds", "decode"])
    assert tool.main() == 0
    assert all(line.startswith("decode b") for line in capsys.readouterr().out.splitlines())
