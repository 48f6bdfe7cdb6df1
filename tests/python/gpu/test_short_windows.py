"""Windows so short that one block of keys holds what a tile sees, and each 64 rows of it read a part of that block, which
may begin at any key (TileUse::kWindow, head dims up to 64).
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gpu import batches, support  # noqa: E402
from gpu.batches import Batch, judged_results, make, require_same  # noqa: E402
from gpu.fixed_splits import plan_of  # noqa: E402
from gpu.support import Case  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = [dtype for dtype in ("bf16", "fp16") if (dtype, (64, 64)) in support.MAIN]
WINDOW = {"head_dim": 64, "heads_q": 8, "heads_k": 1, "window": (127, 0)}
LENGTHS = {
    "q_lengths": (700, 1, 33, 64, 257, 0, 16, 300),
    "k_lengths": (700, 300, 133, 1064, 900, 70, 16, 0),
}
PROMPTS = {**LENGTHS, "q_lengths": (700, 9, 33, 64, 257, 0, 16, 300)}  # none with so few that a decode kernel takes it
ONE_BLOCK = "one block"  # of the reason for the tile


def fitting(ratio: int) -> int:
    """The longest window to the left that a tile holds, with `ratio` heads of q for each of k."""
    queries = 64 // ratio
    return min(136 - queries, 192 - 8 - 15 - 4 * queries)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_place_in_the_pattern_of_the_swizzle(dtype):
    """Slabs begin at each of the eight rows of it: at the start of a sequence, whose first keys end the window, and where
    keys are before the first query.
    """
    support.judge_all(
        [
            Case(f"window of {left} before the diagonal", 700, 700, dtype=dtype, **{**WINDOW, "window": (left, 0)})
            for left in range(119, 129)
        ]
        + [Case(f"{more} keys before the first query", 270, 270 + more, dtype=dtype, **WINDOW) for more in range(17)]
        + [
            Case("to both sides", 700, 700, dtype=dtype, **{**WINDOW, "window": (100, 27)}),
            Case("one key", 700, 900, dtype=dtype, **{**WINDOW, "window": (0, 0)}),
            Case("more queries than keys", 700, 300, dtype=dtype, sinks="fp32", **WINDOW),
            Case("no keys", 300, 0, dtype=dtype, sinks="fp32", **WINDOW),
            Case("several tiles for each block", 3000, 3000, batch=20, dtype=dtype, sinks="bf16", **WINDOW),
        ]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_ratios(dtype):
    """The longest windows that fit, and one key more, for which another tile is taken; idle rows of a slab."""
    support.judge_all(
        Case(f"{ratio} heads of q for each of k, window of {left}", 700, 750, dtype=dtype, head_dim=head_dim,
             heads_q=2 * ratio, heads_k=2, window=(left, 0), sinks="fp32")
        for ratio in (2, 3, 4, 5, 8, 12, 16, 64)
        for left in (fitting(ratio), fitting(ratio) + 1)
        for head_dim in (64, 40)
    )  # fmt: skip


def batch_of(why: str, dtype: str, **changes: object) -> Batch:
    return Batch(why, **{**WINDOW, **LENGTHS, "dtype": dtype, "sinks": "fp32", **changes})


@pytest.mark.parametrize("page", [0, 1, 7, 8, 16, 24, 32, 64, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_on_the_device(dtype, page):
    """Prompts, chunks and single queries, with and without a decode kernel; memory that nobody sees is NaN or inf."""
    keys = {"keys": "paged", "page_size": page} if page else {}
    made = [
        batch_of(f"pages of {page}, {splits} splits, {poison}", dtype, num_splits=splits, poison=poison, **keys, **more)
        for splits, poison in ((0, "nan"), (1, "inf"), (3, "nan"))
        for more in ({}, {"window": (121, 0)}, {"window": (30, 50)}, {"metadata": True}, {"batch_invariant": True})
    ]
    for case in made:
        assert ONE_BLOCK in plan_of(case).explain(), plan_of(case).explain()
    batches.judge_all(made)


@pytest.mark.parametrize("invariant", [False, True], ids=["forced", "batch_invariant"])
@pytest.mark.parametrize("page", [1, 7, 8, 16, 24, 64, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_equal_contiguous_keys(dtype, page, invariant):
    """Bit for bit: which keys a slab reads does not depend on where pages, and with them the block, begin."""
    paged = batch_of(f"pages of {page} and contiguous", dtype, keys="paged", page_size=page, batch_invariant=invariant,
                     sinks="", **PROMPTS)  # fmt: skip
    made = make(paged)
    contiguous = make(paged.but(keys="packed"))
    assert torch.equal(contiguous.truth_k, made.truth_k), "the two batches have other values"
    assert ONE_BLOCK in plan_of(paged).explain(), plan_of(paged).explain()
    require_same(paged, "pages against contiguous keys", judged_results(made), judged_results(contiguous))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_alone_as_in_the_batch(dtype):
    case = batch_of("alone", dtype, keys="paged", batch_invariant=True)
    made = make(case)
    together = judged_results(made)
    for b in range(case.size):
        single = batches.alone(made, b)
        found = batches.of_sequence(single, batches.attend(single), 0)
        require_same(case, f"sequence {b} alone", found, batches.of_sequence(made, together, b))
