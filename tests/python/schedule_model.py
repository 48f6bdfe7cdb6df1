"""Scheduler metadata as plain numpy, from lengths and a mask alone: what the kernel that makes them is held against.

Nothing here is computed by the library. Only how large its tiles are is asked of it (`shapes_of`), which is a choice and
no result. What a sequence's place, a unit and the layout are say `schedule.h`,
`sequence_work.h` and `schedule_layout.h` in src/kernels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

ARRAYS = ("order", "tiles until", "units until", "facts")  # behind the counter, each of `stride` numbers
STEPS_OF_A_DOUBLING = 8
PLACES_BITS = 26  # of the first fact
CUTS_OF_ALL = 0b11 << PLACES_BITS + 2  # whether cutting pays in a kernel that takes all places
LAST_STEP = 127  # all longer sequences are alike


@dataclass(frozen=True)
class Mask:
    """left, right: keys on either side of a query's own position, -1 is unlimited; causal is right = 0. chunk: 0 is none."""

    left: int = -1
    right: int = -1
    chunk: int = 0

    def first_key(self, position: Any) -> Any:
        """The first key that a query at that position may see, if it sees any."""
        first = np.zeros_like(position)
        if self.left >= 0:
            first = np.maximum(first, position - self.left)
        if self.chunk:
            first = np.maximum(first, position // self.chunk * self.chunk)
        return first

    def end_key(self, position: Any, keys: Any) -> Any:
        """The key behind the last one that it may see; at most 0 if it sees none."""
        end = np.asarray(keys)
        if self.right >= 0:
            end = np.minimum(end, position + self.right + 1)
        if self.chunk:
            end = np.minimum(end, (position // self.chunk + 1) * self.chunk)
        return end


@dataclass(frozen=True)
class Shape:
    queries: int  # of a tile
    keys: int  # of a block
    ends: int = 0  # units for what a tile takes beside its blocks


@dataclass(frozen=True)
class Shapes:
    """The tile for many queries and the one for few; whole_keys: of the longest tile of few queries in one part, if parts
    do not depend on the batch.
    """

    prefill: Shape
    decode: Shape
    whole_keys: int = 0


def blocks_of_tile(mask: Mask, queries: Any, keys: Any, first_row: Any, last_row: Any, block: int) -> Any:
    """Key blocks that the tile of these rows visits. The first begins at the first key that any of its rows sees."""
    last_position = last_row + keys - queries  # the last query is at the last key
    begin = mask.first_key(first_row + keys - queries)
    return np.maximum(0, -(-(mask.end_key(last_position, keys) - begin) // block))


@dataclass(frozen=True)
class Work:
    """Of each sequence: its queries, whether these are few, its tiles, the units of the last one and of the first, at
    least 1, and the blocks of the last one, however many parts it has.
    """

    queries: np.ndarray
    decode: np.ndarray
    tiles: np.ndarray
    units: np.ndarray
    least: np.ndarray
    blocks: np.ndarray

    def tile_units(self, sequence: int) -> list[int]:
        """Of each tile: they rise evenly, so that two tiles as far from both ends have as many as these two."""
        count, least, units = (int(x[sequence]) for x in (self.tiles, self.least, self.units))
        half = [least + (units - least) * m // (count - 1) for m in range(count // 2)]
        middle = [least + (units - least) * (count // 2) // max(count - 1, 1)] if count % 2 else []
        if count == 1:
            middle = [units]
        return half + middle + [units + least - u for u in reversed(half)]

    def sums(self) -> np.ndarray:
        """Units of each sequence."""
        return np.asarray([sum(self.tile_units(b)) for b in range(len(self.tiles))], dtype=np.int64)

    def list_order(self, sequence: int) -> list[int]:
        """Its tiles in the order of the list of units: where they rise, each before the one as far from the other end."""
        count = int(self.tiles[sequence])
        if self.least[sequence] == self.units[sequence]:
            return list(range(count))
        return [m for low in range((count + 1) // 2) for m in dict.fromkeys((count - 1 - low, low))]

    def step(self) -> np.ndarray:
        """Blocks to an eighth; 0 without queries."""
        halvings = np.maximum(0, np.floor(np.log2(self.blocks)).astype(np.int64) - 3)
        step = np.minimum(LAST_STEP, STEPS_OF_A_DOUBLING * halvings + (self.blocks >> halvings))
        return np.where(self.tiles == 0, 0, step)

    def order(self) -> np.ndarray:
        """Sequence at each place: those with many queries first, in each class the longest, equals as they come."""
        return np.lexsort((-self.step(), self.decode))


LEAST_UNITS_OF_FEW_QUERIES = 4  # of a tile


def fixed_parts(blocks: np.ndarray, whole: int) -> np.ndarray:
    """Parts of tiles that follow from their blocks: of a quarter of `whole`, at most 32 up to 32 times that, then of that."""
    cut = np.maximum(np.minimum(-(-4 * blocks // whole), 32), -(-blocks // whole))
    return np.where(blocks <= whole, 1, cut)


def work_of(q_lengths: Any, k_lengths: Any, mask: Mask, shapes: Shapes) -> Work:
    queries, keys = (np.asarray(x, dtype=np.int64) for x in (q_lengths, k_lengths))
    decode = queries <= shapes.decode.queries

    def of(shape: Shape, few: bool) -> tuple[np.ndarray, ...]:
        tiles = -(-queries // shape.queries)
        units = blocks_of_tile(
            mask, queries, keys, np.maximum(queries - shape.queries, 0), queries - 1, shape.keys
        )  # the last tile
        first = blocks = units
        if shapes.whole_keys:
            first = units = fixed_parts(units, shapes.whole_keys // shape.keys) if few else np.ones_like(units)
        elif mask.left < 0 and mask.chunk == 0:
            rows = queries - np.maximum(tiles - 1, 0) * shape.queries
            first = blocks_of_tile(mask, queries, keys, np.zeros_like(rows), rows - 1, shape.keys)
        least = LEAST_UNITS_OF_FEW_QUERIES if few and not shapes.whole_keys else 1
        ends = 0 if few or shapes.whole_keys else shape.ends
        units, blocks = (np.where(queries == 0, least, np.maximum(least, x) + ends) for x in (units, blocks))
        first = np.maximum(first, 1) + ends
        return tiles, units, np.where(tiles <= 1, units, np.minimum(first, units)), blocks

    of_few, of_many = of(shapes.decode, True), of(shapes.prefill, False)
    return Work(queries, decode, *(np.where(decode, a, b) for a, b in zip(of_few, of_many, strict=True)))


MOST_EVEN_PLACES = 512  # of a schedule that one thread block makes
MOST_EVEN_UNITS = 15 * 2**14  # of a tile
PARTS_BIT = 20  # from which on stand parts, above units
LEAST_UNITS = 2  # of a part
UNITS_OF_AN_ITEM = 4  # as long as one item more takes
UNITS_OF_CUTTING_ALONE = 10  # as long as merging takes
UNITS_OF_MERGING, UNITS_OF_PART_EACH = 3, 9  # by another kernel, and what a part for each block takes more
UNITS_OF_CHUNKS = 16  # what chunks of equal work take, beside all units as tiles of the kernel have them
UNITS_OF_WIDE_CHUNKS = 22  # the same with more than 192 columns of v
UNITS_OF_CHUNKS_OF_FEW = 20  # what they take beside a block's share of all, where each sequence is one tile
SIZES = 8  # of parts, which are tried
EVEN_BIT = PLACES_BITS + 4  # of the first fact
ONE_EACH = 1 << 31  # the sign of it: sequences of many queries are one tile each in a kernel for few
TURNED_BIT = 29  # of the sums of tiles: where places of the class count; the next one: where all do
BLOCKS_OF_MANY = 132  # thread blocks of a kernel for many queries


@dataclass(frozen=True)
class Call:
    """For which a schedule cuts tiles: its groups of heads, the thread blocks of a call of few queries and the queries that
    one of its tiles holds at most, and both of the kernel that cuts those of many; 0 blocks: there is none. `larger`:
    than its tiles are those that metadata count. `chunks`: units that chunks of equal work take beside a share of all.
    """

    blocks: int = 0
    head_groups: int = 1
    queries_of_one: int = 0
    many_blocks: int = 0
    many_queries: int = 1
    larger: Fraction = Fraction(3, 2)
    chunks: int = UNITS_OF_CHUNKS

    def has_one_tile_each(self, work: Work) -> bool:
        return bool((work.queries <= self.queries_of_one).all())


def parts_of(work: Work, call: Call, size: int) -> np.ndarray:
    """Parts of each sequence if none has more units than that; its tiles are all in as many as the longest."""
    tiles = np.where(work.decode, work.tiles, -(-work.queries // call.many_queries))
    return tiles * -(-work.blocks // size)


def stand_in_front(work: Work, size: int) -> np.ndarray:
    """Sequences whose parts stand up to those of the last tile that is cut, or nearly as long: prompts stand first."""
    nearly_cut = (8 * work.blocks > 7 * size) & (work.tiles > 0)
    return nearly_cut | (~work.decode & (nearly_cut & work.decode).any() & (work.tiles > 0))


def units_of_tiles(work: Work, call: Call) -> np.ndarray:
    """Of all tiles and head groups of each sequence, as if all had as many as the first and the last in the mean."""
    return parts_of(work, call, MOST_EVEN_UNITS) * ((work.blocks + work.least + 1) // 2) * call.head_groups


def cost_of_parts(work: Work, call: Call, blocks: int, size: int) -> int:
    """When `blocks` are done that take a part each and then draw, and all is merged. Those without a part in front draw what
    follows alone until these are done; the one that draws is ahead of the others by three eighths of what it draws.
    """
    counts = parts_of(work, call, size) * call.head_groups
    front, units = stand_in_front(work, size), units_of_tiles(work, call)
    end = parts_until = units_until = 0
    for b in work.order():
        if counts[b] == 0:
            continue
        parts_until, units_until = parts_until + int(counts[b]), units_until + int(units[b])
        length = -(-int(work.blocks[b]) // -(-int(work.blocks[b]) // size))
        start = 0
        if parts_until > blocks:
            before = units_until - length
            start = max(0, before) // blocks
            if counts[front].sum() < blocks:
                behind = max(0, before - int(units[front].sum()))
                start = min(start, behind // (blocks - int(counts[front].sum())))
            start = max(0, start - 3 * length // 8)
        end = max(end, start + length)
    cut = int(counts[work.blocks > size].sum())
    return end + (UNITS_OF_MERGING + UNITS_OF_PART_EACH * cut // blocks if cut else 0)


def size_of_even_parts(work: Work, call: Call) -> int:
    """The most units of a part where tiles are cut each by itself; 0 where they are not.

    Blocks take the parts of cut tiles first, one each at most. Without prompts parts are not much longer than equal shares
    of all, and there is nothing else, or tiles that stay whole are short. Where that cannot be, or sequences have many
    queries, it is the size with which all are done and merged first, if that is sooner than whole tiles and chunks of equal
    work are, and no fresh prompt is cut.
    """
    one_tile_each = call.has_one_tile_each(work)
    blocks = call.blocks if one_tile_each else call.many_blocks
    exists = work.tiles > 0
    units = int(units_of_tiles(work, call).sum())
    most = int(work.blocks[exists].max(initial=0))
    counted = int(work.sums().sum())
    if blocks == 0 or len(exists) > MOST_EVEN_PLACES or units == 0 or most > MOST_EVEN_UNITS:
        return 0
    if counted >= 1 << PARTS_BIT:
        return 0
    share = max(LEAST_UNITS, -(-units // blocks))

    def fit(size: int) -> bool:
        parts = parts_of(work, call, size)
        in_front = int(parts[stand_in_front(work, size)].sum()) * call.head_groups
        return 0 < in_front <= blocks and parts.sum() < 1 << (31 - PARTS_BIT)

    def one_each(size: int) -> bool:
        return int(parts_of(work, call, size).sum()) * call.head_groups <= blocks

    if work.decode.all():
        for size in (share + i * (1 + share // 64) for i in range(SIZES)):
            longest_whole = int(work.blocks[exists & (work.blocks <= size)].max(initial=0))
            short = longest_whole <= min(UNITS_OF_CUTTING_ALONE, share // 2)
            if size <= share + UNITS_OF_AN_ITEM and fit(size) and (short or one_each(size)):
                return size
    found = []
    for size in [max(LEAST_UNITS, 3 * share // 4) + i * (1 + share // 5) for i in range(SIZES - 1)] + [most]:
        cut = exists & (work.blocks > size)
        if not fit(size) or (cut & (2 * work.least < work.blocks)).any():
            continue
        cost = cost_of_parts(work, call, blocks, size)
        pays = cost <= max(most, share)
        if one_tile_each:
            pays &= bool(cut.any()) and cost <= share + UNITS_OF_CHUNKS_OF_FEW
        else:
            pays |= one_each(size) and not cut.any()
            pays &= blocks * (cost - call.chunks) <= call.larger * counted * call.head_groups
        if pays:
            found.append((cost, -len(found), size))  # of equals the last
    return min(found, default=(0, 0, 0))[2]


def turned_bits(work: Work, call: Call) -> np.ndarray:
    """(places,): of every other place of prefill, the last one not among them, whether the places behind it have as much
    work as thread blocks wait, half of the time of its longest tile each, if they end with that: twice the mean. Of large
    batches it is said of all those.
    """
    order = work.order()
    prefill = int(np.sum(~work.decode))
    candidates = (np.arange(len(order)) < prefill) & ((prefill - np.arange(len(order))) % 2 == 0)
    if len(order) > MOST_EVEN_PLACES:
        return candidates * (0b11 << TURNED_BIT)
    units = work.sums()
    blocks = np.where(work.units == work.blocks, units, work.tiles * work.blocks)  # in whatever parts
    until = np.cumsum(units[order])
    to_fill = BLOCKS_OF_MANY * units[order]
    bits = np.zeros(len(order), dtype=np.int64)
    for bit, counted in ((TURNED_BIT, ~work.decode), (TURNED_BIT + 1, np.full(len(order), True))):
        behind = blocks[counted].sum() - until
        bits += (candidates & (behind * work.tiles[order] * call.head_groups >= to_fill)).astype(np.int64) << bit
    return bits


def metadata(work: Work, call: Call = Call(), cuts: int = 0) -> np.ndarray:
    """(1 + 4 * stride,) int32: the counter at 0, then ARRAYS. cuts: whether it pays to cut tiles, the upper bits of the
    first fact, a choice: see `decisions`.
    """
    count = len(work.tiles)
    stride = -(-count // 4) * 4
    order = work.order()
    found = np.zeros((4, stride), dtype=np.int64)
    found[0, :count] = order
    units = work.sums()
    may_pay = cuts & CUTS_OF_ALL or not call.has_one_tile_each(work)
    size = size_of_even_parts(work, call) if may_pay else 0
    if size > 0:
        units = units + (parts_of(work, call, size) << PARTS_BIT)
    for row, numbers in ((1, work.tiles), (2, units)):
        found[row, :count] = np.cumsum(numbers[order])
        found[row, count:] = numbers.sum()
    found[1, :count] += turned_bits(work, call)
    found[3, 0] = np.sum(~work.decode) + cuts
    for place, chosen in ((1, ~work.decode), (2, work.decode)):  # blocks of the longest tile
        found[3, place] = max(work.blocks[chosen & (work.tiles > 0)], default=0)
    if size > 0:
        most_parts = -(-int(found[3, 1:3].max()) // size)
        in_front = int(parts_of(work, call, size)[stand_in_front(work, size)].sum())
        found[3, :3] += 1 << EVEN_BIT, in_front << PARTS_BIT, most_parts << PARTS_BIT
        found[3, 0] -= ONE_EACH if not work.decode.all() and call.has_one_tile_each(work) else 0
    assert found.max(initial=0) < 2**31, "more units than metadata can count"
    return np.concatenate([[0], found.ravel()]).astype(np.int32)


def decisions(found: np.ndarray) -> int:
    """What metadata say of whether it pays to cut tiles, four bits of the first fact: a choice, which the C++ tests know."""
    stride = (len(found) - 1) // len(ARRAYS)
    return int(found[1 + 3 * stride]) & 0b1111 << PLACES_BITS if stride else 0


@dataclass(frozen=True)
class Part:
    """Key blocks [begin, end) of a tile that one chunk of the list of units takes."""

    chunk: int
    sequence: int
    tile: int
    begin: int
    end: int


def parts(work: Work, blocks: Callable[[int, int], int], chunk_units: int) -> Iterator[Part]:
    """The list of units, place after place and tile after tile, in chunks of so many. A tile is cut in proportion to its
    own blocks, blocks(sequence, tile), of which it may have more or fewer than units.
    """
    before = 0
    for sequence in work.order().tolist():
        units_of = work.tile_units(sequence)
        for tile in work.list_order(sequence):
            units = units_of[tile]
            count = blocks(sequence, tile)
            for chunk in range(before // chunk_units, (before + units - 1) // chunk_units + 1):
                first = max(chunk * chunk_units - before, 0)
                last = min((chunk + 1) * chunk_units - before, units)
                yield Part(chunk, sequence, tile, first * count // units, last * count // units)
            before += units


def plan_of(dims: tuple[int, int], heads: tuple[int, int], **bounds: Any) -> tuple[Any, int]:
    """The plan of a call over pages on an H200, and the heads that share a tile: they take its rows in turn, as many of a
    K/V head's as 64 rows hold and divide them evenly.
    """
    import hopper_attention

    plan = hopper_attention.plan(
        dtype="bf16",
        head_dim=dims[0],
        head_dim_v=dims[1],
        heads_q=heads[0],
        heads_kv=heads[1],
        page_size=16,
        device="H200",
        **bounds,
    )
    ratio = heads[0] // heads[1]
    return plan, max(packed for packed in range(1, 65) if ratio % packed == 0)


# By head dims, of tiles of few queries, for which calls may have one kernel; of others 1, in that for many queries.
MIXED_ROUNDS = {(64, 64): 3, (128, 128): 5, (192, 192): 3, (256, 256): 3}


def call_of(batch: int, head_dim: int, head_dim_v: int, heads_q: int, heads_k: int) -> Call:
    """Blocks as the plan of a call of one query each says whose lengths may be long, and that of a step with a prompt, if
    both have one kernel; without such a kernel those of the one for many queries.
    """
    bounds = {"batch": batch, "max_seqlen_q": 1, "max_seqlen_k": 1 << 20, "total_q": batch, "num_splits": 0}
    plan, packed = plan_of((head_dim, head_dim_v), (heads_q, heads_k), **bounds)
    bounds = {"batch": 2, "max_seqlen_q": 100, "max_seqlen_k": 1 << 20, "total_q": 101, "num_splits": 0}
    step, _ = plan_of((head_dim, head_dim_v), (8, 1), **bounds)
    said = re.search(r"^tile: prefill (\d+) rows", "\n".join(step.reasons), re.MULTILINE)
    groups, of_one = heads_q // packed, 64 // packed
    mixed = any("one: it computes tiles of up to" in reason for reason in step.reasons) and said is not None
    few_enough = batch * groups <= MIXED_ROUNDS.get((head_dim, head_dim_v), 1) * BLOCKS_OF_MANY
    chunks = UNITS_OF_WIDE_CHUNKS if head_dim_v > 192 else UNITS_OF_CHUNKS
    if few_enough and not mixed:
        counted = shapes_of(head_dim, head_dim_v, heads_q, heads_k, False).prefill.queries
        return Call(plan.ctas, groups, of_one, BLOCKS_OF_MANY, counted, Fraction(1), chunks)
    if not few_enough:
        return Call(plan.ctas, groups, of_one, many_queries=of_one)
    return Call(plan.ctas, groups, of_one, BLOCKS_OF_MANY, of_one * (int(said[1]) // 64), Fraction(1), chunks)


# What starting and ending a tile of many queries takes, in blocks, by its rows and keys: as its costs say, no result.
UNITS_OF_ENDS = {(192, 128): 1, (192, 96): 3, (192, 80): 3, (128, 128): 2, (128, 112): 2, (128, 80): 4}


def shapes_of(head_dim: int, head_dim_v: int, heads_q: int, heads_k: int, batch_invariant: bool) -> Shapes:
    """Tiles as the plan of a call names them that may have sequences of both kinds, with softcap, so that each kind has
    a kernel.
    """
    bounds = {"batch": 200, "max_seqlen_q": 1000, "max_seqlen_k": 100_000, "total_q": 2000, "softcap": 30.0}
    plan, packed = plan_of((head_dim, head_dim_v), (heads_q, heads_k), batch_invariant=batch_invariant, **bounds)
    text = "\n".join(plan.reasons)

    def shape(pattern: str, few: bool = False) -> Shape:
        said = re.search(rf"^tile: {pattern} (\d+) rows x (\d+) keys", text, re.MULTILINE)
        assert said is not None, f"{pattern} is not in the plan:\n{text}"
        rows, keys = int(said[1]), int(said[2])
        slab = min(rows, 64)  # rows that heads share
        return Shape(slab // packed * (rows // slab), keys, 0 if few else UNITS_OF_ENDS[rows, keys])

    whole = re.search(r"^splits: those of few queries with more than (\d+) keys", text, re.MULTILINE)
    return Shapes(
        shape(r"(?:the others: )?prefill"),
        shape("sequences with few queries: decode", few=True),
        int(whole[1]) if whole and batch_invariant else 0,
    )
