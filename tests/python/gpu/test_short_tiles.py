"""Sequences on few keys: tiles follow from their index, whatever lengths are, and no schedule is read. Drafts and prompts
of as many queries have one tile each, or as many as all of its queries need; others up to 128 keys, and as many tiles
as the bound on queries says, behind which a sequence may have more.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gpu.batches import Batch, attend, judge_all, judged_results, main_dims, make, require_same  # noqa: E402
from gpu.few_sequences import require_graph_serves, require_same_again  # noqa: E402
from gpu.fixed_splits import plan_of  # noqa: E402
from gpu.support import MAIN, small_masks  # noqa: E402
from gpu.test_grid import name_of, on  # noqa: E402

pytestmark = pytest.mark.gpu

KEYS = {  # of each sequence; all have as many queries
    "none, one, less than queries, as many as may be": (
        0,
        1,
        5,
        64,
        130,
        1024,
        7,
        300,
        999,
        12,
        0,
        700,
        65,
        128,
        3,
        16,
        17,
    ),
    "many": tuple(7 * i % 400 for i in range(70)),
    "alike": (300,) * 20,
}
PROMPTS = {  # queries, and keys of each sequence
    "without keys before them": (200, (200,) * 12),
    "with some, or fewer keys than queries": (700, (700, 701, 900, 640, 0, 3, 933)),
    "that fill no tile": (193, (193, 200, 257, 256) * 9),
}
RAGGED = {  # queries and keys of each sequence
    "prompts": tuple((37 * i % 128 + 1, 37 * i % 128 + 1) for i in range(100)),
    "of a few tokens": tuple((9 + i % 17, 9 + i % 17) for i in range(100)),
    "chunks, or more queries than keys, none and one": (
        *((0, 128), (128, 0), (1, 128), (128, 1), (16, 17), (17, 16), (0, 0), (128, 128)),
        *((63, 64), (64, 65), (65, 64), (100, 30), (30, 100)),
    ),
    "one longer than the others": ((128, 128), *((40, 90),) * 99),
}
LAYOUTS = (
    {"keys": "paged", "page_size": 16},
    {"keys": "paged", "page_size": 1},
    {"keys": "paged", "page_size": 64, "strides": "interleaved"},
    {"keys": "paged", "page_size": 16, "metadata": True},
    {"call": "cache", "keys": "paged", "page_size": 16, "leftpad": 21},
    {"call": "cache", "keys": "paged", "page_size": 24, "dense_q": True},
    {"call": "cache", "keys": "dense", "dense_q": True, "leftpad": 5, "batch_idx": True},
)


RAGGED_LAYOUTS = ({"keys": "packed"}, *LAYOUTS[:4])


def short(why: str, queries: int = 16, **given) -> Batch:
    """With eight query heads for each of K and V."""
    keys = KEYS[why]
    fields = {"heads_q": 64, "heads_k": 8, "causal": True, "num_splits": 0, "tail_q": 0, **given}
    return main_dims(Batch(why, (queries,) * len(keys), keys, **fields))


def ragged(why: str, **given) -> Batch:
    """With four query heads for each of K and V, which share a tile."""
    queries, keys = zip(*RAGGED[why], strict=True)
    return main_dims(Batch(why, queries, keys, **{"heads_q": 8, "heads_k": 2, "causal": True, **given}))


def in_turn(make_batch, names, layouts, kernel, mask) -> list[Batch]:
    """A batch of each name, with one layout after the other, beginning elsewhere for each kernel and mask."""
    first = list(small_masks()).index(mask) + MAIN.index(kernel)
    options = {"causal": False, **small_masks()[mask]}
    return [
        make_batch(why, **on(kernel, num_splits=i % 2, seed=i, **{**options, **layouts[(first + i) % len(layouts)]}))
        for i, why in enumerate(names)
    ]


def is_by_index(batch: Batch, **changes) -> bool:
    return "hardly counts" in "\n".join(plan_of(batch, **changes).reasons)


def test_the_plan_takes_them():
    """What else a plan could take is no test of these."""
    made = [short(why, **layout) for why in KEYS for layout in LAYOUTS[:3]]
    assert all(is_by_index(batch) for batch in made), [batch.why for batch in made if not is_by_index(batch)]
    assert not is_by_index(short("alike", tail_q=1, **LAYOUTS[0]))
    found = [ragged(why, **layout) for why in RAGGED for layout in RAGGED_LAYOUTS]
    assert all(is_by_index(batch) for batch in found), [batch.why for batch in found if not is_by_index(batch)]


@pytest.mark.parametrize("mask", small_masks())
@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_masks_and_layouts(kernel, mask):
    """A tile sees nothing, all keys or some under each mask; caches are of any layout."""
    judge_all(in_turn(short, KEYS, LAYOUTS, kernel, mask))


@pytest.mark.parametrize("why", PROMPTS)
@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_prompts(kernel, why):
    """Of several tiles each, in a window, with softcap and sinks, and with a schedule that is given, but not read. What caches
    have room for is mostly more than 4/3 of the queries, so that these calls have a schedule.
    """
    queries, keys = PROMPTS[why]
    fields = {"heads_q": 8, "heads_k": 2, "causal": True, "num_splits": 1, "tail_q": 0}
    for layout in LAYOUTS:
        case = Batch(why, (queries,) * len(keys), keys, **on(kernel, **fields, **layout))
        assert is_by_index(case) or case.call == "cache"
        judge_all([case, case.but(softcap=20.0), case.but(sinks="fp32", num_splits=0)])
        judge_all(
            [case.but(window=(90, 0)), case.but(tail_q=40), *([case.but(extra_q=5)] if case.call == "varlen" else [])]
        )


@pytest.mark.parametrize("ratio", [1, 3, 5, 8, 12, 16, 64])
def test_heads(ratio):
    """As many queries as about 100 rows are; of a tile some heads' rows are left over."""
    judge_all([
        short(why, max(1, 100 // ratio), heads_q=heads_k * ratio, heads_k=heads_k, sinks=sinks, **LAYOUTS[i % len(LAYOUTS)])
        for why in KEYS
        for i, (heads_k, sinks) in enumerate(((3, "fp32"), (8, "")))
    ])  # fmt: skip


@pytest.mark.parametrize("why", KEYS)
@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_the_same_bits_as_by_a_schedule(kernel, why):
    """Tiles must not depend on the bound on queries, which alone says that a schedule is not needed."""
    case = short(why, **on(kernel, num_splits=1, **LAYOUTS[0]))
    assert is_by_index(case) and not is_by_index(case.but(tail_q=1))
    made = make(case)
    expected = judged_results(made)
    for bound in (17, 40, 1000):
        require_same(case, f"max_seqlen_q {bound}", attend(made, max_seqlen_q=bound), expected)
    require_same_again(case)


def test_rows_that_do_not_count():
    for case in (short(why, **LAYOUTS[0]) for why in KEYS):
        judge_all([case.but(tail_q=60), case.but(extra_q=7, extra_k=5), case.but(slack=300), case.but(slack=-1)])


def test_a_graph_serves_other_lengths():
    """Captured for sequences that all have 16 queries, replayed with fewer of them and other keys."""
    case = short("alike", **LAYOUTS[0]).but(k_lengths=(1000,) * 20)
    assert is_by_index(case)
    require_graph_serves(case, [
        tuple((16, 50 * i) for i in range(20)),
        tuple((i % 17, 50 * i) for i in range(20)),
        ((0, 0),) * 19 + ((16, 1000),),
    ])  # fmt: skip


@pytest.mark.parametrize("mask", small_masks())
@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_ragged_masks_and_layouts(kernel, mask):
    """Of the tiles that the bound allows some are empty, full or see nothing."""
    judge_all(in_turn(ragged, RAGGED, RAGGED_LAYOUTS, kernel, mask))


@pytest.mark.parametrize("ratio", [1, 3, 8, 16, 64])
def test_ragged_heads(ratio):
    judge_all(
        ragged(why, heads_q=3 * ratio, heads_k=3, sinks="fp32", **layout) for why in RAGGED for layout in RAGGED_LAYOUTS
    )


@pytest.mark.parametrize("why", RAGGED)
@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_bounds_on_queries_that_do_not_hold(kernel, why):
    """The block that has the last tile which the bound allows takes those behind it, with the same bits."""
    for layout in RAGGED_LAYOUTS[:2]:
        case = ragged(why, **on(kernel, **layout))
        assert all(is_by_index(case, max_seqlen_q=bound) for bound in (17, 40, 128))
        made = make(case)
        expected = judged_results(made)
        for bound in (17, 40, 128, 500):  # the last one with a schedule in most kernels
            require_same(case, f"max_seqlen_q {bound}", attend(made, max_seqlen_q=bound), expected)


def test_a_graph_serves_more_queries_than_its_bound():
    """Captured for sequences of 20 queries, replayed with up to 381 in one of them."""
    case = main_dims(Batch("20 x 20", (20,) * 20, (128,) * 20, 8, 2, causal=True, tail_q=0, **LAYOUTS[0]))
    assert is_by_index(case)
    require_graph_serves(case, [
        tuple((20, 6 * i) for i in range(20)),
        (*((1, 100),) * 19, (381, 128)),
        ((400, 128), *((0, 90),) * 19),
    ])  # fmt: skip
