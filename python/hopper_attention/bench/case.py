"""What the benchmark measures: one call, its goals, and the work in it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from hopper_attention.bench.visible import pairs, seen_keys

CALLS = ("dense", "varlen", "cache")


@dataclass(frozen=True)
class Within:
    """A goal on two times of one measurement: `name` takes at most `factor` times as long as `of`, and `us` more."""

    name: str
    of: str
    factor: float
    us: float = 0.0


@dataclass(frozen=True)
class Case:
    """One call to measure.

    call: "dense" is flash_attn_func, "varlen" flash_attn_varlen_func, "cache" flash_attn_with_kvcache. lengths: keys of
    each sequence where they differ (varlen: queries as well, unless `queries` tells them); batch and seqlen_k follow
    from them. page_size: 0 is contiguous K and V; room: keys that a page table has room for, if more than
    the longest sequence has. Goals, 0 if nothing is said: goal of ours / FA3, goal_best of ours /
    best known, goal_read of the read rate, goal_us at most so many us, goal_over_us at most so many more than K and V
    take at the read rate, within on times of our implementations (see `peers`; those that it names run). seconds: GPU
    time for all implementations together; fill: all of it is used, which short calls do not need. peers: the only ones to
    run beside ours; () is all. size_q: what standard normal numbers are multiplied by to make q.
    """

    suite: str
    name: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int = 0
    dtype: str = "bf16"
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: bool = False
    call: str = "dense"
    page_size: int = 0
    room: int = 0
    lengths: tuple[int, ...] = ()
    queries: tuple[int, ...] = ()
    goal: float = 0.0
    goal_best: float = 0.0
    goal_read: float = 0.0
    goal_us: float = 0.0
    goal_over_us: float = 0.0
    within: tuple[Within, ...] = ()
    seconds: float = 0.4
    fill: bool = False
    peers: tuple[str, ...] = ()
    size_q: float = 1.0

    @property
    def dv(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def k_lengths(self) -> tuple[int, ...]:
        return self.lengths or (self.seqlen_k,) * self.batch

    @property
    def q_lengths(self) -> tuple[int, ...]:
        if self.queries:
            return self.queries
        return self.lengths if self.lengths and self.call == "varlen" else (self.seqlen_q,) * self.batch

    @property
    def most_keys(self) -> int:
        """The bound on the keys of a sequence that calls are told."""
        return max(self.room, *self.k_lengths)

    @property
    def equal_lengths(self) -> bool:
        return len(set(self.k_lengths)) <= 1

    @property
    def is_decode(self) -> bool:
        """Whether K/V bytes are the work, not operations."""
        return self.call == "cache"

    @property
    def element_bytes(self) -> int:
        return 2

    def visible_pairs(self) -> int:
        """(query, key) pairs that the mask leaves, in one head of each sequence."""
        return sum(pairs(q, k, self.causal, self.window) for q, k in zip(self.q_lengths, self.k_lengths, strict=True))

    def flops(self) -> int:
        """Q K^T and P V over visible pairs: two operations for each multiply-add."""
        return 2 * self.visible_pairs() * self.heads_q * (self.head_dim + self.dv)

    def kv_bytes(self) -> int:
        """Bytes of K and V that some query sees."""
        keys = sum(
            seen_keys(q, k, self.causal, self.window) for q, k in zip(self.q_lengths, self.k_lengths, strict=True)
        )
        return keys * self.heads_k * (self.head_dim + self.dv) * self.element_bytes

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
