"""The public functions on numpy arrays and CPU torch tensors: same names, arguments, semantics and results as on the
GPU.

Dimension letters: B batch, Sq / Sk queries / keys of a sequence, T tokens of all sequences, Hq / Hk heads of q / of k
and v, D head dim of q and k, Dv head dim of v and out. dtypes: float16 and bfloat16 (torch, or numpy with ml_dtypes)
and fp8 e4m3 (torch) are computed in float32; float32 and float64 in their own precision. Any head dim, stride and
alignment is allowed, and a negative softmax_scale, which the kernels do not take. Arguments that only steer the GPU
(num_splits, pack_gqa, deterministic, sm_margin, scheduler_metadata, workspace, max_seqlen_*, batch_invariant) have no
effect; out-of-range numbers are refused all the same.

Raises ValueError, TypeError or NotImplementedError before anything is written. Metadata (lengths, pages) is clamped,
never trusted, as on the GPU.
"""

from __future__ import annotations

import numpy as np

from hopper_attention.reference.call import Call, packed_queries
from hopper_attention.reference.checks import (
    boolean,
    check_bound,
    check_kv,
    check_steering,
    floats,
    integers,
    mask_of,
    optional_integers,
    require,
)
from hopper_attention.reference.keys import DenseKeys, PagedKeys, rotate
from hopper_attention.reference.mask import lengths
from hopper_attention.reference.merging import flash_attn_combine, merge_states
from hopper_attention.reference.sequences import (
    cache_keys,
    cache_lengths,
    check_append,
    clamp,
    cp_totals,
    new_keys,
    packed_keys,
    rotary_tables,
)

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "merge_states",
]


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
    *,
    s_aux=None,
    out=None,
    softmax_lse=None,
    batch_invariant=False,
    workspace=None,
):
    """Dense attention. q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) -> out (B, Sq, Hq, Dv).

    With return_attn_probs also LSE (B, Hq, Sq), natural log, float32 (float64 for float64). A row that sees no key
    gives 0 and -inf, with a sink (s_aux (Hq,)) 0 and the sink.
    """
    check_steering(num_splits, sm_margin, batch_invariant)
    q, k, v = floats("q", q, 4), floats("k", k, 4), floats("v", v, 4)
    check_kv(q, k, v)
    require(q.shape[0] == k.shape[0], "q has batch ", q.shape[0], " and k ", k.shape[0], "; they must be equal")
    call = Call(q, k, v, qv, mask_of(causal, window_size, attention_chunk), q.shape[0])
    call.set_softmax(softmax_scale, softcap, s_aux, q_descale, k_descale, v_descale)
    call.set_outputs(out, softmax_lse)
    for b in range(call.batch):
        call.attend(b, (b, slice(0, q.shape[1])), DenseKeys(b, k.shape[1]), lengths(q.shape[1], k.shape[1]))
    return call.result(return_attn_probs)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
    *,
    page_table=None,
    scheduler_metadata=None,
    s_aux=None,
    out=None,
    softmax_lse=None,
    cp_world_size=1,
    cp_rank=0,
    cp_tot_seqused_k=None,
    batch_invariant=False,
    workspace=None,
):
    """Sequences of different lengths, packed. q (Tq, Hq, D), k (Tk, Hk, D), v (Tk, Hk, Dv) -> out (Tq, Hq, Dv).

    cu_seqlens_* (B + 1,) int32: where each sequence starts; seqused_* (B,): how much of it counts. With page_table
    (B, n), k and v are (pages, page_size, Hk, D) and seqused_k is needed. With return_attn_probs also LSE (Hq, Tq).
    Rows outside all sequences are not written (0 and -inf in arrays made here).
    """
    check_steering(num_splits, sm_margin, batch_invariant)
    check_bound("max_seqlen_q", max_seqlen_q)
    check_bound("max_seqlen_k", max_seqlen_k)
    paged = page_table is not None
    q, k, v = floats("q", q, 3), floats("k", k, 4 if paged else 3), floats("v", v, 4 if paged else 3)
    check_kv(q, k, v)
    starts_q = integers("cu_seqlens_q", cu_seqlens_q, (None,))
    require(len(starts_q) >= 1, "cu_seqlens_q is empty; batch + 1 elements are needed")
    batch = len(starts_q) - 1
    used_q = optional_integers("seqused_q", seqused_q, (batch,))
    used_k = optional_integers("seqused_k", seqused_k, (batch,))
    totals = cp_totals(cp_world_size, cp_tot_seqused_k, batch)
    if paged:
        require(cu_seqlens_k is None, "cu_seqlens_k is given with page_table; pages take their lengths from seqused_k")
        require(used_k is not None, "seqused_k is missing; it is needed with page_table")
        table = integers("page_table", page_table, (batch, None))
        keys = [PagedKeys(table[b], k.shape[0], k.shape[1]) for b in range(batch)]
        lengths_k = [clamp(used_k[b], 0, keys[b].capacity) for b in range(batch)]
    else:
        require(cu_seqlens_k is not None, "cu_seqlens_k is missing; without page_table it is needed")
        keys, lengths_k = packed_keys(integers("cu_seqlens_k", cu_seqlens_k, (batch + 1,)), used_k, k.shape[0])
    call = Call(q, k, v, qv, mask_of(causal, window_size, attention_chunk, cp_world_size, cp_rank), batch)
    call.set_softmax(softmax_scale, softcap, s_aux, q_descale, k_descale, v_descale)
    call.set_outputs(out, softmax_lse)
    for b, rows in enumerate(packed_queries(starts_q, used_q, q.shape[0])):
        call.attend(b, (rows,), keys[b], lengths(rows.stop - rows.start, lengths_k[b], totals and totals[b]))
    return call.result(return_attn_probs)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
    *,
    s_aux=None,
    out=None,
    softmax_lse=None,
    cp_world_size=1,
    cp_rank=0,
    cp_tot_seqused_k=None,
    batch_invariant=False,
    workspace=None,
):
    """Attention over a K/V cache, after appending k and v to it in place if they are given.

    q (B, Sq, Hq, D), or (T, Hq, D) with cu_seqlens_q (B + 1,). k_cache (Bc, S, Hk, D), v_cache (Bc, S, Hk, Dv), or
    with page_table (B, n) (pages, page_size, Hk, ...). k (B, Sn, Hk, D) and v, or (Tn, Hk, ...) with
    cu_seqlens_k_new, go to the slots cache_seqlens, cache_seqlens + 1, ... of the sequence; what does not fit is
    dropped. Attention sees cache_seqlens + new - leftpad keys, starting at slot leftpad. cache_batch_idx (B,) picks
    rows of the cache; an index outside it has no keys. rotary_cos, rotary_sin (positions, rotary_dim / 2) rotate new
    keys at rotary_seqlens (default cache_seqlens) + j and queries likewise if causal or windowed, else all at the
    start; q is not modified, its rotated values are rounded to its dtype. Returns out like q with Dv; with
    return_softmax_lse also LSE (B, Hq, Sq) or (Hq, T).
    """
    check_steering(num_splits, sm_margin, batch_invariant)
    check_bound("max_seqlen_q", max_seqlen_q)
    q = floats("q", q, 4 if cu_seqlens_q is None else 3)
    cache_k, cache_v = floats("k_cache", k_cache, 4), floats("v_cache", v_cache, 4)
    check_kv(q, cache_k, cache_v, ("k_cache", "v_cache"))
    if cu_seqlens_q is None:
        batch = q.shape[0]
        rows = [slice(0, q.shape[1])] * batch
    else:
        starts_q = integers("cu_seqlens_q", cu_seqlens_q, (None,))
        require(len(starts_q) >= 1, "cu_seqlens_q is empty; batch + 1 elements are needed")
        batch = len(starts_q) - 1
        rows = packed_queries(starts_q, None, q.shape[0])
    keys = cache_keys(cache_k, batch, page_table, cache_batch_idx)
    used = cache_lengths(cache_seqlens, keys, page_table is not None)
    leftpad = optional_integers("cache_leftpad", cache_leftpad, (batch,))
    totals = cp_totals(cp_world_size, cp_tot_seqused_k, batch)
    mask = mask_of(causal, window_size, attention_chunk, cp_world_size, cp_rank)
    call = Call(q, cache_k, cache_v, qv, mask, batch)
    call.set_softmax(softmax_scale, softcap, s_aux, q_descale, k_descale, v_descale)
    call.set_outputs(out, softmax_lse)
    new_k, new_v, new_rows = new_keys(k, v, cu_seqlens_k_new, cache_k, cache_v, batch)
    require(new_k is None or cache_seqlens is not None, "cache_seqlens is missing; it is needed to append k")
    cos, sin = rotary_tables(rotary_cos, rotary_sin, new_k, q.shape[-1])
    starts = optional_integers("rotary_seqlens", rotary_seqlens, (batch,))
    starts = used if starts is None else starts
    interleaved = boolean("rotary_interleaved", rotary_interleaved)
    if new_k is not None:
        check_append(cache_k, cache_v, page_table is not None, k=new_k, v=new_v, q=q, rotary_cos=cos, rotary_sin=sin)
    if cos is not None:
        cos, sin = cos.read(), sin.read()

    new_lengths = [0] * batch
    for b in range(batch) if new_k is not None else ():
        values_k, values_v = new_k.read(new_rows[b]), new_v.read(new_rows[b])
        new_lengths[b] = len(values_k)
        if cos is not None:
            values_k = rotate(values_k, starts[b] + np.arange(len(values_k)), cos, sin, interleaved)
        keys[b].write(cache_k, used[b], values_k)
        keys[b].write(cache_v, used[b], values_v)

    moving = mask.left != -1 or mask.right != -1 or mask.chunk != 0
    for b in range(batch):
        pad = 0 if leftpad is None else clamp(leftpad[b], 0, keys[b].capacity)
        length_k = max(0, min(used[b] + new_lengths[b], keys[b].capacity) - pad)
        length_q = rows[b].stop - rows[b].start
        rotation = None
        if cos is not None:
            rotation = (starts[b] + np.arange(length_q) * moving, cos, sin, interleaved)
        index = (b, rows[b]) if cu_seqlens_q is None else (rows[b],)
        call.attend(b, index, keys[b], lengths(length_q, length_k, totals and totals[b]), pad, rotation)
    return call.result(return_softmax_lse)
