"""The public functions. Names and argument order are FlashAttention-3's; what is new comes after, keyword-only.

Dimension letters: B batch, Sq / Sk queries / keys of a sequence, T tokens of all sequences, Hq / Hk heads of q / of k
and v (Hq a multiple of Hk), D head dim of q and k, Dv head dim of v and out.

CUDA tensors run the kernels, CPU torch tensors and numpy arrays the reference; the two cannot be mixed in one call.
Errors are ValueError, TypeError or NotImplementedError, raised before anything is launched or written; RuntimeError if
the GPU or its driver cannot run the kernels. No call synchronises or allocates on the device beyond `torch.empty` for
its results, so that all can be captured in CUDA graphs.

Accepted without effect: q_descale, k_descale, v_descale with 16-bit tensors; pack_gqa (a hint); deterministic (results
always are); max_seqlen_q with dense q; cu_seqlens_k_new without k.
"""

from __future__ import annotations

from hopper_attention import gpu, merging
from hopper_attention.arguments import on_cuda, refuse_given


def _reference():
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

    softmax_scale: default D ** -0.5. causal: query i sees keys up to i + Sk - Sq (and the right window is 0 whatever
    was passed). window_size: (left, right) keys beside that diagonal, inclusive; -1 is unlimited, None is (-1, -1).
    attention_chunk: queries and keys of one chunk of this length see each other; 0 is off. softcap: softcap *
    tanh(scores / softcap) before the mask; 0 is off. s_aux (Hq,) bf16, fp16 or fp32: a logit per head in the
    denominator. num_splits: 0 lets the plan choose, 1 to 256 is an upper bound. sm_margin: SMs left free.
    batch_invariant: the result of a sequence depends on no other.

    out (B, Sq, Hq, Dv), dtype of q: written and returned; must not overlap an input. softmax_lse (B, Hq, Sq) float32,
    contiguous: filled if given. workspace: uint8; none is needed.

    Returns out; with return_attn_probs (out, softmax_lse): natural log, including s_aux. A query that sees no key gives
    0 and -inf, with s_aux 0 and s_aux.

    Raises NotImplementedError for qv, for tensors that require grad while grad mode is on, and for head dims without a
    kernel. Allocates out, and softmax_lse if it is returned.
    """
    if not on_cuda("q", q):
        return _reference().flash_attn_func(
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
    return gpu.forward(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        sm_margin=sm_margin,
        return_lse=return_attn_probs,
        s_aux=s_aux,
        out=out,
        softmax_lse=softmax_lse,
        batch_invariant=batch_invariant,
        workspace=workspace,
    )


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
    """Attention of packed sequences of different lengths. Not available on the GPU yet: NotImplementedError for CUDA
    tensors.

    q (Tq, Hq, D), k (Tk, Hk, D), v (Tk, Hk, Dv); with page_table (B, n), k and v are (pages, page_size, Hk, D / Dv).
    cu_seqlens_* (B + 1,) int32: where each sequence starts. seqused_* (B,) int32: how much of it counts; seqused_k is
    needed with pages. max_seqlen_*: bounds, for speed only. The other arguments are those of `flash_attn_func`.

    Returns out (Tq, Hq, Dv); with return_attn_probs also softmax_lse (Hq, Tq) float32. A query that sees no key gives 0
    and -inf. Rows outside all sequences are never written.
    """
    if on_cuda("q", q):
        raise gpu.not_available("flash_attn_varlen_func")
    return _reference().flash_attn_varlen_func(
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
    """Attention over a K/V cache, after appending k and v to it in place. Not available on the GPU yet:
    NotImplementedError.

    q (B, Sq, Hq, D), or (T, Hq, D) with cu_seqlens_q (B + 1,). k_cache (Bc, S, Hk, D), v_cache (Bc, S, Hk, Dv), or with
    page_table (B, n) (pages, page_size, Hk, ...). k (B, Sn, Hk, D) and v are appended at cache_seqlens, (B,) int32 or
    an int: the length before the append, not modified. Attention sees cache_seqlens + new - cache_leftpad keys.
    rotary_cos, rotary_sin (positions, rotary_dim / 2) rotate queries and new keys. The other arguments are those of
    `flash_attn_func`.

    Returns out like q with Dv; with return_softmax_lse also softmax_lse (B, Hq, Sq) or (Hq, T). A query that sees no
    key gives 0 and -inf.
    """
    if on_cuda("q", q):
        raise gpu.not_available("flash_attn_with_kvcache")
    return _reference().flash_attn_with_kvcache(
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
    out unless given, and lse.
    """
    if not on_cuda("out_partial", out_partial):
        return _reference().flash_attn_combine(out_partial, lse_partial, out, out_dtype)
    return merging.combine(out_partial, lse_partial, out, out_dtype)


def merge_states(out_a, lse_a, out_b, lse_b, *, out=None, lse=None):
    """Two results over disjoint keys -> one, (out, lse); what ring and cascade attention need.

    out_a, out_b (B, S, H, D) with lse_a, lse_b (B, H, S) float32, or (T, H, D) with (H, T); natural log. An LSE of -inf
    or +inf means no keys: its out may hold anything. If a sink is in use, pass it to one part only. On the GPU out_* are
    float32, bf16 or fp16, D is a multiple of 8 up to 512, rows have unit stride and start at multiples of 16 bytes; all
    other strides, and those of LSEs, are free. On the CPU any D, strides and float dtype.

    out and lse, like out_a and lse_a, are written if given. out may be out_a, and lse may be lse_a; otherwise they must
    not overlap the other tensors.

    Returns (out, lse). A row without keys on both sides gives 0 and -inf. Allocates out and lse unless given.
    """
    if not on_cuda("out_a", out_a):
        return _reference().merge_states(out_a, lse_a, out_b, lse_b, out=out, lse=lse)
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
    """The schedule of one step's varlen or cache calls, shared by all layers: 1-D int32 CUDA tensor. Not available yet.

    qkv_dtype: None is torch.bfloat16 (torch is not imported for a default value). Raises NotImplementedError.
    """
    raise gpu.not_available("get_scheduler_metadata")
