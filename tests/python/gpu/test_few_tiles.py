"""Prompts that alone leave most of the card idle: tiles of fewer rows, and tiles that are all in as many parts."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gpu import batches  # noqa: E402
from gpu.batches import (  # noqa: E402
    Batch,
    attend,
    judge_all,
    judged_results,
    main_dims,
    make,
    require_same,
)
from gpu.few_sequences import LAYOUTS, require_graph_serves  # noqa: E402
from gpu.fixed_splits import plan_of  # noqa: E402
from gpu.support import MAIN, small_masks  # noqa: E402
from gpu.test_grid import name_of  # noqa: E402
from gpu.test_several_tiles import is_several  # noqa: E402
from gpu.test_shared_tiles import is_shared  # noqa: E402

pytestmark = pytest.mark.gpu


def chunk(why: str, queries: int, length: int, **given) -> Batch:
    """One sequence, whose tiles wait for their keys."""
    return main_dims(Batch(why, (queries,), (length,), **{"heads_q": 8, "heads_k": 2, "num_splits": 0, **given}))


def in_parts(batch: Batch) -> bool:
    return "parts of each tile" in plan_of(batch).explain()


@pytest.mark.parametrize("mask", small_masks())
@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_equal_parts(kernel, mask):
    """Lengths of queries around tiles, and of keys around the fewest that are worth cutting, where parts are empty or
    one thread block takes the tile alone; the bound lets all be in parts.
    """
    dtype, (head_dim, head_dim_v) = kernel
    given = {"dtype": dtype, "head_dim": head_dim, "head_dim_v": head_dim_v, "room_k": 20000, **small_masks()[mask]}
    lengths = [
        *((n, 9000) for n in (17, 32, 33, 48, 49, 64, 100, 129)),
        *((100, n) for n in (0, 1, 70, 767, 768, 769, 959, 961, 1152, 1343, 1345, 1535, 1536, 1537, 1700)),
    ]
    first = list(small_masks()).index(mask) + MAIN.index(kernel)
    made = [
        chunk(f"{queries} queries on {keys} keys", queries, keys, **given, **LAYOUTS[(first + i) % len(LAYOUTS)])
        for i, (queries, keys) in enumerate(lengths)
    ]
    judge_all(made)


@pytest.mark.parametrize("splits", [2, 3, 7, 128])
@pytest.mark.parametrize("ratio", [1, 2, 3, 5, 8, 16, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_ratios_and_numbers_of_parts(head_dim, ratio, splits):
    """Where parts are no more than a cluster has blocks, these share the tiles instead."""
    made = [
        chunk(f"{ratio} heads, at most {splits} parts", queries, 7001, heads_q=heads_k * ratio, heads_k=heads_k,
              num_splits=splits, causal=causal, sinks="fp32", keys="paged", page_size=16, head_dim=head_dim,
              head_dim_v=head_dim)
        for heads_k in ((2, 16) if ratio <= 8 else (2,))
        for queries in (65, 100)
        for causal in (False, True)
    ]  # fmt: skip
    judge_all(made)
    if ratio <= 8 and splits > 2:
        assert all(in_parts(batch) or is_shared(batch) or is_several(batch) for batch in made[:4])
    if ratio <= 8 and splits > 3:
        assert any(in_parts(batch) for batch in made)


@pytest.mark.parametrize("keys", ["packed", "paged"])
def test_parts_of_a_sequence_with_fewer_rows_than_q(keys):
    """Tiles are counted by the rows of q, of which a sequence may have any and begin anywhere."""
    case = chunk("rows of no sequence", 40, 6000, causal=True, keys=keys, tail_q=60, extra_k=5, slack=-1)
    assert in_parts(case)
    judged_results(make(case))
    judge_all([case.but(extra_q=31), case.but(extra_q=31, tail_q=0, slack=3), case.but(q_lengths=(0,), tail_q=100)])


def test_parts_do_not_change_from_run_to_run_and_leave_metadata_alone():
    case = chunk("a chunk", 100, 8000, causal=True, keys="paged", page_size=16)
    made = make(case)
    expected = judged_results(made)
    for _ in range(20):
        require_same(case, "again", attend(made), expected)
    if batches.has_schedules():
        metadata = batches.schedule(made)
        before = metadata.clone()
        require_same(case, "with metadata", attend(made, scheduler_metadata=metadata), expected)
        assert torch.equal(metadata, before)


def test_a_graph_of_parts_serves_other_lengths():
    """Long and short, where one thread block takes each tile alone."""
    case = chunk("captured", 100, 8000, causal=True, keys="paged")
    lengths = [(100, 8000), (100, 400), (3, 8000), (100, 1537), (0, 0), (64, 64), (100, 5000)]
    require_graph_serves(case, [(of_one,) for of_one in lengths])


@pytest.mark.parametrize("metadata", [False, True], ids=["", "metadata"])
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_of_fewer_rows(head_dim, mask, metadata):
    """A schedule counts tiles of 192 rows; here they have 128. Sequences of each number of slabs from none to 13, in
    orders that put the tiles that do not exist first and last.
    """
    dims = {"head_dim": head_dim, "head_dim_v": head_dim}
    given = {"heads_q": 8, "heads_k": 2, "causal": mask == "causal", "metadata": metadata, **dims}
    lengths = [(16 * n + extra, 16 * n + 300 * (n % 3)) for n in range(14) for extra in (0, 1)]
    made = []
    for order in (lengths, lengths[::-1], lengths[::2], [(200, 900)], [(0, 70), (33, 33)], [(17, 0), (300, 20)]):
        queries, keys = zip(*order, strict=True)
        made += [
            main_dims(Batch("few tiles", queries, keys, keys=layout, num_splits=splits, dtype=dtype, **given))
            for layout in ("packed", "paged")
            for splits in (0, 1)
            for dtype in ("bf16", "fp16")
        ]
    judge_all(made)


def test_the_tile_of_few_rows_does_not_depend_on_max_seqlen_q():
    """A packed q and its rows decide, so that an engine's bound changes no bit."""
    case = main_dims(
        Batch("few tiles", (300, 20, 129), (900, 700, 129), heads_q=8, heads_k=2, causal=True, keys="paged")
    )
    made = make(case)
    expected = judged_results(made, max_seqlen_q=300)
    for bound in (301, 449, 4096):
        require_same(case, f"max_seqlen_q {bound}", attend(made, max_seqlen_q=bound), expected)
