"""What the operators return, without computing it: shapes, dtypes, strides. Also allocates results while tracing."""

from __future__ import annotations

from typing import Any

import torch

from hopper_attention.check_schedule import schedule_stride
from hopper_attention.torch_ops import fake_checks


def empty_output(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Like q with the head dim of v, contiguous; bf16 for fp8."""
    if q.dim() < 3:
        raise ValueError(f"q: (B, Sq, Hq, D) or (T, Hq, D) is needed, found {q.dim()} dims: {tuple(q.shape)}")
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)


def empty_lse(q: torch.Tensor) -> torch.Tensor:
    """(B, Hq, Sq) for q (B, Sq, Hq, D), (Hq, T) for (T, Hq, D). float32; the reference of float64 gives float64."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=dtype)


def no_lse(x: torch.Tensor) -> torch.Tensor:
    """What stands for an LSE that was not asked for: no elements."""
    return x.new_empty((0,), dtype=torch.float32)


def attention(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """fwd, varlen_fwd, kvcache, kvcache_append."""
    fake_checks.attention(given)
    q = given["q"]
    out = empty_output(q, given["v_cache"] if "v_cache" in given else given["v"])
    return out, empty_lse(q) if given.get("return_lse") else no_lse(out)


def combined_lse(given: dict[str, Any]) -> torch.Tensor:
    """(B, M, H), a transposed view of (B, H, M)."""
    fake_checks.combine(given)
    parts = given["out_partial"]
    _, batch, queries, heads, _ = parts.shape
    return parts.new_empty((batch, heads, queries), dtype=parts.dtype).transpose(1, 2)


def combine(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    lse, parts = combined_lse(given), given["out_partial"]
    return parts.new_empty(parts.shape[1:], dtype=given.get("out_dtype") or parts.dtype), lse


def merge_states(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    fake_checks.merge(given)
    return tuple(torch.empty_like(given[name], memory_format=torch.contiguous_format) for name in ("out_a", "lse_a"))


def scheduler_metadata(given: dict[str, Any]) -> torch.Tensor:
    """1 + 4 round_up(B, 4) int32."""
    fake_checks.schedule_options(given)
    size = 1 + 4 * schedule_stride(given["batch_size"])
    return given["cache_seqlens"].new_empty((size,), dtype=torch.int32)
