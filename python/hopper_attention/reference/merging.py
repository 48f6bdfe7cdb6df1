"""The public functions that put partial results together, on numpy arrays and CPU torch tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from hopper_attention.reference.arrays import View, new_array, transpose_last_two
from hopper_attention.reference.checks import check_written, floats, is_same_view, shape_is
from hopper_attention.reference.split import combine_parts

OUT_DTYPES = ("bfloat16", "float16", "float32", "float64")


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Combine S partial results. out_partial (S, B, M, H, D) float32, lse_partial (S, B, M, H) float32.

    Returns out (B, M, H, D) in `out_dtype` (default: that of `out`, else of out_partial) and LSE (B, M, H), a
    transposed view of (B, H, M). A partial LSE of -inf or +inf means no keys: its out is never read into the result;
    no keys at all give 0 and -inf. float64 is taken too. Raises ValueError, TypeError; allocates out unless given,
    and LSE.
    """
    parts = floats("out_partial", out_partial, 5, ("float32", "float64"))
    logs = floats("lse_partial", lse_partial, 4, (parts.dtype,))
    shape_is("lse_partial", logs, parts.shape[:-1])
    splits, batch, rows, heads, _ = parts.shape
    wanted = None if out_dtype is None else dtype_word(out_dtype)
    if wanted not in (None, *OUT_DTYPES):
        raise TypeError(f"out_dtype is {wanted}; allowed: {', '.join(OUT_DTYPES)}")
    if out is None:
        out = new_array(out_partial, parts.shape[1:], wanted or parts.dtype, 0.0)
    target = floats("out", out, 4, (wanted,) if wanted else OUT_DTYPES)
    shape_is("out", target, parts.shape[1:])
    check_written({"out": target}, {"out_partial": parts, "lse_partial": logs})
    lse = new_array(out_partial, (batch, heads, rows), parts.dtype, -np.inf)
    for b in range(batch):
        every = slice(0, splits)
        out_b, lse_b = combine_parts(parts.read((every, b)), logs.read((every, b)))
        target.write(b, out_b)
        View(lse).write(b, lse_b.T)
    return out, transpose_last_two(lse)


def merge_states(out_a, lse_a, out_b, lse_b, *, out=None, lse=None):
    """Attention over keys A and over keys B -> over both, for disjoint A and B.

    out_a, out_b (B, S, H, D) with LSE (B, H, S), or (T, H, D) with (H, T), natural log, any strides. `out` may be
    out_a and `lse` lse_a; otherwise they overlap no other array. If a sink is in use, pass it to one part only.
    Returns (out, lse); an LSE of -inf or +inf means no keys, both empty give 0 and -inf. Raises ValueError, TypeError;
    allocates out and lse unless given.
    """
    rank = 4 if getattr(out_a, "ndim", 4) == 4 else 3
    a = floats("out_a", out_a, rank)
    b = floats("out_b", out_b, rank, (a.dtype,))
    shape_is("out_b", b, a.shape)
    lse_dtypes = ("float32", "float64") if a.dtype == "float64" else ("float32",)
    la, lb = floats("lse_a", lse_a, rank - 1, lse_dtypes), floats("lse_b", lse_b, rank - 1, lse_dtypes)
    shape = (*a.shape[:-3], a.shape[-2], a.shape[-3])
    shape_is("lse_a", la, shape)
    shape_is("lse_b", lb, shape)
    out = new_array(out_a, a.shape, a.dtype, 0.0) if out is None else out
    lse = new_array(out_a, shape, la.dtype, 0.0) if lse is None else lse
    target, target_lse = floats("out", out, rank, (a.dtype,)), floats("lse", lse, rank - 1, (la.dtype,))
    shape_is("out", target, a.shape)
    shape_is("lse", target_lse, shape)
    inputs = {"out_a": a, "lse_a": la, "out_b": b, "lse_b": lb}
    in_place = "out_a" if is_same_view(target.memory, a.memory) else ""
    lse_in_place = "lse_a" if is_same_view(target_lse.memory, la.memory) else ""
    check_written({"out": target}, {name: x for name, x in inputs.items() if name != in_place})
    check_written({"lse": target_lse}, {"out": target} | {n: x for n, x in inputs.items() if n != lse_in_place})
    for index in range(a.shape[0]) if rank == 4 else (...,):
        log_a, log_b = la.read(index).T, lb.read(index).T
        merged, log = combine_parts(np.stack([a.read(index), b.read(index)]), np.stack([log_a, log_b]))
        target.write(index, merged)
        target_lse.write(index, log.T)
    return out, lse


def dtype_word(dtype: Any) -> str:
    """torch.bfloat16, np.float16, "float32", ... as a word."""
    word = str(dtype).removeprefix("torch.")
    try:
        return word if word == "bfloat16" else np.dtype(dtype if not word.isidentifier() else word).name
    except TypeError:
        raise TypeError(f"out_dtype is {dtype}; a floating-point dtype is needed") from None
