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

from hopper_attention.torch_ops import flops, kernels  # noqa: F401  (flops registers the formulas)
from hopper_attention.torch_ops.calls import Form, given_arguments
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

_OF_APPENDS = ("k", "v", "rotary_cos", "rotary_sin", "rotary_seqlens")
_OPERATORS = {name: getattr(torch.ops.hopper_attention, name).default for name in SCHEMAS}
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None), int, float, list))
_FORMS = {
    name: Form(name, function)
    for function, operators in {
        "flash_attn_func": ("fwd", "fwd_out"),
        "flash_attn_varlen_func": ("varlen_fwd", "varlen_fwd_out"),
        "flash_attn_with_kvcache": ("kvcache", "kvcache_out", "kvcache_append", "kvcache_append_out"),
    }.items()
    for name in operators
}
_CACHE_PARAMETERS = _FORMS["kvcache"].names


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


def _attention(operator: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Calls the form of `operator` that allocates, or, if any result is given, the form that writes."""
    out, lse = kwargs.get("out"), kwargs.get("softmax_lse")
    writes = out is not None or lse is not None or kwargs.get("workspace") is not None
    operator = operator + "_out" if writes else operator
    form = _FORMS[operator]
    row = form.arguments(args, kwargs)
    with_lse = len(row) > form.flags and row[form.flags] & kernels.LSE != 0
    if not writes:
        out, lse = _call(operator, row)
        return (out, lse) if with_lse else out
    if out is None:
        out = row[form.out] = empty_output(row[0], row[2])
    if with_lse and lse is None:
        lse = row[form.out + 1] = empty_lse(row[0])
    _call(operator, row)
    return (out, lse) if with_lse else out


def flash_attn_func(*args, **kwargs):
    """`hopper_attention.flash_attn_func` through torch.ops.hopper_attention.fwd or fwd_out."""
    return _attention("fwd", args, kwargs)


def flash_attn_varlen_func(*args, **kwargs):
    """`hopper_attention.flash_attn_varlen_func` through varlen_fwd or varlen_fwd_out.

    A max_seqlen_* that is a tensor is not read: the bound is what the shapes allow.
    """
    return _attention("varlen_fwd", args, kwargs)


def flash_attn_with_kvcache(*args, **kwargs):
    """`hopper_attention.flash_attn_with_kvcache` through kvcache or, with k and v, kvcache_append, or their _out."""
    parameters = dict(zip(_CACHE_PARAMETERS, args, strict=False))
    parameters.update(kwargs)
    lengths = parameters.get("cache_seqlens")
    if lengths is not None and not isinstance(lengths, torch.Tensor):
        q, starts = parameters["q"], parameters.get("cu_seqlens_q")
        batch = q.shape[0] if starts is None else starts.shape[0] - 1
        parameters["cache_seqlens"] = torch.full((batch,), lengths, dtype=torch.int32, device=q.device)
    appends = any(parameters.get(name) is not None for name in _OF_APPENDS)
    return _attention("kvcache_append" if appends else "kvcache", (), parameters)


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
