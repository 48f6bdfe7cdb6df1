"""Where the keys of a sequence live: a dense batch, a packed tensor, or pages. And the append with rotary embedding.

Each class turns logical keys of one sequence into a numpy index of the K or V array; nothing else in the package
knows a layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hopper_attention.reference.arrays import View


class Keys(Protocol):
    """The keys of one sequence; `capacity` is the number of slots. Cache slots count from the start of its memory."""

    capacity: int

    def read(self, view: View, head: int, begin: int, end: int) -> np.ndarray:
        """Slots [begin, end) of one head: (end - begin, D)."""

    def write(self, view: View, first: int, values: np.ndarray) -> None:
        """Store (n, Hk, D) in slots first, first + 1, ...; what does not fit is dropped."""


@dataclass(frozen=True)
class DenseKeys:
    """Sequence `batch` of (B, S, Hk, D). An index outside the batch has no slots."""

    batch: int
    capacity: int

    def read(self, view, head, begin, end):
        if self.capacity == 0:
            return np.zeros((0, view.shape[-1]), view.compute)
        return view.read((self.batch, slice(begin, end), head))

    def write(self, view, first, values):
        count = min(len(values), self.capacity - first)
        if count > 0:
            view.write((self.batch, slice(first, first + count)), values[:count])


@dataclass(frozen=True)
class PackedKeys:
    """Rows offset, offset + 1, ... of (T, Hk, D)."""

    offset: int
    capacity: int

    def read(self, view, head, begin, end):
        return view.read((slice(self.offset + begin, self.offset + end), head))

    def write(self, view, first, values):
        raise NotImplementedError("packed keys have no room to append")


@dataclass(frozen=True)
class PagedKeys:
    """Slot s is row s % page_size of page table[s // page_size] of (pages, page_size, Hk, D).

    Pages outside [0, pages) read as zero and drop what is written, as the kernel's tensor maps do.
    """

    table: np.ndarray
    pages: int
    page_size: int

    @property
    def capacity(self) -> int:
        return len(self.table) * self.page_size

    def locate(self, slots):
        page = self.table[slots // self.page_size]
        valid = (page >= 0) & (page < self.pages)
        return np.where(valid, page, 0), slots % self.page_size, valid

    def read(self, view, head, begin, end):
        page, row, valid = self.locate(np.arange(begin, end))
        if self.pages == 0:
            return np.zeros((end - begin, view.shape[-1]), view.compute)
        return np.where(valid[:, None], view.read((page, row, head)), view.compute.type(0))

    def write(self, view, first, values):
        count = max(0, min(len(values), self.capacity - first))
        page, row, valid = self.locate(np.arange(first, first + count))
        view.write((page[valid], row[valid]), values[:count][valid])


def rotate(x: np.ndarray, positions: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """Rotary embedding (Su et al. 2021): pairs (a, b) become (a cos - b sin, b cos + a sin).

    x (n, H, D); positions (n,), clamped to the table; cos, sin (positions, rotary_dim / 2), rotary_dim <= D. Pairs are
    columns (2i, 2i + 1) if interleaved, else (i, i + rotary_dim / 2). Returns a new array; other columns stay.
    """
    half = cos.shape[1]
    positions = np.clip(positions, 0, len(cos) - 1)
    c, s = (table[positions][:, None].astype(x.dtype) for table in (cos, sin))
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = x[..., first], x[..., second]
    y = x.copy()
    y[..., first] = a * c - b * s
    y[..., second] = b * c + a * s
    return y
