"""A call or two of every kernel of this build, in seconds: tools/gpu_report begins with them, and goes no further if one is
wrong. A wheel may hold kernels of other sources than the host code.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gpu import batches, support  # noqa: E402
from gpu.batches import Batch  # noqa: E402
from gpu.support import Case, built_tiles  # noqa: E402

pytestmark = pytest.mark.gpu


def of(kernel: tuple[str, tuple[int, int]]) -> dict[str, object]:
    dtype, (head_dim, head_dim_v) = kernel
    return {"dtype": dtype, "head_dim": head_dim, "head_dim_v": head_dim_v}


@pytest.mark.parametrize("kernel", built_tiles(), ids=str)
def test_dense(kernel):
    """Every dense tile of the head dims: short prompts, long ones, windows, softcap; few queries."""
    support.judge_all(
        [
            Case("a short prompt", 300, 300, causal=True, **of(kernel)),
            Case("a long prompt", 2100, 2100, **of(kernel)),
            Case("a window of packed heads", 700, 700, heads_q=8, heads_k=1, window=(127, 0), **of(kernel)),
            Case("softcap", 300, 500, softcap=50.0, **of(kernel)),
            Case("one query", 1, 3000, **of(kernel)),
        ]
    )


@pytest.mark.parametrize("kernel", built_tiles(), ids=str)
def test_lengths_on_the_device(kernel):
    """Whole tiles of packed keys, cut tiles of pages, softcap; few queries in tiles of 16, 32 and 64 rows."""
    batches.judge_all(
        [
            Batch("packed keys", (300, 1, 70), (300, 400, 70), causal=True, **of(kernel)),
            Batch("pages", (300, 1, 70), (3000, 4000, 70), keys="paged", causal=True, num_splits=0, **of(kernel)),
            Batch("pages of one key", (200, 9), (700, 300), keys="paged", page_size=1, num_splits=0, **of(kernel)),
            Batch("softcap", (300, 1), (500, 900), keys="paged", softcap=50.0, num_splits=0, **of(kernel)),
            Batch("up to 32 rows", (16, 3), (700, 300), keys="paged", causal=True, num_splits=0, **of(kernel)),
            Batch(
                "the same by a schedule",
                (16, 3, 1),
                (20_000, 90, 5000),
                keys="paged",
                causal=True,
                num_splits=0,
                room_k=200_000,
                **of(kernel),
            ),  # fmt: skip
            Batch("up to 64 rows", (32, 3), (700, 300), keys="paged", causal=True, num_splits=0, **of(kernel)),
            Batch("fixed splits", (30, 1), (5000, 9000), keys="paged", batch_invariant=True, **of(kernel)),
        ]
    )
