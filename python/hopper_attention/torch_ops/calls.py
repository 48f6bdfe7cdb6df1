"""Arguments of the public functions -> arguments of operators: what is not given is left out, the rest gets its type."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from hopper_attention import interface
from hopper_attention.arguments import flag, number, window
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


_LSE_FLAGS = ("return_attn_probs", "return_softmax_lse")


class Form:
    """How an attention operator takes the arguments of its public function: by position, up to the last one given."""

    def __init__(self, operator: str, function: str) -> None:
        signature = inspect.signature(getattr(kernels, operator)).parameters.values()
        self.defaults = [None if p.default is p.empty else p.default for p in signature]
        self.required = sum(p.default is p.empty for p in signature)
        self.names = tuple(_PARAMETERS[function])
        places = {p.name: place for place, p in enumerate(signature)}
        self.flags, self.options, self.out = places["flags"], places["options"], places.get("out", -1)
        # Name -> (name, default, conversion, place in the row, bit of the flags, place in the options).
        self.parameters: dict[str, tuple[str, Any, Any, int | None, int, int | None]] = {}
        options = tuple(kernels.OPTIONS)
        for name, (default, convert) in _PARAMETERS[function].items():
            bit = kernels.FLAGS.get("return_lse" if name in _LSE_FLAGS else name, 0)
            item = "window_left" if name == "window_size" else name
            option = options.index(item) if item in options else None
            self.parameters[name] = (name, default, convert, places.get(name), bit, option)
        self.in_order = tuple(self.parameters.values())
        self.default_values = tuple(default for _, default, *_ in self.in_order)

    def arguments(self, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
        """Those of the operator for a call of the function. Raises as `given_arguments`."""
        grad = torch.is_grad_enabled()
        row = self.defaults.copy()
        last, flags, options = max(self.required, self.out + 2), 0, None
        in_order = zip(self.in_order, self.default_values, args, strict=False)
        given = [(parameter, x) for parameter, default, x in in_order if x is not None and x is not default]
        given += [(self.parameters[name], x) for name, x in kwargs.items() if x is not None]
        for (name, default, convert, place, bit, option), value in given:
            if value is default:
                continue
            if convert is not None:
                value = convert(name, value)
                if value is None or value == default:
                    continue
            elif grad and isinstance(value, torch.Tensor):
                refuse_grad(name, value)
            if place is not None:
                row[place] = value
                if place >= last:
                    last = place + 1
            elif bit:
                flags |= bit
            elif option is not None:  # what has no place at all has no effect
                options = options or list(kernels.DEFAULTS)
                if name == "window_size":
                    options[option : option + 2] = value
                else:
                    options[option] = value
        if flags:
            row[self.flags] = flags
            last = max(last, self.flags + 1)
        if options:
            row[self.options] = options
            last = max(last, self.options + 1)
        return row[:last]
