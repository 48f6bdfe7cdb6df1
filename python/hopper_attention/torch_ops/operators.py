"""Defines torch.ops.hopper_attention.*: schemas, kernels (the public functions on plain tensors), fake kernels.

Made with torch.library.Library: a custom_op costs 14.7 us a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hopper_attention import interface
from hopper_attention.torch_ops import fake
from hopper_attention.torch_ops.schema import schema

_CACHES = ("k_cache", "v_cache")
_NEW = ("k", "v", "rotary_cos", "rotary_sin", "rotary_seqlens", "rotary_interleaved", "cu_seqlens_k_new")
_RESULTS = ("out", "softmax_lse", "workspace")
_FLAGS = ("return_attn_probs", "return_softmax_lse")

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


def _define(
    name: str,
    function: Callable,
    fake_kernel: Callable[[dict[str, Any]], Any],
    result: Callable[[Any], Any],
    **options: Any,
) -> None:
    """One operator. `result` brings what the public function returns into the form that the schema promises."""
    text = schema(name, function, **options)
    _LIBRARY.define(text, tags=_TAGS)
    names = argument_names(name)
    public = function.__name__

    def kernel(*args, **kwargs):
        kwargs.update(zip(names, args, strict=False))
        return result(getattr(interface, public)(**kwargs))

    def without_memory(*args, **kwargs):
        kwargs.update(zip(names, args, strict=False))
        return fake_kernel(kwargs)

    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, kernel, device)
    torch.library.register_fake(f"hopper_attention::{name}", without_memory, lib=_LIBRARY)
    SCHEMAS[name] = text


def _with_lse(result: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return result if isinstance(result, tuple) else (result, fake.no_lse(result))


def _same(result: Any) -> Any:
    return result


def _nothing(result: Any) -> None:
    return None


def _second(result: Any) -> torch.Tensor:
    return result[1]


_PAIR = "(Tensor out, Tensor softmax_lse)"
for _name, _function, _without, _written in (
    ("fwd", interface.flash_attn_func, (), ()),
    ("varlen_fwd", interface.flash_attn_varlen_func, (), ()),
    ("kvcache", interface.flash_attn_with_kvcache, _NEW, ()),
    ("kvcache_append", interface.flash_attn_with_kvcache, (), _CACHES),
):
    _define(
        _name, _function, fake.attention, _with_lse, returns=_PAIR, without=(*_without, *_RESULTS), written=_written
    )
    _define(
        f"{_name}_out",
        _function,
        fake.nothing,
        _nothing,
        returns="()",
        without=(*_without, *_FLAGS),
        written=(*_written, *_RESULTS),
        required=("out",),
    )

_define(
    "combine",
    interface.flash_attn_combine,
    fake.combine,
    _same,
    returns="(Tensor out, Tensor softmax_lse)",
    without=("out",),
)
_define(
    "combine_out",
    interface.flash_attn_combine,
    fake.combined_lse,
    _second,
    returns="Tensor",
    written=("out",),
    required=("out",),
)
_define(
    "merge_states",
    interface.merge_states,
    fake.merge_states,
    _same,
    returns="(Tensor out, Tensor lse)",
    without=("out", "lse"),
)
_define(
    "merge_states_out",
    interface.merge_states,
    fake.nothing,
    _nothing,
    returns="()",
    written=("out", "lse"),
    required=("out", "lse"),
)
_define(
    "get_scheduler_metadata",
    interface.get_scheduler_metadata,
    fake.scheduler_metadata,
    _same,
    returns="Tensor",
    without=("out",),
)
_define(
    "get_scheduler_metadata_out",
    interface.get_scheduler_metadata,
    fake.nothing,
    _nothing,
    returns="()",
    written=("out",),
    required=("out",),
)
