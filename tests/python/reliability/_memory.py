"""Memory whose surroundings are watched: tensors between bands of known bytes, and all that a call allocates itself."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from gpu import support
from hopper_attention import gpu as library

GUARD = 1 << 16  # bytes before and after each tensor
ALIGNMENT = 256


class Arena:
    """One allocation in which tensors lie between bands of the byte `band`. 0xFF makes every float of a band NaN."""

    def __init__(self, band: int, size: int = 0) -> None:
        size = size or (256 << 20 if support.DEVICE == "cuda" else 16 << 20)
        self.band = band
        self.memory = torch.full((size,), band, dtype=torch.uint8, device=support.DEVICE)
        self.used = torch.zeros(size, dtype=torch.bool, device=support.DEVICE)
        self.next = GUARD

    def clear(self, *tensors: torch.Tensor) -> None:
        """Forgets all tensors and makes room for copies of those given."""
        needed = sum(x.nbytes + GUARD + ALIGNMENT for x in tensors) + GUARD
        if needed > len(self.memory):
            self.memory = self.memory.new_empty(needed)
            self.used = self.used.new_empty(needed)
        self.memory.fill_(self.band)
        self.used.fill_(False)
        self.next = GUARD

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of that shape, full of the band's byte."""
        size = math.prod(shape) * dtype.itemsize
        begin, end = self.next, self.next + size
        self.next = -(-(end + GUARD) // ALIGNMENT) * ALIGNMENT
        if self.next > len(self.memory):
            raise MemoryError(f"the arena of {len(self.memory)} bytes is too small")
        self.used[begin:end] = True
        return self.memory[begin:end].view(dtype).view(shape)

    def take(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """A contiguous copy of x between bands."""
        return None if x is None else self.room(tuple(x.shape), x.dtype).copy_(x)

    def broken(self) -> torch.Tensor:
        """How many bytes of the bands were written, on the device."""
        return ((self.memory != self.band) & ~self.used).sum()


class Allocations:
    """What calls allocated by torch.empty and torch.empty_like inside `watched`: each between bands, and how large."""

    def __init__(self, band: int, inside: int) -> None:
        self.band, self.inside = band, inside
        self.made: list[tuple[torch.Tensor, int]] = []
        self.workspace_bytes = 0

    def room(self, like: torch.Tensor) -> torch.Tensor:
        memory = torch.full((like.nbytes + 2 * GUARD,), self.band, dtype=torch.uint8, device=support.DEVICE)
        self.made.append((memory, like.nbytes))
        if like.dtype == torch.uint8:
            self.workspace_bytes = max(self.workspace_bytes, like.nbytes)
        place = memory[GUARD : GUARD + like.nbytes]
        return place.fill_(self.inside).view(like.dtype).view(like.shape)

    def broken(self) -> torch.Tensor:
        """How many bytes of the bands were written, on the device."""
        count = torch.zeros((), dtype=torch.int64, device=support.DEVICE)
        for memory, size in self.made:
            count += (memory[:GUARD] != self.band).sum() + (memory[GUARD + size :] != self.band).sum()
        return count


@contextlib.contextmanager
def watched(band: int = 0xA5, inside: int = 0xFF) -> Iterator[Allocations]:
    """Within the block, what the library allocates on the GPU lies between bands and is full of the byte `inside`.

    On the CPU nothing is watched: the reference's own temporaries are no outputs.
    """
    found = Allocations(band, inside)
    empty, empty_like = torch.empty, torch.empty_like

    def on_device(device: Any) -> bool:
        return torch.device(device or "cpu").type == "cuda"

    def guarded_empty(*size: Any, **options: Any) -> torch.Tensor:
        if not on_device(options.get("device")):
            return empty(*size, **options)
        return found.room(empty(*size, **{**options, "device": "meta"}))

    def guarded_empty_like(x: torch.Tensor, **options: Any) -> torch.Tensor:
        if not on_device(options.get("device") or x.device):
            return empty_like(x, **options)
        return found.room(empty(x.shape, dtype=options.get("dtype") or x.dtype, device="meta"))

    torch.empty, torch.empty_like = guarded_empty, guarded_empty_like
    hand_over()
    try:
        yield found
    finally:
        torch.empty, torch.empty_like = empty, empty_like
        hand_over()


def hand_over() -> None:
    """The functions of torch as they are now, to the library, which keeps some of them."""
    library.use_torch.cache_clear()
    library.use_torch()


def different(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many elements have other bits, on the device."""
    return (support.bits(a) != support.bits(b)).sum()


def synchronize() -> None:
    if support.DEVICE == "cuda":
        torch.cuda.synchronize()
