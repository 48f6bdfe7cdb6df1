"""Prompts of at most as many tiles as the card has SMs: the thread blocks of a cluster share a long tile and a short one.
And one sequence whose whole tiles need no schedule.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
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
from gpu.support import small_masks  # noqa: E402

pytestmark = pytest.mark.gpu

# Rows, keys and stages of the tile, by head dim.
SHARED = {
    kernel.tile.head_dim: (kernel.tile.rows, kernel.tile.keys, kernel.tile.stages)
    for kernel in hopper_attention.built_kernels()
    if kernel.tile.calls == "paired"
}
KERNELS = [(dtype, head_dim) for dtype in ("bf16", "fp16") for head_dim in SHARED]
CLUSTERS = (2, 3, 4, 8)  # thread blocks that may share tiles


def shared_by(head_dim: int, cluster: int) -> dict:
    """The choices by which clusters of so many blocks share tiles."""
    return {"head_dim": head_dim, "forced": (("tile", SHARED[head_dim]), ("cluster", cluster))}


def prompt(why: str, queries: int, length: int, **given) -> Batch:
    return main_dims(Batch(why, (queries,), (length,), **{"heads_q": 8, "heads_k": 2, **given}))


def is_shared(batch: Batch) -> bool:
    return "the blocks of a cluster share two" in plan_of(batch).explain()


@pytest.mark.parametrize("mask", small_masks())
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_masks_and_lengths(kernel, mask):
    """An odd number of tiles has one in the middle, which is alone; under some masks the first tiles are the long ones,
    or none is; rows see keys of one part alone, or none at all; blocks of large clusters have no keys of a tile.
    """
    dtype, head_dim = kernel
    options = small_masks()[mask]
    if options.get("softcap"):
        options = {name: value for name, value in options.items() if name != "softcap"}  # has kernels of its own
    lengths = [(65, 65), (65, 700), (128, 128), (129, 500), (200, 1), (257, 300), (500, 500), (700, 70), (640, 641),
               (1000, 1000), (900, 1700), (100, 0), (1500, 1500)]  # fmt: skip
    first = list(small_masks()).index(mask) + KERNELS.index(kernel)
    judge_all([
        prompt(f"{queries} queries on {keys} keys, {cluster} blocks", queries, keys, num_splits=i % 2, dtype=dtype,
               **options, **shared_by(head_dim, cluster), **LAYOUTS[(first + i) % len(LAYOUTS)])
        for cluster in CLUSTERS
        for i, (queries, keys) in enumerate(lengths)
    ])  # fmt: skip


@pytest.mark.parametrize("ratio", [1, 3, 8, 16, 64])
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_heads_of_prompts_that_the_plan_shares_out_so(kernel, ratio):
    dtype, head_dim = kernel
    queries = 16000 // (4 * ratio) if ratio > 1 else 2000
    made = [
        prompt(f"{ratio} heads", queries, queries + more, heads_q=4 * ratio, heads_k=4, causal=True, sinks=sinks,
               dtype=dtype, head_dim=head_dim, num_splits=splits, **layout)
        for more, sinks, splits in ((0, "", 0), (77, "fp32", 1))
        for layout in (LAYOUTS[0], LAYOUTS[3])
    ]  # fmt: skip
    judge_all(made)
    if ratio <= 3:
        assert all(is_shared(batch) for batch in made)


def test_dense_sequences_that_are_alike():
    judge_all([
        main_dims(Batch("alike", (queries,) * n, (queries,) * n, heads_q=8, heads_k=heads_k, keys="dense", call="cache",
                        dense_q=True, causal=True))
        for n, queries, heads_k in ((1, 2048, 8), (2, 1000, 1), (4, 500, 2), (3, 640, 4))
    ])  # fmt: skip


@pytest.mark.parametrize("keys", ["packed", "paged"])
def test_a_sequence_with_fewer_rows_than_q(keys):
    """Tiles are counted by the rows of q, of which a sequence may have any and begin anywhere."""
    case = prompt("rows of no sequence", 1800, 1900, causal=True, keys=keys, tail_q=200, slack=-1)
    assert is_shared(case)
    judged_results(make(case))
    judge_all([case.but(tail_q=0, slack=3)] + [case.but(q_lengths=(n,), tail_q=2000 - n) for n in (0, 1, 100, 1100)])


def test_results_do_not_change_from_run_to_run_nor_with_fewer_sms():
    """With fewer SMs clusters take several pairs, one after the other."""
    case = prompt("a prompt", 1900, 2000, causal=True, keys="paged")
    assert is_shared(case)
    made = make(case)
    expected = judged_results(made)
    for _ in range(20):
        require_same(case, "again", attend(made), expected)
    for margin in (1, 60, 100, 130, 131):
        require_same(case, f"sm_margin {margin}", attend(made, sm_margin=margin), expected)
    metadata = batches.schedule(made)
    before = metadata.clone()
    require_same(case, "with metadata", attend(made, scheduler_metadata=metadata), expected)
    assert torch.equal(metadata, before)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_clusters(kernel, cluster):
    """Of each size: alone in a cluster or not, with queries that are no multiple of a tile's, with idle rows, a head dim
    between those of the tiles, unaligned out, and several pairs for a cluster; the same bits again and again.
    """
    dtype, head_dim = kernel
    given = {"dtype": dtype, "causal": True, "keys": "paged", **shared_by(head_dim, cluster)}
    made = [
        prompt("few tiles of many keys", 100, 5000, **given),
        prompt("idle rows", 300, 900, heads_q=3, heads_k=1, sinks="fp32", **given),
        prompt("a narrower head", 300, 900, **{**given, "head_dim": head_dim - 8}),
        prompt("many pairs", 1900, 2000, **given),
    ]  # fmt: skip
    judge_all(made)
    for case in (made[0], made[3]):
        tensors = make(case)
        expected = judged_results(tensors)
        for _ in range(10):
            require_same(case, "again", attend(tensors), expected)
        for margin in (60, 110):
            require_same(case, f"sm_margin {margin}", attend(tensors, sm_margin=margin), expected)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "whole"])
def test_a_graph_serves_other_lengths(shared):
    """Of a prompt whose tiles two blocks share, and of one whose tiles are whole, in more than a round of the grid."""
    case = prompt("captured", 1900 if shared else 3500, 4000, causal=True, keys="paged")
    assert is_shared(case) == shared
    assert "schedule: none" in "\n".join(plan_of(case).reasons)
    lengths = [(1900, 4000), (1900, 1900), (3, 4000), (100, 1537), (0, 0), (64, 64), (1500, 20), (1337, 3000)]
    require_graph_serves(case, [(of_one,) for of_one in lengths])


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_one_sequence_without_a_schedule(head_dim):
    """Whole tiles of one sequence, a block for each; lengths are those of the device."""
    given = {"head_dim": head_dim, "heads_q": 16, "heads_k": 16, "causal": True}
    made = [
        prompt("whole tiles", queries, keys, softcap=softcap, num_splits=1, room_k=room, tail_q=tail, **layout, **given)
        for queries, keys, room, tail in (
            (900, 1000, 0, 3),
            (1000, 1000, 9000, 200),
            (300, 2000, 0, 0),
            (700, 50, 0, 9),
        )
        for softcap in (0.0, 3.0)
        for layout in (LAYOUTS[0], LAYOUTS[3])
    ]
    judge_all(made)
    assert all("schedule: none" in "\n".join(plan_of(batch).reasons) for batch in made)
