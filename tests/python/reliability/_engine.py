"""The buffers of an engine's step, whose addresses a captured graph remembers, and the calls over them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import hopper_attention
from gpu import batches, support
from gpu.batches import LSE_POISON, POISON_BITS, UNUSED_SLOT
from reliability._memory import different, watched

PAGES = (1, 4, 16, 24, 64, 128)
HEADS = ((8, 2), (8, 1), (4, 4), (12, 2), (32, 8))
KINDS = ("decode", "mixed", "few queries", "append")


@dataclass(frozen=True)
class Model:
    """What a capture fixes. layers: calls that share one schedule. metadata: "no", "before" or "inside" the graph."""

    kind: str
    page: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    dtype: str
    sequences: int
    most_queries: int  # of one sequence
    most_keys: int
    num_splits: int
    batch_invariant: bool
    metadata: str
    layers: int
    window: tuple[int, int]
    softcap: float
    sinks: bool
    rotary: bool


def random_model(seed: int, most_keys: int = 0) -> Model:
    """The model of a seed; most_keys bounds its lengths, 0 does not."""
    r = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    dtype = r.choice(sorted({dtype for dtype, _ in support.MAIN}) or ["bf16"])
    head_dim, head_dim_v = r.choice(support.built_dims(dtype) or [(64, 64)]) if r.random() < 0.5 else (128, 128)
    if not support.supported(head_dim, head_dim_v, dtype):
        head_dim, head_dim_v = support.built_dims(dtype)[0] if support.MAIN else (64, 64)
    heads_q, heads_k = r.choice(HEADS)
    keys = r.choice((300, 3000, 30000))
    rotary = kind == "append" and r.random() < 0.5
    return Model(
        kind=kind,
        page=r.choice(PAGES),
        heads_q=heads_q,
        heads_k=heads_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        sequences=r.choice((1, 5, 8, 31, 64)) if not most_keys else r.randint(1, 4),
        most_queries={"decode": 1, "append": 1, "few queries": 6, "mixed": 200 if not most_keys else 7}[kind],
        most_keys=min(keys, most_keys) if most_keys else keys,
        num_splits=r.choice((0, 0, 1, 32)),
        batch_invariant=r.random() < 0.25,
        metadata=r.choice(("no", "before", "inside")) if batches.has_schedules() else "no",
        layers=r.choice((1, 1, 3)),
        window=r.choice(((-1, -1), (-1, -1), (200, 0))),
        softcap=r.choice((0.0, 0.0, 0.0, 15.0)),
        sinks=r.random() < 0.25,
        rotary=rotary,
    )


class Engine:
    """set(seed) fills the buffers for a step with other lengths, pages and padding; step() makes its calls."""

    def __init__(self, model: Model, seed: int) -> None:
        m = self.model = model
        device, dtype = support.DEVICE, support.DTYPES[m.dtype]
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device).to(dtype)

        self.width = -(-(m.most_keys + 1) // m.page)
        # Not all sequences can be at their longest: pages are what an engine is short of.
        self.pages = max(self.width + 1, min(m.sequences * self.width, 2 * self.width + 4 * m.sequences))
        self.tokens = m.sequences if m.kind in ("decode", "append") else m.sequences + 2 * m.most_queries + 5
        self.k = normal(self.pages, m.page, m.heads_k, m.head_dim)
        self.v = normal(self.pages, m.page, m.heads_k, m.head_dim_v)
        rows = (m.sequences, 1) if m.kind in ("decode", "append") else (self.tokens,)
        self.q = [normal(*rows, m.heads_q, m.head_dim) for _ in range(m.layers)]
        self.cu = torch.zeros(m.sequences + 1, dtype=torch.int32, device=device)
        self.used = torch.zeros(m.sequences, dtype=torch.int32, device=device)
        self.table = torch.full((m.sequences, self.width), UNUSED_SLOT, dtype=torch.int32, device=device)
        self.metadata = torch.zeros(1 + 4 * (-(-m.sequences // 8) * 8), dtype=torch.int32, device=device)
        lse_shape = (m.sequences, m.heads_q, 1) if len(rows) == 2 else (m.heads_q, self.tokens)
        self.out = [torch.empty(*rows, m.heads_q, m.head_dim_v, dtype=dtype, device=device) for _ in self.q]
        self.lse = [torch.empty(lse_shape, device=device) for _ in self.q]
        self.sinks = torch.randn(m.heads_q, generator=generator, device=device) if m.sinks else None
        self.new = None
        if m.kind == "append":
            self.new = [normal(m.sequences, 1, m.heads_k, d) for d in (m.head_dim, m.head_dim_v)]
            self.start = self.k.clone(), self.v.clone()
        self.rotary = {}
        if m.rotary:
            angles = torch.rand(m.most_keys + 1, m.head_dim // 2, generator=generator, device=device)
            self.rotary = {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}
        self.workspace: torch.Tensor | None = None
        self.queries = 0

    def set(self, seed: int) -> None:
        """Lengths, pages and padding of a step; results full of poison."""
        m, r = self.model, random.Random(seed)
        active = r.choice((m.sequences, m.sequences, r.randint(0, m.sequences)))
        queries, keys, pages, tokens = [], [], self.pages, self.tokens
        for b in range(m.sequences):
            n = min(r.choice((1, 1, r.randint(0, m.most_queries), m.most_queries)), tokens) if b < active else 0
            k = r.choice((0, 1, m.page, r.randint(1, 300), r.randint(1, m.most_keys), m.most_keys))
            k = min(k, m.most_keys, pages * m.page - 1) if b < active and pages else 0
            tokens -= n
            pages -= -(-(k + 1) // m.page) if b < active and pages else 0
            queries.append(n)
            keys.append(k)
        self.queries = sum(queries)
        generator = torch.Generator(support.DEVICE).manual_seed(seed)
        counts = [-(-(k + 1) // m.page) if b < active else 0 for b, k in enumerate(keys)]
        order = torch.randperm(self.pages, generator=generator, device=support.DEVICE)
        column = torch.arange(self.width, device=support.DEVICE)
        first = batches.int64(batches.offsets(counts)[:-1])[:, None] + column
        owned = (column < batches.int64(counts)[:, None]) & (first < self.pages)
        table = torch.where(owned, order[first.clamp(max=self.pages - 1)], UNUSED_SLOT)
        self.cu.copy_(batches.int32(batches.offsets(queries)))
        self.used.copy_(batches.int32(keys))
        self.table.copy_(table)
        for x in (*self.q, *(self.new or ())):
            x.copy_(torch.randn(x.shape, generator=generator, device=support.DEVICE))
        if m.metadata == "before":
            self.make_metadata()
        self.clear()

    def clear(self) -> None:
        for out, lse in zip(self.out, self.lse, strict=True):
            out.view(torch.int16).fill_(POISON_BITS)
            lse.fill_(LSE_POISON)
        if self.new is not None:
            self.k.copy_(self.start[0])
            self.v.copy_(self.start[1])

    def make_metadata(self) -> None:
        m = self.model
        packed = m.kind not in ("decode", "append")
        hopper_attention.get_scheduler_metadata(
            *(m.sequences, m.most_queries, m.most_keys + 1, m.heads_q, m.heads_k, m.head_dim, self.used),
            qkv_dtype=self.k.dtype,
            headdim_v=m.head_dim_v,
            cu_seqlens_q=self.cu if packed else None,
            page_size=m.page,
            max_seqlen_k_new=0 if self.new is None else 1,
            causal=True,
            window_size=m.window,
            has_softcap=m.softcap > 0,
            num_splits=m.num_splits,
            batch_invariant=m.batch_invariant,
            out=self.metadata,
        )

    def step(self) -> None:
        """All calls of a step; the first layer appends."""
        m = self.model
        if m.metadata == "inside":
            self.make_metadata()
        options: dict[str, Any] = {
            "page_table": self.table,
            "causal": True,
            "window_size": m.window,
            "softcap": m.softcap,
            "s_aux": self.sinks,
            "num_splits": m.num_splits,
            "batch_invariant": m.batch_invariant,
            "scheduler_metadata": None if m.metadata == "no" else self.metadata,
            "workspace": self.workspace,
        }
        for layer, (q, out, lse) in enumerate(zip(self.q, self.out, self.lse, strict=True)):
            given = {**options, "out": out, "softmax_lse": lse}
            if q.dim() == 3:
                hopper_attention.flash_attn_varlen_func(
                    *(q, self.k, self.v, self.cu),
                    max_seqlen_q=m.most_queries,
                    max_seqlen_k=m.most_keys + 1,
                    seqused_k=self.used,
                    **given,
                )
                continue
            if self.new is not None:  # every layer has a cache of its own; here they write the same keys twice
                given |= {"k": self.new[0], "v": self.new[1], **self.rotary}
            hopper_attention.flash_attn_with_kvcache(
                *(q, self.k, self.v), cache_seqlens=self.used, return_softmax_lse=bool(layer % 2), **given
            )

    def take_workspace(self) -> None:
        """Runs a step and keeps a workspace of the size that it asked for, with room for a rotated q, full of 0xFF."""
        with watched() as allocations:
            self.step()
        rotated = max(q.numel() * q.element_size() for q in self.q) if self.model.rotary else 0
        size = sum(-(-x // 256) * 256 for x in (allocations.workspace_bytes, rotated))
        if size:
            self.workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=support.DEVICE)

    def state(self) -> list[torch.Tensor]:
        """Copies of everything that a step writes."""
        written = [*self.out, *self.lse, *((self.k, self.v) if self.new is not None else ())]
        return [x.clone() for x in written]

    def unwritten(self) -> torch.Tensor:
        """Elements of results in rows of sequences that were not written, and of other rows that were."""
        count = torch.zeros((), dtype=torch.int64, device=support.DEVICE)
        for out, lse in zip(self.out, self.lse, strict=True):
            if out.dim() == 4:
                count += (support.bits(out) == POISON_BITS).sum() + (lse == LSE_POISON).sum()
            else:
                count += (support.bits(out[: self.queries]) == POISON_BITS).sum()
                count += (support.bits(out[self.queries :]) != POISON_BITS).sum()
                count += (lse[:, : self.queries] == LSE_POISON).sum() + (lse[:, self.queries :] != LSE_POISON).sum()
        return count


def state_differs(found: list[torch.Tensor], expected: list[torch.Tensor]) -> torch.Tensor:
    return sum(different(a, b) for a, b in zip(found, expected, strict=True))


class Replayed:
    """A captured graph; without a GPU the call itself stands in for it."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self.graph = None
        if support.DEVICE == "cuda":
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                call()

    def replay(self) -> None:
        if self.graph is None:
            self.call()
        else:
            self.graph.replay()
