"""The border between callers' arrays (numpy, or torch on the CPU) and the numpy code of this package.

A `View` is a window on the caller's memory: it reads any slice as float32 or float64 and writes results back rounded
to the caller's dtype. bfloat16 and fp8, which numpy lacks, go through their bits. torch is never imported from here:
a tensor can only arrive when the caller has imported it.
"""

from __future__ import annotations

import sys
from functools import lru_cache, wraps
from typing import Any

import numpy as np

HALF_DTYPES = ("float16", "bfloat16")
FP8_DTYPES = ("float8_e4m3fn",)
FLOAT_DTYPES = (*HALF_DTYPES, "float32", "float64", *FP8_DTYPES)


def is_torch(x: Any) -> bool:
    """True for a torch tensor; False, without importing torch, for everything else."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def is_array(x: Any) -> bool:
    """True for the two kinds of array that the reference takes."""
    return isinstance(x, np.ndarray) or is_torch(x)


def dtype_name(x: Any) -> str:
    """The dtype as a word, the same for numpy and torch: "bfloat16", "int32"."""
    return str(x.dtype).removeprefix("torch.")


def float_from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """bfloat16 is the upper half of float32: shift it there. uint16 -> float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bfloat16_from_float(values: np.ndarray) -> np.ndarray:
    """float32 -> bits of bfloat16, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded.astype(np.uint16))


@lru_cache(maxsize=1)
def e4m3_values() -> np.ndarray:
    """The 256 values of fp8 e4m3fn: (256,) float32. Exponent bias 7, no infinity, 0x7F and 0xFF are NaN."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent > 0, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6))
    magnitude = np.where((codes & 0x7F) == 0x7F, np.nan, magnitude)
    return np.where(codes < 128, magnitude, -magnitude).astype(np.float32)


def round_to_e4m3(values: np.ndarray) -> np.ndarray:
    """The nearest e4m3fn value, ties to even, saturated at 448. Same shape, float dtype kept."""
    clipped = np.clip(values, -448.0, 448.0)
    _, exponent = np.frexp(clipped)
    step = np.ldexp(np.ones_like(clipped), np.maximum(exponent - 1, -6) - 3)  # three mantissa bits
    return np.rint(clipped / step) * step


def e4m3_codes(values: np.ndarray) -> np.ndarray:
    """float -> uint8 codes of the nearest e4m3fn values; NaN becomes 0x7F."""
    rounded = round_to_e4m3(values)
    code = np.searchsorted(e4m3_values()[:127], np.abs(rounded)).astype(np.uint8)
    return np.where(np.isnan(values), np.uint8(0x7F), code | (np.signbit(rounded) * np.uint8(0x80)))


class View:
    """The caller's array `x`. `read` and `write` take any numpy index.

    Attributes: `shape`; `dtype`, a word such as "bfloat16"; `compute`, the numpy dtype in which to calculate: float64
    for float64, else float32.
    """

    def __init__(self, x: Any):
        self.x = x
        self.dtype = dtype_name(x)
        self.shape = tuple(x.shape)
        self.compute = np.dtype(np.float64 if self.dtype == "float64" else np.float32)
        self.memory = memory_of(x)

    def read(self, index: Any = ...) -> np.ndarray:
        """The elements at `index` as a new array of dtype `compute`."""
        stored = self.memory[index]
        if self.dtype == "bfloat16" and self.memory.dtype == np.uint16:
            return float_from_bfloat16(stored)
        if self.dtype in FP8_DTYPES and self.memory.dtype == np.uint8:
            return e4m3_values()[stored]
        return np.array(stored, dtype=self.compute)

    def write(self, index: Any, values: np.ndarray) -> None:
        """Store `values` at `index`, rounded to the array's dtype."""
        if self.dtype == "bfloat16" and self.memory.dtype == np.uint16:
            self.memory[index] = bfloat16_from_float(values)
        elif self.dtype in FP8_DTYPES and self.memory.dtype == np.uint8:
            self.memory[index] = e4m3_codes(values)
        else:
            with np.errstate(over="ignore"):  # float16 overflows to infinity, as on the GPU
                self.memory[index] = values.astype(self.memory.dtype)

    def round(self, values: np.ndarray) -> np.ndarray:
        """`values` as they would be read back after `write`, in dtype `compute`."""
        return round_to(self.dtype, values).astype(self.compute)


def round_to(dtype: str, values: np.ndarray) -> np.ndarray:
    """`values` rounded to what `dtype` can hold, in their own dtype."""
    if dtype == "bfloat16":
        return float_from_bfloat16(bfloat16_from_float(values)).astype(values.dtype)
    if dtype in FP8_DTYPES:
        return round_to_e4m3(values)
    with np.errstate(over="ignore"):
        return values.astype(np.dtype(dtype)).astype(values.dtype)


def memory_of(x: Any) -> np.ndarray:
    """A numpy array on the memory of `x`; torch bfloat16 and fp8 as unsigned bits."""
    if not is_torch(x):
        return x
    import torch

    x = x.detach()
    name = dtype_name(x)
    if name == "bfloat16":
        return x.view(torch.int16).numpy().view(np.uint16)
    if name in FP8_DTYPES:
        return x.view(torch.uint8).numpy()
    return x.numpy()


def new_array(like: Any, shape: tuple[int, ...], dtype: str, fill: float) -> Any:
    """An array of the kind of `like` (numpy or torch) with all elements `fill`."""
    if is_torch(like):
        import torch

        return torch.full(shape, fill, dtype=getattr(torch, dtype), device=like.device)
    if dtype == "bfloat16":
        import ml_dtypes  # whoever has a numpy bfloat16 array has this package

        return np.full(shape, fill, dtype=ml_dtypes.bfloat16)
    return np.full(shape, fill, dtype=dtype)


def transpose_last_two(x: Any) -> Any:
    """A view with the last two axes exchanged, numpy or torch."""
    return x.swapaxes(-1, -2) if isinstance(x, np.ndarray) else x.transpose(-1, -2)


def algorithm(function):
    """Lets `function`, written for numpy, take numpy arrays or CPU torch tensors of any float dtype.

    float64 is computed in float64, everything else in float32; results have that dtype (half inputs give float32, so
    that the algorithm's own error can be seen) and are torch tensors if any argument is.
    """

    @wraps(function)
    def wrapper(*args, **kwargs):
        given = [*args, *kwargs.values()]
        result = function(*map(operand, args), **{name: operand(x) for name, x in kwargs.items()})
        return to_torch(result) if any(map(is_torch, given)) else result

    return wrapper


def operand(x: Any) -> Any:
    """Float arrays in the dtype to compute in, other arrays (masks, tables) as numpy, everything else as it is."""
    if not is_array(x):
        return x
    return View(x).read() if dtype_name(x) in FLOAT_DTYPES else memory_of(x)


def to_torch(result: Any) -> Any:
    """numpy arrays, alone or in a tuple, as torch tensors."""
    import torch

    if isinstance(result, tuple):
        return tuple(map(to_torch, result))
    return torch.from_numpy(np.ascontiguousarray(result)) if isinstance(result, np.ndarray) else result


def safe(maximum: np.ndarray) -> np.ndarray:
    """A row maximum that can be subtracted: -inf, of a row without keys, becomes 0, because -inf - -inf is NaN."""
    return np.where(np.isneginf(maximum), maximum.dtype.type(0), maximum)


def divide(numerator: np.ndarray, total: np.ndarray) -> np.ndarray:
    """numerator / total, and 0 where the total is 0: a row without keys."""
    return numerator / np.where(total == 0, total.dtype.type(1), total)


def log_sum(maximum: np.ndarray, total: np.ndarray) -> np.ndarray:
    """maximum + ln(total), the log-sum-exp; -inf where the total is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(total == 0, total.dtype.type(-np.inf), maximum + np.log(total))
