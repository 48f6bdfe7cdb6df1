"""Operations for torch.utils.flop_counter.FlopCounterMode: two matrix products for each query and key.

Masks are not taken off, as in torch's own formula for scaled_dot_product_attention. Sequences of packed calls count with
their own lengths, which are read from the device; where there is none (FakeTensor, meta) each counts with the bound.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from hopper_attention.torch_ops.operators import argument_names, by_name


def products(queries: int, keys: int, heads: int, head_dim: int, head_dim_v: int) -> int:
    """q k^T and p v: 2 operations for each multiplication and addition."""
    return 2 * queries * keys * heads * (head_dim + head_dim_v)


def numbers(x: Any) -> list[int] | None:
    """The elements of `x`, None without memory to read."""
    if x is None or x.is_meta or isinstance(x, torch._subclasses.FakeTensor):
        return None
    return x.tolist()


def differences(starts: Any) -> list[int] | None:
    """Lengths from the starts of sequences."""
    values = numbers(starts)
    return None if values is None else [b - a for a, b in zip(values, values[1:], strict=False)]


def bound(given: dict[str, Any], name: str) -> int:
    """max_seqlen_*, 0 if it is not given."""
    return max(0, given.get(name, 0))


def clamped(length: int, most: int) -> int:
    """As the kernels read a length: what they cannot use is clamped."""
    return max(0, min(length, most))


def query_lengths(given: dict[str, Any]) -> list[int]:
    """Queries of each sequence."""
    q, starts = given["q"], given.get("cu_seqlens_q")
    if starts is None:
        return [q.shape[1]] * q.shape[0]
    rows, batch = differences(starts), starts.shape[0] - 1
    if rows is None:
        return [bound(given, "max_seqlen_q") or q.shape[0] // max(1, batch)] * batch
    rows = [clamped(n, q.shape[0]) for n in rows]
    used = numbers(given.get("seqused_q"))
    return rows if used is None else [clamped(n, most) for n, most in zip(used, rows, strict=True)]


def key_lengths(given: dict[str, Any], batch: int) -> list[int]:
    """Keys of each sequence, with those that the call appends, without those before cache_leftpad."""
    k = given["k_cache"] if "k_cache" in given else given["k"]
    table, starts = given.get("page_table"), given.get("cu_seqlens_k")
    most = k.shape[0] if starts is not None else k.shape[1]
    if table is not None:
        most = table.shape[1] * k.shape[1]
    length = given["cache_seqlens"] if given.get("cache_seqlens") is not None else given.get("seqused_k")
    lengths = numbers(length) or differences(starts)
    if lengths is None:
        lengths = [most if starts is None else bound(given, "max_seqlen_k") or most // max(1, batch)] * batch
    new = given.get("k") if "k_cache" in given else None
    added = [0] * batch
    if new is not None:
        added = differences(given.get("cu_seqlens_k_new")) or [new.shape[1] if new.dim() == 4 else 0] * batch
    padding = numbers(given.get("cache_leftpad")) or [0] * batch
    first = (numbers(starts) if table is None else None) or [0] * (batch + 1)
    room = [most - clamped(start, most) for start in first[:-1]]  # packed keys end with the tensor
    return [
        max(0, clamped(clamped(n, end) + max(0, more), end) - clamped(pad, end))
        for n, more, pad, end in zip(lengths, added, padding, room, strict=True)
    ]


def attention_flops(names: tuple[str, ...], *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Of one call of an attention operator whose positional parameters are `names`."""
    given = by_name(names, args, kwargs)
    q, v = given["q"], given["v_cache"] if "v_cache" in given else given["v"]
    queries = query_lengths(given)
    extra = 0 if given.get("qv") is None else given["qv"].shape[-1]
    return sum(
        products(sq, sk, q.shape[-2], q.shape[-1] + extra, v.shape[-1])
        for sq, sk in zip(queries, key_lengths(given, len(queries)), strict=True)
    )


def _register(name: str) -> None:
    names = argument_names(name)

    @register_flop_formula(getattr(torch.ops.hopper_attention, name), get_raw=True)
    def formula(*args, out_val=None, **kwargs):
        return attention_flops(names, *args, out_val=out_val, **kwargs)


def _tell_counters() -> None:
    """A FlopCounterMode copies the formulas when it is made: those at work, under which the first call may have brought
    this module in, get them too.
    """
    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, FlopCounterMode):
            counter.flop_registry = flop_registry | counter.flop_registry


for _operator in ("fwd", "varlen_fwd", "kvcache", "kvcache_append"):
    _register(_operator)
    _register(f"{_operator}_out")
_tell_counters()
