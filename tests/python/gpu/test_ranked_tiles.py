"""Several sequences with about as many tiles as the card has SMs, or up to twice as many: thread blocks find the tiles in
order of their length by themselves, and where each has an SM, those of a cluster share a long tile and a short one.
"""

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
from gpu.support import small_masks  # noqa: E402
from gpu.test_shared_tiles import CLUSTERS, KERNELS, is_shared, shared_by  # noqa: E402

pytestmark = pytest.mark.gpu

# (queries, keys) of the sequences of a batch, with four or eight query heads more than several tiles of 32 rows are for.
SEVERAL = {
    "of all kinds": ((300, 300), (700, 700), (1, 1), (90, 200), (0, 70), (33, 0), (520, 900)),
    "chunks behind other keys": ((428, 2048), (300, 1500), (64, 64), (417, 3000)),
    "alike": ((257, 257),) * 6,
    "one long, others short": ((1100, 1100), (3, 3), (40, 40), (1, 900)),
    "single queries beside a prompt": ((1200, 1200), *(((1, 1200),) * 9)),
    "as many as lanes": tuple((7 * i, 11 * i) for i in range(32)),
}


def several(why: str, lengths, **given) -> Batch:
    queries, keys = zip(*lengths, strict=True)
    return main_dims(Batch(why, queries, keys, **{"heads_q": 8, "heads_k": 2, "causal": True, **given}))


def is_ranked(batch: Batch) -> bool:
    return "ranked by the blocks themselves" in "\n".join(plan_of(batch).reasons)


@pytest.mark.parametrize("mask", small_masks())
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_masks_and_lengths(kernel, mask):
    """Sequences without queries or keys have no tile or an empty one; under masks that are not causal the order is not
    that of lengths, and the longer one of two tiles may be the second.
    """
    dtype, head_dim = kernel
    options = {name: value for name, value in small_masks()[mask].items() if name != "softcap"}
    first = list(small_masks()).index(mask) + KERNELS.index(kernel)
    judge_all([
        several(f"{why}, {heads_q} heads", lengths, dtype=dtype, head_dim=head_dim, heads_q=heads_q, num_splits=i % 2,
                **{"causal": False, **options, **LAYOUTS[(first + i) % len(LAYOUTS)]})
        for heads_q in (4, 8)
        for i, (why, lengths) in enumerate(SEVERAL.items())
    ])  # fmt: skip


@pytest.mark.parametrize("ratio", [1, 3, 8, 16, 64])
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_heads(kernel, ratio):
    dtype, head_dim = kernel
    lengths = tuple((max(1, n // ratio), n // ratio + 900) for n in (2000, 1200, 60, 700))
    judge_all([
        several(f"{ratio} heads", lengths, heads_q=heads_k * ratio, heads_k=heads_k, sinks=sinks, dtype=dtype,
                head_dim=head_dim, num_splits=splits, **LAYOUTS[3])
        for heads_k in (1, 2, 5)
        for sinks, splits in (("", 0), ("fp32", 1))
    ])  # fmt: skip


def test_both_ways_are_taken():
    """Of the cases here and below some share tiles and some take whole ones; what others do is no test of these."""
    made = [several(why, lengths, keys="paged", heads_q=h, num_splits=0) for why, lengths in SEVERAL.items() for h in (4, 8)]  # fmt: skip
    assert sum(is_shared(batch) for batch in made) >= 4
    assert sum(is_ranked(batch) and not is_shared(batch) for batch in made) >= 4


def test_rows_that_do_not_count():
    """seqused_q and seqused_k, rows of q that belong to no sequence, bounds that are larger than the truth or unknown."""
    lengths = SEVERAL["of all kinds"]
    for shares in (True, False):
        given = {"heads_q": 4 if shares else 8, "keys": "paged", "num_splits": 0}
        case = several("fewer rows than q has", lengths, **given)
        judge_all([
            case.but(tail_q=200, slack=-1),
            case.but(extra_q=31, extra_k=5),
            case.but(slack=300, room_k=2900),
            several("a dense q", ((300, 300),) * 4, dense_q=True, call="cache", **given),
        ])  # fmt: skip


@pytest.mark.parametrize("heads_q", [4, 8])
def test_results_do_not_change_from_run_to_run_nor_with_fewer_sms(heads_q):
    """With fewer SMs clusters take several pairs, and whole tiles a schedule shares out: the same bits."""
    case = several("a batch", SEVERAL["of all kinds"], keys="paged", heads_q=heads_q, num_splits=1)
    assert is_ranked(case)
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
    dtype, head_dim = kernel
    judge_all([
        several(f"{why}, {cluster} blocks", lengths, dtype=dtype, heads_q=heads_q, causal=causal, keys="paged",
                **shared_by(head_dim, cluster))
        for heads_q, causal in ((2, True), (8, True), (4, False))
        for why, lengths in SEVERAL.items()
    ])  # fmt: skip


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_graph_of_clusters_serves_other_lengths(cluster):
    lengths = ((700, 1500), (600, 1500), (200, 1500))
    case = several("captured", lengths, keys="paged", heads_q=4, heads_k=4, num_splits=1, **shared_by(128, cluster))
    require_graph_serves(case, [
        ((1, 1500), (1499, 1499), (0, 0)),
        ((0, 5), (3, 1000), (1, 1)),
        ((500, 500), (500, 500), (500, 500)),
    ])  # fmt: skip


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "whole"])
def test_a_graph_serves_other_lengths(shared):
    lengths = ((700, 1500), (600, 1500), (200, 1500))
    case = several("captured", lengths, keys="paged", heads_q=8 if shared else 16, heads_k=4, num_splits=0)
    assert is_ranked(case)
    assert is_shared(case) == shared
    require_graph_serves(case, [
        ((700, 1500), (600, 1500), (200, 1500)),
        ((1, 1500), (1499, 1499), (0, 0)),
        ((0, 5), (3, 1000), (1, 1)),
        ((500, 500), (500, 500), (500, 500)),
        ((64, 20), (1337, 1400), (90, 0)),
    ])  # fmt: skip
