"""Choices of the plan that must not change the result: how many tiles a block takes, in which order, which heads share
a tile. And the lengths at which a pipeline of loads can lose its phase.
"""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
from gpu import support  # noqa: E402
from gpu.support import (  # noqa: E402
    MAIN,
    Case,
    attend,
    judge_all,
    main_dims,
    make_inputs,
    require_same,
    verdict,
)

pytestmark = pytest.mark.gpu

SHAPES = [
    Case("full", 700, 500, heads_q=8, heads_k=8),
    Case("causal", 700, 700, heads_q=8, heads_k=4, causal=True),
    Case("causal, rows without keys", 700, 300, heads_q=8, heads_k=4, causal=True, sinks="fp32"),
    Case("window", 900, 900, window=(100, 20), heads_q=6, heads_k=2),
    Case("packed heads", 20, 600, batch=14, heads_q=16, heads_k=2, causal=True),
    Case("d 64", 700, 700, head_dim=64, heads_q=8, heads_k=8, causal=True, softcap=8.0),
    Case("no keys", 500, 0, heads_q=8),
]


def forced(case: Case, **choices) -> Case:
    return dataclasses.replace(case, forced=tuple(choices.items()))


@pytest.mark.parametrize("case", SHAPES, ids=lambda c: c.why)
def test_any_number_of_blocks_gives_the_same_bits(case):
    case = main_dims(case)
    tensors = make_inputs(case)
    expected = attend(case, tensors)
    assert verdict(case, tensors, *expected), case.line()
    for ctas in (1, 2, 3, 7, 31, 131, 132, 133, 100_000):
        this = forced(case, ctas=ctas)
        require_same(this, f"{ctas} blocks", attend(this, tensors), expected)


@pytest.mark.parametrize("case", SHAPES, ids=lambda c: c.why)
def test_any_order_of_heads_gives_the_same_bits(case):
    case = main_dims(case)
    tensors = make_inputs(case)
    expected = attend(case, tensors)
    for heads_per_pass in (1, 2, 3, 5, 8, 1000):
        for ctas in (0, 3):
            this = forced(case, heads_per_pass=heads_per_pass, ctas=ctas)
            require_same(this, f"{heads_per_pass} heads in a pass", attend(this, tensors), expected)


def test_what_only_steers_gives_the_same_bits():
    case = main_dims(SHAPES[1])
    tensors = make_inputs(case)
    expected = attend(case, tensors)
    for given in (
        {"sm_margin": 1},
        {"sm_margin": 100},
        {"sm_margin": 1000},
        {"pack_gqa": True},
        {"deterministic": True},
    ):
        require_same(case, str(given), attend(case, tensors, **given), expected)


@pytest.mark.parametrize("given", [{"num_splits": 0}, {"num_splits": 256}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("case", SHAPES, ids=lambda c: c.why)
def test_splits_of_a_dense_call(case, given):
    case = main_dims(case)
    tensors = make_inputs(case)
    assert verdict(case, tensors, *attend(case, tensors, **given)), f"{case.line()} {given}"


@pytest.mark.parametrize("fifths", [(1, 3), (0, 1), (4,), (1, 2, 3), range(5)], ids=str)
@pytest.mark.parametrize("queries", [1, 40, 300])
def test_a_row_of_which_a_part_is_nan_is_nan(queries, fifths):
    """Parts whose LSE is NaN must not vanish beside others, in whatever groups the combine kernel takes them."""
    case = main_dims(Case("NaN in some parts of the keys", queries, 2560, batch=1, heads_q=8, heads_k=2))
    tensors = make_inputs(case)
    for fifth in fifths:
        tensors["k"][:, 512 * fifth + 7, 0] = float("nan")
    for splits in (1, 2, 5, 20):
        out, lse = attend(case, tensors, num_splits=splits)
        assert bool(out[:, :, :4].isnan().all()), f"{splits} splits: rows of out that are not NaN"
        assert bool(lse[:, :4].isnan().all()), f"{splits} splits: rows of the LSE that are not NaN"
        assert bool(out[:, :, 4:].isfinite().all()), f"{splits} splits: the other K/V head"


@pytest.mark.parametrize("ratio", [2, 3, 5, 8, 16, 64])
def test_heads_share_a_tile_or_not(ratio):
    judge_all(
        main_dims(
            Case(f"{packed} heads share a tile, {q} queries", q, k, heads_q=2 * ratio, causal=causal, window=window,
                 sinks="fp32", forced=(("packed_heads", packed), ("ctas", ctas)))
        ).with_enough_rows()
        for packed in (1, ratio)
        for q, k in ((1, 200), (7, 100), (65, 300), (200, 130))
        for causal, window in ((False, (-1, -1)), (True, (-1, -1)), (False, (50, 10)))
        for ctas in (0, 2)
    )  # fmt: skip


@pytest.mark.parametrize("ctas", [1, 3])
@pytest.mark.parametrize("kernel", MAIN, ids=str)
def test_key_blocks_around_the_number_of_stages(kernel, ctas):
    """0 to 12 blocks of keys with full and ragged ends, several tiles for each thread block; windows cut the loop."""
    dtype, (head_dim, head_dim_v) = kernel
    tile = next(
        k.tile
        for k in hopper_attention.built_kernels()
        if (support.short(k.dtype), (k.tile.head_dim, k.tile.head_dim_v)) == kernel
    )
    lengths = sorted({max(0, blocks * tile.keys + extra) for blocks in range(13) for extra in (-1, 0, 1)})
    judge_all(
        Case(f"{length} keys", rows, length, batch=1, heads_q=h, heads_k=1, dtype=dtype, head_dim=head_dim,
             head_dim_v=head_dim_v, causal=causal, window=window, forced=(("ctas", ctas),))
        for length in lengths
        for rows, h in ((tile.rows, 5), (3 * tile.rows + 1, 2))
        for causal, window in ((False, (-1, -1)), (True, (-1, -1)), (False, (tile.keys + 3, 0)))
    )  # fmt: skip


def tiles_of_the_build() -> list[tuple[str, str, tuple[int, int, int], tuple[int, int]]]:
    """(dtype, calls, tile, head dims) of the kernels that dense calls can get, but those for short windows alone."""
    return sorted(
        {
            (support.short(k.dtype), t.calls, (t.rows, t.keys, t.stages), (t.head_dim, t.head_dim_v))
            for k, t in ((k, k.tile) for k in hopper_attention.built_kernels())
            if t.calls in ("all", "capped", "dense") and t.slab_keys == 0
        }
    )


@pytest.mark.parametrize(("dtype", "calls", "tile", "dims"), tiles_of_the_build(), ids=str)
def test_every_built_tile_with_every_mask(dtype, calls, tile, dims):
    judge_all(
        Case(f"tile {tile}, {mask}", q, k, dtype=dtype, head_dim=dims[0], head_dim_v=dims[1],
             forced=(("tile", tile),), **options)
        for mask, options in support.small_masks().items()
        if calls in ("all", "capped" if "softcap" in options else "dense")
        for q, k in ((260, 390), (130, 70))
    )  # fmt: skip
