"""The same values in other memory: views whose gaps hold NaN, and results inside poisoned memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

POISON_BITS = 0x7FC5  # a NaN in bf16 and fp16, unlike any that the kernel could write


def transposed(x: torch.Tensor) -> torch.Tensor:
    """(B, S, H, D) as a view of (B, H, S, D)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def surrounded(x: torch.Tensor) -> torch.Tensor:
    """In the middle of a larger tensor full of NaN, every base and stride still a multiple of 16 bytes."""
    b, s, h, d = x.shape
    whole = torch.full((b + 2, s + 5, h + 2, d + 16), float("nan"), dtype=x.dtype, device=x.device)
    view = whole[1 : 1 + b, 2 : 2 + s, 1 : 1 + h, 8 : 8 + d]
    view.copy_(x)
    return view


def past_the_length(x: torch.Tensor, value: float) -> torch.Tensor:
    """The first rows of longer sequences, whose other rows hold `value`."""
    b, s, h, d = x.shape
    whole = torch.full((b, s + 300, h, d), value, dtype=x.dtype, device=x.device)
    whole[:, :s] = x
    return whole[:, :s]


def odd_unit_strides(x: torch.Tensor) -> torch.Tensor:
    """Strides that mean nothing, because their dims have size 1, are odd numbers."""
    odd = (3331333, 5, 3)
    strides = [odd[i] if i < 3 and x.shape[i] == 1 else x.stride(i) for i in range(4)]
    return x.as_strided(x.shape, strides)


def packed_qkv(t: dict[str, Any]) -> dict[str, Any]:
    """q, k, v as slices of one (B, S, Hq + 2 Hk, D) tensor; needs equal lengths and head dims."""
    q, k, v = t["q"], t["k"], t["v"]
    whole = torch.cat([q, k, v], 2)
    hq, hk = q.shape[2], k.shape[2]
    return {**t, "q": whole[:, :, :hq], "k": whole[:, :, hq : hq + hk], "v": whole[:, :, hq + hk :]}


def packed_qkv_by_head(t: dict[str, Any]) -> dict[str, Any]:
    """q, k, v of a head beside each other, (B, S, H, 3, D); needs equal lengths, heads and head dims."""
    whole = torch.stack([t["q"], t["k"], t["v"]], 3)
    return {**t, "q": whole[:, :, :, 0], "k": whole[:, :, :, 1], "v": whole[:, :, :, 2]}


def interleaved_kv(t: dict[str, Any]) -> dict[str, Any]:
    """K and V of a token beside each other, (B, S, 2, Hk, D); needs equal head dims."""
    whole = torch.stack([t["k"], t["v"]], 2)
    return {**t, "k": whole[:, :, 0], "v": whole[:, :, 1]}


def for_each(view: Callable[..., torch.Tensor], *args: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A layout of one tensor applied to q, k and v."""
    return lambda t: {**t, **{name: view(t[name], *args) for name in ("q", "k", "v")}}


LAYOUTS = {
    "transposed (B, H, S, D)": for_each(transposed),
    "gaps full of NaN": for_each(surrounded),
    "NaN past the length": for_each(past_the_length, float("nan")),
    "inf past the length": for_each(past_the_length, float("inf")),
    "K and V interleaved": interleaved_kv,
    "odd strides of size-1 dims": for_each(odd_unit_strides),
}
PACKED = {"packed qkv": packed_qkv, "packed qkv by head": packed_qkv_by_head}


class PoisonedOut:
    """An `out` of any strides inside poisoned memory, which must be intact around it after the call."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: Any, offset: int):
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n > 0)
        self.memory = torch.full((last + 1 + 64,), POISON_BITS, dtype=torch.int16, device=device)
        self.written = torch.zeros_like(self.memory, dtype=torch.bool)
        self.written.as_strided(shape, strides, offset).fill_(True)
        self.out = self.memory.view(dtype).as_strided(shape, strides, offset)

    def touched_outside(self) -> int:
        """How many elements outside `out` were written."""
        return int(((self.memory != POISON_BITS) & ~self.written).sum())

    def untouched_inside(self) -> int:
        """How many elements of `out` were not written."""
        return int(((self.memory == POISON_BITS) & self.written).sum())


def out_strides(shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], int]]:
    """Strides and offset (elements) of results: by TMA where all are multiples of 8, element by element elsewhere."""
    b, s, h, d = shape
    return {
        "contiguous, offset 64": ((s * h * d, h * d, d, 1), 64),
        "(B, H, S, D)": ((h * s * d, d, s * d, 1), 64),
        "gaps of 8 elements": (((s + 1) * (h + 1) * (d + 8), (h + 1) * (d + 8), d + 8, 1), 64),
        "address not in 16 bytes": ((s * h * d, h * d, d, 1), 67),
        "head stride odd": ((s * (h * (d + 3) + 1), h * (d + 3) + 1, d + 3, 1), 64),
        "row stride odd": ((s * (h * d + 5), h * d + 5, d, 1), 64),
        "batch stride odd": ((s * h * d + 7, h * d, d, 1), 64),
        "(S, B, H, D)": ((h * d, b * h * d, d, 1), 8),
    }
