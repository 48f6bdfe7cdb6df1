"""The table of features: complete, what `is_supported` says, and right calls on the CPU reference for every pair."""

from __future__ import annotations

import pytest

import hopper_attention
from hopper_attention import features
from hopper_attention.features import FEATURES, NOT_TOGETHER, all_pairs, covering_rows, pairs_of, why_not

ROWS = covering_rows()


def test_the_calls_have_every_pair_that_works_and_no_other():
    for seed in range(4):
        seen = set().union(*(pairs_of(row) for row in covering_rows(seed)))
        assert seen == set(all_pairs()) - set(NOT_TOGETHER)
    assert len(ROWS) < 50 and all(list(row) == list(FEATURES) for row in ROWS)
    assert covering_rows(1) == covering_rows(1) != covering_rows(2)


def test_the_pairs_that_do_not_work_are_pairs_of_the_table():
    assert set(NOT_TOGETHER) <= set(all_pairs())
    assert len(set(all_pairs())) == len(all_pairs()) > 900


def supported(**changes):
    return hopper_attention.is_supported(**{"dtype": "bf16", "head_dim": 128, "device": "H100", **changes})


CONTRADICTIONS = [  # of the entries of NOT_TOGETHER in turn
    {"packed_k": True},
    {"packed_k": True, "packed_q": True, "append": True},
    {"packed_k": True, "packed_q": True, "append": True, "rotary": True},
]


def test_is_supported_knows_every_feature_that_something_contradicts(monkeypatch):
    mapped = {}
    monkeypatch.setattr(features, "why_not", lambda chosen: mapped.update(chosen) or "enough")
    assert supported() == (False, "enough") and set(mapped) <= set(FEATURES)
    assert {name for pair in NOT_TOGETHER for name, _ in pair} <= set(mapped)
    assert all(value in FEATURES[name] for name, value in mapped.items())


MEANS = [
    ({"causal": True}, {"mask": "causal"}),
    ({"window_size": (3, 2)}, {"mask": "window"}),
    ({"window_size": (3, 2), "causal": True}, {"mask": "causal window"}),
    ({"attention_chunk": 8, "causal": True, "window_size": (3, 2)}, {"mask": "chunk"}),
    ({"softcap": 2.0}, {"softcap": "on"}),
    ({"sinks": True}, {"sinks": "fp32"}),
    ({"packed_q": True}, {"queries": "packed"}),
    ({"packed_q": True, "packed_k": True}, {"queries": "packed", "keys": "packed"}),
    ({"page_size": 1}, {"keys": "pages of 1"}),
    ({"page_size": 24}, {"keys": "pages of 16 or 24"}),
    ({"page_size": 128, "packed_k": True}, {"keys": "pages of 128"}),
    ({"append": True}, {"append": "new keys"}),
    ({"append": True, "rotary": True}, {"append": "rotated"}),
    ({"cp_world_size": 2}, {"ranks": "3"}),
    ({"batch_invariant": True}, {"batch_invariant": "on"}),
    ({"scheduler_metadata": True}, {"metadata": "given"}),
]


@pytest.mark.parametrize(("given", "means"), MEANS, ids=lambda x: str(x))
def test_the_values_that_arguments_mean(monkeypatch, given, means):
    """What they do not say has the value that stands first in the table."""
    found = {}
    monkeypatch.setattr(features, "why_not", lambda chosen: found.update(chosen) or "enough")
    supported(**given)
    assert found == {name: means.get(name, next(iter(FEATURES[name]))) for name in found}


@pytest.mark.parametrize("given, pair", list(zip(CONTRADICTIONS, NOT_TOGETHER, strict=True)), ids=str)
def test_is_supported_answers_from_the_table(given, pair, monkeypatch):
    answer, reason = supported(**given)
    assert not answer and reason == NOT_TOGETHER[pair]
    monkeypatch.setattr(features, "NOT_TOGETHER", {})
    assert supported(**given)[1] not in NOT_TOGETHER.values()


@pytest.mark.parametrize(
    ("word", "given"),
    [("cp_world_size", {"cp_world_size": 0}), ("append", {"append": 3.5}), ("heads", {"heads_q": 3, "heads_kv": 2}),
     ("num_splits", {"num_splits": 300}), ("attention_chunk", {"attention_chunk": -1})],
)  # fmt: skip
def test_wrong_features_are_a_reason_not_an_exception(word, given):
    answer, reason = supported(**given)
    assert not answer and word in reason


def test_a_full_call_is_supported_where_it_is_built():
    given = {"page_size": 16, "causal": True, "window_size": (100, 0), "softcap": 10.0, "sinks": True, "packed_q": True,
             "append": True, "rotary": True, "heads_q": 8, "heads_kv": 2, "cp_world_size": 2,
             "batch_invariant": True}  # fmt: skip
    built = any((k.dtype, k.tile.head_dim) == ("bfloat16", 128) for k in hopper_attention.built_kernels())
    assert supported(**given)[0] == built
    assert why_not({"softcap": "on"}) == ""


@pytest.mark.parametrize("number", range(len(ROWS)), ids=lambda n: "; ".join(ROWS[n].values()))
def test_every_pair_is_a_right_call(number, monkeypatch):
    pytest.importorskip("torch")
    from gpu import batches, support, test_pairs

    monkeypatch.setattr(support, "DEVICE", "cpu")
    monkeypatch.setattr(support, "WORST", support.Worst())
    problem = test_pairs.problem_of(number, ROWS[number], number, batches.Pool())
    assert not problem, problem
    assert support.WORST.judged == 1
