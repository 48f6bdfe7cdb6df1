"""Checks of what callers pass. Every failure names the argument, what was found and what is allowed."""

from __future__ import annotations

import itertools
import math
import operator
import sys
from typing import Any

import numpy as np

from hopper_attention.reference.arrays import FLOAT_DTYPES, FP8_DTYPES, View, dtype_name, is_array, is_torch
from hopper_attention.reference.mask import Mask

LONGER_THAN_ANY = 1 << 40  # a limit that cuts nothing, far from the end of int64


def require(condition: bool, *parts: Any) -> None:
    """Raise ValueError with the joined `parts` unless `condition`."""
    if not condition:
        raise ValueError("".join(str(part) for part in parts))


def check_array(name: str, x: Any) -> None:
    """TypeError unless `x` is a numpy array or torch tensor, ValueError unless it is on the CPU."""
    if not is_array(x):
        raise TypeError(f"{name} is {type(x).__name__}; a numpy array or a torch tensor is needed")
    if is_torch(x):
        require(x.device.type == "cpu", name, " is on ", x.device, "; the reference takes CPU tensors, all of them")
        torch = sys.modules["torch"]
        if x.layout is not torch.strided:
            raise TypeError(f"{name} has layout {x.layout}; torch.strided is needed, an ordinary tensor")
        require(not x.is_neg(), name, " is a view that negates its memory; pass ", name, ".resolve_neg()")
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name} requires grad, but this is forward only: call under torch.inference_mode()"
            )


def floats(name: str, x: Any, rank: int, dtypes: tuple[str, ...] = FLOAT_DTYPES) -> View:
    """A View of `x`, which has `rank` axes and one of `dtypes`."""
    check_array(name, x)
    if dtype_name(x) not in dtypes:
        raise TypeError(f"{name} has dtype {dtype_name(x)}; allowed: {', '.join(dict.fromkeys(dtypes))}")
    require(x.ndim == rank, name, " has ", x.ndim, " dimensions; ", rank, " are needed")
    return View(x)


def integers(name: str, x: Any, shape: tuple[int | None, ...]) -> np.ndarray:
    """int32 array -> int64 numpy array. `shape` has None where any length is allowed."""
    check_array(name, x)
    if dtype_name(x) != "int32":
        raise TypeError(f"{name} has dtype {dtype_name(x)}; int32 is needed")
    found = tuple(x.shape)
    fits = len(found) == len(shape) and all(want in (None, have) for want, have in zip(shape, found, strict=True))
    wanted = ", ".join("any" if n is None else str(n) for n in shape)
    require(fits, name, " has shape ", found, "; (", wanted, "," * (len(shape) == 1), ") is needed")
    return (x.detach().numpy() if is_torch(x) else x).astype(np.int64)


def optional_integers(name: str, x: Any, shape: tuple[int | None, ...]) -> np.ndarray | None:
    """`integers`, or None for None."""
    return None if x is None else integers(name, x, shape)


def integer(name: str, value: Any) -> int:
    """A Python int from anything that is one."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {type(value).__name__}; an integer is needed") from None


def boolean(name: str, value: Any) -> bool:
    """A Python bool from True, False, 0, 1 or a numpy bool."""
    if isinstance(value, (int, np.bool_)):
        return bool(value)
    raise TypeError(f"{name}: True or False is needed, found {type(value).__name__}")


def number(name: str, value: Any) -> float:
    """A finite Python float."""
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{name} is {type(value).__name__}; a number is needed")
    try:
        result = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {type(value).__name__}; a number is needed") from None
    require(math.isfinite(result), name, " is ", result, "; a finite number is needed")
    return result


def shape_is(name: str, view: View, shape: tuple[int, ...]) -> None:
    """ValueError unless `view` has `shape`."""
    require(view.shape == shape, name, " has shape ", view.shape, "; ", shape, " is needed")


def check_bound(name: str, value: Any) -> None:
    """max_seqlen_*: None, an integer or a 0-d integer array; it bounds work on the GPU and has no effect here."""
    if value is not None:
        require(integer(name, value) >= 0, name, " is ", value, "; 0 or more is allowed")


def check_steering(num_splits: Any, sm_margin: Any, batch_invariant: Any) -> None:
    """num_splits 0..256, sm_margin >= 0, a bool: they steer the GPU and have no effect here."""
    splits = integer("num_splits", num_splits)
    require(0 <= splits <= 256, "num_splits is ", splits, "; 0 (the plan chooses) to 256 is allowed")
    require(integer("sm_margin", sm_margin) >= 0, "sm_margin is ", sm_margin, "; 0 or more is allowed")
    boolean("batch_invariant", batch_invariant)


def check_kv(q: View, k: View, v: View, names: tuple[str, str] = ("k", "v")) -> None:
    """dtypes, head counts and head dims of q (..., Hq, D), k (..., Hk, D) and v (..., Hk, Dv)."""
    k_name, v_name = names
    if k.dtype != v.dtype or (k.dtype != q.dtype and k.dtype not in FP8_DTYPES):
        raise TypeError(f"q, {k_name} and {v_name} have dtypes {q.dtype}, {k.dtype} and {v.dtype}; one dtype is needed")
    require(
        k.shape[:-1] == v.shape[:-1],
        v_name,
        " has shape ",
        v.shape,
        "; all but the head dim must equal ",
        k_name,
        "'s ",
        k.shape,
    )
    require(
        q.shape[-1] == k.shape[-1],
        "q and ",
        k_name,
        " have head dims ",
        q.shape[-1],
        " and ",
        k.shape[-1],
        "; they must be equal",
    )
    require(
        q.shape[-1] > 0 and v.shape[-1] > 0,
        "head dims are ",
        q.shape[-1],
        " and ",
        v.shape[-1],
        "; 1 or more is needed",
    )
    heads_q, heads_k = q.shape[-2], k.shape[-2]
    require(heads_k > 0, k_name, " has 0 heads; 1 or more is needed")
    wanted = "; a multiple is needed, heads are the last dim but one"
    require(heads_q % heads_k == 0, "q has ", heads_q, " heads and ", k_name, " ", heads_k, wanted)


def mask_of(causal: Any, window_size: Any, attention_chunk: Any, cp_world_size: Any = 1, cp_rank: Any = 0) -> Mask:
    """The mask arguments in canonical form: causal is a right window of 0, None is unlimited or off."""
    window = (-1, -1) if window_size is None else tuple(window_size) if np.iterable(window_size) else (window_size,)
    require(len(window) == 2, "window_size is ", window_size, "; (left, right) is needed")
    left, right = (integer("window_size", side) for side in window)
    require(left >= -1 and right >= -1, "window_size is ", window, "; -1 (unlimited) or more is allowed")
    chunk = 0 if attention_chunk is None else integer("attention_chunk", attention_chunk)
    require(chunk >= 0, "attention_chunk is ", chunk, "; 0 (off) or more is allowed")
    world, rank = integer("cp_world_size", cp_world_size), integer("cp_rank", cp_rank)
    require(world >= 1, "cp_world_size is ", world, "; 1 or more is allowed")
    require(0 <= rank < world, "cp_rank is ", rank, "; 0 to ", world - 1, " is allowed")
    left, right, chunk = (min(limit, LONGER_THAN_ANY) for limit in (left, right, chunk))
    return Mask(left, 0 if boolean("causal", causal) else right, chunk, world, rank)


def softcap_of(softcap: Any) -> float:
    """0 or more, finite."""
    value = number("softcap", softcap)
    require(value >= 0, "softcap is ", value, "; 0 (off) or more is allowed")
    return value


def check_written(written: dict[str, View], others: dict[str, View | None]) -> None:
    """ValueError if a `written` array is read-only, if its elements share memory, or if it shares memory with another
    array.
    """
    for name, view in written.items():
        require(view.memory.flags.writeable, name, " is a read-only array; pass one that can be written")
        require(
            elements_are_distinct(view.memory),
            name,
            " has elements that share memory (shape ",
            view.shape,
            ", strides ",
            view.memory.strides,
            " bytes); every element needs an address of its own",
        )
    pairs = [*itertools.combinations(written.items(), 2), *itertools.product(written.items(), others.items())]
    for (name, view), (other_name, other) in pairs:
        apart = other is None or not overlaps(view.memory, other.memory)
        require(apart, name, " overlaps ", other_name, "; it must be memory of its own")


def elements_are_distinct(x: np.ndarray) -> bool:
    """Whether the elements provably have an address each: every stride is larger than all that the smaller ones span,
    as in every slice, transpose or reshape of a contiguous array.
    """
    reach = 0
    dims = sorted((abs(stride), n) for stride, n in zip(x.strides, x.shape, strict=True) if n > 1)
    for stride, n in dims if x.size else ():
        if stride <= reach:
            return False
        reach += stride * (n - 1)
    return True


def is_same_view(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of one shape are the same elements at the same addresses."""
    strides = zip(a.shape, a.strides, b.strides, strict=True)
    return address(a) == address(b) and all(n <= 1 or one == other for n, one, other in strides)


def are_same_pages(k: np.ndarray, v: np.ndarray) -> bool:
    """Whether two arrays of pages are the same pages, of which V counts from another one on than K: ids in a page table
    then pick other pages for K than for V, so that the two may share memory.
    """
    if k.strides != v.strides or k.shape[1:] != v.shape[1:] or k.size == 0:
        return False
    step = k.strides[0]
    of_page = sum((n - 1) * stride for n, stride in zip(k.shape[1:], k.strides[1:], strict=True)) + k.itemsize
    between = address(v) - address(k)
    return of_page <= step and between != 0 and between % step == 0


def address(x: np.ndarray) -> int:
    """Of the first element."""
    return x.__array_interface__["data"][0]


def overlaps(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays share an element; undecided cases, which need unusual strides, count as yes, as on the GPU."""
    try:
        return np.may_share_memory(a, b) and np.shares_memory(a, b, max_work=100_000)
    except np.exceptions.TooHardError:
        return True
