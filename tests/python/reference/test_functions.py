"""The public functions on CPU arrays against a dense model written from api.md, in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hopper_attention import reference

SETTINGS = settings(max_examples=120, deadline=None, derandomize=True)
TOLERANCE = {"rtol": 1e-11, "atol": 1e-11}
GARBAGE_PAGE = 2147480000


def model(
    q, k, v, *, causal=False, window=(-1, -1), chunk=0, softcap=0.0, sinks=None, scale=None, total=None, cp=(1, 0)
):
    """One sequence, q (n, Hq, D), k (m, Hk, D): out (n, Hq, Dv), lse (Hq, n), one query of one head at a time."""
    n, heads, d = q.shape
    m = len(k)
    total = m if total is None else total
    out, lse = np.zeros((n, heads, v.shape[2])), np.full((heads, n), -np.inf)
    right = 0 if causal else window[1]
    for h in range(heads):
        head_k = h * k.shape[1] // heads
        for i in range(n):
            at = i + total - n
            position = np.arange(m) * cp[0] + cp[1]
            seen = position < total
            if window[0] >= 0:
                seen &= position >= at - window[0]
            if right >= 0:
                seen &= position <= at + right
            if chunk:
                seen &= position // chunk == at // chunk
            s = k[seen, head_k] @ q[i, h] * (d**-0.5 if scale is None else scale)
            if softcap:
                s = softcap * np.tanh(s / softcap)
            logits = s if sinks is None else np.append(s, sinks[h])
            if len(logits):
                lse[h, i] = np.logaddexp.reduce(logits)
                out[i, h] = np.exp(s - lse[h, i]) @ v[seen, head_k]
    return out, lse


@st.composite
def options(draw):
    """Every combination of masks, softcap, sinks and scale."""
    return {
        "causal": draw(st.booleans()),
        "window": (draw(st.integers(-1, 12)), draw(st.integers(-1, 12))),
        "chunk": draw(st.sampled_from([0, 0, 1, 5])),
        "softcap": draw(st.sampled_from([0.0, 3.0])),
        "sinks": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, 0.3])),
    }


def arguments(option, sinks):
    """The model's options as the public functions call them."""
    return {
        "causal": option["causal"],
        "window_size": option["window"],
        "attention_chunk": option["chunk"],
        "softcap": option["softcap"],
        "softmax_scale": option["scale"],
        "s_aux": sinks,
    }


def with_sinks(option, heads, rng):
    """Model options with the flag replaced by numbers, and those numbers."""
    sinks = rng.standard_normal(heads) * 3 if option["sinks"] else None
    return {**option, "sinks": sinks}, sinks


HEADS = st.sampled_from([(1, 1), (4, 4), (4, 2), (3, 1)])


def draw_lengths(data, high, count):
    return np.array([data.draw(st.sampled_from([0, 1, 2, high // 2, high])) for _ in range(count)], np.int32)


def offsets(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


@SETTINGS
@given(options(), HEADS, st.integers(0, 3), st.integers(0, 20), st.integers(0, 30), st.integers(0, 2**32 - 1))
def test_dense_equals_the_model(option, heads, batch, n, m, seed):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, n, heads[0], 4))
    k, v = rng.standard_normal((batch, m, heads[1], 4)), rng.standard_normal((batch, m, heads[1], 6))
    option, sinks = with_sinks(option, heads[0], rng)
    out, lse = reference.flash_attn_func(q, k, v, return_attn_probs=True, **arguments(option, sinks))
    assert out.shape == (batch, n, heads[0], 6) and lse.shape == (batch, heads[0], n)
    for b in range(batch):
        wanted = model(q[b], k[b], v[b], **option)
        np.testing.assert_allclose(out[b], wanted[0], **TOLERANCE)
        np.testing.assert_allclose(lse[b], wanted[1], **TOLERANCE)


@SETTINGS
@given(options(), HEADS, st.integers(0, 4), st.booleans(), st.booleans(), st.data(), st.integers(0, 2**32 - 1))
def test_varlen_equals_the_model_and_leaves_padding_alone(option, heads, batch, use_q, use_k, data, seed):
    rng = np.random.default_rng(seed)
    n, m = draw_lengths(data, 9, batch), draw_lengths(data, 14, batch)
    cu_q, cu_k = offsets(n), offsets(m)
    used_q = np.array([rng.integers(-1, x + 1) for x in n], np.int32) if use_q else None
    used_k = np.array([rng.integers(-1, x + 1) for x in m], np.int32) if use_k else None
    q = rng.standard_normal((cu_q[-1] + 3, heads[0], 4))
    k, v = (rng.standard_normal((cu_k[-1] + 2, heads[1], 4)) for _ in range(2))
    option, sinks = with_sinks(option, heads[0], rng)
    inside = np.zeros(len(q), bool)
    k_clean, v_clean = k.copy(), v.copy()
    k[:], v[:] = np.nan, np.nan
    out, lse = np.full(q.shape, 9.0), np.full((heads[0], len(q)), 9.0)
    for b in range(batch):
        keys = slice(cu_k[b], cu_k[b] + (m[b] if used_k is None else max(0, used_k[b])))
        k[keys], v[keys] = k_clean[keys], v_clean[keys]
    reference.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, int(n.max(initial=0)), None, used_q, used_k, out=out, softmax_lse=lse,
        **arguments(option, sinks),
    )  # fmt: skip
    for b in range(batch):
        rows = slice(cu_q[b], cu_q[b] + (n[b] if used_q is None else max(0, used_q[b])))
        keys = slice(cu_k[b], cu_k[b] + (m[b] if used_k is None else max(0, used_k[b])))
        inside[rows] = True
        wanted = model(q[rows], k[keys], v[keys], **option)
        np.testing.assert_allclose(out[rows], wanted[0], **TOLERANCE)
        np.testing.assert_allclose(lse[:, rows], wanted[1], **TOLERANCE)
    assert (out[~inside] == 9.0).all() and (lse[:, ~inside] == 9.0).all()


@SETTINGS
@given(options(), HEADS, st.integers(1, 3), st.sampled_from([1, 3, 8]), st.data(), st.integers(0, 2**32 - 1))
def test_paged_varlen_equals_the_model_with_garbage_in_unused_slots(option, heads, batch, page_size, data, seed):
    rng = np.random.default_rng(seed)
    n, m = draw_lengths(data, 6, batch), draw_lengths(data, 20, batch)
    width = -(-20 // page_size)
    pages = rng.permutation(batch * width).reshape(batch, width)
    table = np.full((batch, width + 2), GARBAGE_PAGE, np.int32)
    k, v = (np.full((batch * width, page_size, heads[1], 4), np.nan) for _ in range(2))
    keys = [rng.standard_normal((2, x, heads[1], 4)) for x in m]
    for b in range(batch):
        for j in range(m[b]):
            table[b, j // page_size] = pages[b, j // page_size]
            k[pages[b, j // page_size], j % page_size] = keys[b][0, j]
            v[pages[b, j // page_size], j % page_size] = keys[b][1, j]
    cu_q = offsets(n)
    q = rng.standard_normal((cu_q[-1], heads[0], 4))
    option, sinks = with_sinks(option, heads[0], rng)
    out, lse = reference.flash_attn_varlen_func(
        q, k, v, cu_q, seqused_k=m, page_table=table, return_attn_probs=True, **arguments(option, sinks)
    )
    for b in range(batch):
        rows = slice(cu_q[b], cu_q[b + 1])
        wanted = model(q[rows], *keys[b], **option)
        np.testing.assert_allclose(out[rows], wanted[0], **TOLERANCE)
        np.testing.assert_allclose(lse[:, rows], wanted[1], **TOLERANCE)


def rotated_by_hand(x, positions, cos, sin, interleaved):
    """(n, H, D): each pair as a complex number times cos + i sin."""
    y, half = x.copy(), cos.shape[1]
    for r, position in enumerate(positions):
        for c in range(half):
            a, b = (2 * c, 2 * c + 1) if interleaved else (c, c + half)
            z = (x[r, :, a] + 1j * x[r, :, b]) * (cos[position, c] + 1j * sin[position, c])
            y[r, :, a], y[r, :, b] = z.real, z.imag
    return y


@SETTINGS
@given(options(), HEADS, st.data(), st.integers(0, 2**32 - 1))
def test_kvcache_append_rotary_leftpad_and_indices_equal_the_model(option, heads, data, seed):
    rng = np.random.default_rng(seed)
    batch, capacity, d, page = data.draw(st.integers(1, 3)), 16, 8, 4
    paged, packed, interleaved = data.draw(st.booleans()), data.draw(st.booleans()), data.draw(st.booleans())
    append, rotary, own_starts = data.draw(st.booleans()), data.draw(st.booleans()), data.draw(st.booleans())
    old = draw_lengths(data, 10, batch)
    new = draw_lengths(data, 5, batch) if packed else np.full(batch, data.draw(st.integers(0, 5)), np.int32)
    new *= append
    pad = np.array([rng.integers(0, x + 1) for x in old], np.int32) if data.draw(st.booleans()) else None
    n = draw_lengths(data, 4, batch) if packed else np.full(batch, 3, np.int32)
    cache = rng.standard_normal((2, batch + 2, capacity, heads[1], d))
    slots = rng.permutation(batch + 2)[:batch].astype(np.int32)
    q_rows = [rng.standard_normal((x, heads[0], d)) for x in n]
    new_rows = [rng.standard_normal((2, x, heads[1], d)) for x in new]
    angle = rng.standard_normal((30, data.draw(st.sampled_from([2, 4]))))
    cos, sin = np.cos(angle), np.sin(angle)
    starts = rng.integers(0, 20, batch).astype(np.int32) if own_starts else old
    option, sinks = with_sinks(option, heads[0], rng)
    moving = option["causal"] or option["window"] != (-1, -1) or option["chunk"]

    kwargs = arguments(option, sinks)
    if append:
        join = (lambda rows: np.concatenate(rows)) if packed else np.stack
        kwargs |= {"k": join([r[0] for r in new_rows]), "v": join([r[1] for r in new_rows])}
        if packed:
            kwargs["cu_seqlens_k_new"] = offsets(new)
        if rotary:
            kwargs |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
            kwargs["rotary_seqlens"] = starts if own_starts else None
    k_cache, v_cache = cache.copy()
    if paged:
        pages = rng.permutation((batch + 2) * capacity // page)
        where = pages.reshape(batch + 2, -1)
        shape = (len(pages), page, heads[1], d)
        k_pages, v_pages = np.empty(shape), np.empty(shape)
        k_pages[where] = k_cache.reshape(batch + 2, -1, *shape[1:])
        v_pages[where] = v_cache.reshape(batch + 2, -1, *shape[1:])
        caches, kwargs["page_table"] = (k_pages, v_pages), where[slots].astype(np.int32)
    else:
        caches, kwargs["cache_batch_idx"] = (k_cache, v_cache), slots
    q = np.concatenate(q_rows) if packed else np.stack(q_rows)
    q_before, old_before = q.copy(), old.copy()
    out, lse = reference.flash_attn_with_kvcache(
        q, *caches, cache_seqlens=old, cache_leftpad=pad, cu_seqlens_q=offsets(n) if packed else None,
        return_softmax_lse=True, **kwargs,
    )  # fmt: skip
    np.testing.assert_array_equal(q, q_before)
    np.testing.assert_array_equal(old, old_before)

    expected = cache.copy()
    for b in range(batch):
        keys, queries = new_rows[b][0], q_rows[b]
        if append and rotary:
            keys = rotated_by_hand(keys, starts[b] + np.arange(new[b]), cos, sin, interleaved)
            at = starts[b] + (np.arange(n[b]) if moving else np.zeros(n[b], int))
            queries = rotated_by_hand(queries, at, cos, sin, interleaved)
        expected[0, slots[b], old[b] : old[b] + new[b]] = keys
        expected[1, slots[b], old[b] : old[b] + new[b]] = new_rows[b][1]
        first = 0 if pad is None else pad[b]
        seen_k, seen_v = expected[:, slots[b], first : old[b] + new[b]]
        wanted = model(queries, seen_k, seen_v, **option)
        rows = slice(*offsets(n)[b : b + 2])
        np.testing.assert_allclose(out[rows] if packed else out[b], wanted[0], **TOLERANCE)
        np.testing.assert_allclose(lse[:, rows] if packed else lse[b], wanted[1], **TOLERANCE)
    if paged:
        k_cache, v_cache = (x[where].reshape(cache.shape[1:]) for x in caches)
    np.testing.assert_allclose(np.stack([k_cache, v_cache]), expected, **TOLERANCE)


def test_append_past_the_capacity_or_to_invalid_pages_is_dropped():
    rng = np.random.default_rng(0)
    k_cache, v_cache = rng.standard_normal((2, 4, 2, 1, 4))
    before = k_cache.copy()
    new = np.ones((1, 5, 1, 4))
    table = np.array([[2, -1, 0]], np.int32)
    q = np.zeros((1, 1, 1, 4))
    _, lse = reference.flash_attn_with_kvcache(
        q, k_cache, v_cache, new, new, cache_seqlens=1, page_table=table, return_softmax_lse=True
    )
    before[2, 1], before[0] = 1, 1
    np.testing.assert_array_equal(k_cache, before)
    np.testing.assert_allclose(lse, np.log(6))
    dense_k, dense_v = np.zeros((2, 1, 4, 1, 4))
    _, lse = reference.flash_attn_with_kvcache(q, dense_k, dense_v, new, new, cache_seqlens=3, return_softmax_lse=True)
    np.testing.assert_array_equal(dense_k[0, :, 0, 0], [0, 0, 0, 1])
    np.testing.assert_allclose(lse, np.log(4))


@SETTINGS
@given(options(), st.integers(1, 4), st.integers(0, 6), st.integers(0, 25), st.integers(0, 2**32 - 1))
def test_context_parallel_ranks_merge_to_the_whole(option, world, n, total, seed):
    rng = np.random.default_rng(seed)
    q, k, v = rng.standard_normal((n, 4, 4)), rng.standard_normal((total, 2, 4)), rng.standard_normal((total, 2, 4))
    option = {**option, "sinks": None}
    cu_q = np.array([0, n], np.int32)
    merged = np.zeros((n, 4, 4)), np.full((4, n), -np.inf)
    for rank in range(world):
        mine_k, mine_v = np.ascontiguousarray(k[rank::world]), np.ascontiguousarray(v[rank::world])
        part = reference.flash_attn_varlen_func(
            q, mine_k, mine_v, cu_q, np.array([0, len(mine_k)], np.int32), return_attn_probs=True,
            cp_world_size=world, cp_rank=rank, cp_tot_seqused_k=np.array([total], np.int32), **arguments(option, None),
        )  # fmt: skip
        wanted = model(q, mine_k, mine_v, total=total, cp=(world, rank), **option)
        np.testing.assert_allclose(part[0], wanted[0], **TOLERANCE)
        np.testing.assert_allclose(part[1], wanted[1], **TOLERANCE)
        merged = reference.merge_states(*merged, *part)
    wanted = model(q, k, v, **option)
    np.testing.assert_allclose(merged[0], wanted[0], **TOLERANCE)
    np.testing.assert_allclose(merged[1], wanted[1], **TOLERANCE)


@SETTINGS
@given(st.integers(0, 4), st.integers(0, 2), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_flash_attn_combine_equals_log_sum_exp(splits, batch, rows, seed):
    rng = np.random.default_rng(seed)
    outs, lses = rng.standard_normal((splits, batch, rows, 3, 4)), rng.standard_normal((splits, batch, rows, 3)) * 9
    dead = rng.random(lses.shape) < 0.4
    lses[dead], outs[dead] = rng.choice([-np.inf, np.inf], dead.sum()), np.nan
    out, lse = reference.flash_attn_combine(outs, lses)
    clean = np.where(dead, -np.inf, lses)
    wanted = np.logaddexp.reduce(clean, axis=0) if splits else np.full(lses.shape[1:], -np.inf)
    np.testing.assert_allclose(lse, wanted, **TOLERANCE)
    assert lse.swapaxes(1, 2).flags.c_contiguous
    with np.errstate(invalid="ignore"):
        weights = np.nan_to_num(np.exp(clean - wanted))[..., None]
    np.testing.assert_allclose(out, (weights * np.nan_to_num(outs)).sum(axis=0), **TOLERANCE)


def test_merge_states_takes_strides_and_may_write_over_out_a():
    rng = np.random.default_rng(1)
    outs, lses = rng.standard_normal((2, 2, 5, 3, 4)), rng.standard_normal((2, 5, 3, 2)).transpose(0, 3, 2, 1)
    lses[0, 0, 0, 0] = np.inf
    lses[:, 1, 1, 1] = -np.inf
    wanted = reference.combine_parts(outs, np.swapaxes(lses, 2, 3))
    out_a = outs[0].copy()
    out, lse = reference.merge_states(out_a, lses[0], outs[1], lses[1], out=out_a)
    assert out is out_a
    np.testing.assert_allclose(out, wanted[0], **TOLERANCE)
    np.testing.assert_allclose(lse, wanted[1].swapaxes(1, 2), **TOLERANCE)
    assert (out[1, 1, 1] == 0).all() and lse[1, 1, 1] == -np.inf


def test_long_sequences_cross_many_blocks():
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((1, 1300, 2, 4)) for _ in range(3))
    out, lse = reference.flash_attn_func(q, k, v, window_size=(600, 30), softcap=5.0, return_attn_probs=True)
    wanted = model(q[0], k[0], v[0], window=(600, 30), softcap=5.0)
    np.testing.assert_allclose(out[0], wanted[0], **TOLERANCE)
    np.testing.assert_allclose(lse[0], wanted[1], **TOLERANCE)


def test_memory_stays_linear_in_the_sequence_length():
    import tracemalloc

    q = np.zeros((1, 20_000, 1, 4), np.float32)
    tracemalloc.start()
    reference.flash_attn_func(q, q, q, window_size=(64, 0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20  # the scores alone would be 1.6 GB


def test_nan_in_a_value_reaches_only_the_queries_that_see_it():
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 40, 2, 4)) for _ in range(3))
    clean = reference.flash_attn_func(q, k, v, causal=True)
    v[0, 25, 1], k[0, 30, 0] = np.nan, np.nan
    out = reference.flash_attn_func(q, k, v, causal=True)
    np.testing.assert_array_equal(np.isnan(out[0, :, 1]).any(axis=1), np.arange(40) >= 25)
    np.testing.assert_array_equal(np.isnan(out[0, :, 0]).any(axis=1), np.arange(40) >= 30)
    np.testing.assert_allclose(out[0, :25], clean[0, :25], **TOLERANCE)


def test_qv_adds_its_product_with_v_to_the_scores():
    rng = np.random.default_rng(4)
    q, k = rng.standard_normal((1, 6, 4, 4)), rng.standard_normal((1, 9, 2, 4))
    qv, v = rng.standard_normal((1, 6, 4, 8)), rng.standard_normal((1, 9, 2, 8))
    out, lse = reference.flash_attn_func(q, k, v, qv=qv, causal=True, return_attn_probs=True)
    joined = np.concatenate([q, qv], axis=-1), np.concatenate([k, v], axis=-1)
    wanted = model(joined[0][0], joined[1][0], v[0], causal=True, scale=12**-0.5)
    np.testing.assert_allclose(out[0], wanted[0], **TOLERANCE)
    np.testing.assert_allclose(lse[0], wanted[1], **TOLERANCE)


@pytest.mark.parametrize("given", [3, np.array(3, np.int32), np.array([3, 3], np.int32), None])
def test_cache_seqlens_may_be_a_number_an_array_or_the_full_cache(given):
    rng = np.random.default_rng(5)
    q, k, v = rng.standard_normal((2, 1, 2, 4)), rng.standard_normal((2, 7, 2, 4)), rng.standard_normal((2, 7, 2, 4))
    out = reference.flash_attn_with_kvcache(q, k, v, cache_seqlens=given)
    used = 7 if given is None else 3
    np.testing.assert_allclose(out[1], model(q[1], k[1, :used], v[1, :used])[0], **TOLERANCE)


def test_malformed_metadata_is_clamped():
    rng = np.random.default_rng(6)
    q, k = rng.standard_normal((8, 2, 4)), rng.standard_normal((8, 2, 4))
    wild = np.array([-5, 4, 2, 1000], np.int32)  # queries 0..4, none, 2..8; the last sequence that owns a row wins
    out = reference.flash_attn_varlen_func(q, k, k, wild, wild, seqused_k=np.array([900, -3, 5], np.int32))
    np.testing.assert_allclose(out[:2], model(q[:4], k, k)[0][:2], **TOLERANCE)
    np.testing.assert_allclose(out[2:], model(q[2:], k[2:7], k[2:7])[0], **TOLERANCE)


def test_cache_index_outside_the_cache_has_no_keys_and_drops_writes():
    cache_k, cache_v = np.ones((2, 2, 4, 1, 4))
    new = np.full((2, 1, 1, 4), 7.0)
    index = np.array([5, 1], np.int32)
    q = np.zeros((2, 1, 1, 4))
    out, lse = reference.flash_attn_with_kvcache(
        q, cache_k, cache_v, new, new, cache_seqlens=2, cache_batch_idx=index, return_softmax_lse=True
    )
    assert (cache_k[0] == 1).all() and (cache_k[1, 2] == 7).all()
    assert lse[0, 0, 0] == -np.inf and (out[0] == 0).all()
    np.testing.assert_allclose(lse[1], np.log(3))


@pytest.mark.parametrize("heads", [0, 2], ids=["no heads of q", "heads"])
def test_shapes_without_elements(heads):
    """Sizes of 0 give results of that size, and rows without keys 0 and -inf."""
    q, k = np.ones((1, 3, heads, 4)), np.ones((1, 5, 2, 4))
    out, lse = reference.flash_attn_func(q, k, k, return_attn_probs=True)
    assert out.shape == q.shape and lse.shape == (1, heads, 3) and np.isfinite(lse).all()
    out, lse = reference.flash_attn_func(q, k[:, :0], k[:, :0], return_attn_probs=True)
    assert (out == 0).all() and np.isneginf(lse).all()
    out, lse = reference.flash_attn_func(q[:, :0], k, k, return_attn_probs=True)
    assert out.shape == (1, 0, heads, 4) and lse.shape == (1, heads, 0)
    out = reference.flash_attn_func(q[:0], k[:0], k[:0])
    assert out.shape == (0, 3, heads, 4)


def test_a_chunk_alone_makes_rotated_queries_move():
    """As a window does: of two masks that hide nothing each gives the queries positions of their own."""
    rng = np.random.default_rng(0)
    q, new_k, new_v = (rng.standard_normal((1, 3, 2, 4)) for _ in range(3))
    cos, sin = np.cos(np.arange(40.0)).reshape(20, 2), np.sin(np.arange(40.0)).reshape(20, 2)

    def call(**mask):
        cache = np.zeros((2, 1, 10, 2, 4))
        given = {"rotary_cos": cos, "rotary_sin": sin, "cache_seqlens": 0}
        return reference.flash_attn_with_kvcache(q, *cache, new_k, new_v, **given, **mask)

    window, chunk, nothing = call(window_size=(50, 50)), call(attention_chunk=50), call()
    np.testing.assert_allclose(chunk, window, **TOLERANCE)
    assert np.abs(chunk - nothing)[:, 1:].max() > 1e-3


@pytest.mark.filterwarnings("error")
def test_scores_that_overflow_give_nan_without_a_warning():
    huge = np.full((1, 2, 1, 4), 1e30, np.float32)
    out, lse = reference.flash_attn_func(huge, huge, np.ones_like(huge), return_attn_probs=True)
    assert np.isnan(out).all() and np.isnan(lse).all()
