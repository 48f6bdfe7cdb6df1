"""The small kernels: rows, their arithmetic and their checks, on the reference."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
from hopper_attention.bench import kernels, timing  # noqa: E402
from hopper_attention.bench.suites import decode_case  # noqa: E402


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(kernels, "TRAFFIC", 1e6)
    monkeypatch.setattr(kernels, "COLD_BYTES", 2e6)
    monkeypatch.setattr(kernels, "HEADS", 4)
    from hopper_attention.bench import inputs

    monkeypatch.setattr(inputs, "COLD_BYTES", 1e5)


def made_up_times(calls, seconds, fill=False):
    found = timing.Measured()
    for index, (name, one_each) in enumerate(calls.items()):
        for call in one_each:
            call()
        found.samples[name] = [10.0 * (index + 1)] * 3
    return found


@pytest.mark.parametrize("group", [kernels.merge, kernels.combine], ids=lambda g: g.__name__)
def test_a_kernel_beside_a_copy(group):
    (row,) = group([], 0.1, "cpu", made_up_times)
    assert row["us"] == 10.0 and row["of copy"] == 2.0 and row["goal of copy"] == 0.85
    assert row["GB/s"] == pytest.approx(1e6 / 10 / 1e3, rel=0.02)


def test_append_checks_its_result_and_tells_what_it_adds():
    case = decode_case(3, 40, 4, 2, 64)
    plain, without_lse, full, added = kernels.append([], 0.1, "cpu", made_up_times, case)
    assert (plain["us"], without_lse["us"], full["us"], added["us"]) == (10.0, 20.0, 30.0, 20.0)
    assert added["goal us"] == 4.0 and "launches" in full["remark"]
    assert plain["GB/s"] == pytest.approx(case.kv_bytes() / 10 / 1e3)


def wrong(function, index):
    def call(*given, **options):
        results = function(*given, **options)
        (results if index is None else results[index]).reshape(-1)[3] += 0.7
        return results

    return call


@pytest.mark.parametrize(
    "name, index, group",
    [
        ("merge_states", 0, kernels.merge),
        ("merge_states", 1, kernels.merge),
        ("flash_attn_combine", 0, kernels.combine),
        ("flash_attn_with_kvcache", None, kernels.append),
    ],
)
def test_a_wrong_answer_is_found(monkeypatch, name, index, group):
    monkeypatch.setattr(hopper_attention, name, wrong(getattr(hopper_attention, name), index))
    given = ([], 0.1, "cpu", made_up_times)
    with pytest.raises(AssertionError, match="wrong|relative error"):
        group(*given, decode_case(3, 40, 4, 2, 64)) if group is kernels.append else group(*given)


def test_a_kernel_that_is_not_there_leaves_its_reason(monkeypatch):
    def missing(*_, **__):
        raise NotImplementedError("no kernel for this")

    for name in ("merge_states", "get_scheduler_metadata", "flash_attn_combine"):
        monkeypatch.setattr(hopper_attention, name, missing)
    said = []
    rows = kernels.measure("mixed", [], True, said.append, "cpu", made_up_times)
    assert [row["case"] for row in rows] == ["metadata", "merge", "combine"]
    assert all(row["us"] == "-" and row["remark"] == "no kernel for this" for row in rows) and len(said) == 3


def test_metadata_rows(monkeypatch):
    sizes = []

    def schedule(batch, *given, out, **options):
        sizes.append((batch, len(out)))
        assert given[-1].shape == (batch,) and options["cu_seqlens_q"].shape == (batch + 1,)

    monkeypatch.setattr(hopper_attention, "get_scheduler_metadata", schedule)
    rows = kernels.metadata([], 0.1, "cpu", made_up_times)
    assert [row["goal us"] for row in rows] == [4.0, 8.0]
    assert set(sizes) == {(256, 1 + 4 * 256), (4096, 1 + 4 * 4096)}


def test_a_failure_is_told_and_changes_the_exit_status(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("a fault\nand its story")

    monkeypatch.setattr(hopper_attention, "merge_states", wrong(hopper_attention.merge_states, 0))
    monkeypatch.setattr(hopper_attention, "get_scheduler_metadata", broken)
    rows = kernels.measure("mixed", [], True, lambda text: None, "cpu", made_up_times)
    assert rows[0]["remark"] == "failed: a fault" and rows[1]["remark"].startswith("failed: merge_states: relative")
    assert rows[2]["us"] == 10.0
    assert kernels.any_failed(rows) and not kernels.any_failed(rows[2:])
