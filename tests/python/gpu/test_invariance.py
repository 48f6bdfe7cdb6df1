"""The same bits whoever else is in the batch (batch_invariant), and the same bits every time (always)."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
from gpu import batches, support  # noqa: E402
from gpu.batches import (  # noqa: E402
    Batch,
    alone,
    attend,
    fail,
    int32,
    judged_results,
    main_dims,
    make,
    of_sequence,
    permuted,
    require_same,
)
from gpu.fixed_splits import cut_sequences, plan_of  # noqa: E402
from gpu.support import bits  # noqa: E402

pytestmark = pytest.mark.gpu

RERUNS = 60
MIXED = {"q_lengths": (1, 200, 1, 0, 5, 33, 1, 64), "k_lengths": (900, 200, 0, 70, 2000, 300, 6000, 64)}
DECODE = {"q_lengths": (1,) * 9, "k_lengths": (1, 70, 128, 129, 500, 0, 9000, 3000, 64)}
SPECULATE = {"q_lengths": (4,) * 5, "k_lengths": (4, 700, 64, 2300, 5000)}
FEW = {"q_lengths": (1, 4, 5, 8, 16, 0), "k_lengths": (2500, 5000, 70, 9000, 4100, 30)}  # up to 64 rows; 16 are few
MANY = {"q_lengths": (1,) * 70, "k_lengths": tuple(4000 + 77 * i for i in range(70))}  # a block has all parts of a tile
GROUPS = {"q_lengths": (1, 2) * 12, "k_lengths": tuple(8190 - 170 * i for i in range(24))}  # or four parts each
PROMPTS = {"q_lengths": (300, 1000, 70, 1), "k_lengths": (300, 1000, 2000, 1)}
CUTS = {"q_lengths": (1, 4, 5, 16, 1, 130, 1), "k_lengths": (4095, 4096, 4097, 9000, 13000, 9000, 8193)}

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
    Batch("lengths around cuts", **CUTS, keys="paged", causal=True),
    Batch("lengths around cuts, packed", **CUTS),
    Batch("tiles whose parts one block takes", **MANY, keys="paged", causal=True),
    Batch("tiles whose parts one block takes, d 64, sinks", **MANY, keys="paged", head_dim=64, sinks="fp32"),
    Batch("tiles whose parts one block takes, pages of 1, d 256", **MANY, keys="paged", page_size=1, head_dim=256),
    Batch("tiles in clusters, four parts a block", **GROUPS, keys="paged", causal=True),
    Batch("tiles in clusters, (192, 128), softcap", **GROUPS, head_dim=192, head_dim_v=128, softcap=20.0),
    Batch(
        "chunks of which the longest sequence sees little",
        (1, 1, 2, 1),
        (8300, 8192, 5000, 100),
        keys="paged",
        chunk=8192,
        causal=True,
    ),
    Batch("prompts", **PROMPTS, keys="paged", page_size=128, causal=True),
    Batch("d 64, softcap", **MIXED, keys="paged", head_dim=64, softcap=50.0, causal=True),
    Batch("fp16, d 256", **MIXED, keys="paged", head_dim=256, dtype="fp16", causal=True),
    Batch("(192, 128), one K/V head", **MIXED, keys="paged", head_dim=192, head_dim_v=128, heads_k=1, causal=True),
]
WHOLE = ("mixed in a window, sinks", "up to 64 rows in a window, sinks", "prompts")  # too few keys for a cut


def invariant(case: Batch, **changes) -> Batch:
    return main_dims(case.but(heads_q=8, num_splits=0, batch_invariant=True, **changes))


@pytest.mark.parametrize("case", CASES, ids=lambda b: b.why)
def test_alone_as_in_the_batch(case):
    case = invariant(case)
    assert bool(cut_sequences(case)) == (case.why not in WHOLE), plan_of(case).explain()
    made = make(case)
    together = judged_results(made)
    for b in range(case.size):
        found = of_sequence(made, together, b)
        single = alone(made, b)
        require_same(case, f"sequence {b} alone", of_sequence(single, attend(single), 0), found)


@pytest.mark.parametrize("case", CASES, ids=lambda b: b.why)
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
        if bound not in made.lengths:
            continue
        for value in (None, made.lengths[bound] + 1, 4096, 131072):
            if value is None or value >= made.lengths[bound]:
                require_same(case, f"{bound} {value}", attend(made, **{bound: value}), expected)
    bounds = {bound: None for bound in ("max_seqlen_q", "max_seqlen_k") if bound in made.lengths}
    require_same(case, "no bounds", attend(made, **bounds), expected)
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


@pytest.mark.parametrize(("queries", "keys", "cut"), [(1, 4096, False), (1, 13000, True), (4, 4097, True),
                                                      (16, 9000, True), (130, 9000, False)])  # fmt: skip
def test_neighbours_of_any_size(queries, keys, cut):
    """One sequence among 0, 1, 40 and 1,000 others."""
    expected, values = None, {}
    for others in (0, 1, 40, 1000):
        r = random.Random(others)
        case = main_dims(Batch(f"{queries} queries on {keys} keys among {others} others",
                               (queries, *(r.choice((0, 1, 1, 5)) for _ in range(others))),
                               (keys, *(r.randint(0, 300) for _ in range(others))), keys="paged", heads_q=8,
                               causal=True, num_splits=0, batch_invariant=True))  # fmt: skip
        assert cut_sequences(case) == [0] * cut, plan_of(case).explain()
        made = make(case)
        if expected is not None:  # the same first sequence: its values are put where the new batch has it
            first = made.slots[:keys]
            for name in ("k", "v"):
                batches.put_rows(getattr(made, name), first, values[name])
                getattr(made, f"truth_{name}")[:keys] = values[name]
            made.q[:queries] = values["q"]
        values = {"k": made.truth_k[:keys], "v": made.truth_v[:keys], "q": made.q[:queries]}
        found = of_sequence(made, judged_results(made), 0)
        if expected is not None:
            require_same(case, f"among {others} others", found, expected)
        expected = found


def test_parts_are_merged_in_every_way():
    """By one block that has all of a tile, by a cluster of which each block has one, and by a kernel."""
    case = invariant(Batch("tiles whose parts one block takes", **MANY, keys="paged", causal=True))
    assert "drawn whole" in plan_of(case).explain()
    made = make(case)
    stride = -(-case.size // 4) * 4
    if batches.has_schedules():
        assert int(batches.schedule(made)[1 + 3 * stride]) >> 26 == 0, "the schedule shares out parts"
    together = judged_results(made)
    for b in (0, 2, 40, 69):
        expected = of_sequence(made, together, b)
        single = alone(made, b)
        in_cluster = "by a cluster of" in plan_of(single.batch).explain()
        assert in_cluster == (case.k_lengths[b] > 4096)
        require_same(case, f"sequence {b}, by a cluster", of_sequence(single, attend(single), 0), expected)
        wide = {"max_seqlen_k": 1 << 18}
        assert "by a cluster of" not in plan_of(single.batch, **wide).explain()
        require_same(case, f"sequence {b}, by a kernel", of_sequence(single, attend(single, **wide), 0), expected)


DENSE = [
    ("one query, one split", 1, 4096, {}),
    ("one query", 1, 13000, {"causal": True}),
    ("4 queries", 4, 4097, {"causal": True}),
    ("5 queries, sinks", 5, 9000, {"sinks": "fp32"}),
    ("16 queries, the most that are cut, softcap", 16, 9000, {"causal": True, "softcap": 20.0}),
    ("17 queries, the fewest that are not", 17, 9000, {"causal": True}),
    ("prompts", 300, 300, {"causal": True}),
    ("chunks of prompts in a window", 130, 5000, {"window": (700, 0)}),
    ("one query, d 64", 1, 9000, {"head_dim": 64}),
    ("17 queries, (192, 128)", 17, 4097, {"head_dim": 192, "head_dim_v": 128, "causal": True}),
]


def dense_calls(made: batches.Made, chosen: slice, splits: int = 0) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The sequences `chosen` of a dense batch whose keys are all as long, by each function: out (T, Hq, Dv), lse (T, Hq)."""
    batch = made.batch
    keys = batch.k_lengths[0]
    q, k, v = made.q[chosen], made.k[chosen], made.v[chosen]
    options = {**batch.options, "s_aux": made.s_aux, "num_splits": splits, "batch_invariant": True}
    packed_q, packed_k, packed_v = q.flatten(0, 1), *(x[:, :keys].flatten(0, 1) for x in (k, v))
    starts = (int32([n * i for i in range(len(q) + 1)]) for n in (batch.q_lengths[0], keys))
    used = int32([keys] * len(q))
    results = {
        "dense": hopper_attention.flash_attn_func(q, k[:, :keys], v[:, :keys], return_attn_probs=True, **options),
        "length as an int": hopper_attention.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=keys, return_softmax_lse=True, **options
        ),
        "lengths on the device": hopper_attention.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=used, return_softmax_lse=True, **options
        ),
        "packed": hopper_attention.flash_attn_varlen_func(
            *(packed_q, packed_k, packed_v, *starts, batch.q_lengths[0], keys), return_attn_probs=True, **options
        ),
    }
    return {name: batches.by_row(made, *found) for name, found in results.items()}


@pytest.mark.parametrize(("why", "queries", "keys", "options"), DENSE, ids=[why for why, *_ in DENSE])
def test_sequences_that_are_all_alike(why, queries, keys, options):
    """Dense calls and caches whose length is an int: each sequence has its bits alone, in the batch and as packed."""
    case = main_dims(Batch(why, (queries,) * 5, (keys,) * 5, call="cache", keys="dense", dense_q=True, extra_k=37,
                           heads_q=8, num_splits=0, batch_invariant=True, **options))  # fmt: skip
    cut = queries <= 16 and keys > 4096
    assert cut_sequences(case) == list(range(5)) * cut, plan_of(case).explain()
    made = make(case)
    out, lse = judged_results(made)
    expected = batches.by_row(made, out, lse)
    for splits in (0, 1, 7):
        for name, found in dense_calls(made, slice(None), splits).items():
            require_same(case, f"{name}, num_splits {splits}", found, expected)
    for b in range(case.size):
        rows = slice(b * queries, (b + 1) * queries)
        for name, found in dense_calls(made, slice(b, b + 1)).items():
            require_same(case, f"{name}, sequence {b} alone", found, tuple(x[rows] for x in expected))


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
