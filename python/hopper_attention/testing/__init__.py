"""For tests of this package and of its users: forced plans; `testing.gates` judges the accuracy of a result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hopper_attention import _core


@contextmanager
def force_plan(
    *,
    tile: tuple[int, ...] | None = None,
    num_splits: int = 0,
    packed_heads: int = 0,
    heads_per_pass: int = 0,
    ctas: int = 0,
    cluster: int = 0,
    one_tile: bool = False,
) -> Iterator[None]:
    """Within the block, GPU calls of this thread use these choices instead of the plan's own: for bitwise comparisons.

    tile: (rows, keys) or (rows, keys, stages). num_splits, packed_heads (1 or Hq / Hk), heads_per_pass, ctas: 0 leaves
    the choice to the plan. cluster: thread blocks that share a tile of few queries, a power of 2 up to 16; -1: none do;
    where clusters share tiles of many queries 2, 3, 4 or 8; 0 leaves the choice to the plan. one_tile: no sequence has
    several tiles of 32 rows instead of a larger one. A value that a problem does not allow raises ValueError in the
    call. Nests.
    """
    choices = tuple(tile or ())
    if len(choices) not in (0, 2, 3):
        raise ValueError(f"tile: (rows, keys) or (rows, keys, stages) is needed, found {tile!r}")
    rows, keys, stages = (*choices, 0, 0, 0)[:3]
    before = _core.force_plan(
        _core.ForcedPlan(
            rows=rows,
            keys=keys,
            stages=stages,
            packed_heads=packed_heads,
            heads_per_pass=heads_per_pass,
            ctas=ctas,
            num_splits=num_splits,
            cluster=cluster,
            one_tile=one_tile,
        )
    )
    try:
        yield
    finally:
        _core.force_plan(before)
