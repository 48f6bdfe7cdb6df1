"""What check_metadata says of scheduler metadata: whether a schedule is one, and of these numbers of queries."""

from __future__ import annotations

from typing import Any

MOST_TILE_QUERIES = 256  # at least as many as a tile of any kernel holds
PLACES_BITS = 26  # of the first fact; above them it says whether tiles are to be cut
EVEN_BIT = 30  # of the first fact: whether parts stand above the units
UNITS_BITS = 20  # then
TILES_BITS = 29  # of their sums; above them it says in which order they are taken
MOST_FEW_QUERIES = 64  # of a sequence that counts as one of few queries: kSlabRows in src/kernels/tile_geometry.h


def schedule_stride(batch: Any) -> Any:
    """Places of each array of the metadata, as in src/kernels/schedule.h; of a symbolic batch, too."""
    return (batch + 3) // 4 * 4


def first_pair(x: Any) -> tuple[int, int] | None:
    """Where a value stands twice."""
    import numpy as np

    order = np.argsort(x, kind="stable")
    equal = x[order[1:]] == x[order[:-1]]
    if not equal.any():
        return None
    i = int(equal.argmax())
    return int(order[i]), int(order[i + 1])


def check_schedule(found: Any, on_gpu: bool, rows: Any, queries: Any) -> None:
    """Scheduler metadata as src/kernels/schedule.h lays it out: a counter, then arrays of `stride` places: the sequence at
    each place, tiles and units of work of all places up to it, and facts. rows: queries of each sequence without
    seqused_q, which schedules do not know; queries: those that count.
    """
    batch = len(rows)
    stride = schedule_stride(batch)
    size = 1 + 4 * stride
    if len(found) < size:
        raise ValueError(
            f"scheduler_metadata: must have at least {size} elements for {batch} sequences, found {len(found)}"
        )
    if not found[:size].any() and not on_gpu:
        return  # what get_scheduler_metadata gives for CPU tensors, whose calls need no schedule
    order, tiles, units, facts = (found[1 + i * stride :][:stride] for i in range(4))
    order, tiles, units = order[:batch], tiles[:batch] % 2**TILES_BITS, units[:batch]
    counters = {0: found[0]}
    if batch > 0:
        prefill, counters[size - stride + 3] = int(facts[0]) % 2**PLACES_BITS, facts[3]
        if not 0 <= prefill <= batch:
            raise ValueError(f"scheduler_metadata: {prefill} places are of prefill, but there are {batch}")
        if int(facts[0]) >> EVEN_BIT & 1:
            units = units % 2**UNITS_BITS
    for place, drawn in counters.items():
        if drawn != 0:
            raise ValueError(
                f"scheduler_metadata: the counter of drawn items, element {place}, must be 0 between calls, found {drawn}"
            )
    outside = (order < 0) | (order >= batch)
    if outside.any():
        place = int(outside.argmax())
        raise ValueError(f"scheduler_metadata: place {place} has sequence {order[place]}, but there are {batch}")
    if (pair := first_pair(order)) is not None:
        raise ValueError(f"scheduler_metadata: places {pair[0]} and {pair[1]} both have sequence {order[pair[0]]}")
    for what, sums in (("tiles", tiles), ("units", units)):
        before = sums_before(sums)
        less = sums < before
        if less.any():
            place = int(less.argmax())
            raise ValueError(
                f"scheduler_metadata: the sum of {what} decreases from {before[place]} to {sums[place]} at place {place}"
            )
        here = sums - before
        wrong = (here == 0) & (queries[order] > 0) | (here > 0) & (rows[order] == 0)
        if wrong.any():
            place = int(wrong.argmax())
            b = order[place]
            raise ValueError(
                f"scheduler_metadata: place {place} has {here[place]} {what}, but its sequence, {b}, has {rows[b]} queries"
            )
    if batch > 0:
        check_tiles(tiles - sums_before(tiles), order, rows, queries, int(prefill))


def check_tiles(tiles: Any, order: Any, rows: Any, queries: Any, prefill: int) -> None:
    """The places of a schedule have the tiles of its sequences' queries: those of few queries, behind `prefill` places,
    one each, all others as many as tiles of one size that hold them. rows, queries: as in check_schedule().
    """
    import numpy as np

    first, few = order[:prefill], order[prefill:]
    if len(first) and len(few) and queries[few].max() >= rows[first].min():
        many, other = few[queries[few].argmax()], first[rows[first].argmin()]
        raise ValueError(
            f"scheduler_metadata: was made for other lengths: sequence {many} with {queries[many]} queries is among those "
            f"of few queries, sequence {other} with {rows[other]} is not"
        )
    if (tiles[prefill:] > 1).any():
        place = prefill + int((tiles[prefill:] > 1).argmax())
        raise ValueError(
            f"scheduler_metadata: was made for other lengths: place {place} has {tiles[place]} tiles, but its sequence, "
            f"{order[place]}, is among those of few queries, which have one"
        )
    if len(few) and queries[few].max() > MOST_FEW_QUERIES:
        many = few[queries[few].argmax()]
        raise ValueError(
            f"scheduler_metadata: was made for other lengths: sequence {many} is among those of few queries, at most "
            f"{MOST_FEW_QUERIES}, but has {queries[many]}"
        )
    if prefill == 0:
        return
    size = np.arange(1, MOST_TILE_QUERIES + 1)[:, None]
    fits = (-(-queries[first] // size) <= tiles[:prefill]) & (tiles[:prefill] <= -(-rows[first] // size))
    if not fits.all(axis=1).any():
        best = int(fits.sum(axis=1).argmax())
        place = int((~fits[best]).argmax())
        raise ValueError(
            f"scheduler_metadata: was made for other lengths: place {place} has {tiles[place]} tiles, but its sequence, "
            f"{order[place]}, has {rows[order[place]]} queries, and tiles of {best + 1} queries hold those of most others"
        )


def sums_before(sums: Any) -> Any:
    """Running sums without the element itself."""
    import numpy as np

    return np.concatenate(([0], sums[:-1]))[: len(sums)]
