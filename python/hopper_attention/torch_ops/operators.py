"""Defines torch.ops.hopper_attention.*: schemas, kernels (the public functions on plain tensors), fake kernels.

Made with torch.library.Library: a custom_op costs 14.7 us a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hopper_attention import interface
from hopper_attention.torch_ops import fake, fake_checks, kernels
from hopper_attention.torch_ops.schema import schema

_CACHES = ("k_cache", "v_cache")
_RESULTS = ("out", "softmax_lse", "workspace")

SCHEMAS: dict[str, str] = {}
_LIBRARY = torch.library.Library("hopper_attention", "DEF")
# What a caller or an earlier operation made is passed on with its strides: last stride 1, rows on 16 bytes.
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)


def argument_names(name: str) -> tuple[str, ...]:
    """The positional parameters of operator `name`."""
    arguments = getattr(torch.ops.hopper_attention, name).default._schema.arguments
    return tuple(argument.name for argument in arguments if not argument.kwarg_only)


def by_name(names: tuple[str, ...], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of an operator whose positional parameters are `names`; of the flags the one on the LSE."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    given["return_lse"] = given.pop("flags", 0) & kernels.LSE != 0
    return given


def _define(
    name: str, signature: Callable, kernel: Callable, fake_kernel: Callable[[dict[str, Any]], Any], **options: Any
) -> None:
    """One operator, whose schema follows `signature`."""
    text = schema(name, signature, **options)
    _LIBRARY.define(text, tags=_TAGS)
    names = argument_names(name)

    def without_memory(*args, **kwargs):
        return fake_kernel(by_name(names, args, kwargs))

    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, kernel, device)
    torch.library.register_fake(f"hopper_attention::{name}", without_memory, lib=_LIBRARY)
    SCHEMAS[name] = text


def _define_of_attention(
    name: str,
    signature: Callable,
    kernel: Callable,
    fake_kernel: Callable[[dict[str, Any]], Any],
    without: tuple[str, ...] = (),
    **options: Any,
) -> None:
    """One operator of `kernels`, which Python calls directly where nothing has to see the call."""
    _define(name, signature, kernel, fake_kernel, without=(*without, *kernels.NOT_IN_SCHEMAS), **options)
    operator = getattr(torch.ops.hopper_attention, name).default
    operator._op = kernels.CalledDirectly(operator, kernel)


def _define_of_function(
    name: str,
    function: Callable,
    fake_kernel: Callable[[dict[str, Any]], Any],
    result: Callable[[Any], Any],
    **options: Any,
) -> None:
    """One operator with the parameters of the public `function`. `result` brings what that returns into the form that
    the schema promises.
    """
    public = function.__name__

    def kernel(*args, **kwargs):
        return result(getattr(interface, public)(**dict(zip(names, args, strict=False)), **kwargs))

    _define(name, function, kernel, fake_kernel, **options)
    names = argument_names(name)


def _same(result: Any) -> Any:
    return result


def _nothing(result: Any) -> None:
    return None


def _second(result: Any) -> torch.Tensor:
    return result[1]


for _name, _written in (("fwd", ()), ("varlen_fwd", ()), ("kvcache", ()), ("kvcache_append", _CACHES)):
    _kernel = getattr(kernels, f"{_name}_out")
    _define_of_attention(
        _name,
        _kernel,
        kernels.allocating(_kernel),
        fake.attention,
        returns="(Tensor out, Tensor softmax_lse)",
        without=_RESULTS,
        written=_written,
    )
    _define_of_attention(
        f"{_name}_out",
        _kernel,
        _kernel,
        fake_checks.attention,
        returns="()",
        written=(*_written, *_RESULTS),
    )

_define_of_function(
    "combine",
    interface.flash_attn_combine,
    fake.combine,
    _same,
    returns="(Tensor out, Tensor softmax_lse)",
    without=("out",),
)
_define_of_function(
    "combine_out",
    interface.flash_attn_combine,
    fake.combined_lse,
    _second,
    returns="Tensor",
    written=("out",),
    required=("out",),
)
_define_of_function(
    "merge_states",
    interface.merge_states,
    fake.merge_states,
    _same,
    returns="(Tensor out, Tensor lse)",
    without=("out", "lse"),
)
_define_of_function(
    "merge_states_out",
    interface.merge_states,
    fake_checks.merge,
    _nothing,
    returns="()",
    written=("out", "lse"),
    required=("out", "lse"),
)
_define_of_function(
    "get_scheduler_metadata",
    interface.get_scheduler_metadata,
    fake.scheduler_metadata,
    _same,
    returns="Tensor",
    without=("out",),
)
_define_of_function(
    "get_scheduler_metadata_out",
    interface.get_scheduler_metadata,
    fake_checks.schedule_options,
    _nothing,
    returns="()",
    written=("out",),
    required=("out",),
)
