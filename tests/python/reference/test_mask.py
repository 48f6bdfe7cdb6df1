"""The interval mask and the block ranges against a mask drawn element by element."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hopper_attention import reference

SETTINGS = settings(max_examples=300, deadline=None, derandomize=True)
LIMIT = st.integers(-1, 25)
LENGTH = st.integers(0, 40)


def drawn(mask, n, m, total):
    """Element by element; key j of this rank stands at position j * world + rank."""
    seen = np.zeros((n, m), bool)
    for i in range(n):
        at = i + total - n
        for j in range(m):
            position = j * mask.cp_world_size + mask.cp_rank
            seen[i, j] = (
                (mask.left == -1 or position >= at - mask.left)
                and (mask.right == -1 or position <= at + mask.right)
                and (mask.chunk == 0 or position // mask.chunk == at // mask.chunk)
                and position < total
            )
    return seen


@SETTINGS
@given(LIMIT, LIMIT, st.integers(0, 12), LENGTH, LENGTH)
def test_intervals_equal_the_drawn_mask_and_never_move_left(left, right, chunk, n, m):
    mask, length = reference.Mask(left, right, chunk), reference.lengths(n, m)
    np.testing.assert_array_equal(reference.dense_mask(mask, length), drawn(mask, n, m, m))
    begin, end = reference.visible(mask, np.arange(n), length)
    assert (np.diff(begin) >= 0).all() and (np.diff(end) >= 0).all()
    assert (begin >= 0).all() and (begin <= end).all() and (end <= m).all()


@SETTINGS
@given(LIMIT, LIMIT, st.integers(0, 12), LENGTH, st.integers(0, 60), st.integers(1, 4), st.data())
def test_context_parallel_ranks_share_out_the_drawn_mask(left, right, chunk, n, total, world, data):
    rank = data.draw(st.integers(0, world - 1))
    m = len(range(rank, total, world))
    mask = reference.Mask(left, right, chunk, world, rank)
    np.testing.assert_array_equal(reference.dense_mask(mask, reference.lengths(n, m, total)), drawn(mask, n, m, total))


@SETTINGS
@given(LIMIT, LIMIT, st.integers(0, 12), st.integers(1, 40), LENGTH, st.integers(1, 12), st.data())
def test_block_ranges_hold_all_visible_keys_and_mask_where_needed(left, right, chunk, n, m, block, data):
    first = data.draw(st.integers(0, n - 1))
    last = data.draw(st.integers(first, n - 1))
    mask = reference.Mask(left, right, chunk)
    seen = drawn(mask, n, m, m)[first : last + 1]
    blocks = reference.block_range(mask, first, last, reference.lengths(n, m), block)
    visited = np.zeros(m, bool)
    for index in range(blocks.begin, blocks.end):
        start = blocks.origin + index * block
        visited[start : start + block] = True
        if blocks.full_begin <= index < blocks.full_end:
            assert start + block <= m and seen[:, start : start + block].all()
        else:
            assert start + block > m or not seen[:, start : start + block].all(), "it needs no mask"
    assert not seen[:, ~visited].any()
    assert blocks.begin <= blocks.full_begin <= max(blocks.full_end, blocks.full_begin)
    assert blocks.full_end <= blocks.end or blocks.end == 0
    keys = np.flatnonzero(seen.any(axis=0))
    if len(keys):
        assert blocks.keys == (keys[0], keys[-1] + 1) and blocks.origin == keys[0]
