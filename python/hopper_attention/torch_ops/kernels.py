"""What the attention operators do on tensors with memory: calls of the public functions.

The signatures are the schemas. An argument costs a call of its operator 0.1 us where it is left to its default, 0.2 where it
is not, and a list 1 us, under a mode twice: hence flags in one number, what is rarely used in `options`, and at the end
what hardly ever is. `_out` forms write into what they are given.
"""

from __future__ import annotations

from typing import Any

from hopper_attention import interface
from hopper_attention.torch_ops import fake

# Bits of `flags`. The arguments that they stand for are True where the bit is set, but rotary_interleaved.
FLAGS = {"causal": 1, "batch_invariant": 2, "return_lse": 4, "rotary_interleaved": 8}
CAUSAL, INVARIANT, LSE, HALVES = FLAGS.values()

# The items of `options`, where it is given.
OPTIONS = {
    "window_left": -1,
    "window_right": -1,
    "attention_chunk": 0,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}
DEFAULTS = tuple(OPTIONS.values())


def with_lse(result: Any) -> tuple[Any, Any]:
    """The two results that the operators return."""
    return result if isinstance(result, tuple) else (result, fake.no_lse(result))


def dense(
    q, k, v, s_aux, num_splits, flags, softmax_scale, softcap, options, qv, q_descale, k_descale, v_descale, out=None,
    softmax_lse=None, workspace=None,
):  # fmt: skip
    left, right, chunk, margin, _, _ = DEFAULTS if options is None else options
    return interface.flash_attn_func(
        q, k, v, softmax_scale, flags & CAUSAL != 0, qv, q_descale, k_descale, v_descale, (left, right), chunk, softcap,
        num_splits, None, False, margin, flags & LSE != 0, s_aux=s_aux, out=out, softmax_lse=softmax_lse,
        batch_invariant=flags & INVARIANT != 0, workspace=workspace,
    )  # fmt: skip


def packed(
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, scheduler_metadata, s_aux, num_splits, flags,
    max_seqlen_q, max_seqlen_k, softmax_scale, softcap, options, seqused_q, qv, q_descale, k_descale, v_descale,
    cp_tot_seqused_k, out=None, softmax_lse=None, workspace=None,
):  # fmt: skip
    left, right, chunk, margin, world, rank = DEFAULTS if options is None else options
    return interface.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, None if max_seqlen_q < 0 else max_seqlen_q,
        None if max_seqlen_k < 0 else max_seqlen_k, seqused_q, seqused_k, softmax_scale, flags & CAUSAL != 0, qv,
        q_descale, k_descale, v_descale, (left, right), chunk, softcap, num_splits, None, False, margin,
        flags & LSE != 0, page_table=page_table, scheduler_metadata=scheduler_metadata, s_aux=s_aux, out=out,
        softmax_lse=softmax_lse, cp_world_size=world, cp_rank=rank, cp_tot_seqused_k=cp_tot_seqused_k,
        batch_invariant=flags & INVARIANT != 0, workspace=workspace,
    )  # fmt: skip


def cache(
    q, k_cache, v_cache, new, cache_seqlens, page_table, cu_seqlens_q, scheduler_metadata, s_aux, num_splits, flags,
    max_seqlen_q, softmax_scale, softcap, options, cache_batch_idx, cache_leftpad, qv, q_descale, k_descale, v_descale,
    cp_tot_seqused_k, out=None, softmax_lse=None, workspace=None,
):  # fmt: skip
    """new: k, v, rotary_cos, rotary_sin, rotary_seqlens, cu_seqlens_k_new."""
    left, right, chunk, margin, world, rank = DEFAULTS if options is None else options
    k, v, rotary_cos, rotary_sin, rotary_seqlens, cu_seqlens_k_new = new
    return interface.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, qv, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
        page_table, cu_seqlens_q, cu_seqlens_k_new, None if max_seqlen_q < 0 else max_seqlen_q, rotary_seqlens,
        q_descale, k_descale, v_descale, softmax_scale, flags & CAUSAL != 0, (left, right), chunk, softcap,
        flags & HALVES == 0, scheduler_metadata, num_splits, None, margin, flags & LSE != 0, s_aux=s_aux, out=out,
        softmax_lse=softmax_lse, cp_world_size=world, cp_rank=rank, cp_tot_seqused_k=cp_tot_seqused_k,
        batch_invariant=flags & INVARIANT != 0, workspace=workspace,
    )  # fmt: skip


NOTHING_NEW = (None,) * 6


def fwd(
    q, k, v, s_aux=None, num_splits=1, flags=0, softmax_scale=None, softcap=0.0, options=None, qv=None, q_descale=None,
    k_descale=None, v_descale=None,
):  # fmt: skip
    return with_lse(
        dense(
            q, k, v, s_aux, num_splits, flags, softmax_scale, softcap, options, qv, q_descale, k_descale, v_descale,
        )
    )  # fmt: skip


def fwd_out(
    q, k, v, out, softmax_lse=None, workspace=None, s_aux=None, num_splits=1, flags=0, softmax_scale=None, softcap=0.0,
    options=None, qv=None, q_descale=None, k_descale=None, v_descale=None,
):  # fmt: skip
    dense(
        q, k, v, s_aux, num_splits, flags, softmax_scale, softcap, options, qv, q_descale, k_descale, v_descale, out,
        softmax_lse, workspace,
    )  # fmt: skip


def varlen_fwd(
    q, k, v, cu_seqlens_q, cu_seqlens_k=None, seqused_k=None, page_table=None, scheduler_metadata=None, s_aux=None,
    num_splits=1, flags=0, max_seqlen_q=-1, max_seqlen_k=-1, softmax_scale=None, softcap=0.0, options=None,
    seqused_q=None, qv=None, q_descale=None, k_descale=None, v_descale=None, cp_tot_seqused_k=None,
):  # fmt: skip
    return with_lse(
        packed(
            q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, scheduler_metadata, s_aux, num_splits, flags,
            max_seqlen_q, max_seqlen_k, softmax_scale, softcap, options, seqused_q, qv, q_descale, k_descale, v_descale,
            cp_tot_seqused_k,
        )
    )  # fmt: skip


def varlen_fwd_out(
    q, k, v, cu_seqlens_q, out, softmax_lse=None, workspace=None, cu_seqlens_k=None, seqused_k=None, page_table=None,
    scheduler_metadata=None, s_aux=None, num_splits=1, flags=0, max_seqlen_q=-1, max_seqlen_k=-1, softmax_scale=None,
    softcap=0.0, options=None, seqused_q=None, qv=None, q_descale=None, k_descale=None, v_descale=None,
    cp_tot_seqused_k=None,
):  # fmt: skip
    packed(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, scheduler_metadata, s_aux, num_splits, flags,
        max_seqlen_q, max_seqlen_k, softmax_scale, softcap, options, seqused_q, qv, q_descale, k_descale, v_descale,
        cp_tot_seqused_k, out, softmax_lse, workspace,
    )  # fmt: skip


def kvcache(
    q, k_cache, v_cache, cache_seqlens=None, page_table=None, cu_seqlens_q=None, scheduler_metadata=None, s_aux=None,
    num_splits=0, flags=0, max_seqlen_q=-1, softmax_scale=None, softcap=0.0, options=None, cache_batch_idx=None,
    cache_leftpad=None, qv=None, q_descale=None, k_descale=None, v_descale=None, cp_tot_seqused_k=None,
):  # fmt: skip
    return with_lse(
        cache(
            q, k_cache, v_cache, NOTHING_NEW, cache_seqlens, page_table, cu_seqlens_q, scheduler_metadata, s_aux,
            num_splits, flags, max_seqlen_q, softmax_scale, softcap, options, cache_batch_idx, cache_leftpad, qv,
            q_descale, k_descale, v_descale, cp_tot_seqused_k,
        )
    )  # fmt: skip


def kvcache_out(
    q, k_cache, v_cache, out, softmax_lse=None, workspace=None, cache_seqlens=None, page_table=None, cu_seqlens_q=None,
    scheduler_metadata=None, s_aux=None, num_splits=0, flags=0, max_seqlen_q=-1, softmax_scale=None, softcap=0.0,
    options=None, cache_batch_idx=None, cache_leftpad=None, qv=None, q_descale=None, k_descale=None, v_descale=None,
    cp_tot_seqused_k=None,
):  # fmt: skip
    cache(
        q, k_cache, v_cache, NOTHING_NEW, cache_seqlens, page_table, cu_seqlens_q, scheduler_metadata, s_aux,
        num_splits, flags, max_seqlen_q, softmax_scale, softcap, options, cache_batch_idx, cache_leftpad, qv, q_descale,
        k_descale, v_descale, cp_tot_seqused_k, out, softmax_lse, workspace,
    )  # fmt: skip


def kvcache_append(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, rotary_seqlens=None, cu_seqlens_k_new=None,
    cache_seqlens=None, page_table=None, cu_seqlens_q=None, scheduler_metadata=None, s_aux=None, num_splits=0, flags=0,
    max_seqlen_q=-1, softmax_scale=None, softcap=0.0, options=None, cache_batch_idx=None, cache_leftpad=None, qv=None,
    q_descale=None, k_descale=None, v_descale=None, cp_tot_seqused_k=None,
):  # fmt: skip
    new = (k, v, rotary_cos, rotary_sin, rotary_seqlens, cu_seqlens_k_new)
    return with_lse(
        cache(
            q, k_cache, v_cache, new, cache_seqlens, page_table, cu_seqlens_q, scheduler_metadata, s_aux, num_splits,
            flags, max_seqlen_q, softmax_scale, softcap, options, cache_batch_idx, cache_leftpad, qv, q_descale,
            k_descale, v_descale, cp_tot_seqused_k,
        )
    )  # fmt: skip


def kvcache_append_out(
    q, k_cache, v_cache, out, softmax_lse=None, workspace=None, k=None, v=None, rotary_cos=None, rotary_sin=None,
    rotary_seqlens=None, cu_seqlens_k_new=None, cache_seqlens=None, page_table=None, cu_seqlens_q=None,
    scheduler_metadata=None, s_aux=None, num_splits=0, flags=0, max_seqlen_q=-1, softmax_scale=None, softcap=0.0,
    options=None, cache_batch_idx=None, cache_leftpad=None, qv=None, q_descale=None, k_descale=None, v_descale=None,
    cp_tot_seqused_k=None,
):  # fmt: skip
    new = (k, v, rotary_cos, rotary_sin, rotary_seqlens, cu_seqlens_k_new)
    cache(
        q, k_cache, v_cache, new, cache_seqlens, page_table, cu_seqlens_q, scheduler_metadata, s_aux, num_splits, flags,
        max_seqlen_q, softmax_scale, softcap, options, cache_batch_idx, cache_leftpad, qv, q_descale, k_descale,
        v_descale, cp_tot_seqused_k, out, softmax_lse, workspace,
    )  # fmt: skip
