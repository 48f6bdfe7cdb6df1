"""The cases: well formed, with the work that counting gives."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys

import pytest

from hopper_attention.bench import host, record, suites, traffic
from hopper_attention.bench.case import CALLS, Case
from hopper_attention.bench.lengths import ragged_lengths, skewed_lengths

ALL = suites.select("all", None) + host.CASES + traffic.CASES


@pytest.mark.parametrize("case", ALL, ids=lambda case: f"{case.suite}: {case.name}")
def test_a_case_is_well_formed(case):
    assert case.call in CALLS
    assert case.heads_q % case.heads_k == 0
    assert len(case.k_lengths) == len(case.q_lengths) == case.batch
    assert max(case.k_lengths) == case.seqlen_k and min(case.k_lengths) >= 1
    assert all(q <= k for q, k in zip(case.q_lengths, case.k_lengths, strict=True))
    assert case.head_dim % 8 == case.dv % 8 == 0
    assert not case.page_size or case.call != "dense"
    assert case.flops() > 0 and case.kv_bytes() > 0


def test_names_tell_cases_apart():
    names = [(case.suite, case.name) for case in ALL]
    assert len(set(names)) == len(names)


def test_the_prefill_grid_is_the_table_of_best_speeds():
    grid = suites.prefill()
    assert len(grid) == 36
    assert {case.batch * case.seqlen_q for case in grid} == {suites.GRID_TOKENS}
    assert {case.heads_q * case.head_dim for case in grid} == {suites.GRID_HIDDEN}
    table = record.best_table()
    assert {(case.seqlen_q, case.heads_q, case.head_dim, case.causal) for case in grid} == set(table)
    assert all(row["best_over_fa3_varlen"] >= 1 for row in table.values())
    assert all(row["batch"] * row["seqlen"] == suites.GRID_TOKENS for row in table.values())


def visible(case: Case, row: int, key: int, seqlen_q: int, seqlen_k: int) -> bool:
    """The mask in words: beside the diagonal on which the last query sees the last key."""
    position = row + seqlen_k - seqlen_q
    if case.causal and key > position:
        return False
    left, right = case.window
    if left >= 0 and key < position - left:
        return False
    return case.causal or right < 0 or key <= position + right


@pytest.mark.parametrize("seed", range(40))
def test_work_is_what_counting_gives(seed):
    r = random.Random(seed)
    lengths = tuple(r.randint(1, 24) for _ in range(r.randint(1, 3)))
    call = r.choice(["varlen", "cache"])
    case = Case(
        *("made up", "", len(lengths), r.randint(1, 24), max(lengths), 4, 2, 16, 8),
        causal=r.random() < 0.5,
        window=r.choice([(-1, -1), (5, 0), (0, 0), (3, 4), (-1, 2), (7, -1)]),
        call=call,
        lengths=lengths,
    )
    pairs, keys = 0, 0
    for q, k in zip(case.q_lengths, case.k_lengths, strict=True):
        seen = [[visible(case, row, key, q, k) for key in range(k)] for row in range(q)]
        pairs += sum(map(sum, seen))
        keys += sum(any(column) for column in zip(*seen, strict=True))
    assert case.visible_pairs() == pairs
    multiply_adds = pairs * 4 * 16 + pairs * 4 * 8
    assert case.flops() == 2 * multiply_adds
    assert case.kv_bytes() == keys * 2 * (16 + 8) * 2


def test_figures_of_the_anchors():
    """b64 4k, 32/8: 244 us at 4.4 TB/s; d128 causal 16k: half of 4 d N^2 for each head."""
    (case,) = suites.select("decode", "name == 'b64 4k, 32/8, d128'")
    assert case.kv_bytes() / 4.4e12 * 1e6 == pytest.approx(244, rel=0.002)
    (case,) = suites.select("prefill", "head_dim == 128 and causal and seqlen_q == 16384")
    assert case.flops() == pytest.approx(2 * 16384**2 * 128 * 16, rel=1e-4)


def test_select_filters_by_fields():
    assert len(suites.select("prefill", "head_dim == 128 and causal and seqlen_q in (512, 1024)")) == 2
    assert suites.select("decode", "'window' in name")
    assert suites.select("prefill", "heads_k > 1000") == []


@pytest.mark.parametrize("expression", ["head_dim ==", "no_such_field > 1", "__import__('os')", "head_dim + 'a'"])
def test_select_reports_what_is_wrong_with_an_expression(expression):
    with pytest.raises(ValueError, match=r"--filter .*fields: suite, name, batch"):
        suites.select("prefill", expression)


def test_lengths_have_both_ends_and_do_not_change():
    assert sorted(skewed_lengths(16, 1, 8192, 0))[::15] == [1, 8192]
    assert sorted(ragged_lengths(32, 512, 8192, 0))[::31] == [512, 8192]
    assert ragged_lengths(32, 512, 8192, 0) == ragged_lengths(32, 512, 8192, 0)


def test_the_command_line_imports_nothing_that_may_be_missing():
    code = (
        "import sys, hopper_attention.bench.__main__, hopper_attention.bench.run, hopper_attention.bench.plots, "
        "hopper_attention.bench.host, hopper_attention.bench.traffic; "
        "print(sorted({'torch', 'triton', 'rich', 'matplotlib'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_table_of_best_decode_times_is_of_cases_of_the_suite():
    names = {case.name for case in suites.decode()}
    table = record.decode_best_table()
    assert set(table) <= names
    assert all(0 < row["best_us"] <= row["fa3_us"] for row in table.values())
    assert {case.name for case in suites.decode() if case.goal_best} <= set(table)
    few = [case for case in suites.decode() if case.goal_best == 1.0]
    assert len(few) == 21


def test_a_mixed_step_has_prompts_and_single_queries():
    step = next(case for case in suites.mixed() if case.queries)
    assert step.q_lengths == (1024,) * 2 + (1,) * 62 and step.k_lengths == (1024,) * 2 + (4096,) * 62
    assert step.visible_pairs() == 2 * 1024 * 1025 // 2 + 62 * 4096


def test_goals_follow_from_the_bytes_of_k_and_v():
    cases = {case.name: case for case in suites.decode()}
    for case in cases.values():
        plain = case.seqlen_q == 1 and case.window == (-1, -1)
        assert bool(case.goal_read) == (plain and case.kv_bytes() >= 1e9 and case.equal_lengths), case.name
        assert bool(case.goal_over_us) == (plain and 100e6 <= case.kv_bytes() < 1e9), case.name
    assert {case.page_size: case.goal_read for case in cases.values() if case.head_dim == 128 and case.goal_read} == {
        **dict.fromkeys((1, 4), 0.96),
        **dict.fromkeys((16, 64, 256, 0), 0.98),
    }
    assert cases["b64 4k, 32/8, d128"].goal_read == cases["b64 32k, 8/1, d128"].goal_read == 0.98
    assert cases["b64 8k, 32/8, d64"].goal_read == 0.94
    assert cases["b256 1k, 64/8, d64"].goal_over_us == 8.0 and cases["b64 8k, 8/1, d128"].goal_over_us == 5.0
    assert cases["b32 512-8k, 32/8, d128"].goal_over_us == 5.0


def test_what_must_be_as_fast_as_something_else():
    every = {case.name: [w.of for w in case.within] for case in suites.engine() + suites.decode()}
    assert every["GQA 32/8, d128, b1 8k, sinks"] == ["ours, no sinks"]
    assert every["GQA 32/8, d128, b1 8k, fp16"] == ["ours, bf16"]
    assert every["b64 4k, 32/8, d128, 8 queries"] == ["ours, one query", "ours"]
    assert all(("ours, dense" in [w.of for w in c.within]) == (c.equal_lengths) for c in suites.varlen())
    for case in suites.decode() + suites.mixed():
        assert any(w.name == "ours, batch_invariant" for w in case.within) == (case.batch >= 32), case.name
    assert all(case.goal_best == 0.95 for case in suites.prefill())


def test_tables_have_room_for_more_than_the_longest_sequence():
    """Calls are told of the room; slots behind a sequence's pages hold no page, and the check reads none of them."""
    pytest.importorskip("torch")
    from hopper_attention.bench import inputs

    cases = suites.tables()
    assert all(case.most_keys == suites.ROOM > max(case.k_lengths) for case in cases)
    small = dataclasses.replace(cases[0], seqlen_k=100, room=1024)
    (made, *_) = inputs.make(small, "cpu")
    assert made.page_table.shape == (1, 64)
    assert (made.page_table[0, 7:] == inputs.UNUSED_PAGE).all() and (made.page_table[0, :7] != inputs.UNUSED_PAGE).all()
    assert inputs.sequence_kv(small, made, 0)[0].shape == (100, 1, 128)
