"""What callers pass, brought into the form that the kernels take. Every failure names the argument."""

from __future__ import annotations

import operator
import sys
from typing import Any

_CUDA = 2  # DLPack's kDLCUDA
_INT64_END = 1 << 63
_UNNAMED_DTYPE = "another dtype"  # as src/host/text.h
_SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def is_torch(x: Any) -> bool:
    """True for a torch tensor; False, without importing torch, for everything else."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def on_cuda(name: str, x: Any) -> bool:
    """Whether `x` lives on a CUDA device. TypeError if it is no array, or a tensor without memory of its own."""
    torch = sys.modules.get("torch")
    if torch is not None:
        if type(x) is torch.Tensor:
            return x.is_cuda
        if isinstance(x, torch.Tensor):
            _refuse_dispatching(name, x, torch)
            return x.is_cuda
    device = getattr(x, "__dlpack_device__", None)
    if device is None:
        raise TypeError(f"{name}: a torch tensor or a numpy array is needed, found {type(x).__name__}")
    return int(device()[0]) == _CUDA


def integer(name: str, value: Any) -> int:
    """A Python int. A tensor on a GPU is refused: reading it would synchronise."""
    if type(value) is not int:
        _refuse_device_value(name, value)
        try:
            value = operator.index(value)
        except TypeError:
            raise TypeError(f"{name}: an integer is needed, found {_found(value)}") from None
    if not -_INT64_END <= value < _INT64_END:
        raise ValueError(f"{name}: an integer of 64 bits is needed, found {value}")
    return value


def bound(name: str, value: Any) -> int:
    """A length from an int or a 0-d integer tensor. One on a GPU is read, which synchronises; not while a graph is
    captured.
    """
    if type(value) is int and 0 <= value < _INT64_END:
        return value
    if getattr(value, "is_cuda", False):
        if sys.modules["torch"].cuda.is_current_stream_capturing():
            raise ValueError(
                f"{name}: is a tensor on {value.device}, which cannot be read while a graph is captured; pass an int, "
                "or None"
            )
        value = value.item()
    value = integer(name, value)
    if value < 0:
        raise ValueError(f"{name}: must be at least 0, found {value}")
    return value


def lengths(name: str, value: Any) -> tuple[Any, int]:
    """(tensor, -1) from a tensor of lengths, (None, n) from one length for all sequences, (None, -1) from None."""
    if value is None:
        return None, -1
    if len(getattr(value, "shape", ())) > 0:
        return value, -1
    return None, max(0, integer(name, value))


def size_of_pages(page_size: Any) -> int:
    """Keys of a page, 1 or more; 0 for None, no pages."""
    if page_size is None:
        return 0
    size = integer("page_size", page_size)
    if size < 1:
        raise ValueError(f"page_size: must be at least 1, or None for no pages, found {size}")
    return size


def number(name: str, value: Any) -> float:
    """A Python float. A tensor on a GPU is refused: reading it would synchronise."""
    if type(value) is float:
        return value
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{name}: a number is needed, found {_found(value)}")
    _refuse_device_value(name, value)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: a number is needed, found {_found(value)}") from None


def window(window_size: Any) -> tuple[int, int]:
    """(left, right) from a pair; None is unlimited, (-1, -1)."""
    if window_size is None:
        return -1, -1
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"window_size: (left, right) or None is needed, found {window_size!r}") from None
    if type(left) is type(right) is int and -1 <= left < _INT64_END and -1 <= right < _INT64_END:
        return left, right
    return integer("window_size", left), integer("window_size", right)


def flag(name: str, value: Any) -> bool:
    """A Python bool from True, False, 0, 1 or a numpy bool."""
    if value is True or value is False:
        return value
    if isinstance(value, int) or type(value).__name__ == "bool" or type(value).__name__ == "bool_":
        return bool(value)
    raise TypeError(f"{name}: True or False is needed, found {_found(value)}")


def dtype_name(dtype: Any) -> str:
    """ "bfloat16" from torch.bfloat16, "float16" from numpy.float16, numpy.dtype("float16"), torch.half or "fp16"."""
    name = dtype.__name__ if isinstance(dtype, type) else str(dtype)
    name = name.removeprefix("torch.")
    return _SHORT_NAMES.get(name, name)


def naming_dtype(error: TypeError, tensors: dict[str, Any]) -> TypeError:
    """The error with the name of the dtype, where it is one that `_core` has no name for. tensors: by their names there."""
    name, colon, rest = str(error).partition(":")
    dtype = getattr(tensors.get(name), "dtype", None)
    if dtype is None or not rest.endswith(_UNNAMED_DTYPE):
        return error
    return TypeError(name + colon + rest.removesuffix(_UNNAMED_DTYPE) + dtype_name(dtype))


def needed(name: str, value: Any, when: str = "") -> Any:
    """`value`, which must not be None. when: "with" or "without" what it is needed."""
    if value is None:
        raise ValueError(f"{name}: is needed{' ' * bool(when)}{when}, found None")
    return value


def refuse_given(function: str, **features: Any) -> None:
    """NotImplementedError for the first of `features` that is not None."""
    for name, value in features.items():
        if value is not None:
            raise NotImplementedError(
                f"{name}: not available on the GPU yet in {function}; pass None, or CPU tensors to run the reference"
            )


def check_torch_inputs(**tensors: Any) -> None:
    """Refuses what a kernel cannot read or must not read; None and arrays of other libraries pass.

    TypeError: a tensor without memory of its own (FakeTensor, a functional or other dispatching subclass). ValueError: a
    view that negates, which has other signs in memory; such a view of a complex tensor has no unit stride, so that
    `_core` refuses it where one is needed. NotImplementedError: grad mode is on and a tensor requires grad; the kernels are forward only.
    """
    torch = sys.modules["torch"]
    grad = torch.is_grad_enabled()
    for name, x in tensors.items():
        if type(x) is not torch.Tensor:
            if not isinstance(x, torch.Tensor):
                continue
            _refuse_dispatching(name, x, torch)
        if x.is_neg():
            raise ValueError(f"{name}: is a view that negates its memory; pass {name}.resolve_neg()")
        if grad and x.requires_grad:
            raise NotImplementedError(
                f"{name}: requires grad, but this is forward only; call under torch.inference_mode() or detach it"
            )


def _refuse_dispatching(name: str, x: Any, torch: Any) -> None:
    if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(
            f"{name}: a plain torch.Tensor is needed, found {type(x).__name__}, which has no memory of its own; "
            "tracing (torch.compile, FakeTensorMode, functionalization) is not supported"
        )


def _refuse_device_value(name: str, value: Any) -> None:
    if getattr(value, "is_cuda", False):
        raise TypeError(f"{name}: a value on the host is needed, found a tensor on {value.device}")


def _found(value: Any) -> str:
    return f"{type(value).__name__} {value!r}" if isinstance(value, (int, float, str, bytes)) else type(value).__name__
