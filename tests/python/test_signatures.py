"""Engines call these functions by position and by name: a signature changes only on purpose."""

from __future__ import annotations

import inspect

import pytest

import hopper_attention
from hopper_attention.reference import functions

# qkv_dtype: None means torch.bfloat16, which importing the package must not need.
SIGNATURES = {
    "flash_attn_func": """(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
            v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
            deterministic=False, sm_margin=0, return_attn_probs=False, *, s_aux=None, out=None, softmax_lse=None,
            batch_invariant=False, workspace=None)""",
    "flash_attn_varlen_func": """(q, k, v, cu_seqlens_q, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
            seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
            v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
            deterministic=False, sm_margin=0, return_attn_probs=False, *, page_table=None, scheduler_metadata=None,
            s_aux=None, out=None, softmax_lse=None, cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None,
            batch_invariant=False, workspace=None)""",
    "flash_attn_with_kvcache": """(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
        cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None,
        cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None,
        softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False, *, s_aux=None,
        out=None, softmax_lse=None, cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None, batch_invariant=False,
        workspace=None)""",
    "flash_attn_combine": "(out_partial, lse_partial, out=None, out_dtype=None)",
    "merge_states": "(out_a, lse_a, out_b, lse_b, *, out=None, lse=None)",
    "get_scheduler_metadata": """(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim,
        cache_seqlens, qkv_dtype=None, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None,
        page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False,
        num_splits=0, pack_gqa=None, sm_margin=0, *, batch_invariant=False, out=None)""",
    "check_metadata": """(q, k, *, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        cache_seqlens=None, page_table=None, cache_batch_idx=None, cache_leftpad=None, cu_seqlens_k_new=None,
        seqlen_k_new=0, rotary_seqlens=None, max_seqlen_q=None, max_seqlen_k=None, cp_world_size=1, cp_rank=0,
        cp_tot_seqused_k=None, k_new=None, causal=False, window_size=(-1, -1), attention_chunk=0,
        scheduler_metadata=None)""",
    "is_supported": """(*, dtype, kv_dtype=None, head_dim, head_dim_v=None, page_size=None, causal=False,
        window_size=(-1, -1), softcap=0.0, sinks=False, device=None, attention_chunk=0, packed_q=False,
        packed_k=False, append=False, rotary=False, num_splits=0, heads_q=1, heads_kv=1, cp_world_size=1,
        batch_invariant=False, scheduler_metadata=False)""",
    "plan": """(*, dtype, kv_dtype=None, head_dim, head_dim_v=None, page_size=None, causal=False, window_size=(-1, -1),
        softcap=0.0, sinks=False, device=None, batch, max_seqlen_q, max_seqlen_k, heads_q, heads_kv, num_splits=0,
        attention_chunk=0, batch_invariant=False, lengths_on_device=False, total_q=None, total_k=None,
        scheduler_metadata=False, rotary=False)""",
    "support_matrix": "()",
    "info": "()",
    "built_kernels": "()",
    "warmup": "(device=None)",
}
ON_THE_CPU = [
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "flash_attn_combine",
    "merge_states",
]


def signature(function):
    """Names, kinds and defaults, without annotations."""
    found = inspect.signature(function)
    parameters = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in found.parameters.values()]
    return str(found.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    assert signature(getattr(hopper_attention, name)) == " ".join(SIGNATURES[name].split())


@pytest.mark.parametrize("name", ON_THE_CPU)
def test_the_reference_has_the_same_signature(name):
    assert signature(getattr(functions, name)) == signature(getattr(hopper_attention, name))


def test_every_public_function_is_in_the_snapshot():
    functions_here = {name for name in hopper_attention.__all__ if inspect.isfunction(getattr(hopper_attention, name))}
    assert functions_here == set(SIGNATURES)


@pytest.mark.parametrize("name", SIGNATURES)
def test_plain_function_with_documented_parameters(name):
    function = getattr(hopper_attention, name)
    assert inspect.isfunction(function) and inspect.getdoc(function)
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
