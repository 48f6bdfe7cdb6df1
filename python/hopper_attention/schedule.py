"""Scheduler metadata: the schedule of one step, made once and read by the calls of all layers."""

from __future__ import annotations

from typing import Any

from hopper_attention import _core, gpu
from hopper_attention.arguments import (
    bound,
    dtype_name,
    flag,
    integer,
    is_torch,
    lengths,
    on_cuda,
    size_of_pages,
    window,
)


def make(
    batch_size: int,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Any,
    qkv_dtype: Any,
    headdim_v: int | None,
    cu_seqlens_q: Any,
    cu_seqlens_k_new: Any,
    cache_leftpad: Any,
    page_size: int | None,
    max_seqlen_k_new: Any,
    causal: bool,
    window_size: Any,
    attention_chunk: int | None,
    num_splits: int,
    sm_margin: int,
    batch_invariant: bool,
    out: Any,
) -> Any:
    """Arguments, results and errors as in `get_scheduler_metadata`."""
    batch = integer("batch_size", batch_size)
    head_dim = integer("headdim", headdim)
    seqused_k, seqused_k_all = lengths("cache_seqlens", cache_seqlens)
    left, right = window(window_size)
    new = bound("max_seqlen_k_new", max_seqlen_k_new)
    for name, x in (("cache_seqlens", seqused_k), ("cu_seqlens_q", cu_seqlens_q), ("out", out)):
        if x is not None and not on_cuda(name, x):
            raise ValueError(f"{name}: must be on a CUDA device, but is on the CPU")
    if out is None:
        out = empty_metadata(batch, source(cache_seqlens, cu_seqlens_q))
    try:
        _core.make_schedule(
            out,
            dtype="bfloat16" if qkv_dtype is None else dtype_name(qkv_dtype),
            batch=batch,
            seqlen_q=bound("max_seqlen_q", max_seqlen_q),
            seqlen_k=bound("max_seqlen_k", max_seqlen_k),
            heads_q=integer("num_heads_q", num_heads_q),
            heads_k=integer("num_heads_kv", num_heads_kv),
            head_dim=head_dim,
            head_dim_v=head_dim if headdim_v is None else integer("headdim_v", headdim_v),
            page_size=size_of_pages(page_size),
            seqused_k=seqused_k,
            seqused_k_all=seqused_k_all,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k_new=cu_seqlens_k_new,
            cache_leftpad=cache_leftpad,
            seqlen_k_new=0 if cu_seqlens_k_new is not None else new,
            causal=flag("causal", causal),
            window_left=left,
            window_right=right,
            attention_chunk=0 if attention_chunk is None else integer("attention_chunk", attention_chunk),
            num_splits=integer("num_splits", num_splits),
            sm_margin=integer("sm_margin", sm_margin),
            batch_invariant=flag("batch_invariant", batch_invariant),
            stream=gpu.current_stream(out),
        )
    except (ValueError, TypeError, NotImplementedError) as error:
        raise renamed(error) from None
    return out


def source(cache_seqlens: Any, cu_seqlens_q: Any) -> Any:
    """The tensor whose device the metadata is on; None: the current CUDA device."""
    return cache_seqlens if len(getattr(cache_seqlens, "shape", ())) > 0 else cu_seqlens_q


def empty_metadata(batch: int, like: Any) -> Any:
    """int32 on the device of the lengths, or on the current one where no tensor says which."""
    if batch < 0:
        raise ValueError(f"batch_size: must be at least 0, found {batch}")
    if like is not None and not is_torch(like):
        raise TypeError("out: is needed unless cache_seqlens or cu_seqlens_q is a torch tensor, whose device it takes")
    import torch

    device = torch.device("cuda", torch.cuda.current_device()) if like is None else like.device
    return torch.empty(_core.schedule_size(batch), dtype=torch.int32, device=device)


def renamed(error: Exception) -> Exception:
    """The error with the argument's name as it is in get_scheduler_metadata."""
    name, colon, rest = str(error).partition(":")
    names = {
        "out (metadata)": "out",
        "seqused_k": "cache_seqlens",
        "batch": "batch_size",
        "seqlen_q": "max_seqlen_q",
        "seqlen_k": "max_seqlen_k",
        "dtype": "qkv_dtype",
        "heads of q": "num_heads_q",
        "heads of k": "num_heads_kv",
    }
    return type(error)(names.get(name, name) + colon + rest)
