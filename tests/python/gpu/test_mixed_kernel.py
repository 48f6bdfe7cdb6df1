"""Prompts beside sequences of few queries in one kernel, which computes tiles of at most 16 rows as kernels for few do."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import schedule_model  # noqa: E402
from gpu.batches import Batch, judge_all, judged_results, make, require_same, schedule  # noqa: E402
from gpu.few_sequences import LAYOUTS, require_graph_serves, require_same_again  # noqa: E402
from gpu.fixed_splits import plan_of  # noqa: E402
from gpu.support import small_masks  # noqa: E402
from gpu.test_ranked_tiles import several  # noqa: E402
from gpu.test_shared_tiles import KERNELS  # noqa: E402

pytestmark = pytest.mark.gpu

# Those whose O of many queries lies in slots of the ring, too, between tiles of few that have it elsewhere.
WIDE = [("bf16", 192), ("fp16", 192), ("bf16", 256), ("fp16", 256)]

# (queries, keys) of the sequences of a step.
STEPS = {
    "tiles of both classes in turn, whole": ((1, 700), (90, 90), (1, 0), (1, 129), (40, 0), (1, 128), (200, 900)),
    "long keys of single queries, cut": ((70, 300), (1, 9000), (1, 5000), (1, 40), (1, 2500)),
    "a long chunk, cut": ((150, 9000), (1, 300), (1, 1), (3, 640), (20, 20)),
    "both cut": ((150, 7000), (33, 5000), *(((1, 4000),) * 6)),
    "queries around what 16 rows hold": tuple((n, 100 + 450 * n) for n in range(1, 20)),
    "no prompt": ((1, 3000), (1, 200), (2, 6000), (1, 0)) * 3,
    "no single query": ((130, 2000), (65, 65), (300, 4000)),
    "short tiles": ((64, 64), *(((1, 150),) * 20)),
}
# Where the schedule cuts long tiles each by itself.
EVEN = {
    "tiles of a chunk are cut, those of single queries whole": ((150, 9000), *(((1, 300),) * 60)),
    "prompts whole, single queries behind them cut": ((70, 300), (90, 90), *(((1, 20_000),) * 3), *(((1, 500),) * 40)),
    "both classes cut, a part for each block": ((33, 4000), *(((1, 6000),) * 3), (2, 5000)),
    "parts in front, and more whole tiles than blocks": ((40, 12_000), *((1, 400 + 3 * n) for n in range(60)), (1, 0)),
}
# More sequences of few queries than the scheduler has near, and more tiles of them than SMs.
MANY = {
    "few prompts": ((60, 900), (300, 700), (1, 0), (0, 400), *((1 + n % 3, 40 + 9 * n) for n in range(90))),
    "as many prompts as are near, and more": (*((20 + n, 20 + 5 * n) for n in range(40)), *(((1, 300),) * 70)),
    "no prompt, or one without keys": ((30, 0), *((1, 64 + n) for n in range(70))),
    "long prompts, in parts": (*(((150, 6000),) * 3), *(((1, 130),) * 70), (4, 3000)),
    "a long tile of few queries, in parts": ((100, 100), (1, 40_000), *(((2, 200),) * 70)),
}
# Prompts have most of the SMs, and decode takes longer than one of their tiles.
ALTERNATE = ((1700, 1700), *(((1, 1800),) * 80), (0, 9), (2, 1000))


def step(why: str, **given) -> Batch:
    """With an engine's bounds: a page table that has room for more keys than clusters could have."""
    layout = {"keys": "paged", "page_size": 16, "slack": 500}
    batch = several(
        why,
        {**STEPS, **EVEN, **MANY, "both alternate": ALTERNATE}[why],
        **{"num_splits": 0, "heads_q": 8, "heads_k": 2, **layout, **given},
    )
    return batch.but(room_k=300_000) if batch.keys == "paged" else batch


def is_mixed(batch: Batch) -> bool:
    text = plan_of(batch, max_seqlen_q=max(batch.q_lengths) + batch.slack).explain()
    return "it computes tiles of up to 16 rows as those for few queries do" in text


def finds_few_by_number(batch: Batch) -> bool:
    text = plan_of(batch, max_seqlen_q=max(batch.q_lengths) + batch.slack).explain()
    return "one kernel instead of two, for many sequences" in text


def parts_of_the_longest(batch: Batch) -> int:
    """0 if tiles are not in even parts, 1 if the longest is whole."""
    facts = schedule(make(batch))[1 + 3 * (-(-batch.size // 4) * 4) :].tolist()
    return facts[2] >> schedule_model.PARTS_BIT if facts[0] >> schedule_model.EVEN_BIT else 0


@pytest.mark.parametrize("mask", small_masks())
@pytest.mark.parametrize("kernel", KERNELS + WIDE, ids=str)
def test_masks_and_lengths(kernel, mask):
    dtype, head_dim = kernel
    options = {name: value for name, value in small_masks()[mask].items() if name != "softcap"}
    first = list(small_masks()).index(mask) + (KERNELS + WIDE).index(kernel)
    judge_all([
        step(why, dtype=dtype, head_dim=head_dim, heads_q=10,
             **{"causal": False, **options, **LAYOUTS[(first + i) % len(LAYOUTS)]})
        for i, why in enumerate(STEPS)
    ])  # fmt: skip


@pytest.mark.parametrize("mask", ["full", "causal", "sinks", "left window", "chunk"])
@pytest.mark.parametrize("kernel", KERNELS + WIDE, ids=str)
def test_all_steps_have_the_kernel(kernel, mask):
    """Under masks that bound no tile. Under others they may be so short that they need no schedule."""
    dtype, head_dim = kernel
    cases = [step(why, dtype=dtype, head_dim=head_dim, **{"causal": False, **small_masks()[mask]}) for why in STEPS]
    bounded = mask in ("left window", "chunk")
    assert bounded or all(is_mixed(case) for case in cases)
    judge_all(cases)


@pytest.mark.parametrize("ratio", [1, 2, 3, 5, 8, 12, 16, 64])
@pytest.mark.parametrize("kernel", KERNELS + WIDE, ids=str)
def test_heads(kernel, ratio):
    """Rows of a slab that hold no query, tiles of 16 rows and of 17, sinks."""
    dtype, head_dim = kernel
    judge_all([
        step(why, heads_q=heads_k * ratio, heads_k=heads_k, sinks=sinks, dtype=dtype, head_dim=head_dim)
        for why in STEPS for heads_k, sinks in ((1, ""), (3, "fp32"))
    ])  # fmt: skip


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("page_size", [1, 8, 24, 128])
def test_pages_of_any_size_hold_the_same(page_size, head_dim):
    """The same bits, however keys lie; those of pages of one key are gathered."""
    for why in STEPS:
        case = step(why, page_size=page_size, head_dim=head_dim)
        assert is_mixed(case), why
        require_same(case, why, judged_results(make(case)), judged_results(make(case.but(page_size=16))))


@pytest.mark.parametrize("why", STEPS)
@pytest.mark.parametrize("head_dim", [128, 192, 256])
def test_results_do_not_change_from_run_to_run(head_dim, why):
    case = step(why, head_dim=head_dim)
    assert is_mixed(case)
    require_same_again(case)


@pytest.mark.parametrize("why", EVEN)
@pytest.mark.parametrize("kernel", KERNELS + WIDE, ids=str)
def test_long_tiles_are_cut_each_by_itself(kernel, why):
    """The same bits with metadata and without. Calls of fewer queries than metadata know are cut otherwise, and two kernels
    count units, whatever parts the same metadata have.
    """
    dtype, head_dim = kernel
    case = step(why, dtype=dtype, head_dim=head_dim, causal=True)
    assert is_mixed(case) and parts_of_the_longest(case) > 1
    judge_all([case.but(extra_q=31), case.but(extra_q=31, metadata=True), case.but(sinks="fp32", heads_q=10)])
    others = [case.but(metadata=True, **given) for given in ({"num_splits": 1}, {"num_splits": 3}, {"softcap": 20.0})]
    assert not any(is_mixed(other) for other in others)
    judge_all(others)
    require_same_again(case)


@pytest.mark.parametrize("why", MANY)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_sequences_of_few_queries_are_found_by_their_number(kernel, why):
    """Also where calls have fewer queries than metadata know, so that some of those sequences have none."""
    dtype, head_dim = kernel
    case = step(why, dtype=dtype, head_dim=head_dim)
    assert finds_few_by_number(case)
    judge_all([case.but(**given) for given in (
        {"metadata": True}, {"extra_q": 31, "metadata": True}, {"causal": False, "window": (300, 5)},
        {"sinks": "fp32", "heads_q": 10}, {"heads_q": 40, "heads_k": 2}, {"page_size": 1},
    )])  # fmt: skip
    require_same_again(case)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_both_classes_alternate(dtype):
    case = step("both alternate", dtype=dtype)
    assert finds_few_by_number(case) and parts_of_the_longest(case) == 0
    judge_all([case, case.but(metadata=True), case.but(heads_q=10, sinks="fp32"), case.but(extra_q=31, metadata=True)])
    require_same_again(case)


def test_rows_that_do_not_count():
    """Rows of q that belong to no sequence, and keys that nobody sees."""
    case = step("both cut")
    assert is_mixed(case)
    judge_all([case.but(tail_q=60), case.but(extra_q=31, extra_k=5), case.but(slack=900)])


@pytest.mark.parametrize("head_dim", [128, 256])
def test_a_graph_serves_other_lengths(head_dim):
    """Captured for a chunk beside single queries, replayed with whole tiles, cut ones, one class alone and none."""
    lengths = {"q_lengths": (300, *((1,) * 11)), "k_lengths": (1500, *((1000,) * 11))}
    case = step("short tiles", head_dim=head_dim).but(**lengths)
    assert is_mixed(case)
    require_graph_serves(case, [
        ((300, 1500), *(((1, 1000),) * 11)),
        (*(((1, 1),) * 11), (300, 300)),
        (*(((1, 1500),) * 2), (290, 1500), *(((1, 2),) * 9)),
        ((26, 1500),) * 11 + ((25, 25),),
        ((0, 0),) * 12,
        ((2, 1500), (3, 1500), (4, 1500), (5, 1500)) * 3,
    ])  # fmt: skip


def test_a_graph_of_many_sequences_serves_other_lengths():
    """Captured for one prompt beside single queries, replayed with classes that alternate, parts, one class and none."""
    case = step("both alternate").but(q_lengths=(1700, *((1,) * 80)), k_lengths=(1700, *((400,) * 80)))
    assert finds_few_by_number(case)
    require_graph_serves(case, [
        ((1700, 1700), *(((1, 1800),) * 80)),
        (*(((1, 1800),) * 80), (1690, 1700)),
        ((100, 1700), *(((1, 100),) * 80)),
        ((22, 1500),) * 81,
        ((21, 1800),) * 40 + ((1, 1800),) * 41,
        ((0, 0),) * 81,
        ((2, 1500),) * 81,
    ])  # fmt: skip
