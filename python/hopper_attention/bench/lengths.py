"""Lengths of the sequences of a batch, spread in one way or another."""

from __future__ import annotations

import random


def skewed_lengths(batch: int, shortest: int, longest: int, seed: int) -> tuple[int, ...]:
    """Lengths with even logarithms, both ends included, in random order."""
    ratio = longest / shortest
    found = [round(shortest * ratio ** (i / (batch - 1))) for i in range(batch)]
    random.Random(seed).shuffle(found)
    return tuple(found)


def ragged_lengths(batch: int, shortest: int, longest: int, seed: int) -> tuple[int, ...]:
    """Evenly spaced lengths, both ends included, in random order."""
    found = [shortest + round((longest - shortest) * i / (batch - 1)) for i in range(batch)]
    random.Random(seed).shuffle(found)
    return tuple(found)


def squared_lengths(batch: int, longest: int, seed: int) -> tuple[int, ...]:
    """Random lengths of up to `longest`, most of them short: a square of what is spread evenly."""
    r = random.Random(seed)
    return tuple(max(64, int(longest * r.random() ** 2)) for _ in range(batch))
