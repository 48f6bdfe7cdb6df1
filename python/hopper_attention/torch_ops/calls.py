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


def _window(name: str, value: Any) -> list[int]:
    return list(window(value))


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
_DEFAULTS = {
    name: {p.name: p.default for p in inspect.signature(getattr(interface, name)).parameters.values()}
    for name in FUNCTIONS
}
_NAMES = {name: tuple(defaults) for name, defaults in _DEFAULTS.items()}


def given_arguments(function: str, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of the public `function` that are not its defaults, as its operators take them.

    Raises NotImplementedError if grad mode is on and a tensor requires grad, TypeError for values of the wrong type.
    """
    defaults = _DEFAULTS[function]
    named = dict(zip(_NAMES[function], args, strict=False))
    named.update(kwargs)
    given = {}
    grad = torch.is_grad_enabled()
    for name, value in named.items():
        if value is None or value is defaults[name]:
            continue
        kind = TYPES.get(name)
        if kind is not None:
            value = _CONVERT[kind](name, value)
            if value is None:
                continue
        elif grad and isinstance(value, torch.Tensor) and value.requires_grad:
            raise NotImplementedError(
                f"{name}: requires grad, but this is forward only; call under torch.inference_mode() or detach it"
            )
        given[name] = value
    return given
