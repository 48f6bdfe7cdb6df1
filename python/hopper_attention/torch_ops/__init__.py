"""The public functions as torch operators: torch.ops.hopper_attention.fwd, varlen_fwd, kvcache, combine, ...

Importing this module defines them. Callers need not: the public functions come here by themselves while torch.compile or
torch.export traces, under a dispatch mode and for tensors without memory; all other calls reach the kernels directly,
because a call through torch's dispatcher costs several microseconds.

The functions below have the arguments and results of the public ones and call one operator each. Operators have the
parameters of the public function in their order, less those that only another form of it takes:

fwd, varlen_fwd, kvcache, kvcache_append, combine, merge_states, get_scheduler_metadata: return new tensors;
    softmax_lse has no elements unless it was asked for. kvcache_append also writes k and v into the caches.
the same with _out (not get_scheduler_metadata): write into tensors that are given; nothing is returned.
"""

from __future__ import annotations

from typing import Any

import torch

from hopper_attention.torch_ops import flops  # noqa: F401  (registers the formulas)
from hopper_attention.torch_ops.calls import given_arguments
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

_OF_APPENDS = frozenset(("k", "v", "rotary_cos", "rotary_sin", "rotary_seqlens"))
_OPERATORS = {name: getattr(torch.ops.hopper_attention, name).default for name in SCHEMAS}


def _attention(operator: str, given: dict[str, Any], flag: str) -> Any:
    """Calls the form of `operator` that allocates, or, if any result is given, the form that writes."""
    with_lse = given.get(flag, False)
    if "out" not in given and "softmax_lse" not in given and "workspace" not in given:
        out, lse = _OPERATORS[operator](**given)
        return (out, lse) if with_lse else out
    given.pop(flag, None)
    if "out" not in given:
        given["out"] = empty_output(given)
    if with_lse and "softmax_lse" not in given:
        given["softmax_lse"] = empty_lse(given)
    _OPERATORS[operator + "_out"](**given)
    return (given["out"], given["softmax_lse"]) if with_lse else given["out"]


def flash_attn_func(*args, **kwargs):
    """`hopper_attention.flash_attn_func` through torch.ops.hopper_attention.fwd or fwd_out."""
    return _attention("fwd", given_arguments("flash_attn_func", args, kwargs), "return_attn_probs")


def flash_attn_varlen_func(*args, **kwargs):
    """`hopper_attention.flash_attn_varlen_func` through varlen_fwd or varlen_fwd_out.

    A max_seqlen_* that is a tensor is not read: the bound is what the shapes allow.
    """
    return _attention("varlen_fwd", given_arguments("flash_attn_varlen_func", args, kwargs), "return_attn_probs")


def flash_attn_with_kvcache(*args, **kwargs):
    """`hopper_attention.flash_attn_with_kvcache` through kvcache or, with k and v, kvcache_append, or their _out."""
    given = given_arguments("flash_attn_with_kvcache", args, kwargs)
    lengths = given.get("cache_seqlens")
    if lengths is not None and not isinstance(lengths, torch.Tensor):
        q, starts = given["q"], given.get("cu_seqlens_q")
        batch = q.shape[0] if starts is None else starts.shape[0] - 1
        given["cache_seqlens"] = torch.full((batch,), lengths, dtype=torch.int32, device=q.device)
    appends = not _OF_APPENDS.isdisjoint(given)
    if not appends:  # without effect: there is nothing to append or to rotate
        given.pop("cu_seqlens_k_new", None)
        given.pop("rotary_interleaved", None)
    return _attention("kvcache_append" if appends else "kvcache", given, "return_softmax_lse")


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
