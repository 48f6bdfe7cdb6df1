"""Arguments of the public functions -> arguments of operators: what is not given is left out, the rest gets its type."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from hopper_attention import interface
from hopper_attention.arguments import dtype_name, flag, number, window
from hopper_attention.merging import torch_dtype
from hopper_attention.torch_ops import kernels
from hopper_attention.torch_ops.schema import TYPES

FUNCTIONS = (
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "flash_attn_combine",
    "merge_states",
    "get_scheduler_metadata",
)


def _window(name: str, value: Any) -> tuple[int, int]:
    return window(value)


def _integer(name: str, value: Any) -> Any:
    """An int or SymInt. A tensor would have to be read, which tracing cannot do."""
    if isinstance(value, torch.Tensor):
        raise TypeError(
            f"{name}: an integer is needed, found a tensor; pass an int (torch.jit.trace has sizes in tensors: int(size))"
        )
    return value


def _dtype(name: str, value: Any) -> torch.dtype:
    if name == "out_dtype":
        return torch_dtype(value)
    dtype = value if isinstance(value, torch.dtype) else getattr(torch, dtype_name(value), None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}: a dtype is needed, found {value!r}")
    return dtype


_CONVERT: dict[str, Callable[[str, Any], Any]] = {
    "SymInt[]": _window,
    "SymInt": _integer,
    "float": number,
    "bool": flag,
    "ScalarType": _dtype,
}


def _parameters(function: Callable) -> dict[str, tuple[Any, Callable[[str, Any], Any] | None]]:
    """Name -> (default, conversion to the operator's type; None for tensors) of a public function, in order."""
    return {
        p.name: (p.default, _CONVERT.get(TYPES.get(p.name, "Tensor")))
        for p in inspect.signature(function).parameters.values()
    }


_PARAMETERS = {name: _parameters(getattr(interface, name)) for name in FUNCTIONS}


def given_arguments(function: str, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of the public `function` that are not its defaults, with the types that operators take.

    Raises NotImplementedError if grad mode is on and a tensor requires grad, TypeError for values of the wrong type.
    """
    parameters = _PARAMETERS[function]
    grad = torch.is_grad_enabled()
    given: dict[str, Any] = {}
    for name, value in (*zip(parameters, args, strict=False), *kwargs.items()):
        if value is None:
            continue
        default, convert = parameters[name]
        if value is default:
            continue
        if convert is not None:
            value = convert(name, value)
            if value is None or value == default:
                continue
        elif grad and isinstance(value, torch.Tensor):
            refuse_grad(name, value)
        given[name] = value
    return given


def refuse_grad(name: str, value: torch.Tensor) -> None:
    """NotImplementedError if `value` requires grad."""
    if value.requires_grad:
        raise NotImplementedError(
            f"{name}: requires grad, but this is forward only; call under torch.inference_mode() or detach it"
        )


def bound(value: Any) -> Any:
    """max_seqlen_* of an operator. What is in a tensor is left out: it would have to be read, and is only a bound."""
    if type(value) is int:
        return value
    return -1 if value is None or isinstance(value, torch.Tensor) else value


def option(name: str, value: Any, default: int) -> Any:
    if type(value) is int:
        return value
    return default if value is None else _integer(name, value)


def flags_of(
    causal: Any, batch_invariant: Any, return_lse: Any, flag_name: str, pack_gqa: Any, deterministic: Any = False
) -> int:
    """The bits of the flags that all attention operators have. flag_name: of return_lse. TypeError for values, those of
    the hints pack_gqa and deterministic too, that are no flags.
    """
    if pack_gqa is not None:
        flag("pack_gqa", pack_gqa)
    if deterministic is not False:
        flag("deterministic", deterministic)
    flags = kernels.CAUSAL if causal is True or (causal is not False and flag("causal", causal)) else 0
    if batch_invariant is True or (batch_invariant is not False and flag("batch_invariant", batch_invariant)):
        flags |= kernels.INVARIANT
    if return_lse is True or (return_lse is not False and flag(flag_name, return_lse)):
        flags |= kernels.LSE
    return flags


NO_NUMBERS = [None, 0.0, None]


def numbers_of(
    softmax_scale: Any,
    softcap: Any,
    window_size: Any,
    attention_chunk: Any,
    sm_margin: Any,
    cp_world_size: Any = 1,
    cp_rank: Any = 0,
) -> list[Any]:
    """softmax_scale, softcap and options of an operator, as many as differ from NO_NUMBERS."""
    if softmax_scale is not None and type(softmax_scale) is not float:
        softmax_scale = number("softmax_scale", softmax_scale)
    if type(softcap) is not float:
        softcap = number("softcap", softcap)
    options = options_of(window_size, attention_chunk, sm_margin, cp_world_size, cp_rank)
    if options is not None:
        return [softmax_scale, softcap, options]
    return [] if softmax_scale is None and softcap == 0 else [softmax_scale, softcap]


def options_of(
    window_size: Any, attention_chunk: Any, sm_margin: Any, cp_world_size: Any, cp_rank: Any
) -> list[Any] | None:
    """`options` of an operator; None where all are defaults."""
    if type(attention_chunk) is type(sm_margin) is type(cp_world_size) is type(cp_rank) is int:  # as nearly always
        others = attention_chunk != 0 or sm_margin != 0 or cp_world_size != 1 or cp_rank != 0
        if not others and type(window_size) is tuple and window_size == (-1, -1):
            return None
    left, right = (-1, -1) if window_size is None else window(window_size)
    chunk = option("attention_chunk", attention_chunk, 0)
    margin = option("sm_margin", sm_margin, 0)
    world, rank = option("cp_world_size", cp_world_size, 1), option("cp_rank", cp_rank, 0)
    if left == right == -1 and chunk == margin == rank == 0 and world == 1:
        return None
    return [left, right, chunk, margin, world, rank]


def refuse_grads(names: tuple[str, ...], row: list[Any]) -> None:
    """NotImplementedError for the first tensor of `row` that requires grad."""
    for name, x in zip(names, row, strict=False):
        if isinstance(x, torch.Tensor):
            refuse_grad(name, x)
