"""The public functions. Names and argument order are FlashAttention-3's; what is new comes after, keyword-only.

Dimension letters: B batch, Sq / Sk queries / keys of a sequence, T tokens of all sequences, Hq / Hk heads of q / of k
and v (Hq a multiple of Hk), D head dim of q and k, Dv head dim of v and out.

CUDA tensors run the kernels, CPU torch tensors and numpy arrays the reference; the two cannot be mixed in one call.
While torch traces or a mode or transform watches, calls go through `torch.ops.hopper_attention` and do the same.
Errors are ValueError, TypeError or NotImplementedError, raised before anything is launched or written; RuntimeError if
the GPU or its driver cannot run the kernels. No call synchronises (but to read a max_seqlen_* that is on the GPU) or
allocates on the device beyond `torch.empty` for results, workspace and a rotated q, so that all can be captured in CUDA
graphs; with out, softmax_lse and workspace given, nothing.

Accepted without effect: q_descale, k_descale, v_descale with 16-bit tensors; pack_gqa (a hint); deterministic (results
always are); max_seqlen_q with dense q; cu_seqlens_k_new without k.
"""

from __future__ import annotations

from hopper_attention import _core, cache, gpu, merging, schedule, watching
from hopper_attention.arguments import needed, on_cuda, refuse_given
from hopper_attention.watching import is_watched

# `torch_ops`, which puts itself here: an import statement costs 0.2 us.
operators = None


def _operators():
    """The module of torch's operators."""
    if not watching.is_traced() and operators is not None:  # which changes while the first call is traced
        return operators
    from hopper_attention import torch_ops

    return torch_ops


def _elsewhere(name, x, *others):
    """The module whose functions take a call that is not for the kernels: torch's operators, or the reference. None for
    the kernels. `name` is that of the argument `x`, `others` are all other tensors.
    """
    if is_watched(x, others):
        return _operators()
    if on_cuda(name, x):
        return None
    from hopper_attention.reference import functions

    return functions


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
    """Dense attention: softmax(mask(cap(q k^T softmax_scale))) v for each head (FlashAttention-3, arXiv:2407.08608).

    q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), bf16 or fp16 on one CUDA device, last stride 1, other strides
    free multiples of 16 bytes, base 16-byte aligned; head dims multiples of 8. On the CPU any float dtype.

    softmax_scale: default D ** -0.5; on the GPU not negative (negate q instead). causal: query i sees keys up to
    i + Sk - Sq (and the right window is 0 whatever was passed). window_size: (left, right) keys beside that diagonal,
    inclusive; -1 is unlimited, None is (-1, -1). attention_chunk: queries and keys of one chunk of this length see each
    other; 0 is off. softcap: softcap * tanh(scores / softcap) before the mask; 0 is off. s_aux (Hq,) bf16, fp16 or
    fp32: a logit per head in the denominator. num_splits: how many parts the keys of a tile may be cut into that are
    merged through the workspace; 0 lets the plan choose, 1 to 256 is an upper bound. sm_margin: SMs left free.
    batch_invariant: the bits of a sequence's result depend on that sequence alone, not on other sequences, num_splits,
    max_seqlen_* or whether metadata is given. That costs time (batches of 32 and more up to a quarter, one sequence up to
    five times; figures are in docs/speed.md) and workspace: up to 32 slots for each sequence of few queries with up to
    128k keys, behind that one for every 4,096.

    out (B, Sq, Hq, Dv), dtype of q: written and returned; must not overlap an input. softmax_lse (B, Hq, Sq) float32,
    contiguous: filled if given. workspace: (bytes,) uint8, 16-byte aligned, with any contents, of
    plan(...).workspace_bytes or more; allocated if it is needed and not given.

    Returns out; with return_attn_probs (out, softmax_lse): natural log, including s_aux. A query that sees no key gives
    0 and -inf, with s_aux 0 and s_aux.

    Raises on the GPU NotImplementedError for qv, for fp8, for tensors that require grad while grad mode is on, and for
    head dims without a kernel; ValueError and TypeError, with the argument's name, for shapes, strides, dtypes, devices
    and overlaps that are not as above. Allocates, if not given, out, softmax_lse if it is returned, and the workspace.
    """
    if not watching.is_traced() and qv is None:
        done = _core.attend_dense(
            q,
            k,
            v,
            softmax_scale,
            causal,
            window_size,
            attention_chunk,
            softcap,
            num_splits,
            sm_margin,
            return_attn_probs,
            s_aux,
            out,
            softmax_lse,
            batch_invariant,
            workspace,
        )
        if done is not None:
            return done
    elsewhere = _elsewhere("q", q, k, v, qv, q_descale, k_descale, v_descale, s_aux, out, softmax_lse, workspace)
    if elsewhere is not None:
        return elsewhere.flash_attn_func(
            q,
            k,
            v,
            softmax_scale,
            causal,
            qv,
            q_descale,
            k_descale,
            v_descale,
            window_size,
            attention_chunk,
            softcap,
            num_splits,
            pack_gqa,
            deterministic,
            sm_margin,
            return_attn_probs,
            s_aux=s_aux,
            out=out,
            softmax_lse=softmax_lse,
            batch_invariant=batch_invariant,
            workspace=workspace,
        )
    if qv is not None:
        refuse_given("flash_attn_func", qv=qv)
    args = gpu.arguments(
        q,
        k,
        v,
        softmax_scale,
        causal,
        window_size,
        attention_chunk,
        softcap,
        num_splits,
        sm_margin,
        return_attn_probs,
        s_aux,
        out,
        softmax_lse,
        batch_invariant,
        workspace,
    )
    return gpu.forward(args, return_attn_probs)


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
    """Attention of packed sequences of different lengths, on packed or paged keys.

    q (Tq, Hq, D); k (Tk, Hk, D), v (Tk, Hk, Dv), or with page_table (B, n) pages (pages, page_size, Hk, D / Dv) of any
    page_size; page ids of slots past a sequence's keys may be anything. dtypes, strides and head dims as in
    `flash_attn_func`.

    Lengths are int32 on the device of q, contiguous (page_table: unit last stride), and read there alone: what is out
    of bounds is clamped, see `check_metadata`; a negative length counts as 0. cu_seqlens_q, cu_seqlens_k (B + 1,): where
    each sequence starts; exactly one of cu_seqlens_k and page_table is needed. seqused_q, seqused_k (B,): how many
    queries and keys count, from the start of the sequence; seqused_k is needed with pages. q may have rows outside all
    sequences: their out and LSE are not written.

    max_seqlen_q, max_seqlen_k: upper bounds, for speed only: an int, or a 0-d integer tensor (one on the GPU is read,
    which synchronises, and is refused during graph capture); None is what the shapes allow. Rows of a sequence that has
    more than max_seqlen_q queries may be left unwritten.

    scheduler_metadata: from `get_scheduler_metadata`, so that layers share it; None: made in the workspace by each
    call. num_splits: as in `flash_attn_func`; with 1 no tile is cut, sequences of few queries included, but two thread
    blocks may share tiles of few sequences (`plan().explain()` says so). cp_world_size, cp_rank: this rank holds the
    keys whose position is cp_rank modulo cp_world_size; k, v and their lengths are local, cp_tot_seqused_k (B,) the
    lengths on all ranks; out and LSE are of the local keys, for `merge_states`. workspace: (bytes,) uint8, 16-byte
    aligned, with any contents; how many bytes follows from shapes and bounds, never from lengths, and may be fewer for
    more queries; one that is too small raises ValueError with the number; allocated if not given. At most 64 MB, but
    with batch_invariant in proportion to B and max_seqlen_k: 2.1 GiB for 256 sequences of up to 256 queries and 128k
    keys with 32/8 heads of 128, 133 MiB where each has one. The other arguments are those of `flash_attn_func`.

    out (Tq, Hq, Dv) and softmax_lse (Hq, Tq) float32, contiguous, are written if given. Returns out; with
    return_attn_probs (out, softmax_lse). A query that sees no key gives 0 and -inf, with s_aux 0 and s_aux.

    Raises and allocates as `flash_attn_func`.
    """
    if not watching.is_traced() and qv is None:
        done = _core.attend_packed(
            q,
            k,
            v,
            softmax_scale,
            causal,
            window_size,
            attention_chunk,
            softcap,
            num_splits,
            sm_margin,
            return_attn_probs,
            s_aux,
            out,
            softmax_lse,
            batch_invariant,
            workspace,
            cu_seqlens_q,
            seqused_k,
            page_table,
            max_seqlen_q,
            cp_world_size,
            cp_rank,
            cp_tot_seqused_k,
            scheduler_metadata,
            cu_seqlens_k,
            seqused_q,
            max_seqlen_k,
        )
        if done is not None:
            return done
    elsewhere = _elsewhere(
        *("q", q, k, v, qv, q_descale, k_descale, v_descale, s_aux, out, softmax_lse, workspace),
        *(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, scheduler_metadata, cp_tot_seqused_k),
    )
    if elsewhere is None:
        if qv is not None:
            refuse_given("flash_attn_varlen_func", qv=qv)
        args = gpu.arguments(
            q,
            k,
            v,
            softmax_scale,
            causal,
            window_size,
            attention_chunk,
            softcap,
            num_splits,
            sm_margin,
            return_attn_probs,
            s_aux,
            out,
            softmax_lse,
            batch_invariant,
            workspace,
            cu_seqlens_q if cu_seqlens_q is not None else needed("cu_seqlens_q", cu_seqlens_q),
            seqused_k,
            page_table,
            max_seqlen_q,
            cp_world_size,
            cp_rank,
            cp_tot_seqused_k,
            scheduler_metadata,
            cu_seqlens_k if page_table is not None else needed("cu_seqlens_k", cu_seqlens_k, "without page_table"),
            seqused_q,
            max_seqlen_k,
        )
        return gpu.forward(args, return_attn_probs)
    return elsewhere.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q,
        seqused_k,
        softmax_scale,
        causal,
        qv,
        q_descale,
        k_descale,
        v_descale,
        window_size,
        attention_chunk,
        softcap,
        num_splits,
        pack_gqa,
        deterministic,
        sm_margin,
        return_attn_probs,
        page_table=page_table,
        scheduler_metadata=scheduler_metadata,
        s_aux=s_aux,
        out=out,
        softmax_lse=softmax_lse,
        cp_world_size=cp_world_size,
        cp_rank=cp_rank,
        cp_tot_seqused_k=cp_tot_seqused_k,
        batch_invariant=batch_invariant,
        workspace=workspace,
    )


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

    q (B, Sq, Hq, D), or (Tq, Hq, D) with cu_seqlens_q (B + 1,). k_cache (Bc, S, Hk, D), v_cache (Bc, S, Hk, Dv), or
    with page_table (B, n) pages (pages, page_size, Hk, D / Dv). cache_seqlens: keys in the cache before the append,
    (B,) or an int for all sequences; it is not modified. None is a full cache; pages, k and v need it. cache_batch_idx
    (B,): which row of the cache belongs to a sequence, default its own; not with pages. cache_leftpad (B,): slots at
    the start of a sequence that hold no keys. All tensors of lengths are int32 on the device of q, contiguous; what is
    out of bounds is clamped. num_splits: as in `flash_attn_func`, but the plan chooses by default.

    k (B, Sn, Hk, D) and v (B, Sn, Hk, Dv), or (Tn, Hk, ...) with cu_seqlens_k_new (B + 1,), dtype of the cache, go to
    the slots from cache_seqlens on; what does not fit or has no valid page is dropped. The caches may be views of one
    tensor, but share no element, unless v_cache starts a whole number of pages behind or before k_cache: ids in page_table
    then pick other pages for K than for V. k, v, q and the tables share no memory with them. Attention sees
    cache_seqlens + new - cache_leftpad keys. rotary_cos, rotary_sin (positions, rotary_dim / 2), float32 or dtype of the
    cache, rotary_dim up to D, rotate neighbouring columns, without rotary_interleaved the two halves; new keys at
    rotary_seqlens (B,) (default cache_seqlens) + j, and queries likewise if attention is causal, windowed or in chunks,
    else all at the start; q is not modified.

    max_seqlen_q, scheduler_metadata, cp_* and workspace, also with batch_invariant, as in `flash_attn_varlen_func`, the
    other arguments as in `flash_attn_func`.

    Returns out, as q with Dv; with return_softmax_lse (out, softmax_lse (B, Hq, Sq) or (Hq, Tq) float32). A query that
    sees no key gives 0 and -inf, with s_aux 0 and s_aux.

    Raises and allocates as `flash_attn_func`, and with rotary embedding a rotated q, like q; it goes to the end of a
    workspace that is given and has room for it, as that of plan(..., rotary=True).workspace_bytes has: bytes of the plan
    and of q, each rounded up to 256. Appending is a launch of its own before attention; all errors of both are found
    before it, but that a workspace cannot be allocated.
    """
    if not watching.is_traced() and qv is None:
        rotary = None
        if rotary_cos is not None or rotary_sin is not None or rotary_interleaved is not True:
            rotary = (rotary_cos, rotary_sin, rotary_seqlens, rotary_interleaved)
        done = _core.attend_cache(
            q,
            k_cache,
            v_cache,
            softmax_scale,
            causal,
            window_size,
            attention_chunk,
            softcap,
            num_splits,
            sm_margin,
            return_softmax_lse,
            s_aux,
            out,
            softmax_lse,
            batch_invariant,
            workspace,
            cu_seqlens_q,
            cache_seqlens,
            page_table,
            max_seqlen_q,
            cp_world_size,
            cp_rank,
            cp_tot_seqused_k,
            scheduler_metadata,
            cache_batch_idx,
            cache_leftpad,
            k,
            v,
            cu_seqlens_k_new,
            rotary,
        )
        if done is not None:
            return done
    elsewhere = _elsewhere(
        *("q", q, k_cache, v_cache, qv, q_descale, k_descale, v_descale, s_aux, out, softmax_lse, workspace),
        *(k, v, rotary_cos, rotary_sin, cu_seqlens_k_new, rotary_seqlens, cache_seqlens, cache_batch_idx),
        *(cache_leftpad, page_table, cu_seqlens_q, scheduler_metadata, cp_tot_seqused_k),
    )
    if elsewhere is None:
        if qv is not None:
            refuse_given("flash_attn_with_kvcache", qv=qv)
        return cache.attend(
            q,
            k_cache,
            v_cache,
            (k, v, rotary_cos, rotary_sin, cu_seqlens_k_new, rotary_seqlens, rotary_interleaved),
            cache_seqlens,
            cache_batch_idx,
            cache_leftpad,
            page_table,
            cu_seqlens_q,
            max_seqlen_q,
            softmax_scale,
            causal,
            window_size,
            attention_chunk,
            softcap,
            scheduler_metadata,
            num_splits,
            sm_margin,
            return_softmax_lse,
            s_aux,
            out,
            softmax_lse,
            cp_world_size,
            cp_rank,
            cp_tot_seqused_k,
            batch_invariant,
            workspace,
        )
    return elsewhere.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        qv,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        page_table,
        cu_seqlens_q,
        cu_seqlens_k_new,
        max_seqlen_q,
        rotary_seqlens,
        q_descale,
        k_descale,
        v_descale,
        softmax_scale,
        causal,
        window_size,
        attention_chunk,
        softcap,
        rotary_interleaved,
        scheduler_metadata,
        num_splits,
        pack_gqa,
        sm_margin,
        return_softmax_lse,
        s_aux=s_aux,
        out=out,
        softmax_lse=softmax_lse,
        cp_world_size=cp_world_size,
        cp_rank=cp_rank,
        cp_tot_seqused_k=cp_tot_seqused_k,
        batch_invariant=batch_invariant,
        workspace=workspace,
    )


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Results over S disjoint parts of the keys -> one result (Flash-Decoding, 2023, the last step).

    out_partial (S, B, M, H, D) float32, lse_partial (S, B, M, H) float32, natural log; M queries. A partial LSE of -inf
    or +inf means a part without keys: its out may hold anything. On the GPU D is a multiple of 8 up to 512 and rows of
    out_partial and out start at multiples of 4 elements, with unit stride; all other strides, and those of lse_partial,
    are free. On the CPU any D and strides, and float64.

    out (B, M, H, D) is written if given; it must not overlap the parts. out_dtype: float32, bfloat16 or float16; default
    that of out, else of out_partial.

    Returns (out, lse (B, M, H) float32, a transposed view of (B, H, M)). A row without keys gives 0 and -inf. Allocates
    out unless given, and lse. One kernel. Raises ValueError and TypeError for what is not as above, NotImplementedError
    for a wider D and for tensors that require grad while grad mode is on.
    """
    elsewhere = _elsewhere("out_partial", out_partial, lse_partial, out)
    if elsewhere is not None:
        return elsewhere.flash_attn_combine(out_partial, lse_partial, out, out_dtype)
    return merging.combine(out_partial, lse_partial, out, out_dtype)


def merge_states(out_a, lse_a, out_b, lse_b, *, out=None, lse=None):
    """Two results over disjoint keys -> one, (out, lse); what ring and cascade attention need.

    out_a, out_b (B, S, H, D) with lse_a, lse_b (B, H, S) float32, or (T, H, D) with (H, T); natural log. An LSE of -inf
    or +inf means no keys: its out may hold anything. If a sink is in use, pass it to one part only. On the GPU out_* are
    float32, bf16 or fp16, D is a multiple of 8 up to 512, rows have unit stride and start at multiples of 16 bytes; all
    other strides, and those of LSEs, are free. On the CPU any D, strides and float dtype.

    out and lse, like out_a and lse_a, are written if given. out may be out_a, and lse may be lse_a; otherwise they must
    not overlap the other tensors.

    Returns (out, lse). A row without keys on both sides gives 0 and -inf. Allocates out and lse unless given. One
    kernel. Raises as `flash_attn_combine`.
    """
    elsewhere = _elsewhere("out_a", out_a, lse_a, out_b, lse_b, out, lse)
    if elsewhere is not None:
        return elsewhere.merge_states(out_a, lse_a, out_b, lse_b, out=out, lse=lse)
    return merging.merge_states(out_a, lse_a, out_b, lse_b, out, lse)


def get_scheduler_metadata(
    batch_size,
    max_seqlen_q,
    max_seqlen_k,
    num_heads_q,
    num_heads_kv,
    headdim,
    cache_seqlens,
    qkv_dtype=None,
    headdim_v=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    cache_leftpad=None,
    page_size=None,
    max_seqlen_k_new=0,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    has_softcap=False,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    *,
    batch_invariant=False,
    out=None,
):
    """The schedule of one step's `flash_attn_varlen_func` or `flash_attn_with_kvcache` calls, shared by all layers.

    cache_seqlens: keys of each sequence, (B,) int32, or an int for all; for packed keys their lengths. Not None.
    cu_seqlens_q (B + 1,): where queries start; without it every sequence has max_seqlen_q. cu_seqlens_k_new (B + 1,) or
    max_seqlen_k_new: keys that the calls append. max_seqlen_q, max_seqlen_k: bounds, see `flash_attn_varlen_func`; they
    need not be those of the calls. qkv_dtype: None is torch.bfloat16 (torch is not imported for a default value).
    batch_size, lengths, heads, head dims, dtype, page_size, window, chunk, causal, leftpad and batch_invariant must be
    those of the calls (`check_metadata` tells whether the lengths of queries are; with other lengths of keys work is
    only shared less evenly); has_softcap, num_splits, pack_gqa and sm_margin have no effect. With batch_invariant only
    calls with packed queries on one rank use it; those with (B, Sq, Hq, D) queries, seqused_q or cp_world_size make
    their own.

    Returns a 1-D int32 tensor of 1 + 4 * (B rounded up to a multiple of 4) elements, or `out`, of that many or more,
    which overlaps no other tensor. It is on the device of cache_seqlens; for an int on that of the other tensors, or,
    without any, on the current CUDA device. Its contents may be copied elsewhere.
    One small kernel; allocates only the result, and nothing with out. Calls that run at the same time on two streams
    need metadata of their own. Raises ValueError, TypeError or NotImplementedError for what no call on a GPU takes. For
    CPU tensors, whose calls need no schedule: zeros, after the same checks.
    """
    needed("cache_seqlens", cache_seqlens)
    others = (cu_seqlens_q, cu_seqlens_k_new, cache_leftpad, out)
    like = schedule.source(cache_seqlens, cu_seqlens_q, cu_seqlens_k_new, cache_leftpad, out)
    if is_watched(like, others):
        return _operators().get_scheduler_metadata(
            batch_size,
            max_seqlen_q,
            max_seqlen_k,
            num_heads_q,
            num_heads_kv,
            headdim,
            cache_seqlens,
            qkv_dtype,
            headdim_v,
            cu_seqlens_q,
            cu_seqlens_k_new,
            cache_leftpad,
            page_size,
            max_seqlen_k_new,
            causal,
            window_size,
            attention_chunk,
            has_softcap,
            num_splits,
            pack_gqa,
            sm_margin,
            batch_invariant=batch_invariant,
            out=out,
        )
    return schedule.make(
        batch_size,
        max_seqlen_q,
        max_seqlen_k,
        num_heads_q,
        num_heads_kv,
        headdim,
        cache_seqlens,
        qkv_dtype,
        headdim_v,
        cu_seqlens_q,
        cu_seqlens_k_new,
        cache_leftpad,
        page_size,
        max_seqlen_k_new,
        causal,
        window_size,
        attention_chunk,
        num_splits,
        sm_margin,
        batch_invariant,
        out,
        like,
    )
