"""Arguments of the public functions -> arguments of operators: what is not given is left out, the rest gets its type."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from hopper_attention import interface
from hopper_attention.arguments import flag, number, window
from hopper_attention.merging import torch_dtype
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
    """An int or SymInt. A tensor would have to be read, which tracing cannot do: max_seqlen_* are only bounds."""
    if isinstance(value, torch.Tensor):
        if name.startswith("max_seqlen"):
            return None
        raise TypeError(f"{name}: an integer is needed, found a tensor")
    return value


def _dtype(name: str, value: Any) -> torch.dtype:
    return value if isinstance(value, torch.dtype) else torch_dtype(value)


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
    """The arguments of a call of the public `function` that are not its defaults, as its operators take them.

    Raises NotImplementedError if grad mode is on and a tensor requires grad, TypeError for values of the wrong type.
    """
    parameters = _PARAMETERS[function]
    grad = torch.is_grad_enabled()
    given: dict[str, Any] = {}
    for name, value in (*zip(parameters, args, strict=False), *kwargs.items()):
        default, convert = parameters[name]
        if value is None or value is default:
            continue
        if convert is not None:
            value = convert(name, value)
            if value is None or value == default:
                continue
        elif grad and isinstance(value, torch.Tensor) and value.requires_grad:
            raise NotImplementedError(
                f"{name}: requires grad, but this is forward only; call under torch.inference_mode() or detach it"
            )
        given[name] = value
    return given
