"""SGLang: its spelling of the attention functions (sgl_kernel.flash_attn, sglang 0.5), and a plugin to run it on them.

    HOPPER_ATTENTION_SGLANG=1 python -m sglang.launch_server --attention-backend fa3 ...

SGLang finds `plugin` by itself, in each of its processes, as a plugin of the group sglang.srt.plugins; nothing happens
unless the variable is set. Where Python starts the server, `install()` before sets it.

`ver` chooses FlashAttention's version there; 3 runs here, others raise. Positions are those of sgl_kernel, whose functions
are replaced; what only sglang's own functions have comes last.
"""

from __future__ import annotations

import os
from functools import partial

import hopper_attention

SWITCH = "HOPPER_ATTENTION_SGLANG"


def plugin() -> None:
    """`install()`, if HOPPER_ATTENTION_SGLANG is 1 or true."""
    if os.environ.get(SWITCH, "").strip().lower() in ("1", "true"):
        install()


def install() -> None:
    """Puts the functions in the place of SGLang's FlashAttention-3, in sgl_kernel and where sglang loads it, here and, by
    HOPPER_ATTENTION_SGLANG, in the processes that this one starts: SGLang's schedulers are some.
    """
    import sgl_kernel.flash_attn as kernels

    os.environ[SWITCH] = "1"
    names = ("flash_attn_with_kvcache", "flash_attn_varlen_func", "get_scheduler_metadata")
    for name in names:
        setattr(kernels, name, globals()[name])
    try:
        from sglang.kernels.ops.attention import flash_attention_v3
    except ImportError:  # other versions call sgl_kernel directly
        return
    functions = {name: globals()[name] for name in names[:2]}
    flash_attention_v3._load_fa3_kernels = lambda: functions


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
    attention_chunk=None,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    only_qv=False,
    sm_margin=0,
    return_softmax_lse=False,
    sinks=None,
    score_mod=None,
    aux_tensors=None,
    ver=3,
    out=None,
    sfq=None,
    sfk=None,
    sfv=None,
    rel_bias=None,
    rel_bias_prep_cache=None,
    max_seqlen_k=None,
    mask_mod=None,
):
    """`hopper_attention.flash_attn_with_kvcache`; sinks is s_aux. max_seqlen_k, a bound, is not needed.

    Returns out, with return_softmax_lse (out, softmax_lse, empty, empty), as sgl_kernel does. Raises
    NotImplementedError for what only FlashAttention-4 has, and for only_qv.
    """
    if (
        only_qv
        or ver != 3
        or not (score_mod is aux_tensors is sfq is sfk is sfv is rel_bias is rel_bias_prep_cache is mask_mod is None)
    ):
        _refuse(
            only_qv=only_qv or None,
            score_mod=score_mod,
            aux_tensors=aux_tensors,
            sfq=sfq,
            sfk=sfk,
            sfv=sfv,
            rel_bias=rel_bias,
            rel_bias_prep_cache=rel_bias_prep_cache,
            mask_mod=mask_mod,
            ver=None if ver == 3 else ver,
        )
    attend = hopper_attention.flash_attn_with_kvcache
    # What SGLang passes in every layer goes by itself: beyond 30 values, a keyword counting twice, Python makes a list
    # and a dict of them, which costs 1 us.
    if (
        not (k is v is qv is rotary_cos is rotary_sin is rotary_seqlens is cu_seqlens_k_new is None)
        or not (cache_batch_idx is cache_leftpad is q_descale is k_descale is v_descale is None)
        or attention_chunk
        or sm_margin
    ):
        attend = partial(
            attend,
            k=k,
            v=v,
            qv=qv,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            cache_batch_idx=cache_batch_idx,
            cache_leftpad=cache_leftpad,
            cu_seqlens_k_new=cu_seqlens_k_new,
            rotary_seqlens=rotary_seqlens,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            attention_chunk=attention_chunk,
            rotary_interleaved=rotary_interleaved,
            sm_margin=sm_margin,
        )
    result = attend(
        q,
        k_cache,
        v_cache,
        cache_seqlens=cache_seqlens,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        scheduler_metadata=scheduler_metadata,
        num_splits=num_splits,
        return_softmax_lse=return_softmax_lse,
        s_aux=sinks,
        out=out,
    )
    return _with_rest(result)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q=None,
    max_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    page_table=None,
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
    only_qv=False,
    sm_margin=0,
    return_softmax_lse=False,
    sinks=None,
    score_mod=None,
    aux_tensors=None,
    ver=3,
    out=None,
    sfq=None,
    sfk=None,
    sfv=None,
    rel_bias=None,
    rel_bias_prep_cache=None,
    mask_mod=None,
):
    """`hopper_attention.flash_attn_varlen_func`; page_table comes after seqused_k, sinks is s_aux. Without cu_seqlens_q
    q, k and v are dense, (B, S, H, D).

    Returns and raises as `flash_attn_with_kvcache`.
    """
    _refuse(
        only_qv=only_qv or None,
        score_mod=score_mod,
        aux_tensors=aux_tensors,
        sfq=sfq,
        sfk=sfk,
        sfv=sfv,
        rel_bias=rel_bias,
        rel_bias_prep_cache=rel_bias_prep_cache,
        mask_mod=mask_mod,
        ver=None if ver == 3 else ver,
    )
    options = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "qv": qv,
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
        "window_size": window_size,
        "attention_chunk": attention_chunk,
        "softcap": softcap,
        "num_splits": num_splits,
        "pack_gqa": pack_gqa,
        "sm_margin": sm_margin,
        "return_attn_probs": return_softmax_lse,
        "s_aux": sinks,
        "out": out,
    }
    if cu_seqlens_q is None:
        _refuse(cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k, page_table=page_table)
        return _with_rest(hopper_attention.flash_attn_func(q, k, v, **options))
    result = hopper_attention.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        None if page_table is not None else cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q,
        seqused_k,
        page_table=page_table,
        **options,
    )
    return _with_rest(result)


def get_scheduler_metadata(
    batch_size,
    max_seqlen_q,
    max_seqlen_k,
    num_heads,
    num_heads_k,
    headdim,
    cache_seqlens,
    qkv_dtype=None,
    headdim_v=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    cu_seqlens_k_new=None,
    seqused_q=None,
    leftpad_k=None,
    page_size=None,
    max_seqlen_k_new=0,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    has_softcap=False,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
):
    """`hopper_attention.get_scheduler_metadata`; num_heads and num_heads_k are num_heads_q and num_heads_kv, leftpad_k is
    cache_leftpad.

    Raises NotImplementedError for cu_seqlens_k and seqused_q: cache_seqlens say how many keys there are.
    """
    _refuse(cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q)
    return hopper_attention.get_scheduler_metadata(
        batch_size,
        max_seqlen_q,
        max_seqlen_k,
        num_heads,
        num_heads_k,
        headdim,
        cache_seqlens,
        qkv_dtype,
        headdim_v,
        cu_seqlens_q,
        cu_seqlens_k_new,
        leftpad_k,
        page_size,
        max_seqlen_k_new,
        causal,
        window_size,
        attention_chunk,
        has_softcap,
        num_splits,
        pack_gqa,
        sm_margin,
    )


def _with_rest(result):
    """(out, lse) with two empty tensors, which stand for the parts of a split."""
    if not isinstance(result, tuple):
        return result
    nothing = result[1].new_empty((0,))
    return (*result, nothing, nothing.clone())


def _refuse(**arguments) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name}: not available, found {value!r:.60}; leave it at its default")
