"""vLLM: its spelling of the attention functions, and `register()` for the backend plugin.

    vllm serve MODEL --attention-backend CUSTOM        # after pip install hopper-attention

vLLM finds `register` by itself, as a plugin of the group vllm.general_plugins; nothing happens unless CUSTOM is chosen.
The backend is vLLM's FlashAttention backend; each layer that this library supports runs on it, others as before.

The functions have the signatures of vllm.vllm_flash_attn (0.33). With VLLM_BATCH_INVARIANT=1 calls are batch invariant.
"""

from __future__ import annotations

import os
from functools import lru_cache, partial

import hopper_attention

_VERSIONS = (3, 2, None)
BACKEND = "hopper_attention.integrations.vllm_backend.HopperAttentionBackend"


def register() -> None:
    """Makes the backend known to vLLM as CUSTOM, unless another plugin has taken that name."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, BACKEND)


@lru_cache(maxsize=1)
def batch_invariant() -> bool:
    """Whether VLLM_BATCH_INVARIANT is set, as vLLM reads it: once."""
    return bool(int(os.environ.get("VLLM_BATCH_INVARIANT", "0")))


def flash_attn_varlen_func(
    q,
    k,
    v,
    max_seqlen_q,
    cu_seqlens_q,
    max_seqlen_k,
    cu_seqlens_k=None,
    seqused_k=None,
    q_v=None,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=None,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    return_softmax_lse=False,
    out=None,
    scheduler_metadata=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    num_splits=0,
    output_scale=None,
    fa_version=2,
    s_aux=None,
    cp_world_size=1,
    cp_rank=0,
    cp_tot_seqused_k=None,
    mask_mod=None,
    block_sparse_tensors=None,
    aux_tensors=None,
    aux_tensor_leading_dims=None,
    dynamic_causal=None,
    gather_kv_indices=None,
    gather_kv_valid_length=None,
):
    """`hopper_attention.flash_attn_varlen_func`; block_table is page_table, q_v is qv, window_size None or a pair. The
    default of softmax_scale is D ** -0.5 also with q_v. fa_version 2 and 3, as vLLM chooses, run the same.

    Returns out, with return_softmax_lse (out, softmax_lse (Hq, T)). return_attn_probs has no effect, as in vLLM.

    Raises ValueError if neither or both of cu_seqlens_k and seqused_k are given; NotImplementedError for alibi_slopes,
    dropout_p, another fa_version and what only FlashAttention-4 has, unless it is the default.
    """
    if (cu_seqlens_k is None) == (seqused_k is None):
        raise ValueError(
            "cu_seqlens_k, seqused_k: one of them is needed, found " + ("none" if seqused_k is None else "both")
        )
    if (
        dropout_p
        or alibi_slopes is not None
        or output_scale is not None
        or mask_mod is not None
        or block_sparse_tensors is not None
        or aux_tensors is not None
        or aux_tensor_leading_dims is not None
        or dynamic_causal is not None
        or gather_kv_indices is not None
        or gather_kv_valid_length is not None
        or fa_version not in _VERSIONS
    ):
        _refuse(
            dropout_p=dropout_p or None,
            alibi_slopes=alibi_slopes,
            output_scale=output_scale,
            mask_mod=mask_mod,
            block_sparse_tensors=block_sparse_tensors,
            aux_tensors=aux_tensors,
            aux_tensor_leading_dims=aux_tensor_leading_dims,
            dynamic_causal=dynamic_causal,
            gather_kv_indices=gather_kv_indices,
            gather_kv_valid_length=gather_kv_valid_length,
            fa_version=None if fa_version in _VERSIONS else fa_version,
        )
    if softmax_scale is None and q_v is not None:
        softmax_scale = q.shape[-1] ** -0.5
    attend = hopper_attention.flash_attn_varlen_func
    if cp_world_size != 1 or cp_rank != 0:
        attend = partial(attend, cp_world_size=cp_world_size, cp_rank=cp_rank, cp_tot_seqused_k=cp_tot_seqused_k)
    if batch_invariant():
        attend = partial(attend, batch_invariant=True)
    return attend(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        None,
        seqused_k,
        softmax_scale,
        causal,
        q_v,
        q_descale,
        k_descale,
        v_descale,
        window_size,
        0,
        softcap,
        num_splits,
        return_attn_probs=return_softmax_lse,
        page_table=block_table,
        scheduler_metadata=scheduler_metadata,
        s_aux=s_aux,
        out=out,
    )


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
    has_softcap=False,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
):
    """`hopper_attention.get_scheduler_metadata` without attention_chunk."""
    return hopper_attention.get_scheduler_metadata(
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
        0,
        has_softcap,
        num_splits,
        pack_gqa,
        sm_margin,
        batch_invariant=batch_invariant(),
    )


def _refuse(**arguments) -> None:
    for name, value in arguments.items():
        if value is not None:
            found = value if isinstance(value, (int, float)) else type(value).__name__
            raise NotImplementedError(f"{name}: not available, found {found}; leave it at its default")
