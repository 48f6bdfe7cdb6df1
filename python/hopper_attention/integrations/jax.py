"""The functions on jax arrays, through DLPack and torch: no copies of q, k and v, streams in order. Eager only.

    from hopper_attention.integrations import jax as attention
    out = attention.flash_attn_func(q, k, v, causal=True)

Arguments and results are those of the functions in `hopper_attention`; every array is a jax array, on a CPU or on CUDA
devices. torch has to be installed for the same CUDA. Inside jax.jit, grad or vmap they raise TypeError. Arrays of jax are
never written: `out`, `softmax_lse` and, for the cache, new k and v are refused.
"""

from __future__ import annotations

from typing import Any

import jax
import torch

import hopper_attention

_WRITTEN = ("out", "softmax_lse", "lse", "workspace")


def flash_attn_func(q, k, v, *args, **kwargs):
    """`hopper_attention.flash_attn_func`."""
    return _call(hopper_attention.flash_attn_func, (q, k, v, *args), kwargs)


def flash_attn_varlen_func(q, k, v, *args, **kwargs):
    """`hopper_attention.flash_attn_varlen_func`."""
    return _call(hopper_attention.flash_attn_varlen_func, (q, k, v, *args), kwargs)


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, *args, **kwargs):
    """`hopper_attention.flash_attn_with_kvcache` without appending: the cache of jax is written by jax."""
    for name, x in (("k", k), ("v", v)):
        if x is not None:
            raise NotImplementedError(f"{name}: jax arrays are not written; update the cache with .at[...].set(...)")
    return _call(hopper_attention.flash_attn_with_kvcache, (q, k_cache, v_cache, None, None, *args), kwargs)


def flash_attn_combine(out_partial, lse_partial, out_dtype=None):
    """`hopper_attention.flash_attn_combine`; out_dtype: a word such as "bfloat16"."""
    return _call(
        hopper_attention.flash_attn_combine, (out_partial, lse_partial), {"out_dtype": out_dtype}, "out_partial"
    )


def merge_states(out_a, lse_a, out_b, lse_b):
    """`hopper_attention.merge_states`."""
    return _call(hopper_attention.merge_states, (out_a, lse_a, out_b, lse_b), {}, "out_a")


def _call(function, args: tuple, kwargs: dict[str, Any], first: str = "q"):
    """The function on torch tensors. first: the name of the first argument, which has to be a jax array."""
    if not isinstance(args[0], jax.Array):
        raise TypeError(f"{first}: a jax array is needed, found {type(args[0]).__name__}")
    for name in _WRITTEN:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{name}: jax arrays are not written; take the result that is returned")
    with torch.inference_mode():
        result = function(*map(_to_torch, args), **{name: _to_torch(x) for name, x in kwargs.items()})
    return tuple(map(_to_jax, result)) if isinstance(result, tuple) else _to_jax(result)


def _to_torch(x: Any) -> Any:
    """A tensor on the memory of a jax array; anything else as it is."""
    if isinstance(x, jax.core.Tracer):
        raise TypeError("jax.jit, grad and vmap are not available: call this function on arrays, outside of them")
    return torch.from_dlpack(x) if isinstance(x, jax.Array) else x


def _to_jax(x: torch.Tensor) -> jax.Array:
    return jax.dlpack.from_dlpack(x.contiguous())
