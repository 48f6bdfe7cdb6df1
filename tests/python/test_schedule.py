"""The plain model of scheduler metadata says what is promised of a schedule; the kernel is held against it on the GPU."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

import schedule_model
from schedule_model import Mask, Shape, Shapes

MASKS = {
    "none": Mask(),
    "causal": Mask(right=0),
    "window": Mask(5, 3),
    "causal window of one key": Mask(0, 0),
    "left window": Mask(left=7),
    "right window": Mask(right=4),
    "chunk": Mask(chunk=6),
    "causal chunk": Mask(right=0, chunk=10),
    "chunk of one key": Mask(chunk=1),
    "chunk and window": Mask(4, 6, 9),
}
SMALL = Shapes(Shape(6, 5), Shape(2, 4))
SMALL_FIXED = Shapes(Shape(6, 5), Shape(2, 4), whole_keys=8)
SMALL_WITH_ENDS = Shapes(Shape(6, 5, ends=3), Shape(2, 4))


def sees(mask: Mask, queries: int, keys: int) -> np.ndarray:
    """(queries, keys) bool, pair by pair as docs say: query i has position i + keys - queries."""
    found = np.zeros((queries, keys), dtype=bool)
    for i, key in itertools.product(range(queries), range(keys)):
        position = i + keys - queries
        found[i, key] = (
            (mask.left < 0 or position - key <= mask.left)
            and (mask.right < 0 or key - position <= mask.right)
            and (mask.chunk == 0 or position // mask.chunk == key // mask.chunk)
        )
    return found


def blocks_seen(mask: Mask, queries: int, keys: int, rows: range, block: int) -> list[range]:
    """Key blocks from the first to the last key that some row sees."""
    columns = np.flatnonzero(sees(mask, queries, keys)[rows.start : rows.stop].any(0))
    if not len(columns):
        return []
    first, end = int(columns[0]), int(columns[-1]) + 1
    return [range(start, min(start + block, end)) for start in range(first, end, block)]


def tiles_of(queries: int, shapes: Shapes) -> tuple[Shape, list[range]]:
    shape = shapes.decode if queries <= shapes.decode.queries else shapes.prefill
    return shape, [range(i, min(i + shape.queries, queries)) for i in range(0, queries, shape.queries)]


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_blocks_of_a_tile_are_those_of_the_mask(mask):
    for queries, keys in itertools.product((1, 2, 3, 7, 12, 13, 20), (0, 1, 4, 5, 6, 11, 24)):
        for shapes in (SMALL, SMALL_FIXED):
            shape, tiles = tiles_of(queries, shapes)
            for rows in tiles:
                count = schedule_model.blocks_of_tile(mask, queries, keys, rows.start, rows.stop - 1, shape.keys)
                assert count == len(blocks_seen(mask, queries, keys, rows, shape.keys)), (queries, keys, rows)


@pytest.mark.parametrize("chunk_units", (1, 2, 3, 7, 1000))
@pytest.mark.parametrize("shapes", (SMALL, SMALL_FIXED, SMALL_WITH_ENDS), ids=["", "batch_invariant", "ends"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_every_pair_of_blocks_is_taken_once(mask, shapes, chunk_units):
    """Whichever way the list of units is cut; and each pair of a query and a key that it sees lies in one of them."""
    r = random.Random(chunk_units)
    lengths = [(r.choice((0, 1, 2, 3, 7, 20)), r.choice((0, 1, 5, 11, 24))) for _ in range(9)]
    work = schedule_model.work_of(*zip(*lengths, strict=True), mask, shapes)

    def blocks(sequence: int, tile: int) -> list[range]:
        queries, keys = lengths[sequence]
        shape, tiles = tiles_of(queries, shapes)
        return blocks_seen(mask, queries, keys, tiles[tile], shape.keys)

    taken = [np.zeros(pair, dtype=np.int64) for pair in lengths]
    chunks = []
    for part in schedule_model.parts(work, lambda b, tile: len(blocks(b, tile)), chunk_units):
        rows = tiles_of(lengths[part.sequence][0], shapes)[1][part.tile]
        for block in blocks(part.sequence, part.tile)[part.begin : part.end]:
            taken[part.sequence][rows.start : rows.stop, block.start : block.stop] += 1
        chunks.append(part.chunk)
    assert chunks == sorted(chunks)
    for (queries, keys), count in zip(lengths, taken, strict=True):
        assert count.max(initial=0) <= 1
        assert bool((count[sees(mask, queries, keys)] == 1).all()), (queries, keys)


def test_cuts_are_equal_within_one_block():
    work = schedule_model.work_of([1, 1, 13, 2], [400, 37, 90, 0], Mask(right=0), SMALL)

    def blocks(sequence: int, tile: int) -> int:
        return int(work.units[sequence]) - (0 if work.decode[sequence] else 2 * (2 - tile))

    for chunk_units in (1, 2, 7, 30):
        found = list(schedule_model.parts(work, blocks, chunk_units))
        for (sequence, tile), group in itertools.groupby(found, key=lambda p: (p.sequence, p.tile)):
            whole = [p.end - p.begin for p in group][1:-1]  # the first and the last chunk may hold other tiles, too
            assert max(whole, default=0) - min(whole, default=0) <= 1, (chunk_units, sequence, tile)


def test_fixed_cuts_follow_from_the_sequence_alone():
    """batch_invariant: a unit is a split, as many of a sequence as it has in a batch of its own."""
    lengths = [(1, 7), (2, 8), (1, 9), (2, 40), (20, 300), (0, 50), (1, 16), (1, 17), (1, 257), (2, 1000)]
    together = schedule_model.work_of(*zip(*lengths, strict=True), Mask(right=0), SMALL_FIXED)
    assert together.units.tolist() == [1, 1, 6, 20, 1, 1, 8, 10, 33, 125]
    assert together.tiles.tolist() == [1, 1, 1, 1, 4, 0, 1, 1, 1, 1]
    for b, (queries, keys) in enumerate(lengths):
        alone = schedule_model.work_of([queries], [keys], Mask(right=0), SMALL_FIXED)
        assert (alone.tiles[0], alone.units[0]) == (together.tiles[b], together.units[b])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shapes", (SMALL, SMALL_FIXED), ids=["", "batch_invariant"])
def test_every_sequence_has_one_place_the_longest_first(shapes, seed):
    r = random.Random(seed)
    size = r.choice((1, 3, 4, 50, 600))
    queries = [r.choice((0, 1, 1, 2, 3, 30, 200)) for _ in range(size)]
    keys = [r.choice((0, 1, 30, r.randint(0, 3000), r.randint(0, 200_000))) for _ in range(size)]
    work = schedule_model.work_of(queries, keys, MASKS[r.choice(list(MASKS))], shapes)
    numbers = schedule_model.metadata(work)
    stride = -(-size // 4) * 4
    assert numbers.dtype == np.int32 and numbers.shape == (1 + 4 * stride,) and numbers[0] == 0
    order, tiles, units, facts = numbers[1:].reshape(4, stride).tolist()
    turned = [word >> schedule_model.TURNED_BIT for word in tiles]
    tiles = [word % 2**schedule_model.TURNED_BIT for word in tiles]
    assert sorted(order[:size]) == list(range(size)) and set(order[size:]) <= {0}

    prefill = sum(n > shapes.decode.queries for n in queries)
    assert facts[0] == prefill and not any(facts[3:])
    assert not any(turned[prefill:]) and not any(turned[i] for i in range(prefill - 1, -1, -2))
    classes = (order[:prefill], order[prefill:size])
    assert all(queries[b] > shapes.decode.queries for b in classes[0])
    assert all(queries[b] <= shapes.decode.queries for b in classes[1])
    for places, most in zip(classes, facts[1:3], strict=True):
        of_tile = [int(work.blocks[b]) if queries[b] else 0 for b in places]
        assert max(of_tile, default=0) == most
        for (a, first), (b, second) in itertools.pairwise(zip(places, of_tile, strict=True)):
            assert 8 * second < 9 * max(1, first) or first >= 1 << 18, "a longer one comes later by more than an eighth"
            assert first != second or a < b, "equals do not keep their order"

    before = [0, 0]
    for place, b in enumerate(order[:size]):
        shape, rows = tiles_of(queries[b], shapes)
        before[0] += len(rows)
        before[1] += len(rows) * int(work.units[b])
        assert [tiles[place], units[place]] == before
    assert {(t, u) for t, u in zip(tiles[size:], units[size:], strict=True)} <= {tuple(before)}


def test_units_are_the_blocks_of_a_full_last_tile():
    """Up to a slab: tiles of several slabs are filled from the end, slab by slab."""
    for mask, (queries, keys) in itertools.product(MASKS.values(), ((1, 50), (2, 9), (13, 40), (20, 5), (7, 0))):
        work = schedule_model.work_of([queries], [keys], mask, SMALL)
        shape, tiles = tiles_of(queries, SMALL)
        assert work.tiles[0] == len(tiles)
        last = range(max(0, queries - shape.queries), queries)
        least = schedule_model.LEAST_UNITS_OF_FEW_QUERIES if work.decode[0] else 1
        seen = len(blocks_seen(mask, queries, keys, last, shape.keys))
        assert work.units[0] == work.blocks[0] == max(least, seen)
        assert schedule_model.work_of([queries], [keys], mask, SMALL_FIXED).blocks[0] == max(1, seen)


def test_tiles_are_read_from_the_plan():
    """Packed heads share the rows: 4 of them leave 48 queries of 192 rows; tiles of 32 rows are for calls in which bits may
    depend on the batch.
    """
    assert schedule_model.shapes_of(128, 128, 8, 2, False) == Shapes(Shape(48, 80, ends=3), Shape(8, 128))
    fixed = schedule_model.shapes_of(128, 128, 8, 2, True)
    assert fixed.decode == Shape(16, 128) and fixed.whole_keys % 128 == 0 and fixed.whole_keys > 0
    assert schedule_model.shapes_of(64, 64, 8, 8, False) == Shapes(Shape(192, 128, ends=1), Shape(16, 128))
    assert schedule_model.shapes_of(192, 128, 128, 1, False).decode == Shape(1, 64)
    assert schedule_model.shapes_of(96, 96, 8, 8, False).decode == Shape(32, 128)


def test_random_steps_of_the_gpu_test_are_countable_and_varied():
    pytest.importorskip("torch")
    from gpu import test_schedule as on_gpu

    seen = set()
    for size in on_gpu.SIZES:
        for number in range(on_gpu.STEPS if size <= 4096 else 3):
            step = on_gpu.random_step(size, number)
            stride = -(-size // 4) * 4
            cuts = 1 << schedule_model.PLACES_BITS
            order, _, _, facts = on_gpu.of_model(step, cuts)[1:].reshape(4, stride)
            prefill = facts[0] % cuts
            seen |= {("invariant", step.batch_invariant), ("leftpad", step.leftpad is not None), type(step.new)}
            seen |= {step.dims, step.heads, ("prefill", prefill > 0), ("decode", prefill < size)}
            seen.add(("even", bool(facts[0] >> schedule_model.EVEN_BIT)))
            seen |= {("keys", min(2, int(k))) for k in step.k_lengths()[:50]}
            if step.batch_invariant:
                seen.add(("cut", facts[2] > 1))
    flags = {(name, x) for name in ("invariant", "leftpad", "prefill", "decode", "cut", "even") for x in (False, True)}
    assert seen == flags | {int, tuple, *on_gpu.DIMS, *on_gpu.HEADS, ("keys", 0), ("keys", 1), ("keys", 2)}


def test_a_difference_is_named():
    pytest.importorskip("torch")
    from gpu import test_schedule as on_gpu

    step = on_gpu.random_step(5, 0)
    right = on_gpu.of_model(step, 0)
    wrong = right.copy()
    wrong[1 + 8 + 3] += 1
    assert on_gpu.difference(step, right, right) == ""
    assert on_gpu.difference(step, wrong, right).startswith("tiles until, place 3: ")
