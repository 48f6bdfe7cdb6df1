"""Calls of few queries: tiles that clusters of CTAs share, tiles of 16, 32 and 64 rows, and calls that start early."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
from gpu import batches, support  # noqa: E402
from gpu.batches import Batch, attend, fail, judge_all, judged_results, main_dims, make, require_same  # noqa: E402
from gpu.fixed_splits import plan_of  # noqa: E402
from gpu.layouts import PoisonedOut, out_strides  # noqa: E402
from gpu.support import MAIN, built_dims, same_bits, small_masks  # noqa: E402
from gpu.test_grid import name_of, on  # noqa: E402
from hopper_attention.testing import force_plan  # noqa: E402

pytestmark = pytest.mark.gpu

SIZES = (1, 2, 4, 8, 16)
# Rows of a tile: queries of a sequence x query heads of a K/V head.
ROWS = {
    "1 row": (1, 1),
    "4 rows": (1, 4),
    "8 rows": (2, 4),
    "15 rows": (3, 5),
    "16 rows": (4, 4),
    "16 heads": (1, 16),
    "20 rows": (5, 4),
    "32 rows": (4, 8),
}
# Of the tile of 64 rows. More than 8 blocks have no threads to merge so many, and with head dim 256 no room.
MANY_ROWS = {"33 rows": (33, 1), "48 rows": (6, 8), "60 rows": (12, 5), "64 rows": (8, 8)}
ALL_ROWS = {**ROWS, **MANY_ROWS}
MOST_OF_MANY_ROWS = 8
FEW = [name for name, (queries, heads) in ROWS.items() if queries * heads <= 16]
# Around blocks of 64 and of 128 keys; most have fewer blocks than large clusters have CTAs.
KEYS = (0, 1, 63, 64, 65, 127, 128, 129, 300, 2500)
LAYOUTS = {
    "dense": {"call": "cache", "keys": "dense", "extra_k": 30},
    "dense, leftpad": {"call": "cache", "keys": "dense", "leftpad": 37},
    "dense, rows by index": {"call": "cache", "keys": "dense", "batch_idx": True},
    "packed": {"call": "varlen", "keys": "packed", "extra_k": 7},
    "pages of 1": {"call": "varlen", "keys": "paged", "page_size": 1},
    "pages of 16": {"call": "cache", "keys": "paged", "page_size": 16},
    "pages of 64, interleaved": {"call": "varlen", "keys": "paged", "page_size": 64, "strides": "interleaved"},
    "pages of 16, leftpad": {"call": "cache", "keys": "paged", "page_size": 16, "leftpad": 21},
}
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (50, 3)},
    "causal window and sinks": {"causal": True, "window": (130, 0), "sinks": "fp32"},
    "chunk and bf16 sinks": {"chunk": 90, "causal": True, "sinks": "bf16"},
    "softcap and fp16 sinks": {"softcap": 5.0, "sinks": "fp16"},
}


def batch_of(why: str, rows: str, layout: str, **options) -> Batch:
    """One call of few queries; num_splits leaves the plan free."""
    queries, heads = ALL_ROWS[rows]
    dense_q = LAYOUTS[layout]["call"] == "cache"
    fields = {
        "q_lengths": (queries,) * len(KEYS),
        "k_lengths": KEYS,
        "heads_q": 2 * heads,
        "heads_k": 2,
        "num_splits": 0,
        "dense_q": dense_q,
        **LAYOUTS[layout],
        **options,
    }
    return Batch(f"{why}, {rows}, {layout}", **fields)


def shareable(size: int, head_dim: int, head_dim_v: int) -> int:
    """Columns are merged four at a time, and 16 blocks would have six each of a tile's 96."""
    return min(size, 8) if 64 < max(head_dim, head_dim_v) <= 96 else size


def sizes_cases(kernel, size: int) -> Iterator[Batch]:
    """All rows; masks and layouts in turn, so that the sizes and kernels together meet every pair of them."""
    shift = SIZES.index(size) + MAIN.index(kernel)
    for i, rows in enumerate(ROWS):
        layout = list(LAYOUTS)[(i + shift) % len(LAYOUTS)]
        mask = list(MASKS)[(i * 5 + shift) % len(MASKS)]
        yield batch_of(
            f"cluster of {size}, {mask}", rows, layout, forced=(("cluster", shareable(size, *kernel[1])),), seed=i + shift,
            **on(kernel, **MASKS[mask]),
        )  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_sizes(kernel, size):
    judge_all(sizes_cases(kernel, size))


def many_rows_cases(kernel, size: int) -> Iterator[Batch]:
    for i, (rows, layout) in enumerate(itertools.product(MANY_ROWS, LAYOUTS)):
        mask = list(MASKS)[(i + size) % len(MASKS)]
        yield batch_of(f"cluster of {size}, {mask}", rows, layout, forced=(("cluster", size), ("one_tile", True)), seed=i,
                       **on(kernel, **MASKS[mask]))  # fmt: skip


@pytest.mark.parametrize("size", [size for size in SIZES if size <= MOST_OF_MANY_ROWS])
@pytest.mark.parametrize("kernel", [kernel for kernel in MAIN if max(kernel[1]) <= 192], ids=name_of)
def test_many_rows(kernel, size):
    judge_all(many_rows_cases(kernel, size))


def mask_cases(mask: str, size: int) -> Iterator[Batch]:
    shapes = itertools.product(("4 rows", "16 rows", "32 rows"), ("dense", "pages of 16", "pages of 1", "packed"))
    for i, (rows, layout) in enumerate(shapes):
        yield main_dims(
            batch_of(f"{mask}, cluster of {size}", rows, layout, forced=(("cluster", size),), seed=i,
                     **small_masks()[mask])
        )  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 8, 16])
@pytest.mark.parametrize("mask", small_masks())
def test_masks(mask, size):
    judge_all(mask_cases(mask, size))


def ragged_cases(size: int) -> Iterator[Batch]:
    """Several queries of each sequence, none of some; of rows behind them nobody may write."""
    kinds = {
        "up to 4": (1, 0, 4, 2, 0, 3, 4, 1, 0, 4),
        "none but one": (0, 0, 0, 0, 0, 3, 0, 0, 0, 0),
        "up to 8": (8, 1, 0, 5, 8, 0, 2, 0, 7, 8),
    }
    for i, ((kind, queries), layout) in enumerate(itertools.product(kinds.items(), LAYOUTS)):
        room = kind != "up to 8"  # the bound, too, must leave at most 32 rows
        yield main_dims(
            batch_of(f"{kind} queries, cluster of {size}", "4 rows", layout, q_lengths=queries, dense_q=False,
                     extra_q=i % 2 * room if LAYOUTS[layout]["call"] == "varlen" else 0, slack=i % 3 * room,
                     causal=i % 4 != 0,
                     window=(70, 0) if i % 5 == 0 else (-1, -1), forced=(("cluster", size),), seed=i)
        )  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_ragged_queries(size):
    judge_all(ragged_cases(size))


def dims_cases(dtype: str, size: int) -> Iterator[Batch]:
    """Head dims that fill no tile: owners of columns past the head dim have nothing to write."""
    for i, (d, dv) in enumerate(built_dims(dtype)):
        for rows in ("4 rows", "20 rows"):
            layout = list(LAYOUTS)[i % len(LAYOUTS)]
            yield batch_of(f"head dims {d} and {dv}, cluster of {size}", rows, layout, head_dim=d, head_dim_v=dv,
                           dtype=dtype, causal=i % 2 == 0, sinks="fp32" if i % 3 == 0 else "",
                           forced=(("cluster", shareable(size, d, dv)),), seed=i)  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_head_dims(dtype, size):
    judge_all(dims_cases(dtype, size))


def context_parallel_cases(size: int) -> Iterator[Batch]:
    for i, ((world, rank), rows) in enumerate(
        itertools.product(((2, 0), (2, 1), (3, 1)), ("4 rows", "16 rows", "32 rows"))
    ):
        layout = ("pages of 16", "dense", "pages of 1", "packed")[i % 4]
        yield main_dims(
            batch_of(f"rank {rank} of {world}, cluster of {size}", rows, layout, cp_world=world, cp_rank=rank,
                     causal=i % 3 != 0, forced=(("cluster", size),), seed=i)
        )  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_context_parallelism(size):
    judge_all(context_parallel_cases(size))


def split_cases(kernel, parts: int) -> Iterator[Batch]:
    """The tile of few rows, cut into parts that go through the workspace."""
    for i, rows in enumerate(FEW):
        layout = list(LAYOUTS)[(i + parts) % len(LAYOUTS)]
        mask = list(MASKS)[(i + parts) % len(MASKS)]
        yield batch_of(f"{parts} parts through the workspace, {mask}", rows, layout,
                       forced=(("num_splits", parts), ("cluster", -1)), metadata=i % 2 == 0, seed=i,
                       **on(kernel, **MASKS[mask]))  # fmt: skip


@pytest.mark.parametrize("parts", [2, 3, 7])
@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_parts_of_few_rows_through_the_workspace(kernel, parts):
    judge_all(split_cases(kernel, parts))


def several_cases(kernel, size: int, several: int) -> Iterator[Batch]:
    """Several clusters for a tile: each leaves its part in the workspace."""
    size = shareable(size, *kernel[1])
    for i, rows in enumerate(ROWS):
        layout = list(LAYOUTS)[(i * 3 + several) % len(LAYOUTS)]
        mask = list(MASKS)[(i * 5 + several) % len(MASKS)]
        yield batch_of(f"{several} clusters of {size}, {mask}", rows, layout,
                       forced=(("cluster", size), ("num_splits", size * several)), seed=i,
                       **on(kernel, **MASKS[mask]))  # fmt: skip


@pytest.mark.parametrize(("size", "several"), [(2, 2), (2, 22), (4, 3), (16, 7)])
@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_several_clusters_for_a_tile(kernel, size, several):
    judge_all(several_cases(kernel, size, several))


# Tiles of one sequence, behind a bound of 128k keys: blocks of a cluster, and clusters of a tile that the plan chooses.
SHARES = {1: (8, 14), 2: (8, 7), 3: (8, 4), 4: (4, 7), 7: (8, 2), 8: (8, 1), 10: (4, 2), 12: (2, 5), 13: (2, 5)}


def long_cases(tiles: int) -> Iterator[Batch]:
    """Lengths that the first cluster takes alone, with fewer blocks than there are CTAs, and long ones."""
    for i, (length, (mask, options)) in enumerate(itertools.product((1, 900, 3000, 50_000), MASKS.items())):
        metadata = i % 2 == 0
        yield main_dims(
            batch_of(f"{tiles} tiles of {length} keys, {mask}", "8 rows", "pages of 16", q_lengths=(2,),
                     k_lengths=(length,), heads_q=4 * tiles, heads_k=tiles, room_k=1 << 17, metadata=metadata, seed=i,
                     **options)
        )  # fmt: skip


@pytest.mark.parametrize("tiles", SHARES)
def test_long_tiles_of_one_sequence(tiles):
    """As the plan chooses: as many clusters for each tile as the card has room for, where that is faster."""
    size, clusters = SHARES[tiles]
    cases = list(long_cases(tiles))
    expected = f"{clusters} clusters of {size} blocks" if clusters > 1 else f"a cluster of {size} blocks"
    plain = next(case for case in cases if case.window == (-1, -1) and not case.chunk)
    if plain.dims == (128, 128):
        assert expected in plan_of(plain).explain(), plan_of(plain).explain()
    judge_all(cases)


ROOM = 200_000  # keys of a page table wider than any sequence is long, as engines have it for captured graphs
# How long sequences are where the bound does not tell: whether clusters take their tiles the schedule says.
LENGTHS = {
    "alike": lambda size: [1000 - i % 3 for i in range(size)],
    "alike and long": lambda size: [6000 + 64 * (i % 3) for i in range(size)],
    "one long": lambda size: [20_000, *([100] * (size - 1))],
    "one long, the last": lambda size: [*([700] * (size - 1)), 9000],
    "around blocks": lambda size: [(0, 1, 63, 64, 65, 127, 128, 129, 8191, 8193)[i % 10] for i in range(size)],
    "none": lambda size: [0] * size,
}
# Sequences for which the plan takes clusters of 16, 8, 4, 2 and 1 if lengths are alike, on every other block of the grid
# or not, and draws tiles.
BATCHES = {3: 16, 4: 8, 8: 4, 16: 2, 31: 1, 50: 1, 80: 0}


def room_cases(sequences: int, rows: str) -> Iterator[Batch]:
    for i, (kind, lengths) in enumerate(LENGTHS.items()):
        layout = ("pages of 16", "pages of 1", "packed", "pages of 64, interleaved", "pages of 16, leftpad")[i % 5]
        mask = list(MASKS)[(i + sequences) % len(MASKS)]
        yield main_dims(
            batch_of(f"{sequences} sequences, {kind}, {mask}, room for {ROOM}", rows, layout,
                     q_lengths=(ALL_ROWS[rows][0],) * sequences, k_lengths=tuple(lengths(sequences)), room_k=ROOM,
                     metadata=i % 2 == 0, seed=i, **MASKS[mask])
        )  # fmt: skip


@pytest.mark.parametrize("rows", ["1 row", "16 rows", "20 rows", "32 rows", "60 rows", "64 rows"])
@pytest.mark.parametrize("sequences", BATCHES)
def test_room_for_more_keys_than_any_sequence_has(sequences, rows):
    """The plan's bound says nothing: the kernel reads in the schedule whether clusters, whole tiles or parts are best."""
    size = min(BATCHES[sequences], MOST_OF_MANY_ROWS) if rows in MANY_ROWS else BATCHES[sequences]
    plain = next(case for case in room_cases(sequences, rows) if case.window == (-1, -1) and not case.chunk)
    expected = f"each by a cluster of {size} blocks" if size > 1 else "each by a block" if size else "drawn whole"
    assert expected in plan_of(plain).explain(), plan_of(plain).explain()
    judge_all(room_cases(sequences, rows))


def test_room_for_more_keys_changes_no_bits_of_whole_tiles():
    """One split: the same tiles as with a bound that fits, whoever takes them."""
    for rows, sequences in itertools.product(("4 rows", "32 rows"), BATCHES):
        fits = main_dims(batch_of("one split", rows, "pages of 16", q_lengths=(ROWS[rows][0],) * sequences,
                                  k_lengths=tuple(LENGTHS["around blocks"](sequences)), num_splits=1, causal=True))  # fmt: skip
        made, wide = make(fits), make(fits.but(room_k=ROOM))
        require_same(fits, f"{rows}, {sequences} sequences, room for more", attend(wide), judged_results(made))


def whole_cases(kernel) -> Iterator[Batch]:
    """The tile of few rows as a whole, from a schedule and from its index."""
    for i, rows in enumerate(FEW):
        for layout, splits in (("pages of 16", 1), ("packed", 1), ("dense", 1)):
            mask = list(MASKS)[i % len(MASKS)]
            yield batch_of(f"whole tiles, {mask}", rows, layout, num_splits=splits, forced=(("cluster", -1),), seed=i,
                           **on(kernel, **MASKS[mask]))  # fmt: skip


@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_few_rows_without_clusters(kernel):
    judge_all(whole_cases(kernel))


def chosen_cases() -> Iterator[Batch]:
    """As the plan chooses: large clusters for one long sequence, none for many, short tiles in turn."""
    shapes = {
        "one long sequence": ((20_000,), 8, 2),
        "one long sequence of one head": ((40_000,), 4, 1),
        "three of one head": ((20_000, 30_000, 500), 4, 1),
        "four of different lengths": ((9000, 1, 70, 4000), 8, 2),
        "as many tiles as SMs": ((1000,) * 16, 32, 8),
        "short tiles in turn": ((200, 1, 0, 128, 400) * 40, 32, 8),
        "more tiles than SMs, of different lengths": ((200, 1, 0, 4000, 400) * 12, 32, 8),
        "more tiles than SMs, too long for turns": ((200, 1, 0, 9000, 400) * 12, 32, 8),
        "one head": ((5000, 100), 1, 1),
    }
    for i, (why, (keys, heads_q, heads_k)) in enumerate(shapes.items()):
        for queries, causal in ((1, True), (3, True), (5, False)):
            layout = ("pages of 16", "dense", "packed")[(i + queries) % 3]
            for metadata in (False, True):
                yield main_dims(
                    batch_of(why, "1 row", layout, q_lengths=(queries,) * len(keys), k_lengths=keys, heads_q=heads_q,
                             heads_k=heads_k, causal=causal, metadata=metadata, seed=i)
                )  # fmt: skip


def test_what_the_plan_chooses():
    judge_all(chosen_cases())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", ["4 rows", "16 rows", "20 rows"])
def test_results_of_any_strides(rows, size):
    """Also rows and heads that begin at no multiple of 16 bytes; nothing beside them is written."""
    case = main_dims(batch_of(f"strides of out, cluster of {size}", rows, "dense", causal=True, sinks="fp32",
                              forced=(("cluster", size),)))  # fmt: skip
    made = make(case)
    expected = judged_results(made)
    shape = tuple(expected[0].shape)
    for name, (strides, offset) in out_strides(shape).items():
        target = PoisonedOut(shape, strides, made.q.dtype, support.DEVICE, offset)
        found = attend(made, (target.out, torch.empty_like(expected[1])))
        require_same(case, name, found, expected)
        if target.touched_outside() or target.untouched_inside():
            fail(case, f"{name}: {target.touched_outside()} written outside, {target.untouched_inside()} not written")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", ["4 rows", "20 rows"])
@pytest.mark.parametrize("layout", ["dense", "pages of 1", "pages of 16"])
def test_hidden_keys_never_count(layout, rows, size):
    """Keys before every query's window and memory that no sequence uses hold NaN or garbage: the bits stay the same."""
    case = main_dims(batch_of(f"hidden keys, cluster of {size}", rows, layout, causal=True, window=(100, 0),
                              poison="zero", forced=(("cluster", size),)))  # fmt: skip
    made = make(case)
    expected = judged_results(made)
    hidden = []
    starts = batches.offsets(case.k_lengths)
    for b, keys in enumerate(case.k_lengths):
        first_seen = max(0, keys - case.q_lengths[b] - 100)
        hidden.append(torch.arange(starts[b], starts[b] + first_seen, device=support.DEVICE))
    rows_of_memory = made.k.shape[0] * made.k.shape[1]
    unused = torch.ones(rows_of_memory, dtype=torch.bool, device=support.DEVICE)
    unused[made.slots] = False
    poisoned = torch.cat([made.slots[torch.cat(hidden)], unused.nonzero().flatten()])
    for value in (float("nan"), float("inf"), -3e4):
        for x in (made.k, made.v):
            filled = torch.full((len(poisoned), *x.shape[2:]), value, dtype=x.dtype, device=x.device)
            batches.put_rows(x, poisoned, filled)
        require_same(case, f"{value} in hidden and unused memory", attend(made), expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_reruns_have_the_same_bits(rows, size):
    case = main_dims(batch_of(f"reruns, cluster of {size}", rows, "pages of 16", causal=True, sinks="fp32",
                              forced=(("cluster", size),)))  # fmt: skip
    made = make(case)
    expected = judged_results(made)
    results = [attend(made) for _ in range(20)]
    for found in results:
        require_same(case, "again", found, expected)


@pytest.mark.parametrize("rows", ROWS)
def test_reruns_of_several_clusters_have_the_same_bits(rows):
    case = main_dims(batch_of("reruns of several clusters", rows, "pages of 16", causal=True, sinks="fp32",
                              forced=(("cluster", 4), ("num_splits", 12))))  # fmt: skip
    made = make(case)
    expected = judged_results(made)
    for _ in range(20):
        require_same(case, "again", attend(made), expected)


@pytest.mark.parametrize("size", [0, 1, 2, 8, 16])
def test_a_graph_is_replayed_with_other_lengths(size):
    case = main_dims(batch_of(f"graph, cluster of {size}", "8 rows", "pages of 16", causal=True,
                              forced=(("cluster", size),)))  # fmt: skip
    made = make(case)
    results = batches.new_results(made)
    used = made.lengths["cache_seqlens"]
    attend(made, results)  # modules are loaded outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # each starts while the one before runs
            attend(made, results)
    first = used.clone()
    for step, lengths in enumerate((first, first // 2, first.clamp(max=1), torch.zeros_like(first), first)):
        used.copy_(lengths)
        for x in results:
            x.fill_(7.0)
        graph.replay()
        replayed = [x.clone() for x in results]
        for x in results:
            x.fill_(7.0)
        require_same(case, f"replay {step}", tuple(replayed), attend(made, results))


class Chain:
    """Calls of which each reads what the one before has written, with and without a wait for the GPU in between."""

    def __init__(self, rows: str, seed: int = 0) -> None:
        self.case = main_dims(batch_of("a chain of calls", rows, "dense", q_lengths=(ROWS[rows][0],) * 4,
                                       k_lengths=(700, 64, 1, 2500), extra_k=0, seed=seed, poison="zero"))  # fmt: skip
        if self.case.dims[0] != self.case.dims[1]:
            pytest.skip("out cannot be the next call's q")
        self.made = make(self.case)
        self.start = self.made.q.clone()
        self.spare = torch.zeros_like(self.start)

    def call(self, q: torch.Tensor, out: torch.Tensor, **choices) -> None:
        """A scale so large that results stay far from each other."""
        options = {"num_splits": 0, "out": out, "softmax_scale": 2.0, **self.made.lengths}
        with force_plan(**choices) if choices else contextlib.nullcontext():
            hopper_attention.flash_attn_with_kvcache(q, self.made.k, self.made.v, **options)

    def run(self, choices: list[dict], wait: bool, between: Callable | None = None, steps: int = 24) -> torch.Tensor:
        q, out = self.start.clone(), self.spare.clone()
        found = []
        for step in range(steps):
            self.call(q, out, **choices[step % len(choices)])
            if between is not None:
                between(out, step)
            if wait:
                torch.cuda.synchronize()
            q, out = out, q
            if step % 4 == 3:
                found.append(q.clone())
        return torch.stack(found)


CHAINS = {
    **{f"clusters of {size}": [{"cluster": size}] for size in SIZES},
    "clusters of changing size": [{"cluster": size} for size in (1, 16, 2, 8, 4)],
    "parts through the workspace": [{"num_splits": 3, "cluster": -1}],
    "several clusters": [{"cluster": 4, "num_splits": 12}, {"cluster": 2, "num_splits": 14}, {"cluster": 2}],
    "clusters and parts": [{"cluster": 8}, {"num_splits": 3, "cluster": -1}, {"cluster": 1}, {"num_splits": 7}],
    "as the plan chooses": [{}],
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("rows", ["1 row", "16 rows", "32 rows"])
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_a_call_waits_for_what_the_one_before_writes(in_graph, rows, chain):
    calls = Chain(rows)
    expected = calls.run(CHAINS[chain], wait=True)
    judge_runs(calls, chain, lambda: calls.run(CHAINS[chain], wait=False), expected, in_graph)


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("chain", ["clusters of 1", "clusters of 8", "clusters and parts"])
def test_a_call_waits_for_torch_and_torch_for_the_call(chain, in_graph):
    calls = Chain("8 rows")
    used = calls.made.lengths["cache_seqlens"]
    lengths = [batches.int32(x) for x in ((700, 64, 1, 2500), (3, 2, 1, 900), (600, 1, 0, 2400))]

    def kernels(out: torch.Tensor, step: int) -> None:
        out.mul_(1.5).sub_(out.roll(1, 0), alpha=0.25)
        if step % 3 == 0:
            used.copy_(lengths[step // 3 % len(lengths)])  # a copy by the driver: lengths of the next call

    def run(wait: bool) -> torch.Tensor:
        used.copy_(lengths[0])
        return calls.run(CHAINS[chain], wait, kernels)

    expected = run(True)
    judge_runs(calls, f"{chain}, torch between", lambda: run(False), expected, in_graph)


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("chain", ["clusters of 2", "clusters and parts"])
def test_a_call_waits_for_another_stream(chain, in_graph):
    """Through events, as engines do; every second call runs on the side stream."""
    calls = Chain("4 rows")
    expected = calls.run(CHAINS[chain], wait=True)
    side = torch.cuda.Stream()

    def run() -> torch.Tensor:
        main = torch.cuda.current_stream()
        q, out = calls.start.clone(), calls.spare.clone()
        found = []
        for step in range(24):
            stream, other = (side, main) if step % 2 else (main, side)
            if step:
                stream.wait_stream(other)
            with torch.cuda.stream(stream):
                calls.call(q, out, **CHAINS[chain][step % len(CHAINS[chain])])
                q, out = out, q
                if step % 4 == 3:
                    found.append(q.clone())
        main.wait_stream(side)
        return torch.stack(found)

    judge_runs(calls, f"{chain}, two streams", run, expected, in_graph)


def judge_runs(calls: Chain, what: str, run: Callable, expected: torch.Tensor, in_graph: bool) -> None:
    """Several runs, or several replays of one, against the results with a wait after every call."""
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
    for _ in range(4):
        if in_graph:
            captured.zero_()
            graph.replay()
        found = captured if in_graph else run()
        torch.cuda.synchronize()
        if not same_bits(found, expected):
            fail(calls.case, f"{what}: results differ from those with a wait after every call")


@pytest.mark.parametrize("rows", ["4 rows", "32 rows"])
def test_a_call_reads_keys_that_the_one_before_wrote(rows):
    """Out of a prefill call are the values, then the keys of calls of few queries, then memory for a later out."""
    case = main_dims(batch_of("keys from a call", rows, "dense", poison="zero"))
    if case.dims[0] != case.dims[1]:
        pytest.skip("out cannot be keys")
    d, dtype = case.head_dim, support.DTYPES[case.dtype]
    generator = torch.Generator(support.DEVICE).manual_seed(1)
    queries, heads = ROWS[rows]
    long_q, first_k, first_v = (
        torch.randn(2, 300, 2, d, generator=generator, device=support.DEVICE).to(dtype) for _ in range(3)
    )
    few = torch.randn(2, queries, 2 * heads, d, generator=generator, device=support.DEVICE).to(dtype)

    def run(wait: bool) -> torch.Tensor:
        k, v, spare = first_k.clone(), first_v.clone(), torch.zeros_like(first_k)
        outs = torch.zeros(12, *few.shape, dtype=dtype, device=support.DEVICE)
        for step, out in enumerate(outs):
            with force_plan(cluster=SIZES[step % len(SIZES)]):
                hopper_attention.flash_attn_func(few, k, v, softmax_scale=1.0, num_splits=0, out=out)
            if wait:
                torch.cuda.synchronize()
            hopper_attention.flash_attn_func(long_q, k, v, softmax_scale=1.0, causal=True, out=spare)
            if wait:
                torch.cuda.synchronize()
            k, v, spare = v, spare, k
        return outs

    expected = run(True)
    for _ in range(3):
        if not same_bits(run(False), expected):
            fail(case, "results differ from those with a wait after every call")


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("layout", ["dense", "pages of 1", "pages of 16"])
def test_appended_keys_arrive_before_they_are_read(layout, size):
    """A decode loop without a wait: each call appends the keys that the next one reads, and overwrites none too soon."""
    steps = 16
    case = main_dims(batch_of(f"append, cluster of {size}", "4 rows", layout, k_lengths=tuple(n + steps for n in KEYS),
                              call="cache", dense_q=True, poison="zero", forced=(("cluster", size),)))  # fmt: skip
    made = make(case.but(extra_k=0))
    kept = made.k.clone(), made.v.clone()
    generator = torch.Generator(support.DEVICE).manual_seed(2)
    shape = (steps, len(KEYS), 1, case.heads_k)
    new_k = torch.randn(*shape, case.dims[0], generator=generator, device=support.DEVICE).to(made.k.dtype)
    new_v = torch.randn(*shape, case.dims[1], generator=generator, device=support.DEVICE).to(made.v.dtype)

    def run(wait: bool) -> tuple[torch.Tensor, ...]:
        for x, y in zip((made.k, made.v), kept, strict=True):
            x.copy_(y)
        used = batches.int32(list(KEYS))
        outs = []
        for step in range(steps):
            outs.append(attend(made, cache_seqlens=used, k=new_k[step], v=new_v[step])[0])
            used = used + 1
            if wait:
                torch.cuda.synchronize()
        return torch.stack(outs), made.k.clone(), made.v.clone()

    expected = run(True)
    for _ in range(3):
        for name, found, wanted in zip(("out", "k", "v"), run(False), expected, strict=True):
            if not same_bits(found, wanted):
                fail(case, f"{name} differs from that with a wait after every call")


def test_what_cannot_be_shared_is_refused():
    case = main_dims(batch_of("forced", "4 rows", "dense"))
    for changes, forced in (
        ({"num_splits": 1}, 2),
        ({"num_splits": 1}, 16),
        ({"q_lengths": (9,) * 67, "k_lengths": (70,) * 67}, 16),  # 36 rows; not every tile of 32 would have an SM
        ({}, 3),
        ({}, 32),
    ):
        made = make(case.but(forced=(("cluster", forced),), **changes))
        with pytest.raises(ValueError, match="^cluster: "):
            attend(made)
    judged_results(make(case.but(forced=(("cluster", 1),), num_splits=1)))
