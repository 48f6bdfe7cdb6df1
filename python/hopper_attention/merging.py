"""CUDA tensors -> kernels that put partial results together: allocates what the caller did not give, calls `_core`."""

from __future__ import annotations

import sys
from typing import Any

from hopper_attention import _core
from hopper_attention.arguments import check_torch_inputs, is_torch, naming_dtype
from hopper_attention.gpu import current_stream, stream_comes_with_tensors


def combine(out_partial: Any, lse_partial: Any, out: Any, out_dtype: Any) -> tuple[Any, Any]:
    """S partial results on one device -> (out, lse). Arguments, results and errors as in `flash_attn_combine`."""
    if not is_torch(out_partial):
        raise TypeError(f"out_partial: a torch tensor is needed, found {type(out_partial).__name__}")
    torch = sys.modules["torch"]
    check_torch_inputs(out_partial=out_partial, lse_partial=lse_partial, out=out)
    dtype = None if out_dtype is None else torch_dtype(out_dtype)
    if out_partial.dim() != 5:
        raise ValueError(
            "out_partial: must have shape (parts, batch, queries, heads, head_dim), found "
            f"{out_partial.dim()} dims: {tuple(out_partial.shape)}"
        )
    _, batch, queries, heads, _ = out_partial.shape
    if out is None:
        out = torch.empty(out_partial.shape[1:], dtype=dtype or out_partial.dtype, device=out_partial.device)
    elif dtype is not None and getattr(out, "dtype", dtype) != dtype:
        raise TypeError(f"out: dtype must be out_dtype, {dtype}, found {out.dtype}")
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=out_partial.device).transpose(1, 2)
    out_partial, lse_partial, given_out = readable(out_partial, lse_partial, out)
    try:
        _core.combine(out_partial, lse_partial, given_out, lse, current_stream(out_partial))
    except TypeError as error:
        raise naming_dtype(error, {"out_partial": out_partial, "lse_partial": lse_partial, "out": out}) from None
    return out, lse


def merge_states(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, out: Any, lse: Any) -> tuple[Any, Any]:
    """Two results on one device -> (out, lse). Arguments, results and errors as in `merge_states`."""
    if "torch" in sys.modules:
        check_torch_inputs(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b, out=out, lse=lse)
    if out is None:
        out = empty_like("out", out_a, "out_a")
    if lse is None:
        lse = empty_like("lse", lse_a, "lse_a")
    out_a, lse_a, out_b, lse_b, given_out, given_lse = readable(out_a, lse_a, out_b, lse_b, out, lse)
    try:
        _core.merge_states(out_a, lse_a, out_b, lse_b, given_out, given_lse, current_stream(out_a))
    except TypeError as error:
        given = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b, "out": out, "lse": lse}
        raise naming_dtype(error, given) from None
    return out, lse


def readable(*tensors: Any) -> tuple[Any, ...]:
    """The tensors as `_core` can read them: __dlpack__, which torch < 2.10 needs, refuses requires_grad."""
    if "torch" not in sys.modules or stream_comes_with_tensors():
        return tensors
    return tuple(x.detach() if is_torch(x) else x for x in tensors)


def empty_like(name: str, x: Any, x_name: str) -> Any:
    """A contiguous tensor of the shape, dtype and device of `x`."""
    if not is_torch(x):
        raise TypeError(f"{name}: is needed unless {x_name} is a torch tensor, which allocates it")
    torch = sys.modules["torch"]
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def torch_dtype(out_dtype: Any) -> Any:
    """A torch dtype from what the reference takes for one: torch.bfloat16, np.float16, "float32"."""
    torch = sys.modules["torch"]
    dtype = out_dtype
    if not isinstance(dtype, torch.dtype):
        from hopper_attention.reference.merging import dtype_word

        dtype = getattr(torch, dtype_word(out_dtype), None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"out_dtype: must be float32, bfloat16 or float16, found {out_dtype}")
    return dtype
