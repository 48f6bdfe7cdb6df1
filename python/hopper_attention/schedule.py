"""Scheduler metadata: the schedule of one step, made once and read by the calls of all layers."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from hopper_attention import _core, features, gpu
from hopper_attention.arguments import (
    bound,
    dtype_name,
    flag,
    integer,
    is_torch,
    lengths,
    naming_dtype,
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
    like: Any,
) -> Any:
    """Arguments, results and errors as in `get_scheduler_metadata`. like: `source` of the tensors."""
    seqused_k, seqused_k_all = lengths("cache_seqlens", cache_seqlens)
    new = bound("max_seqlen_k_new", max_seqlen_k_new)
    options = numbers(
        batch_size,
        max_seqlen_q,
        max_seqlen_k,
        num_heads_q,
        num_heads_kv,
        headdim,
        qkv_dtype,
        headdim_v,
        page_size,
        causal,
        window_size,
        attention_chunk,
        num_splits,
        sm_margin,
        batch_invariant,
    )
    if like is not None and not on_cuda("cache_seqlens", like):
        return make_on_cpu(options, like, seqused_k, cu_seqlens_q, cu_seqlens_k_new, cache_leftpad, out)
    for name, x in (("cache_seqlens", seqused_k), ("cu_seqlens_q", cu_seqlens_q), ("out", out)):
        if x is not None and not on_cuda(name, x):
            raise ValueError(f"{name}: must be on a CUDA device, but is on the CPU")
    if out is None:
        out = empty_metadata(options["batch"], like)
    options["seqused_k"] = seqused_k
    options["seqused_k_all"] = seqused_k_all
    options["cu_seqlens_q"] = cu_seqlens_q
    options["cu_seqlens_k_new"] = cu_seqlens_k_new
    options["cache_leftpad"] = cache_leftpad
    options["seqlen_k_new"] = 0 if cu_seqlens_k_new is not None else new
    try:
        options["stream"] = gpu.current_stream(out)
        _core.make_schedule(out, **options)
    except TypeError as error:
        raise renamed(naming_dtype(error, {**options, "out (metadata)": out})) from None
    except (ValueError, NotImplementedError) as error:
        raise renamed(error) from None
    return out


def numbers(
    batch_size: int,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    qkv_dtype: Any,
    headdim_v: int | None,
    page_size: int | None,
    causal: bool,
    window_size: Any,
    attention_chunk: int | None,
    num_splits: int,
    sm_margin: int,
    batch_invariant: bool,
) -> dict[str, Any]:
    """What is no tensor, for `_core.make_schedule` and `_core.plan`."""
    head_dim = integer("headdim", headdim)
    left, right = window(window_size)
    dtype = "bfloat16" if qkv_dtype is None else dtype_name(qkv_dtype)
    if dtype not in features.DTYPES:
        raise TypeError(f"qkv_dtype: must be {' or '.join(features.DTYPES)}, found {dtype}")
    return {
        "dtype": dtype,
        "batch": integer("batch_size", batch_size),
        "seqlen_q": bound("max_seqlen_q", max_seqlen_q),
        "seqlen_k": bound("max_seqlen_k", max_seqlen_k),
        "heads_q": integer("num_heads_q", num_heads_q),
        "heads_k": integer("num_heads_kv", num_heads_kv),
        "head_dim": head_dim,
        "head_dim_v": head_dim if headdim_v is None else integer("headdim_v", headdim_v),
        "page_size": size_of_pages(page_size),
        "causal": flag("causal", causal),
        "window_left": left,
        "window_right": right,
        "attention_chunk": 0 if attention_chunk is None else integer("attention_chunk", attention_chunk),
        "num_splits": integer("num_splits", num_splits),
        "sm_margin": integer("sm_margin", sm_margin),
        "batch_invariant": flag("batch_invariant", batch_invariant),
    }


def make_on_cpu(
    options: dict[str, Any],
    like: Any,
    seqused_k: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k_new: Any,
    cache_leftpad: Any,
    out: Any,
) -> Any:
    """Zeros in `out`, or in a new array of the kind of `like`: calls of CPU tensors need no schedule. Raises for what the
    GPU refuses.
    """
    from hopper_attention.reference.arrays import View, new_array
    from hopper_attention.reference.checks import check_written, integers, optional_integers, require

    check_numbers(options, cu_seqlens_q is not None)
    batch = options["batch"]
    given = {
        "cache_seqlens": (seqused_k, batch),
        "cu_seqlens_q": (cu_seqlens_q, batch + 1),
        "cu_seqlens_k_new": (cu_seqlens_k_new, batch + 1),
        "cache_leftpad": (cache_leftpad, batch),
    }
    for name, (x, elements) in given.items():
        optional_integers(name, x, (elements,))
    size = _core.schedule_size(batch)
    if out is None:
        return new_array(like, (size,), "int32", 0)
    found = len(integers("out", out, (None,)))
    require(found >= size, "out: must have at least ", size, " elements for ", batch, " sequences, found ", found)
    check_written({"out": View(out)}, {name: View(x) for name, (x, _) in given.items() if x is not None})
    out[:size] = 0
    return out


def check_numbers(options: dict[str, Any], packed_q: bool) -> None:
    """Raises as `make` for what `numbers` returned, without a GPU. packed_q: with cu_seqlens_q."""
    rows = min(max(0, options["batch"]) * options["seqlen_q"], 1 << 30)  # more no call takes
    try:
        _core.plan(_core.device_info("H100"), **options, ragged=True, total_q=rows if packed_q else None)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise renamed(error) from None


def source(*tensors: Any) -> Any:
    """The first of `tensors`, on whose device the metadata is; None: all are None or numbers."""
    for x in tensors:
        if x is not None and len(getattr(x, "shape", ())) > 0:
            return x
    return None


def empty_metadata(batch: int, like: Any) -> Any:
    """int32 on the device of `like`, or on the current one for None."""
    if batch < 0:
        raise ValueError(f"batch_size: must be at least 0, found {batch}")
    if like is not None and not is_torch(like):
        raise TypeError(
            "out: is needed unless the first tensor of cache_seqlens, cu_seqlens_q, cu_seqlens_k_new and cache_leftpad is "
            "a torch tensor, whose device it takes"
        )
    device = current_device() if like is None else like.device
    torch = sys.modules["torch"]
    return torch.empty(_core.schedule_size(batch), dtype=torch.int32, device=device)


def current_device() -> Any:
    """The current CUDA device. ValueError where there is none."""
    torch = None
    with contextlib.suppress(ImportError):
        import torch
    if torch is None or not torch.cuda.is_available():
        raise ValueError(
            "cache_seqlens: is a number, so that another tensor must say on which device the metadata is to be: there is "
            "no CUDA device to take instead; pass a tensor, or cu_seqlens_q, cu_seqlens_k_new, cache_leftpad or out beside it"
        )
    return torch.device("cuda", torch.cuda.current_device())


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
