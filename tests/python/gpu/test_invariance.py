"""The same bits whoever else is in the batch (batch_invariant), and the same bits every time (always)."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from gpu import batches, support  # noqa: E402
from gpu.batches import (  # noqa: E402
    Batch,
    alone,
    attend,
    fail,
    judged_results,
    main_dims,
    make,
    of_sequence,
    permuted,
    require_same,
)
from gpu.support import bits  # noqa: E402

pytestmark = pytest.mark.gpu

RERUNS = 60
MIXED = {"q_lengths": (1, 200, 1, 0, 5, 33, 1, 64), "k_lengths": (900, 200, 0, 70, 2000, 300, 6000, 64)}
DECODE = {"q_lengths": (1,) * 9, "k_lengths": (1, 70, 128, 129, 500, 0, 9000, 3000, 64)}
SPECULATE = {"q_lengths": (4,) * 5, "k_lengths": (4, 700, 64, 2300, 5000)}
FEW = {"q_lengths": (1, 4, 5, 8, 16, 0), "k_lengths": (2500, 5000, 70, 9000, 4100, 30)}  # up to 64 rows; 16 are few
PROMPTS = {"q_lengths": (300, 1000, 70, 1), "k_lengths": (300, 1000, 2000, 1)}

CASES = [
    Batch("mixed, pages of 16", **MIXED, keys="paged", causal=True),
    Batch("mixed, packed", **MIXED, causal=True),
    Batch("mixed in a window, sinks", **MIXED, keys="paged", window=(300, 0), sinks="fp32"),
    Batch("mixed, 70 queries of each that do not count", **MIXED, keys="paged", extra_q=70, causal=True),
    Batch("mixed, pages of 1", **MIXED, keys="paged", page_size=1, causal=True),
    Batch("decode, pages of 16", **DECODE, keys="paged", call="cache", dense_q=True, causal=True),
    Batch("decode, dense cache", **DECODE, keys="dense", call="cache", dense_q=True, batch_idx=True),
    Batch("decode with left padding", **DECODE, keys="dense", call="cache", dense_q=True, leftpad=40),
    Batch("4 queries, pages of 64", **SPECULATE, keys="paged", page_size=64, call="cache", dense_q=True, causal=True),
    Batch("up to 64 rows", **FEW, keys="paged", causal=True),
    Batch("up to 64 rows in a window, sinks", **FEW, window=(3000, 0), sinks="fp32"),
    Batch("prompts", **PROMPTS, keys="paged", page_size=128, causal=True),
    Batch("d 64, softcap", **MIXED, keys="paged", head_dim=64, softcap=20.0, causal=True),
    Batch("fp16, d 256", **MIXED, keys="paged", head_dim=256, dtype="fp16", causal=True),
    Batch("(192, 128), one K/V head", **MIXED, keys="paged", head_dim=192, head_dim_v=128, heads_k=1, causal=True),
]


def invariant(case: Batch, **changes) -> Batch:
    return main_dims(case.but(heads_q=8, num_splits=0, batch_invariant=True, **changes))


@pytest.mark.parametrize("case", CASES, ids=lambda b: b.why)
def test_alone_as_in_the_batch(case):
    case = invariant(case)
    made = make(case)
    together = judged_results(made)
    for b in range(case.size):
        found = of_sequence(made, together, b)
        single = alone(made, b)
        require_same(case, f"sequence {b} alone", of_sequence(single, attend(single), 0), found)


@pytest.mark.parametrize("case", [c for c in CASES if c.keys != "packed"], ids=lambda b: b.why)
def test_another_order(case):
    case = invariant(case)
    made = make(case)
    expected = judged_results(made)
    for seed in range(2):
        order = list(range(case.size))
        random.Random(seed).shuffle(order)
        other = permuted(made, order)
        results = attend(other)
        for place, b in enumerate(order):
            found = of_sequence(other, results, place)
            require_same(case, f"sequence {b} at place {place}", found, of_sequence(made, expected, b))


@pytest.mark.parametrize("case", CASES, ids=lambda b: b.why)
def test_nothing_that_steers_changes_a_bit(case):
    """num_splits, max_seqlen_*, metadata made for any bounds or not at all."""
    case = invariant(case)
    made = make(case)
    expected = judged_results(made)
    for splits in (1, 2, 7, 128):
        require_same(case, f"num_splits {splits}", attend(made, num_splits=splits), expected)
    for bound in ("max_seqlen_q", "max_seqlen_k"):
        if made.lengths.get(bound) is None:
            continue
        for value in (made.lengths[bound] + 1, 4096, 131072):
            if value >= made.lengths[bound]:
                require_same(case, f"{bound} {value}", attend(made, **{bound: value}), expected)
    if batches.has_schedules():
        for bounds in ((1, 1), (4096, 131072)):
            metadata = batches.schedule(made, max_seqlen_q=bounds[0], max_seqlen_k=bounds[1])
            require_same(case, f"metadata for {bounds}", attend(made, scheduler_metadata=metadata), expected)


@pytest.mark.parametrize("case", [c for c in CASES if c.keys == "paged" and not c.dense_q], ids=lambda b: b.why)
def test_padding_of_the_batch(case):
    """Sequences of length 0 at the end, as in a graph captured for a larger batch."""
    case = invariant(case)
    made = make(case)
    expected = judged_results(made)
    for more in (1, 23, 500):
        lengths = dict(made.lengths)
        last = lengths["cu_seqlens_q"][-1:]
        lengths["cu_seqlens_q"] = torch.cat([lengths["cu_seqlens_q"], last.expand(more)])
        for name in {"seqused_q", "seqused_k"} & set(lengths):
            lengths[name] = torch.nn.functional.pad(lengths[name], (0, more))
        lengths["page_table"] = torch.nn.functional.pad(lengths["page_table"], (0, 0, 0, more), value=2147480000)
        require_same(case, f"{more} empty sequences", attend(made, **lengths), expected)


def test_neighbours_of_any_size():
    """One sequence among 0, 1, 40 and 1,000 others."""
    for queries in (1, 4, 130):
        expected, values = None, {}
        for others in (0, 1, 40, 1000):
            r = random.Random(others)
            case = main_dims(Batch(f"{queries} queries among {others} others", (queries, *(r.choice((0, 1, 1, 5)) for _ in range(others))),
                                   (3000, *(r.randint(0, 300) for _ in range(others))), keys="paged", heads_q=8,
                                   causal=True, num_splits=0, batch_invariant=True))  # fmt: skip
            made = make(case)
            if expected is not None:  # the same first sequence: its values are put where the new batch has it
                first = made.slots[:3000]
                for name in ("k", "v"):
                    batches.put_rows(getattr(made, name), first, values[name])
                    getattr(made, f"truth_{name}")[:3000] = values[name]
                made.q[:queries] = values["q"]
            values = {"k": made.truth_k[:3000], "v": made.truth_v[:3000], "q": made.q[:queries]}
            found = of_sequence(made, judged_results(made), 0)
            if expected is not None:
                require_same(case, f"among {others} others", found, expected)
            expected = found


RERUN = [
    Batch("mixed", **MIXED, keys="paged", causal=True, num_splits=0),
    Batch("decode with splits", **DECODE, keys="paged", call="cache", dense_q=True, causal=True, num_splits=0),
    Batch("decode, pages of 1", **DECODE, keys="paged", page_size=1, num_splits=7),
    Batch("prompts", **PROMPTS, causal=True),
    Batch("(192, 128) splits", **MIXED, head_dim=192, head_dim_v=128, keys="paged", num_splits=3),
]


@pytest.mark.parametrize("metadata", [False, True], ids=["", "metadata"])
@pytest.mark.parametrize("case", RERUN, ids=lambda b: b.why)
def test_reruns_beside_a_busy_stream(case, metadata):
    """With the workspace full of the last run's data, of 0xFF, or made by the call."""
    case = main_dims(case.but(heads_q=8))
    made = make(case)
    given = {"scheduler_metadata": batches.schedule(made)} if metadata and batches.has_schedules() else {}
    expected = judged_results(made, **given)
    wanted = [bits(x).clone() for x in expected]
    different = torch.zeros((), dtype=torch.int64, device=support.DEVICE)
    on_gpu = support.DEVICE == "cuda"
    side = torch.cuda.Stream() if on_gpu else None
    hog = torch.empty(1 << 26, dtype=torch.uint8, device=support.DEVICE) if on_gpu else None
    workspace = torch.full((96 << 20,), 0xFF, dtype=torch.uint8, device=support.DEVICE)
    for turn in range(RERUNS if on_gpu else 3):
        if on_gpu:
            with torch.cuda.stream(side):
                hog[: 1 << 25].copy_(hog[1 << 25 :])
        if turn % 3 == 1:
            workspace.fill_(0xFF)
        found = attend(made, workspace=workspace if turn % 3 else None, **given)
        different += sum((bits(x) != w).sum() for x, w in zip(found, wanted, strict=True))
    if int(different):
        fail(case, f"{int(different)} elements differed in {RERUNS} reruns")
