"""The list of wrong calls, on the CPU reference and with launches stubbed out; on a GPU it is a section of
tools/reliability.
"""

from __future__ import annotations

import collections

import pytest

import wrong_calls
from wrong_calls import GPU, STUB, TORCH, StubWorld, TorchWorld, Wrong, every, problem_of

CALLS = every()


def by_why(wrong: Wrong) -> str:
    return f"{wrong.function}, {wrong.why}"


def test_there_are_enough_of_all_functions():
    counts = collections.Counter(wrong_calls.FUNCTIONS[wrong.function].__name__ for wrong in CALLS)
    assert len(CALLS) == len({by_why(wrong) for wrong in CALLS}) > 600
    assert set(counts) == {
        "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "flash_attn_combine", "merge_states",
        "get_scheduler_metadata", "check_metadata", "plan",
    } and min(counts.values()) >= 12  # fmt: skip


@pytest.fixture
def stub(recorder):
    return StubWorld(recorder)


@pytest.mark.parametrize("wrong", [w for w in CALLS if StubWorld(None).can(w)], ids=by_why)
def test_a_wrong_call_launches_nothing(stub, wrong):
    problem = problem_of(stub, wrong)
    assert not problem, problem


@pytest.fixture(scope="module")
def cpu():
    pytest.importorskip("torch")
    return TorchWorld("cpu")


@pytest.mark.parametrize("wrong", [w for w in CALLS if w.on not in (STUB, GPU)], ids=by_why)
def test_the_reference_refuses_it(cpu, wrong):
    problem = problem_of(cpu, wrong)
    assert not problem, problem


def test_what_is_not_refused_or_not_named_is_found(cpu):
    q = wrong_calls.RIGHT["flash_attn_func"]["q"]
    for said, wrong in {
        "raised nothing": Wrong("flash_attn_func", "right", ValueError, "q", {"softcap": 1.0}, TORCH),
        "does not name": Wrong("flash_attn_func", "other name", ValueError, "page_table", {"softcap": -1.0}, TORCH),
        "raised ValueError": Wrong("flash_attn_func", "other type", TypeError, "softcap", {"softcap": -1.0}, TORCH),
    }.items():
        assert said in problem_of(cpu, wrong)
    right = cpu.right("flash_attn_func")
    before = cpu.before("flash_attn_func")
    assert cpu.touched("flash_attn_func", before) == ""
    right["out"][0, 0, 0, 0] = 5
    assert cpu.touched("flash_attn_func", before) == "it wrote to out"
    assert cpu.right_call("flash_attn_func") == ""
    changed = cpu.rights["flash_attn_func"]["q"]
    kept = changed.clone()
    changed[0, 0, 0, 0] += 1
    assert cpu.touched("flash_attn_func", {}) == "it wrote to q"
    assert cpu.right_call("flash_attn_func") == "the next call gives another result"
    changed.copy_(kept)
    assert q.shape == tuple(changed.shape)
