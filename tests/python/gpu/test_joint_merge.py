"""Tiles cut by a schedule whose parts are merged by the blocks that left them, without a kernel behind these."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")

from gpu import batches, support  # noqa: E402
from gpu.batches import Batch, attend, judge_all, judged_results, main_dims, make, require_same  # noqa: E402
from gpu.fixed_splits import plan_of  # noqa: E402
from gpu.support import MAIN  # noqa: E402
from gpu.test_clusters import FEW, LAYOUTS, MASKS, batch_of  # noqa: E402
from gpu.test_grid import name_of, on  # noqa: E402

pytestmark = pytest.mark.gpu

# Keys of sequences whose tiles a schedule cuts: how many parts the longest has is what counts.
CUT = {
    "few parts": (9000, 5000, 100, 7000, 3000, 1),
    "one tile in many parts": (40_000, 100, 700, 0),
    "two tiles in many parts": (30_000, 64, 25_000, 65),
    "parts without keys": (20_000, *([1] * 30)),
    "one tile in parts, then many whole ones": (20_000, *([500] * 150)),
}
ROOM = 200_000
ROWS = (*FEW, "20 rows", "32 rows", "48 rows", "64 rows")  # in kernels for 16, for 32 and for 64
WORKSPACE = 64 << 20


def cut_batch(lengths: str, rows: str, layout: str, **options) -> Batch:
    keys = CUT[lengths]
    queries = batch_of("", rows, layout).q_lengths[0]
    made = batch_of(f"{lengths}, merged by their blocks", rows, layout, q_lengths=(queries,) * len(keys),
                    k_lengths=keys, room_k=ROOM, **options)  # fmt: skip
    return made


def cut_cases(kernel) -> Iterator[Batch]:
    for i, (lengths, rows) in enumerate(itertools.product(CUT, ROWS)):
        turn = i + i // len(ROWS)  # so that rows meet all layouts, with metadata and without
        layout = [name for name in LAYOUTS if "pages" in name][turn % 4]
        mask = list(MASKS)[i % len(MASKS)]
        yield cut_batch(lengths, rows, layout, metadata=turn // 2 % 2 == 0, seed=i, **on(kernel, **MASKS[mask]))


@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_parts_that_their_blocks_merge(kernel):
    judge_all(cut_cases(kernel))


@pytest.mark.parametrize("lengths", CUT)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_one_query_each_where_there_may_be_64_rows(head_dim, lengths):
    """Metadata count sequences of few rows, and may cut their tiles each by itself, in a kernel whose tile has 64."""
    keys = CUT[lengths]
    dims = {"head_dim": head_dim, "head_dim_v": head_dim}
    judge_all(
        main_dims(batch_of(lengths, "64 rows", layout, q_lengths=(1,) * len(keys), k_lengths=keys, room_k=ROOM, slack=7,
                           causal=True, metadata=metadata, seed=5, **dims))
        for layout in ("pages of 1", "pages of 64, interleaved")
        for metadata in (False, True)
    )  # fmt: skip


@pytest.mark.parametrize("rows", ROWS)
def test_no_kernel_follows(rows):
    case = main_dims(cut_batch("few parts", rows, "pages of 16"))
    assert "by the blocks that leave parts of a tile" in plan_of(case).explain()


@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_tiles_of_one_kernel_with_few_rows_and_with_more(kernel):
    """Those with at most 16 rows are computed with half as many columns, whole, in parts and in clusters."""
    queries = (8, 1, 5, 4, 3, 8, 0, 2)  # of four heads each
    for seed, keys in enumerate(((9000, 5000, 100, 7000, 3000, 1, 40, 0), (30_000, 20_000, *[64] * 6), (700,) * 8)):
        for room in (0, ROOM):
            why = f"{keys[0]} keys, room for {room}"
            judge_all([batch_of(why, "4 rows", "pages of 16", q_lengths=queries, k_lengths=keys, dense_q=False, room_k=room,
                                seed=seed, metadata=room > 0, **on(kernel, causal=True))])  # fmt: skip


DRAFTS = {
    "ragged": (9000, 5000, 100, 7000, 3000, 64),
    "one long": (30_000, *([400] * 40)),
    "whole tiles behind parts": (6000, 5000, *([900] * 60)),
}


def drafts(lengths: str, queries: tuple[int, ...], **given) -> Batch:
    """Of eight heads a K/V head, so that with 8 queries a tile of 64 rows is full: metadata count them as many."""
    layout = {"keys": "paged", "heads_q": 8, "heads_k": 1, "causal": True, "num_splits": 0, "room_k": ROOM}
    return main_dims(Batch(f"drafts, {lengths}", queries, DRAFTS[lengths], **{**layout, **given}))


def are_one_tile_each(batch: Batch) -> bool:
    """Whether metadata cut them each by itself, and say that any is one tile."""
    facts = batches.schedule(make(batch))[1 + 3 * (-(-batch.size // 4) * 4) :]
    return int(facts[0]) < 0


def require_same_from_run_to_run(case: Batch) -> None:
    """With the same metadata: without them a plan that knows the lengths may have other tiles."""
    made = make(case)
    metadata = batches.schedule(made)
    before = metadata.clone()
    expected = judged_results(made, scheduler_metadata=metadata)
    for _ in range(20):
        require_same(case, "again", attend(made, scheduler_metadata=metadata), expected)
    assert torch.equal(metadata, before)


@pytest.mark.parametrize("lengths", DRAFTS)
@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_drafts_are_cut_each_by_itself(kernel, lengths):
    """Of as many queries in a cache call, of 5 to 8 in a varlen call; sinks, windows, pages whose keys are gathered."""
    size = len(DRAFTS[lengths])
    of_cache = drafts(lengths, (8,) * size, call="cache", dense_q=True, **on(kernel))
    packed = drafts(lengths, tuple(8 - b % 4 for b in range(size)), **on(kernel))
    for case in (of_cache, packed):
        assert are_one_tile_each(case)
        assert plan_of(case).kernel == "decode"
        judge_all([case, case.but(metadata=True), case.but(metadata=True, sinks="fp32"), case.but(page_size=1)])
        judge_all([case.but(metadata=True, window=(3000, 0)), case.but(metadata=True, num_splits=3)])
    require_same_from_run_to_run(packed)


@pytest.mark.parametrize("lengths", DRAFTS)
@pytest.mark.parametrize("queries", [1, 20, 300])
def test_drafts_by_metadata_of_a_step_with_other_queries(queries, lengths):
    """These may know several tiles of a sequence, of which its only one then has all units."""
    case = drafts(lengths, (8,) * len(DRAFTS[lengths]), call="cache", dense_q=True)
    made = make(case)
    metadata = batches.schedule(made, max_seqlen_q=queries)
    judged_results(made, scheduler_metadata=metadata)


def filled(value: int) -> Callable[[torch.Tensor], None]:
    return lambda workspace: workspace.fill_(value)


def random_bytes(workspace: torch.Tensor) -> None:
    workspace.copy_(torch.randint(0, 256, workspace.shape, dtype=torch.uint8, device=workspace.device))


CONTENTS = {
    "zeros": filled(0),
    "ones": filled(1),
    "0xFF, also the number of the call": filled(0xFF),
    "random": random_bytes,
}


@pytest.mark.parametrize("lengths", CUT)
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_a_workspace_may_hold_anything(lengths, in_graph):
    """Before each call, and nothing at all between calls: what one leaves must not count for the next."""
    case = main_dims(cut_batch(lengths, "8 rows", "pages of 16", causal=True, poison="zero"))
    made = make(case)
    expected = judged_results(made)
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=support.DEVICE)
    results = batches.new_results(made)

    def call() -> None:
        attend(made, results, workspace=workspace)

    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        call = graph.replay
    for name, fill in [*CONTENTS.items(), *((f"as call {i} left it", None) for i in range(5))]:
        if fill is not None:
            fill(workspace)
        for x, poison in zip(results, batches.new_results(made), strict=True):
            x.copy_(poison)
        call()
        require_same(case, f"workspace: {name}", results, expected)


@pytest.mark.parametrize("rows", ["8 rows", "32 rows", "64 rows"])
@pytest.mark.parametrize("lengths", ["one tile in many parts", "two tiles in many parts", "parts without keys"])
def test_a_number_of_the_call_that_comes_back(lengths, rows):
    """Calls of other kinds may write the same over it each time and leave the counts as they are: both calls are then
    number 0, and the second must not add to what the first has counted.
    """
    case = main_dims(cut_batch(lengths, rows, "pages of 16", causal=True, poison="zero"))
    made = make(case)
    expected = judged_results(made)
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=support.DEVICE)
    words = workspace.view(torch.int64)
    for turn in range(3):
        found = attend(made, batches.new_results(made), workspace=workspace)
        require_same(case, f"call {turn} with number 0", found, expected)
        numbers = (words == 1).nonzero().flatten()
        assert len(numbers) == 1, "the number of the call is the one word that has become 1"
        words[numbers] = 0


def test_calls_of_different_lengths_share_a_workspace():
    """Tiles count in the words of other tiles, and those of a call that has many come behind one that has few."""
    cases = [main_dims(cut_batch(lengths, rows, "pages of 16", causal=True, poison="zero"))
             for lengths, rows in itertools.product(CUT, ("1 row", "16 rows", "32 rows", "64 rows"))]  # fmt: skip
    calls = [make(case) for case in cases]
    expected = [judged_results(made) for made in calls]
    workspace = torch.full((WORKSPACE,), 0xFF, dtype=torch.uint8, device=support.DEVICE)
    generator = torch.Generator().manual_seed(3)
    for i in torch.randint(0, len(cases), (60,), generator=generator).tolist():
        found = attend(calls[i], batches.new_results(calls[i]), workspace=workspace)
        require_same(cases[i], "after calls of other lengths", found, expected[i])


@pytest.mark.parametrize("lengths", ["few parts", "one tile in parts, then many whole ones"])
def test_calls_behind_one_with_damaged_metadata(lengths):
    """Its parts are not all counted, or more than there are: the next call has a number of its own."""
    case = main_dims(cut_batch(lengths, "4 rows", "pages of 16", causal=True, poison="zero", metadata=True))
    made = make(case)
    expected = judged_results(made)
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=support.DEVICE)
    metadata = batches.schedule(made)
    before = metadata.clone()
    words = metadata.numel()
    facts = words - (words - 1) // 4
    counter = (
        facts + 3
    )  # of blocks that have begun: behind one that is wrong, some count with the number of the next call
    damages = [(word, 1 + word % 3) for word in range(1, words, max(1, words // 40)) if word != counter]
    damages += [(facts, 1 << bit) for bit in range(26, 31)]
    damages += [(facts + i, by) for i in (1, 2) for by in (1, -5, 2**31 - 1)]
    for word, by in damages:
        damaged = metadata.clone()
        damaged[word] = (
            (int(damaged[word]) ^ by) if word == facts else max(-(2**31), min(2**31 - 1, int(damaged[word]) + by))
        )
        attend(made, batches.new_results(made), workspace=workspace, scheduler_metadata=damaged)
        found = attend(made, batches.new_results(made), workspace=workspace, scheduler_metadata=metadata)
        require_same(case, f"after word {word} was damaged", found, expected)
    assert torch.equal(metadata, before), "the counters of the schedule are 0 between calls"


def test_calls_on_several_streams_at_once():
    """Blocks that wait for others of their grid must not hold the SMs which these need: each call alone fills the card, so
    that all grids have some blocks that run and some that do not. Blocks that wait in vain leave poison, after 0.2 s.
    """
    cases = [main_dims(cut_batch(lengths, rows, "pages of 16", causal=True, poison="zero"))
             for lengths, rows in itertools.product(CUT, ("1 row", "64 rows"))]  # fmt: skip
    calls = [make(case) for case in cases]
    expected = [judged_results(made) for made in calls]
    workspaces = [torch.zeros(WORKSPACE, dtype=torch.uint8, device=support.DEVICE) for _ in calls]
    results = [batches.new_results(made) for made in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(100):
        for made, into, workspace, stream in zip(calls, results, workspaces, streams, strict=True):
            with torch.cuda.stream(stream):
                for x, poison in zip(into, batches.new_results(made), strict=True):
                    x.copy_(poison)
                attend(made, into, workspace=workspace)
    torch.cuda.synchronize()
    for case, found, wanted in zip(cases, results, expected, strict=True):
        require_same(case, "beside calls on other streams", found, wanted)
