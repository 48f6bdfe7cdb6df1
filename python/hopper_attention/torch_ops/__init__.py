"""The public functions as torch operators: torch.ops.hopper_attention.fwd, varlen_fwd, kvcache, combine, ...

Importing this module defines them. Callers need not: the public functions come here by themselves while torch.compile or
torch.export traces, under a dispatch mode and for tensors without memory; all other calls reach the kernels directly,
because a call through torch's dispatcher costs several microseconds.

The functions below have the arguments and results of the public ones and call one operator each. The attention operators
take tensors by the names of the public function and scalars as `kernels` says, since a call through torch's dispatcher pays
for each argument; the others have the parameters of their function:

fwd, varlen_fwd, kvcache, kvcache_append, combine, merge_states, get_scheduler_metadata: return new tensors;
    softmax_lse has no elements unless it was asked for. kvcache_append also writes k and v into the caches.
the same with _out (not get_scheduler_metadata): write into tensors that are given; nothing is returned.
"""

from __future__ import annotations

from typing import Any

import torch

from hopper_attention.arguments import flag
from hopper_attention.torch_ops import flops, kernels  # noqa: F401  (flops registers the formulas)
from hopper_attention.torch_ops.calls import (
    bound,
    check_hints,
    flags_of,
    given_arguments,
    number_of,
    option,
    options_of,
    refuse_grads,
    scale_of,
)
from hopper_attention.torch_ops.fake import empty_lse, empty_output
from hopper_attention.torch_ops.operators import SCHEMAS

__all__ = [
    "SCHEMAS",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "merge_states",
]

_OPERATORS = {name: getattr(torch.ops.hopper_attention, name).default for name in SCHEMAS}
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None), int, float, list))


def _mode_to_call() -> Any:
    """The innermost dispatch mode, if it is a user's and the first to see a call."""
    modes = torch._C._len_torch_dispatch_stack()
    if modes == 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    mode = torch._C._get_dispatch_stack_at(modes - 1)
    return None if hasattr(mode, "_mode_key") else mode  # torch's own: they fake, functionalize or trace


def _call(operator: str, row: list[Any]) -> Any:
    """Calls `operator`. Where a dispatch mode has to see a call of plain tensors, it is handed over here as torch's
    dispatcher does it, which would change every argument from Python to C++ and back before.
    """
    function = _OPERATORS[operator]
    if torch.compiler.is_dynamo_compiling():
        return function(*row)
    mode = _mode_to_call()
    if mode is None or not _PLAIN.issuperset(map(type, row)):
        return function(*row)
    torch._C._pop_torch_dispatch_stack(None)
    try:
        return mode.__torch_dispatch__(function, (), tuple(row), {})
    finally:
        torch._C._push_on_torch_dispatch_stack(mode)


def _attend(operator: str, first: list[Any], results: list[Any], more: list[Any], with_lse: int) -> Any:
    """Calls the form of `operator` that allocates, or, if any of `results` (out, softmax_lse, workspace) is given, the
    form that writes. first: the arguments before them, with q and v in places 0 and 2; more: those after.
    """
    out, lse, workspace = results
    if out is None and lse is None and workspace is None:
        out, lse = _call(operator, first + more)
        return (out, lse) if with_lse else out
    if out is None:
        out = empty_output(first[0], first[2])
    if with_lse and lse is None:
        lse = empty_lse(first[0])
    _call(operator + "_out", [*first, out, lse, workspace, *more])
    return (out, lse) if with_lse else out


def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False, *, s_aux=None, out=None, softmax_lse=None, batch_invariant=False, workspace=None,
):  # fmt: skip
    """`hopper_attention.flash_attn_func` through torch.ops.hopper_attention.fwd or fwd_out."""
    if torch.is_grad_enabled():
        refuse_grads(
            q=q, k=k, v=v, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, s_aux=s_aux, out=out,
            softmax_lse=softmax_lse, workspace=workspace,
        )  # fmt: skip
    scale, softcap = scale_of(softmax_scale), number_of("softcap", softcap)
    check_hints(pack_gqa, deterministic)
    flags = flags_of(causal, batch_invariant, return_attn_probs, "return_attn_probs")
    options = options_of(window_size, attention_chunk, sm_margin)
    more = [s_aux, option("num_splits", num_splits, 1), flags]
    rare = [qv, q_descale, k_descale, v_descale]
    if scale is not None or softcap != 0 or options is not None or any(x is not None for x in rare):
        more += [scale, softcap, options, *rare]
    return _attend("fwd", [q, k, v], [out, softmax_lse, workspace], more, flags & kernels.LSE)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False, *, page_table=None, scheduler_metadata=None, s_aux=None, out=None, softmax_lse=None,
    cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None, batch_invariant=False, workspace=None,
):  # fmt: skip
    """`hopper_attention.flash_attn_varlen_func` through varlen_fwd or varlen_fwd_out.

    A max_seqlen_* that is a tensor is not read: the bound is what the shapes allow.
    """
    if torch.is_grad_enabled():
        refuse_grads(
            q=q, k=k, v=v, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, s_aux=s_aux, out=out,
            softmax_lse=softmax_lse, workspace=workspace,
        )  # fmt: skip
    scale, softcap = scale_of(softmax_scale), number_of("softcap", softcap)
    check_hints(pack_gqa, deterministic)
    flags = flags_of(causal, batch_invariant, return_attn_probs, "return_attn_probs")
    options = options_of(window_size, attention_chunk, sm_margin, cp_world_size, cp_rank)
    more = [
        cu_seqlens_k, seqused_k, page_table, scheduler_metadata, s_aux, option("num_splits", num_splits, 1), flags,
        bound("max_seqlen_q", max_seqlen_q), bound("max_seqlen_k", max_seqlen_k),
    ]  # fmt: skip
    rare = [seqused_q, qv, q_descale, k_descale, v_descale, cp_tot_seqused_k]
    if scale is not None or softcap != 0 or options is not None or any(x is not None for x in rare):
        more += [scale, softcap, options, *rare]
    return _attend(
        "varlen_fwd", [q, k, v, cu_seqlens_q], [out, softmax_lse, workspace], more, flags & kernels.LSE
    )  # fmt: skip


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False, *, s_aux=None,
    out=None, softmax_lse=None, cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None, batch_invariant=False,
    workspace=None,
):  # fmt: skip
    """`hopper_attention.flash_attn_with_kvcache` through kvcache or, with k and v, kvcache_append, or their _out."""
    if torch.is_grad_enabled():
        refuse_grads(
            q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, qv=qv, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
            q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, s_aux=s_aux, out=out,
            softmax_lse=softmax_lse, workspace=workspace,
        )  # fmt: skip
    if cache_seqlens is not None and not isinstance(cache_seqlens, torch.Tensor):
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    scale, softcap = scale_of(softmax_scale), number_of("softcap", softcap)
    check_hints(pack_gqa, False)
    flags = flags_of(causal, batch_invariant, return_softmax_lse, "return_softmax_lse")
    if rotary_interleaved is not True and not flag("rotary_interleaved", rotary_interleaved):
        flags |= kernels.HALVES
    options = options_of(window_size, attention_chunk, sm_margin, cp_world_size, cp_rank)
    new = [k, v, rotary_cos, rotary_sin, rotary_seqlens, cu_seqlens_k_new]
    operator = "kvcache_append" if any(x is not None for x in new[:5]) else "kvcache"
    more = new if operator == "kvcache_append" else []
    more = [
        *more, cache_seqlens, page_table, cu_seqlens_q, scheduler_metadata, s_aux, option("num_splits", num_splits, 0),
        flags, bound("max_seqlen_q", max_seqlen_q),
    ]  # fmt: skip
    rare = [cache_batch_idx, cache_leftpad, qv, q_descale, k_descale, v_descale, cp_tot_seqused_k]
    if scale is not None or softcap != 0 or options is not None or any(x is not None for x in rare):
        more += [scale, softcap, options, *rare]
    return _attend(operator, [q, k_cache, v_cache], [out, softmax_lse, workspace], more, flags & kernels.LSE)


def flash_attn_combine(*args, **kwargs):
    """`hopper_attention.flash_attn_combine` through combine or combine_out."""
    given = given_arguments("flash_attn_combine", args, kwargs)
    if "out" not in given:
        return _OPERATORS["combine"](**given)
    return given["out"], _OPERATORS["combine_out"](**given)


def merge_states(*args, **kwargs):
    """`hopper_attention.merge_states` through merge_states or merge_states_out."""
    given = given_arguments("merge_states", args, kwargs)
    if "out" not in given and "lse" not in given:
        return _OPERATORS["merge_states"](**given)
    for name, like in (("out", "out_a"), ("lse", "lse_a")):
        if name not in given:
            given[name] = torch.empty_like(given[like], memory_format=torch.contiguous_format)
    _OPERATORS["merge_states_out"](**given)
    return given["out"], given["lse"]


def get_scheduler_metadata(*args, **kwargs):
    """`hopper_attention.get_scheduler_metadata` through get_scheduler_metadata or get_scheduler_metadata_out."""
    given = given_arguments("get_scheduler_metadata", args, kwargs)
    lengths, starts = given.get("cache_seqlens"), given.get("cu_seqlens_q")
    if lengths is not None and not isinstance(lengths, torch.Tensor):
        device = "cuda" if starts is None else starts.device
        given["cache_seqlens"] = torch.full((given["batch_size"],), lengths, dtype=torch.int32, device=device)
    if "out" not in given:
        return _OPERATORS["get_scheduler_metadata"](**given)
    _OPERATORS["get_scheduler_metadata_out"](**given)
    return given["out"]
