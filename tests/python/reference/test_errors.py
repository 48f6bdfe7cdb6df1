"""What a user can get wrong: the exception names the argument, and nothing is written."""

from __future__ import annotations

import numpy as np
import pytest

from hopper_attention import reference

Q, K, V = np.zeros((2, 3, 4, 8), np.float32), np.zeros((2, 5, 2, 8), np.float32), np.zeros((2, 5, 2, 8), np.float32)
PACKED = np.zeros((6, 2, 8), np.float32)
CU = np.array([0, 3, 6], np.int32)

DENSE = [
    ("q is a list", TypeError, "q", {"q": [1.0]}),
    ("q has 3 axes", ValueError, "q", {"q": Q[0]}),
    ("q holds integers", TypeError, "q", {"q": Q.astype(np.int32)}),
    ("dtypes differ", TypeError, "float64", {"v": V.astype(np.float64)}),
    ("batches differ", ValueError, "batch", {"q": Q[:1]}),
    ("lengths of k and v differ", ValueError, "v has shape", {"v": V[:, :4]}),
    ("head dims of q and k differ", ValueError, "head dims", {"q": Q[..., :4]}),
    ("heads do not divide", ValueError, "heads", {"q": Q[:, :, :3]}),
    ("no K/V head", ValueError, "0 heads", {"k": K[:, :, :0], "v": V[:, :, :0]}),
    ("NaN scale", ValueError, "softmax_scale", {"softmax_scale": float("nan")}),
    ("scale is a word", TypeError, "softmax_scale", {"softmax_scale": "big"}),
    ("scale is a number in words", TypeError, "softmax_scale", {"softmax_scale": "0.5"}),
    ("negative softcap", ValueError, "softcap", {"softcap": -1.0}),
    ("window of one side", ValueError, "window_size", {"window_size": (1,)}),
    ("window of one number", ValueError, "window_size", {"window_size": 5}),
    ("window below -1", ValueError, "window_size", {"window_size": (-2, 0)}),
    ("window of floats", TypeError, "window_size", {"window_size": (1.5, 0)}),
    ("negative chunk", ValueError, "attention_chunk", {"attention_chunk": -4}),
    ("num_splits -5", ValueError, "num_splits", {"num_splits": -5}),
    ("num_splits 1000", ValueError, "num_splits", {"num_splits": 1000}),
    ("negative sm_margin", ValueError, "sm_margin", {"sm_margin": -1}),
    ("sinks of other length", ValueError, "s_aux", {"s_aux": np.zeros(3, np.float32)}),
    ("sinks of integers", TypeError, "s_aux", {"s_aux": np.zeros(4, np.int32)}),
    ("out of other shape", ValueError, "out", {"out": np.zeros((2, 3, 4, 4), np.float32)}),
    ("out of other dtype", TypeError, "out", {"out": np.zeros(Q.shape, np.float16)}),
    ("out is q", ValueError, "overlaps q", {"out": Q}),
    ("out with stride 0", ValueError, "stride", {"out": np.lib.stride_tricks.as_strided(Q, Q.shape, (0, 0, 0, 4))}),
    ("lse of other shape", ValueError, "softmax_lse", {"softmax_lse": np.zeros((2, 3, 4), np.float32)}),
    ("lse of half type", TypeError, "softmax_lse", {"softmax_lse": np.zeros((2, 4, 3), np.float16)}),
    ("qv of other shape", ValueError, "qv", {"qv": Q[:, :2]}),
]


@pytest.mark.parametrize("why, error, message, change", DENSE, ids=[case[0] for case in DENSE])
def test_dense(why, error, message, change):
    with pytest.raises(error, match=message):
        reference.flash_attn_func(**({"q": Q, "k": K, "v": V} | change))


VARLEN = [
    ("int64 offsets", TypeError, "cu_seqlens_q", {"cu_seqlens_q": CU.astype(np.int64)}),
    ("empty offsets", ValueError, "cu_seqlens_q", {"cu_seqlens_q": CU[:0]}),
    ("offsets of other batch", ValueError, "cu_seqlens_k", {"cu_seqlens_k": CU[:2]}),
    ("no offsets of k", ValueError, "cu_seqlens_k is missing", {"cu_seqlens_k": None}),
    ("seqused_q of other batch", ValueError, "seqused_q", {"seqused_q": CU}),
    ("negative maximum", ValueError, "max_seqlen_q", {"max_seqlen_q": -1}),
    ("maximum is a float", TypeError, "max_seqlen_k", {"max_seqlen_k": 3.5}),
    ("pages and offsets of k", ValueError, "page_table", {"k": K, "v": V, "page_table": np.zeros((2, 1), np.int32)}),
    (
        "pages without lengths",
        ValueError,
        "seqused_k is missing",
        {"k": K, "v": V, "cu_seqlens_k": None, "page_table": np.zeros((2, 1), np.int32)},
    ),
    ("rank outside the world", ValueError, "cp_rank", {"cp_world_size": 2, "cp_rank": 2, "cp_tot_seqused_k": CU[:2]}),
    ("ranks without totals", ValueError, "cp_tot_seqused_k", {"cp_world_size": 2}),
]


@pytest.mark.parametrize("why, error, message, change", VARLEN, ids=[case[0] for case in VARLEN])
def test_varlen(why, error, message, change):
    good = {"q": PACKED, "k": PACKED, "v": PACKED, "cu_seqlens_q": CU, "cu_seqlens_k": CU}
    reference.flash_attn_varlen_func(**good)
    with pytest.raises(error, match=message):
        reference.flash_attn_varlen_func(**(good | change))


TABLES = np.zeros((5, 4), np.float32)
NEW = np.zeros((2, 1, 2, 8), np.float32)
CACHE = [
    ("k without v", ValueError, "together", {"k": NEW}),
    ("append without lengths", ValueError, "cache_seqlens is missing", {"k": NEW, "v": NEW}),
    ("new keys of other heads", ValueError, "k has shape", {"k": NEW[:, :, :1], "v": NEW, "cache_seqlens": 1}),
    ("rotary without k", ValueError, "without k", {"rotary_cos": TABLES, "rotary_sin": TABLES}),
    ("cos without sin", ValueError, "together", {"rotary_cos": TABLES, "k": NEW, "v": NEW, "cache_seqlens": 1}),
    (
        "rotary tables without positions",
        ValueError,
        "rotary_cos has no positions",
        {"rotary_cos": TABLES[:0], "rotary_sin": TABLES[:0], "k": NEW, "v": NEW, "cache_seqlens": 1},
    ),
    (
        "rotary wider than the head",
        ValueError,
        "head dim",
        {"rotary_cos": np.zeros((5, 5), np.float32), "rotary_sin": np.zeros((5, 5), np.float32)}
        | {"k": NEW, "v": NEW, "cache_seqlens": 1},
    ),
    (
        "pages and indices",
        ValueError,
        "cache_batch_idx",
        {"page_table": CU[None, :2].repeat(2, 0), "cache_batch_idx": CU[:2]},
    ),
    ("int64 lengths", TypeError, "cache_seqlens", {"cache_seqlens": np.array([1, 2])}),
    ("length is a float", TypeError, "cache_seqlens", {"cache_seqlens": 1.5}),
    ("cache of other batch", ValueError, "k_cache", {"k_cache": K[:1], "v_cache": V[:1]}),
]


@pytest.mark.parametrize("why, error, message, change", CACHE, ids=[case[0] for case in CACHE])
def test_kvcache_refuses_before_it_writes(why, error, message, change):
    k_cache, v_cache = K.copy() + 5, V.copy() + 5
    good = {"q": Q, "k_cache": k_cache, "v_cache": v_cache}
    reference.flash_attn_with_kvcache(**good)
    with pytest.raises(error, match=message):
        reference.flash_attn_with_kvcache(**(good | change))
    assert (k_cache == 5).all() and (v_cache == 5).all()


def test_combine_and_merge():
    parts, logs = np.zeros((2, 1, 3, 2, 4), np.float32), np.zeros((2, 1, 3, 2), np.float32)
    with pytest.raises(ValueError, match="lse_partial"):
        reference.flash_attn_combine(parts, logs[:1])
    with pytest.raises(TypeError, match="out_partial"):
        reference.flash_attn_combine(parts.astype(np.float16), logs)
    with pytest.raises(TypeError, match="out has dtype"):
        reference.flash_attn_combine(parts, logs, out=parts[0].copy(), out_dtype="float16")
    lse = np.zeros((1, 2, 3), np.float32)
    with pytest.raises(ValueError, match="lse_a"):
        reference.merge_states(parts[0], logs[0], parts[1], lse)
    with pytest.raises(ValueError, match="out overlaps out_b"):
        reference.merge_states(parts[0], lse, parts[1], lse, out=parts[1])


READ_ONLY = np.zeros(Q.shape, np.float32)
READ_ONLY.setflags(write=False)


def test_read_only_arrays_are_read_but_not_written():
    reference.flash_attn_func(READ_ONLY, K, V)
    with pytest.raises(ValueError, match="^out is a read-only array"):
        reference.flash_attn_func(Q, K, V, out=READ_ONLY)
    k_cache, v_cache = K.copy(), V.copy()
    v_cache.setflags(write=False)
    with pytest.raises(ValueError, match="^v_cache is a read-only array"):
        reference.flash_attn_with_kvcache(Q, k_cache, v_cache, NEW + 1, NEW, cache_seqlens=1)
    assert not k_cache.any()
    parts, lse = np.zeros((2, 2, 3, 4, 8), np.float32), np.zeros((2, 4, 3), np.float32)
    with pytest.raises(ValueError, match="^out is a read-only array"):
        reference.merge_states(parts[0], lse, parts[1], lse, out=READ_ONLY)
    with pytest.raises(ValueError, match="^out is a read-only array"):
        reference.flash_attn_combine(parts, np.zeros((2, 2, 3, 4), np.float32), out=READ_ONLY)


def test_torch_tensors_without_ordinary_memory():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in (Q, K, V))
    rotated = torch.complex(k, k).conj().imag  # what a rotary embedding of complex numbers may leave
    with pytest.raises(ValueError, match=r"^k is a view that negates its memory; pass k.resolve_neg\(\)"):
        reference.flash_attn_func(q, rotated, v)
    reference.flash_attn_func(q, rotated.resolve_neg(), v)
    with pytest.raises(TypeError, match="^v has layout torch.sparse_coo"):
        reference.flash_attn_func(q, k, v.to_sparse())


def test_messages_say_shapes_and_dtypes_as_python_does():
    with pytest.raises(ValueError, match=r"^cu_seqlens_k has shape \(2,\); \(3,\) is needed"):
        reference.flash_attn_varlen_func(PACKED, PACKED, PACKED, CU, CU[:2])
    with pytest.raises(TypeError, match="^softmax_lse has dtype float16; allowed: float32$"):
        reference.flash_attn_func(Q, K, V, softmax_lse=np.zeros((2, 4, 3), np.float16))


def test_arguments_that_only_steer_the_gpu_have_no_effect():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 3, 4, 8)), rng.standard_normal((2, 5, 2, 8))
    plain = reference.flash_attn_func(q, k, k)
    ones = np.ones((2, 2), np.float32) * 3
    steered = reference.flash_attn_func(
        q, k, k, num_splits=7, pack_gqa=True, deterministic=True, sm_margin=4, batch_invariant=True, q_descale=ones,
        k_descale=ones, v_descale=ones, window_size=None, attention_chunk=None, workspace=np.zeros(16, np.uint8),
    )  # fmt: skip
    np.testing.assert_array_equal(plain, steered)


def test_limits_longer_than_any_sequence_cut_nothing():
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 3, 4, 8)), rng.standard_normal((2, 5, 2, 8))
    huge = 2**62
    cut = reference.flash_attn_func(q, k, k, window_size=(huge, huge), attention_chunk=huge)
    np.testing.assert_array_equal(cut, reference.flash_attn_func(q, k, k))
