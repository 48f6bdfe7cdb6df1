"""The readable variants say the same as the public functions, which are tested against a model of their own."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hopper_attention import reference

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)
TOLERANCE = {"rtol": 1e-11, "atol": 1e-11}
LIMIT = st.integers(-1, 8)


def agree(found, wanted):
    np.testing.assert_allclose(found[0], wanted[0], **TOLERANCE)
    np.testing.assert_allclose(found[1], wanted[1], **TOLERANCE)


def offsets(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


LENGTHS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=4)


@SETTINGS
@given(LENGTHS, LIMIT, LIMIT, st.sampled_from([0, 3]), st.integers(0, 2**32 - 1))
def test_varlen(pairs, left, right, chunk, seed):
    rng = np.random.default_rng(seed)
    cu_q, cu_k = offsets([n for n, _ in pairs]), offsets([m for _, m in pairs])
    q = rng.standard_normal((cu_q[-1] + 2, 4, 8))
    k, v = rng.standard_normal((cu_k[-1], 2, 8)), rng.standard_normal((cu_k[-1], 2, 5))
    found = reference.varlen_attention(q, k, v, cu_q, cu_k, mask=reference.Mask(left, right, chunk))
    options = {"window_size": (left, right), "attention_chunk": chunk, "return_attn_probs": True}
    agree(found, reference.flash_attn_varlen_func(q, k, v, cu_q, cu_k, **options))


@SETTINGS
@given(st.lists(st.integers(0, 12), min_size=1, max_size=3), st.sampled_from([1, 4, 5]), st.integers(0, 2**32 - 1))
def test_paged(lengths, page_size, seed):
    rng = np.random.default_rng(seed)
    width = -(-12 // page_size)
    table = rng.permutation(len(lengths) * width).reshape(len(lengths), width).astype(np.int32)
    for b, length in enumerate(lengths):
        table[b, -(-length // page_size) :] = 2147480000
    q = rng.standard_normal((len(lengths), 3, 4, 8))
    k, v = rng.standard_normal((2, len(lengths) * width, page_size, 2, 8))
    used = np.array(lengths, np.int32)
    found = reference.paged_attention(q, k, v, table, used, mask=reference.Mask(right=0))
    options = {"cache_seqlens": used, "page_table": table, "causal": True, "return_softmax_lse": True}
    agree(found, reference.flash_attn_with_kvcache(q, k, v, **options))


@SETTINGS
@given(st.integers(0, 9), st.integers(0, 12), LIMIT, LIMIT, st.sampled_from([0, 4]), st.integers(0, 2**32 - 1))
def test_window_softcap_and_sink(n, m, left, right, chunk, seed):
    rng = np.random.default_rng(seed)
    q, k, v = rng.standard_normal((n, 8)), rng.standard_normal((m, 8)), rng.standard_normal((m, 5))
    dense = [x[None, :, None] for x in (q, k, v)]

    def public(**options):
        out, lse = reference.flash_attn_func(*dense, return_attn_probs=True, **options)
        return out[0, :, 0], lse[0, 0]

    window = {"window_size": (left, right), "attention_chunk": chunk}
    seen = reference.dense_mask(reference.Mask(left, right, chunk), reference.lengths(n, m))
    agree(reference.windowed_attention(q, k, v, left, right, chunk=chunk), public(**window))
    agree(reference.soft_capped_attention(q, k, v, 2.0, mask=seen), public(softcap=2.0, **window))
    agree(reference.sink_attention(q, k, v, 0.7, mask=seen), public(s_aux=np.array([0.7]), **window))


def test_scales_and_what_is_off_by_default():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 6, 2, 8))
    table, used, starts = np.array([[0]], np.int32), np.array([6], np.int32), offsets([6])
    for scale in (None, 0.3):
        wanted = reference.flash_attn_func(q, k, v, softmax_scale=scale, return_attn_probs=True)
        agree(reference.paged_attention(q, k, v, table, used, scale=scale), wanted)
        packed = reference.varlen_attention(q[0], k[0], v[0], starts, starts, scale=scale)
        agree([x[None] for x in packed], wanted)
        one_head = wanted[0][0, :, 0], wanted[1][0, 0]
        arrays = q[0, :, 0], k[0, :, 0], v[0, :, 0]
        agree(reference.windowed_attention(*arrays, scale=scale), one_head)
        agree(reference.soft_capped_attention(*arrays, 0.0, scale=scale), one_head)
        agree(reference.sink_attention(*arrays, -1e4, scale=scale), one_head)
