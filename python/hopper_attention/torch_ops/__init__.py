"""The public functions as torch operators: torch.ops.hopper_attention.fwd, varlen_fwd, kvcache, combine, ...

Importing this module defines them. Callers need not: the public functions come here by themselves while torch.compile,
torch.export or torch.jit.trace traces, under a dispatch mode and for tensors without memory; all other calls reach the
kernels directly, because a call through torch's dispatcher costs several microseconds.

The functions below have the arguments and results of the public ones and call one operator each. The attention operators
take tensors by the names of the public function and scalars as `kernels` says, since a call through torch's dispatcher pays
for each argument; the others have the parameters of their function:

fwd, varlen_fwd, kvcache, kvcache_append, combine, merge_states, get_scheduler_metadata: return new tensors;
    softmax_lse has no elements unless it was asked for. kvcache_append also writes k and v into the caches.
the same with _out (not get_scheduler_metadata): write into tensors that are given; nothing is returned.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from hopper_attention import _core, interface, schedule
from hopper_attention.arguments import flag
from hopper_attention.torch_ops import flops, kernels  # noqa: F401  (flops registers the formulas)
from hopper_attention.torch_ops.calls import (
    NO_NUMBERS,
    bound,
    flags_of,
    given_arguments,
    numbers_of,
    option,
    refuse_grads,
)
from hopper_attention.torch_ops.fake import empty_lse, empty_output
from hopper_attention.torch_ops.operators import SCHEMAS, argument_names

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
_NAMES = {name: argument_names(name) for name in SCHEMAS}
# What torch's dispatcher asks and does; each name of a path costs as much as some of these calls.
_is_grad_enabled = torch.is_grad_enabled
_modes, _transform = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_pop_mode, _push_mode = torch._C._pop_torch_dispatch_stack, torch._C._push_on_torch_dispatch_stack


def _call(operator: str, row: list[Any]) -> Any:
    """Calls `operator`. Where a dispatch mode has to see a call of plain tensors, it is handed over here as torch's
    dispatcher does it, which would change every argument from Python to C++ and back before.

    Raises NotImplementedError if grad mode is on and a tensor requires grad.
    """
    function = _OPERATORS[operator]
    if _is_grad_enabled():
        refuse_grads(_NAMES[operator], row)
    if torch.compiler.is_dynamo_compiling() or _modes() == 0 or _transform() is not None:
        return function(*row)
    arguments = _core.plain_arguments(row)
    if arguments is not None:
        mode = _pop_mode(None)
        try:
            if not hasattr(mode, "_mode_key"):
                return mode.__torch_dispatch__(function, (), arguments, {})
        finally:
            _push_mode(mode)
    return function(*row)  # tensors without memory, or a mode of torch's own: it fakes, functionalizes or traces


def _attend(operator: str, row: list[Any], place: int, with_lse: int) -> Any:
    """Calls the form of `operator` that allocates, or, if out, softmax_lse or workspace is given, the form that writes.

    row: the arguments of the latter, q and v in places 0 and 2, those three from `place` on.
    """
    out, lse, workspace = row[place : place + 3]
    if out is lse is workspace is None:
        out, lse = _call(operator, row[:place] + row[place + 3 :])
        return (out, lse) if with_lse else out
    if out is None:
        out = row[place] = empty_output(row[0], row[2])
    if with_lse and lse is None:
        lse = row[place + 1] = empty_lse(row[0])
    _call(operator + "_out", row)
    return (out, lse) if with_lse else out


def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False, *, s_aux=None, out=None, softmax_lse=None, batch_invariant=False, workspace=None,
):  # fmt: skip
    """`hopper_attention.flash_attn_func` through torch.ops.hopper_attention.fwd or fwd_out."""
    flags = flags_of(causal, batch_invariant, return_attn_probs, "return_attn_probs", pack_gqa, deterministic)
    numbers = numbers_of(softmax_scale, softcap, window_size, attention_chunk, sm_margin)
    row = [q, k, v, out, softmax_lse, workspace, s_aux, option("num_splits", num_splits, 1), flags]
    row += numbers
    if not (qv is q_descale is k_descale is v_descale is None):
        row += [*NO_NUMBERS[len(numbers) :], qv, q_descale, k_descale, v_descale]
    return _attend("fwd", row, 3, flags & kernels.LSE)


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
    flags = flags_of(causal, batch_invariant, return_attn_probs, "return_attn_probs", pack_gqa, deterministic)
    numbers = numbers_of(softmax_scale, softcap, window_size, attention_chunk, sm_margin, cp_world_size, cp_rank)
    row = [
        q, k, v, cu_seqlens_q, out, softmax_lse, workspace, cu_seqlens_k, seqused_k, page_table, scheduler_metadata,
        s_aux, option("num_splits", num_splits, 1), flags, bound(max_seqlen_q), bound(max_seqlen_k),
    ]  # fmt: skip
    row += numbers
    if not (seqused_q is qv is q_descale is k_descale is v_descale is cp_tot_seqused_k is None):
        row += [*NO_NUMBERS[len(numbers) :], seqused_q, qv, q_descale, k_descale, v_descale, cp_tot_seqused_k]
    return _attend("varlen_fwd", row, 4, flags & kernels.LSE)


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
    if cache_seqlens is not None and not isinstance(cache_seqlens, torch.Tensor):
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    flags = flags_of(causal, batch_invariant, return_softmax_lse, "return_softmax_lse", pack_gqa)
    if rotary_interleaved is not True and not flag("rotary_interleaved", rotary_interleaved):
        flags |= kernels.HALVES
    numbers = numbers_of(softmax_scale, softcap, window_size, attention_chunk, sm_margin, cp_world_size, cp_rank)
    row = [q, k_cache, v_cache, out, softmax_lse, workspace]
    appends = not (k is v is rotary_cos is rotary_sin is rotary_seqlens is None)
    if appends:
        row += [k, v, rotary_cos, rotary_sin, rotary_seqlens, cu_seqlens_k_new]
    row += [
        cache_seqlens, page_table, cu_seqlens_q, scheduler_metadata, s_aux, option("num_splits", num_splits, 0),
        flags, bound(max_seqlen_q),
    ]  # fmt: skip
    row += numbers
    if not (cache_batch_idx is cache_leftpad is qv is q_descale is k_descale is v_descale is cp_tot_seqused_k is None):
        row += [
            *NO_NUMBERS[len(numbers) :], cache_batch_idx, cache_leftpad, qv, q_descale, k_descale, v_descale,
            cp_tot_seqused_k,
        ]  # fmt: skip
    return _attend("kvcache_append" if appends else "kvcache", row, 3, flags & kernels.LSE)


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
    lengths = given.get("cache_seqlens")
    if lengths is not None and not isinstance(lengths, torch.Tensor):
        like = schedule.source(*map(given.get, ("cu_seqlens_q", "cu_seqlens_k_new", "cache_leftpad", "out")))
        device = schedule.current_device() if like is None else like.device
        given["cache_seqlens"] = torch.full((given["batch_size"],), lengths, dtype=torch.int32, device=device)
    if "out" not in given:
        return _OPERATORS["get_scheduler_metadata"](**given)
    _OPERATORS["get_scheduler_metadata_out"](**given)
    return given["out"]


interface.operators = sys.modules[__name__]
