"""Prompts beside sequences of few queries, each class in a kernel of its own that finds its tiles without a schedule."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gpu.batches import Batch, attend, judge_all, judged_results, make, require_same  # noqa: E402
from gpu.few_sequences import LAYOUTS, require_graph_serves, require_same_again  # noqa: E402
from gpu.fixed_splits import plan_of  # noqa: E402
from gpu.support import small_masks  # noqa: E402
from gpu.test_ranked_tiles import several  # noqa: E402
from gpu.test_shared_tiles import KERNELS  # noqa: E402

pytestmark = pytest.mark.gpu

SINGLES = tuple((1, keys) for keys in (1, 130, 900, 0, 2000, 127, 128, 129, 1500, 64, 640, 1100))
# (queries, keys) of the sequences of a step.
STEPS = {
    "a chunk": (*SINGLES[:5], (300, 1500), *SINGLES[5:]),
    "prompts at both ends, and one without keys": ((90, 90), *SINGLES, *SINGLES, (40, 0), (200, 200)),
    "queries around what a tile of few rows holds": tuple((n, 300 + 200 * n) for n in range(10)) * 2,
    "no prompt": SINGLES * 2,
    "nothing but chunks": ((17, 900), (20, 1200), (33, 700), (18, 18), (60, 60)) * 3,
    "as many sequences as have ranks": ((100, 600), *(((1, 300),) * 159)),
    "one more": ((100, 600), *(((1, 300),) * 160)),
}


def step(why: str, lengths, **given) -> Batch:
    """With an engine's bounds: one kernel does for all if none can have many keys."""
    layout = {"keys": "paged", "page_size": 16, "room_k": 4000, "slack": 200}
    return several(why, lengths, **{"num_splits": 0, **layout, **given})


def explained(batch: Batch) -> str:
    return plan_of(batch, max_seqlen_q=max(batch.q_lengths) + batch.slack).explain()


def has_classes(batch: Batch) -> bool:
    return "both find their tiles by themselves" in explained(batch)


@pytest.mark.parametrize("mask", small_masks())
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_masks_and_lengths(kernel, mask):
    dtype, head_dim = kernel
    options = {name: value for name, value in small_masks()[mask].items() if name != "softcap"}
    first = list(small_masks()).index(mask) + KERNELS.index(kernel)
    judge_all([
        step(f"{why}, {heads_k} heads of k", lengths, dtype=dtype, head_dim=head_dim, heads_q=4 * heads_k, heads_k=heads_k,
             **{"causal": False, **options, **LAYOUTS[(first + i) % len(LAYOUTS)]})
        for heads_k in (2, 8)
        for i, (why, lengths) in enumerate(STEPS.items())
    ])  # fmt: skip


@pytest.mark.parametrize("ratio", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_heads(kernel, ratio):
    """Fewer tiles of few queries than thread blocks, which clusters share, and more, which are drawn."""
    dtype, head_dim = kernel
    judge_all([
        step(f"{why}, {ratio} heads", STEPS[why], heads_q=heads_k * ratio, heads_k=heads_k, sinks=sinks, dtype=dtype,
             head_dim=head_dim, num_splits=splits, room_k=room)
        for heads_k, room in ((1, 4000), (2, 8000), (16, 0))
        for why in ("a chunk", "queries around what a tile of few rows holds")
        for sinks, splits in (("", 0), ("fp32", 3))
    ])  # fmt: skip


def test_all_ways_are_taken():
    """Of the cases here: either class first, and tiles of few queries in clusters, whole and drawn."""
    taken = [explained(step(why, lengths, heads_q=h, heads_k=k, head_dim=d, room_k=room))
             for why, lengths in STEPS.items() for h, k in ((8, 2), (8, 1), (32, 8), (64, 16))
             for d in (64, 128) for room in (4000, 9000)]  # fmt: skip
    taken = [text for text in taken if "both find their tiles by themselves" in text]
    for text in ("with few queries first", "behind the others", "few queries by a cluster", "drawn in its order",
                 "tiles of few queries are whole"):  # fmt: skip
        assert sum(text in one for one in taken) >= 2, text


def test_rows_that_do_not_count():
    """Rows of q that belong to no sequence, and keys that nobody sees."""
    case = step("rows of no sequence", STEPS["a chunk"])
    assert has_classes(case)
    judge_all([case.but(tail_q=60), case.but(extra_q=31, extra_k=5), case.but(slack=900, room_k=2900)])


@pytest.mark.parametrize("why, heads_k", [("a chunk", 2), ("no prompt", 8)], ids=["clusters", "drawn"])
def test_results_do_not_change_from_run_to_run(why, heads_k):
    case = step(why, STEPS[why], heads_q=4 * heads_k, heads_k=heads_k)
    assert has_classes(case)
    assert ("drawn in its order" in explained(case)) == (heads_k == 8)
    require_same_again(case)


@pytest.mark.parametrize("heads_k", [2, 8])
def test_a_graph_serves_other_lengths(heads_k):
    """Captured for a chunk beside single queries, replayed where that is not so."""
    case = step("captured", ((300, 1500), *(((1, 1000),) * 11)), heads_q=4 * heads_k, heads_k=heads_k)
    assert has_classes(case)
    require_graph_serves(case, [
        ((300, 1500), *(((1, 1000),) * 11)),
        (*(((1, 1),) * 11), (300, 300)),
        ((26, 1500),) * 11 + ((25, 25),),
        ((0, 0),) * 12,
        ((2, 1500), (3, 1500), (4, 1500), (5, 1500)) * 3,
    ])  # fmt: skip


def test_malformed_lengths_touch_nothing_else():
    """Starts of sequences that decrease: rows may be anything, memory outside of out and LSE stays, the next call is right."""
    case = step("starts that decrease", STEPS["a chunk"])
    made = make(case)
    expected = judged_results(made)
    good = made.lengths["cu_seqlens_q"].clone()
    made.lengths["cu_seqlens_q"].copy_(good.flip(0))
    attend(made)
    torch.cuda.synchronize()
    made.lengths["cu_seqlens_q"].copy_(good)
    require_same(case, "after the malformed call", attend(made), expected)
