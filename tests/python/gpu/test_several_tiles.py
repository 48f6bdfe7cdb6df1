"""Sequences with more query rows than the tile of 32 holds, in several such tiles: chunks and drafts on few keys.

Of a packed q each sequence has as many tiles as hold its queries, which thread blocks find by the sums of these; else
all have as many. Blocks of a cluster share a tile, several clusters leave their parts to the combine kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from gpu.batches import Batch, attend, judge_all, judged_results, make, require_same  # noqa: E402
from gpu.few_sequences import require_graph_serves, require_same_again  # noqa: E402
from gpu.fixed_splits import plan_of  # noqa: E402
from gpu.support import MAIN, small_masks  # noqa: E402
from gpu.test_clusters import shareable  # noqa: E402
from gpu.test_grid import name_of, on  # noqa: E402

pytestmark = pytest.mark.gpu

# (queries, keys) of the sequences of a batch, with four query heads for each of K and V.
LENGTHS = {
    "a draft": ((9, 900), (9, 1), (9, 64), (9, 9)),
    "a chunk": ((40, 300),),
    "chunks and single queries": ((1, 500), (33, 700), (1, 1), (17, 64), (0, 90), (12, 12), (1, 0)),
    "none but one": ((0, 0), (0, 40), (0, 7), (30, 100), (0, 0)),
    "more than a lane each": tuple((1 + i % 3 * 9, 20 + 3 * i) for i in range(35)),
}
LAYOUTS = (
    {"keys": "packed"},
    {"keys": "paged", "page_size": 16},
    {"keys": "paged", "page_size": 1},
    {"keys": "paged", "page_size": 64, "strides": "interleaved"},
    {"call": "cache", "keys": "paged", "page_size": 16, "leftpad": 21},
)


def several(why: str, lengths, **given) -> Batch:
    queries, keys = zip(*lengths, strict=True)
    fields = {"heads_q": 4, "heads_k": 1, "causal": True, "num_splits": 0, **given}
    return Batch(why, queries, keys, **fields)


def is_several(batch: Batch) -> bool:
    return "several tiles for each sequence" in "\n".join(plan_of(batch).reasons)


def mask_cases(kernel, mask: str) -> Iterator[Batch]:
    """Tiles of a sequence see other keys under each mask, the first of them perhaps none."""
    first = list(small_masks()).index(mask) + MAIN.index(kernel)
    for i, (why, lengths) in enumerate(LENGTHS.items()):
        layout = LAYOUTS[(first + i) % len(LAYOUTS)]
        options = {"causal": False, **small_masks()[mask], **layout}
        yield several(f"{why}, {mask}", lengths, num_splits=i % 2, seed=i, **on(kernel, **options))


@pytest.mark.parametrize("mask", small_masks())
@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_masks_and_lengths(kernel, mask):
    judge_all(mask_cases(kernel, mask))


@pytest.mark.parametrize("ratio", [1, 2, 3, 5, 6, 7, 8, 12, 16, 24, 32])
def test_heads(ratio):
    """Of 32 rows those of heads that do not fill them are left over."""
    lengths = tuple((max(1, n // ratio), n // ratio + 100) for n in (90, 40, 3, 65))
    judge_all([
        several(f"{ratio} heads", lengths, heads_q=heads_k * ratio, heads_k=heads_k, sinks=sinks, softcap=softcap,
                **LAYOUTS[1])
        for heads_k in (1, 3)
        for sinks, softcap in (("", 0.0), ("fp32", 0.0), ("bf16", 20.0))
    ])  # fmt: skip


def test_the_plan_takes_them():
    """What else a plan could take is no test of these."""
    made = [several(why, lengths, keys="paged") for why, lengths in LENGTHS.items()]
    assert all(is_several(batch) for batch in made), [batch.why for batch in made if not is_several(batch)]


@pytest.mark.parametrize("queries", [9, 16, 40])
def test_a_dense_q(queries):
    """All sequences have as many tiles, also where lengths of K and V are on the device, or seqused_q leaves some out."""
    lengths = ((queries, 700), (queries, queries), (queries, 0), (queries, 90))
    judge_all([
        several("a dense q", lengths, dense_q=True, call=call, causal=causal, **layout)
        for causal in (True, False)
        for call, layout in (("cache", LAYOUTS[1]), ("cache", {"keys": "dense", "leftpad": 5, "batch_idx": True}))
    ])  # fmt: skip


def test_rows_that_do_not_count():
    """Rows of q that belong to no sequence, seqused_q and seqused_k, bounds that are larger than the truth or unknown."""
    for case in (several(why, lengths, keys="paged") for why, lengths in LENGTHS.items()):
        judge_all([case.but(tail_q=60), case.but(extra_q=7, extra_k=5), case.but(slack=300), case.but(slack=-1)])


@pytest.mark.parametrize(("size", "clusters"), [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (2, 2), (4, 3), (2, 9)])
@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_clusters(kernel, size, clusters):
    """Each share of a tile, also of one without keys, and parts of tiles that do not exist."""
    size = shareable(size, *kernel[1])
    forced = (("cluster", size), *((("num_splits", size * clusters),) if clusters > 1 else ()))
    lengths = ((9, 2500), (16, 130), (12, 3), (0, 64), (1, 700))
    judge_all([
        several(f"{clusters} clusters of {size}", lengths, forced=forced, seed=i, **on(kernel, causal=i % 2 == 0, **layout))
        for i, layout in enumerate(LAYOUTS)
    ])  # fmt: skip


def test_results_do_not_change_from_run_to_run_nor_with_the_bound_on_queries():
    case = several("a batch", LENGTHS["chunks and single queries"], keys="paged")
    drafts = several("drafts in a window", LENGTHS["a draft"], keys="paged", window=(300, 0))
    assert is_several(case) and is_several(drafts)
    require_same_again(case)
    for batch, bounds in ((case, (34, 200, 5000)), (drafts, (11, 16))):
        made = make(batch)
        expected = judged_results(made)
        for bound in bounds:
            require_same(batch, f"max_seqlen_q {bound}", attend(made, max_seqlen_q=bound), expected)
    whole = case.but(num_splits=1)
    assert is_several(whole)
    made = make(whole)
    expected = judged_results(made)
    for margin in (1, 60, 130, 131):
        require_same(whole, f"sm_margin {margin}", attend(made, sm_margin=margin), expected)


def test_a_graph_serves_other_lengths():
    case = several("captured", ((40, 900), (8, 900), (1, 900)), keys="paged")
    assert is_several(case)
    require_graph_serves(case, [
        ((1, 900), (1, 1), (40, 40)),
        ((0, 5), (49, 600), (0, 0)),
        ((16, 16), (16, 900), (17, 0)),
    ])  # fmt: skip
