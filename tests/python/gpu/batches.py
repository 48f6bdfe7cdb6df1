"""Varlen, paged and cache calls: a batch with its reason, its tensors with poison in everything unused, the verdict.

What the kernels are judged by never goes through a layout: keys and values are made as packed rows and scattered into
the cache or its pages; the float64 reference reads the packed rows. Everything else in the memory of K, V, q, out, LSE
and page tables is poison. Runs on any device (`support.DEVICE`), so that the harness itself is tested without a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hopper_attention
from gpu import support
from gpu.layouts import POISON_BITS
from gpu.support import DTYPES, MAX_REPORTED, ROWS_FOR_RMS, bits, same_bits
from hopper_attention.testing import force_plan, gates

UNUSED_SLOT = 2147480000  # what engines leave in page-table slots behind a sequence
LSE_POISON = 777.25
POISONS = {"nan": math.nan, "inf": math.inf, "garbage": -3e4, "zero": 0.0}
_BLOCK_SCORES = 1 << 24  # scores of one block of the reference: 128 MiB in float64


@dataclass(frozen=True)
class Batch:
    """One call of flash_attn_varlen_func or flash_attn_with_kvcache.

    keys: "packed" (cu_seqlens_k), "paged" or "dense" (a cache). dense_q: q is (B, Sq, Hq, D); q_lengths are equal.
    extra_q, extra_k: rows behind what counts in each packed sequence, so that seqused_q and seqused_k are needed.
    leftpad: slots before the first key, up to so many. cp_world: this rank holds every cp_world-th key. slack: how much
    larger than the truth max_seqlen_* are; -1 passes None. room_k: keys that max_seqlen_k or the page table have room
    for, if more, as in engines that capture graphs. given_by: the code that makes this batch, if not its fields.
    """

    why: str
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    heads_q: int = 4
    heads_k: int = 2
    head_dim: int = 128
    head_dim_v: int = 0
    dtype: str = "bf16"
    call: str = "varlen"
    keys: str = "packed"
    page_size: int = 16
    strides: str = "contiguous"
    dense_q: bool = False
    extra_q: int = 0
    extra_k: int = 0
    tail_q: int = 3
    leftpad: int = 0
    batch_idx: bool = False
    cp_world: int = 1
    cp_rank: int = 0
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    chunk: int = 0
    softcap: float = 0.0
    sinks: str = ""
    scale: float | None = None
    num_splits: int = 1
    metadata: bool = False
    batch_invariant: bool = False
    slack: int = 0
    room_k: int = 0
    poison: str = "nan"
    inputs: str = "normal"
    seed: int = 0
    forced: tuple[tuple[str, Any], ...] = ()
    given_by: str = ""

    @property
    def size(self) -> int:
        return len(self.q_lengths)

    @property
    def dims(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim_v or self.head_dim

    @property
    def options(self) -> dict[str, Any]:
        return {
            "softmax_scale": self.scale,
            "causal": self.causal,
            "window_size": self.window,
            "attention_chunk": self.chunk,
            "softcap": self.softcap,
        }

    def line(self) -> str:
        """The command that runs this batch again, from the root of the repository."""
        given = self.given_by or "Batch(" + ", ".join(
            f"{f.name}={getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default or f.name == "why"
        ) + ")"  # fmt: skip
        source = "gpu.test_random_batches" if self.given_by else "gpu.batches"
        return f'reproduce: PYTHONPATH="tests/python:$PYTHONPATH" python -c "from {source} import *; judge({given})"'

    def but(self, **changes: Any) -> Batch:
        return dataclasses.replace(self, **{"given_by": "", **changes})


def supported(batch: Batch) -> bool:
    return support.supported(*batch.dims, batch.dtype)


def main_dims(batch: Batch) -> Batch:
    """The batch with a dtype and head dims that this build has, those given if it has them."""
    if not support.MAIN or supported(batch):
        return batch
    dtype, (head_dim, head_dim_v) = support.MAIN[0]
    return batch.but(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v)


@dataclass
class Made:
    """Tensors of a batch. q, k, v as the call takes them; truth_k (sum of lengths, Hk, D), truth_v; the rows of q that
    count start at q_starts and belong to flat rows of q.
    """

    batch: Batch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    truth_k: torch.Tensor
    truth_v: torch.Tensor
    q_lengths: torch.Tensor  # (B,) int64
    k_lengths: torch.Tensor
    q_starts: torch.Tensor
    k_starts: torch.Tensor  # of truth_k
    k_totals: torch.Tensor  # keys on all ranks of context parallelism
    slots: torch.Tensor  # flat row of k and v of every row of truth_k
    lengths: dict[str, Any] = field(default_factory=dict)  # arguments of the call
    s_aux: torch.Tensor | None = None
    leftpad: torch.Tensor | None = None


def int32(values: Any, device: Any = None) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=device or support.DEVICE)


def offsets(lengths: Iterable[int]) -> list[int]:
    found = [0]
    for length in lengths:
        found.append(found[-1] + length)
    return found


def storage(shape: tuple[int, ...], dims: tuple[int, int], strides: str, dtype: torch.dtype, value: float):
    """K (*shape, D) and V (*shape, Dv) full of `value`; shape is (sequences or pages, rows, heads) or (rows, heads)."""
    d, dv = dims
    device = support.DEVICE
    if strides == "contiguous":
        return tuple(torch.full((*shape, n), value, dtype=dtype, device=device) for n in dims)
    if strides == "interleaved":  # K and V of a token and head beside each other
        whole = torch.full((*shape, d + dv), value, dtype=dtype, device=device)
        return whole[..., :d], whole[..., d:]
    if strides == "heads first":
        swapped = (*shape[:-2], shape[-1], shape[-2])
        return tuple(torch.full((*swapped, n), value, dtype=dtype, device=device).transpose(-2, -3) for n in dims)
    if strides == "K page, V page":  # (pages, 2, rows, heads, D): what vLLM allocates
        whole = torch.full((shape[0], 2, *shape[1:], max(dims)), value, dtype=dtype, device=device)
        return whole[:, 0, ..., :d], whole[:, 1, ..., :dv]
    if strides == "gaps":  # behind each head and each row: multiples of 16 bytes and of nothing more
        row = shape[-1] + 1
        whole = (torch.full((*shape[:-1], row, n), value, dtype=dtype, device=device) for n in (d + 8, dv + 24))
        return tuple(x[..., :-1, :n] for x, n in zip(whole, dims, strict=True))
    raise ValueError(f"strides: unknown kind {strides!r}")


def put_rows(target: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """target (..., rows, H, D) of any strides, its leading dims as one axis of rows."""
    if target.dim() == 3:
        target[rows] = values
    else:
        target[rows // target.shape[1], rows % target.shape[1]] = values


def make_values(batch: Batch, total_q: int, total_k: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """q (total_q, Hq, D), k (total_k, Hk, D), v (total_k, Hk, Dv) of the kind that the batch names."""
    d, dv = batch.dims

    def normal(rows: int, heads: int, dim: int) -> torch.Tensor:
        return torch.randn(rows, heads, dim, generator=generator, device=support.DEVICE)

    q, k, v = normal(total_q, batch.heads_q, d), normal(total_k, batch.heads_k, d), normal(total_k, batch.heads_k, dv)
    if batch.inputs == "large logits":
        q, k = q + 1, k + 40
    elif batch.inputs == "spread logits":
        q = q * (20 if batch.dtype == "bf16" else 2)
    elif batch.inputs == "one outlier channel":
        q[..., 3] += 30
        k[..., 3] = 30 + 0.3 * k[..., 3]
    elif batch.inputs == "equal keys":
        k = k[:1].expand_as(k)
    elif batch.inputs == "small integers":
        q, k, v = (x.mul(1.5).round().clamp(-4, 4) for x in (q, k, v))
    elif batch.inputs != "normal":
        raise ValueError(f"inputs: unknown kind {batch.inputs!r}")
    return tuple(x.to(DTYPES[batch.dtype]) for x in (q, k, v))


INPUT_KINDS = ["normal", "large logits", "spread logits", "one outlier channel", "equal keys", "small integers"]


def make(batch: Batch) -> Made:
    """The tensors of a batch; the same for the same seed and device."""
    device = support.DEVICE
    generator = torch.Generator(device).manual_seed(batch.seed)
    size, poison = batch.size, POISONS[batch.poison]
    q_starts = offsets(n + batch.extra_q for n in batch.q_lengths)
    total_q = q_starts[-1] + (0 if batch.dense_q else batch.tail_q)
    k_starts = offsets(batch.k_lengths)
    values_q, truth_k, truth_v = make_values(batch, total_q, k_starts[-1], generator)
    q_lengths, k_lengths, starts = (
        torch.tensor(x, dtype=torch.int64, device=device) for x in (batch.q_lengths, batch.k_lengths, q_starts)
    )
    truth_starts = torch.tensor(k_starts, dtype=torch.int64, device=device)
    k_totals = k_lengths
    if batch.cp_world > 1:  # the last keys of the sequence may be on other ranks
        more = torch.randint(0, 2, (size,), generator=generator, device=device)
        k_totals = k_lengths * batch.cp_world + torch.where(k_lengths > 0, batch.cp_rank - batch.cp_world + 1, 0)
        k_totals = k_totals + more * (batch.cp_world - 1 - batch.cp_rank) * (k_lengths > 0)
    if not batch.dense_q:  # rows that no sequence owns
        row = torch.arange(total_q, device=device)
        owner = torch.searchsorted(starts[1:].contiguous(), row, right=True).clamp(max=max(size - 1, 0))
        counts = row - starts[owner] < q_lengths[owner] if size else torch.zeros_like(row, dtype=torch.bool)
        values_q[~counts] = poison
    made = Made(
        batch,
        *(values_q, truth_k, truth_v, truth_k, truth_v),
        *(q_lengths, k_lengths, starts[:-1], truth_starts[:-1], k_totals),
        slots=truth_starts,
    )
    sequence = torch.repeat_interleave(torch.arange(size, device=device), k_lengths, output_size=k_starts[-1])
    key = torch.arange(k_starts[-1], device=device) - truth_starts[sequence]
    pad = torch.zeros(size, dtype=torch.int64, device=device)
    if batch.leftpad:
        pad = torch.randint(0, batch.leftpad + 1, (size,), generator=generator, device=device)
        made.leftpad = pad.to(torch.int32)
    place_keys(made, sequence, key + pad[sequence], k_lengths + pad, generator)
    put_rows(made.k, made.slots, truth_k)
    put_rows(made.v, made.slots, truth_v)
    if batch.sinks:
        made.s_aux = torch.randn(batch.heads_q, generator=generator, device=device).mul(2).to(DTYPES[batch.sinks])
    if batch.dense_q:
        longest = batch.q_lengths[0] if size else 5
        made.q = values_q.view(size, longest, batch.heads_q, batch.head_dim)
    set_lengths(made, q_starts, k_lengths + pad)
    return made


def place_keys(
    made: Made, sequence: torch.Tensor, slot: torch.Tensor, used: torch.Tensor, generator: torch.Generator
) -> None:
    """Makes k and v full of poison, and says which flat row each key goes to; used (B,): slots of each sequence."""
    batch, device, dtype = made.batch, support.DEVICE, DTYPES[made.batch.dtype]
    poison, size = POISONS[batch.poison], batch.size
    host_used = [n + batch.leftpad for n in batch.k_lengths]  # at least what is used, known without a synchronisation
    if batch.keys == "packed":
        starts = offsets(n + batch.extra_k for n in batch.k_lengths)
        made.k, made.v = storage((starts[-1] + 5, batch.heads_k), batch.dims, batch.strides, dtype, poison)
        made.slots = int64(starts)[sequence] + slot
        made.lengths["cu_seqlens_k"] = int32(starts)
    elif batch.keys == "paged":
        page = batch.page_size
        counts = [-(-n // page) for n in host_used]
        width = max([1, *counts, -(-batch.room_k // page)]) + (2 if batch.seed % 3 else 0)
        first = offsets(counts)
        pages = first[-1] + 3  # some that nobody owns
        shape = (pages, page, batch.heads_k)
        made.k, made.v = storage(shape, batch.dims, batch.strides, dtype, poison)
        order = torch.randperm(pages, generator=generator, device=device)
        column = torch.arange(width, device=device)
        owned = column[None] < -(-used[:, None] // page)
        index = (int64(first[:-1])[:, None] + column[None]).clamp(max=pages - 1)
        junk = UNUSED_SLOT if batch.seed % 2 else -1 - 7 * (batch.seed % 5)
        table = torch.where(owned, order[index], junk).to(torch.int32)
        made.lengths["page_table"] = table
        made.slots = table[sequence, slot // page].long() * page + slot % page
    else:
        rows = size + (3 if batch.batch_idx else 0)
        depth = max([1, *host_used]) + batch.extra_k
        shape = (rows, depth, batch.heads_k)
        made.k, made.v = storage(shape, batch.dims, batch.strides, dtype, poison)
        index = torch.randperm(rows, generator=generator, device=device)[:size]
        if batch.batch_idx:
            made.lengths["cache_batch_idx"] = index.to(torch.int32)
        else:
            index = torch.arange(size, device=device)
        made.slots = index[sequence] * depth + slot


def int64(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int64, device=support.DEVICE)


def set_lengths(made: Made, q_starts: list[int], used: torch.Tensor) -> None:
    """The arguments that tell lengths."""
    batch, given = made.batch, made.lengths
    if not batch.dense_q:
        given["cu_seqlens_q"] = int32(q_starts)
    longest_q = max([0, *(n + batch.extra_q for n in batch.q_lengths)])
    if not batch.dense_q:
        given["max_seqlen_q"] = None if batch.slack < 0 else longest_q + batch.slack
    if batch.call == "varlen":
        longest_k = max([0, *(n + batch.extra_k for n in batch.k_lengths)])
        given["max_seqlen_k"] = None if batch.slack < 0 else max(longest_k + batch.slack, batch.room_k)
        if batch.extra_q:
            given["seqused_q"] = made.q_lengths.to(torch.int32)
        if batch.extra_k or batch.keys == "paged":
            given["seqused_k"] = used.to(torch.int32)
    else:
        given["cache_seqlens"] = used.to(torch.int32)
        if batch.leftpad:
            given["cache_leftpad"] = made.leftpad
    if batch.cp_world > 1:
        given["cp_world_size"], given["cp_rank"] = batch.cp_world, batch.cp_rank
        given["cp_tot_seqused_k"] = made.k_totals.to(torch.int32)


def used_lengths(made: Made) -> torch.Tensor:
    """(B,) int32: keys of each sequence as get_scheduler_metadata takes them."""
    for name in ("seqused_k", "cache_seqlens"):
        if name in made.lengths:
            return made.lengths[name]
    return made.k_lengths.to(torch.int32)


def schedule(made: Made, **changes: Any) -> torch.Tensor:
    """get_scheduler_metadata of the batch."""
    batch, given = made.batch, made.lengths
    bound_q = given.get("max_seqlen_q")
    bound_k = given.get("max_seqlen_k")
    arguments = {
        "batch_size": batch.size,
        "max_seqlen_q": max([1, *batch.q_lengths]) if bound_q is None else bound_q,
        "max_seqlen_k": max([1, batch.room_k, *(n + batch.leftpad for n in batch.k_lengths)])
        if bound_k is None
        else bound_k,
        "num_heads_q": batch.heads_q,
        "num_heads_kv": batch.heads_k,
        "headdim": batch.head_dim,
        "headdim_v": batch.dims[1],
        "cache_seqlens": used_lengths(made),
        "qkv_dtype": DTYPES[batch.dtype],
        "cu_seqlens_q": given.get("cu_seqlens_q"),
        "cache_leftpad": made.leftpad,
        "page_size": batch.page_size if batch.keys == "paged" else None,
        "causal": batch.causal,
        "window_size": batch.window,
        "attention_chunk": batch.chunk,
        "has_softcap": batch.softcap > 0,
        "num_splits": batch.num_splits,
        "batch_invariant": batch.batch_invariant,
    }
    return hopper_attention.get_scheduler_metadata(**{**arguments, **changes})


def new_results(made: Made) -> tuple[torch.Tensor, torch.Tensor]:
    """out and LSE full of poison, inside no larger memory; in the shapes of the call."""
    q, dv = made.q, made.batch.dims[1]
    out = torch.full((*q.shape[:-1], dv), POISON_BITS, dtype=torch.int16, device=q.device).view(q.dtype)
    shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    return out, torch.full(shape, LSE_POISON, device=q.device)


def attend(
    made: Made, results: tuple[torch.Tensor, torch.Tensor] | None = None, with_lse: bool = True, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the call under the forced choices of the batch; `given` replaces arguments. Without `with_lse` the
    call is not asked for the LSE, and lse keeps what it holds.
    """
    batch = made.batch
    out, lse = new_results(made) if results is None else results
    arguments = {
        **made.lengths,
        **batch.options,
        "s_aux": made.s_aux,
        "num_splits": batch.num_splits,
        "batch_invariant": batch.batch_invariant,
        "out": out,
        "softmax_lse": lse if with_lse else None,
    }
    if batch.metadata and has_schedules():
        arguments["scheduler_metadata"] = schedule(made)
    arguments.update(given)
    forced = force_plan(**dict(batch.forced)) if batch.forced else contextlib.nullcontext()
    with forced:
        if batch.call == "varlen":
            arguments["return_attn_probs"] = with_lse
            found = hopper_attention.flash_attn_varlen_func(made.q, made.k, made.v, **arguments)
        else:
            arguments["return_softmax_lse"] = with_lse
            found = hopper_attention.flash_attn_with_kvcache(made.q, made.k, made.v, **arguments)
    return found if with_lse else (found, lse)


def has_schedules() -> bool:
    """Scheduler metadata exist on GPUs only."""
    return torch.device(support.DEVICE).type == "cuda"


def by_row(made: Made, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out (T, Hq, Dv) and lse (T, Hq), whatever the shapes of the call."""
    if out.dim() == 3:
        return out, lse.transpose(0, 1)
    return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


def rows_that_count(made: Made) -> torch.Tensor:
    """(T,) bool: rows of q that belong to a sequence."""
    total = made.q.shape[0] if made.q.dim() == 3 else made.q.shape[0] * made.q.shape[1]
    row = torch.arange(total, device=made.q.device)
    if made.batch.size == 0:
        return torch.zeros_like(row, dtype=torch.bool)
    if made.batch.dense_q:
        return torch.ones_like(row, dtype=torch.bool)
    ends = made.q_starts + made.q_lengths
    owner = torch.searchsorted(made.q_starts.contiguous(), row, right=True) - 1
    # Empty sequences share their start with the next one: the last of those that start at a row is the longest.
    return (owner >= 0) & (row < ends[owner.clamp(min=0)])


@dataclass
class Judged:
    """The gates of one batch, with the sums behind the RMS ratio."""

    result: gates.GateResult
    squares: float
    plain_squares: float
    rows: int


def buckets(batch: Batch) -> Iterator[list[int]]:
    """Sequences with queries, those of similar lengths together, so that padding them costs little."""
    found: dict[tuple[int, int], list[int]] = {}
    for b, (q, k) in enumerate(zip(batch.q_lengths, batch.k_lengths, strict=True)):
        if q:
            found.setdefault((math.ceil(math.log(q, 8)), math.ceil(math.log(max(k, 1), 4))), []).append(b)
    return iter(found.values())


def blocks(batch: Batch) -> Iterator[tuple[list[int], int, int]]:
    """(sequences, first row, last row) of bounded size."""
    for chosen in buckets(batch):
        longest_q = max(batch.q_lengths[b] for b in chosen)
        longest_k = max(1, *(batch.k_lengths[b] for b in chosen))
        rows = max(1, min(longest_q, _BLOCK_SCORES // (longest_k * batch.heads_q)))
        each = longest_k * max(batch.heads_q * rows, batch.heads_k * max(batch.dims))
        count = max(1, _BLOCK_SCORES // each)
        for i in range(0, len(chosen), count):
            for row in range(0, longest_q, rows):
                yield chosen[i : i + count], row, min(row + rows, longest_q)


def hidden_keys(made: Made, chosen: torch.Tensor, row: torch.Tensor, keys: int) -> torch.Tensor:
    """(sequences, rows, keys): whether the query must not see the key. By positions, as the interface defines them."""
    batch = made.batch
    key = torch.arange(keys, device=row.device)
    position = key * batch.cp_world + batch.cp_rank
    total = made.k_totals[chosen][:, None, None]
    diagonal = row[None, :, None] + total - made.q_lengths[chosen][:, None, None]
    distance = position - diagonal  # 0: the query's own position
    hidden = (key >= made.k_lengths[chosen][:, None, None]) | (position >= total)
    left, right = batch.window[0], 0 if batch.causal else batch.window[1]
    if left >= 0:
        hidden = hidden | (distance < -left)
    if right >= 0:
        hidden = hidden | (distance > right)
    if batch.chunk:
        chunk_of = torch.div(diagonal, batch.chunk, rounding_mode="floor")
        hidden = hidden | (torch.div(position, batch.chunk, rounding_mode="floor") != chunk_of)
    return hidden.expand(-1, len(row), -1)


def verdict(made: Made, out: torch.Tensor, lse: torch.Tensor) -> Judged:
    """The three gates over all sequences. One synchronisation."""
    batch = made.batch
    out, lse = by_row(made, out, lse)
    q = made.q.reshape(-1, *made.q.shape[-2:])
    truth_k, truth_v = (x if len(x) else x.new_zeros(1, *x.shape[1:]) for x in (made.truth_k, made.truth_v))
    group = batch.heads_q // batch.heads_k
    unit = gates.UNIT[q.dtype]
    scale = batch.head_dim**-0.5 if batch.scale is None else batch.scale
    problem = SimpleNamespace(q=q, scale=scale, softcap=batch.softcap)
    found_blocks = []
    places = []
    rows_judged = 0
    with torch.no_grad():
        for sequences, first, last in blocks(batch):
            chosen = int64(sequences)
            keys = max(1, *(batch.k_lengths[b] for b in sequences))
            row = torch.arange(first, last, device=q.device)
            index = (made.q_starts[chosen][:, None] + row).clamp(max=len(q) - 1)
            index_k = (made.k_starts[chosen][:, None] + torch.arange(keys, device=q.device)).clamp(max=len(truth_k) - 1)
            n, r = index.shape

            def by_group(x: torch.Tensor, n: int = n, r: int = r) -> torch.Tensor:
                """(n, r, Hq, ...) -> (n * Hk, r * group, ...)"""
                x = x.reshape(n, r, batch.heads_k, group, *x.shape[3:]).transpose(1, 2)
                return x.reshape(n * batch.heads_k, r * group, *x.shape[4:])

            def by_head(x: torch.Tensor, n: int = n, keys: int = keys) -> torch.Tensor:
                return x.transpose(1, 2).reshape(n * batch.heads_k, keys, x.shape[-1])

            hidden = hidden_keys(made, chosen, row, keys)
            hidden = hidden[:, :, None].expand(n, r, batch.heads_q, keys)
            valid = (row < made.q_lengths[chosen][:, None])[:, :, None].expand(n, r, batch.heads_q)
            sink = None
            if made.s_aux is not None:
                sink = by_group(made.s_aux.float()[None, None].expand(n, r, batch.heads_q))
            block = gates.Block(
                slice(0), slice(0),
                torch.where(by_group(valid)[..., None], by_group(q[index]), 0),
                by_head(truth_k[index_k]), by_head(truth_v[index_k]), by_group(hidden), sink,
            )  # fmt: skip
            found_blocks.append(judge_block(problem, block, by_group(out[index]), by_group(lse[index]),
                                            by_group(valid), unit))  # fmt: skip
            places.append((sequences, first, r, group))
            rows_judged += sum(max(0, min(batch.q_lengths[b], last) - first) for b in sequences) * batch.heads_q
        written = elsewhere_written(made, out, lse)
        if found_blocks:
            numbers = torch.cat([torch.stack(found_blocks), written.double().expand(1, 10)]).tolist()
        else:
            numbers = [[float(written)] * 10]
    return conclude(batch, numbers[:-1], places, int(numbers[-1][0]), rows_judged)


def judge_block(
    problem: Any, block: gates.Block, found: torch.Tensor, found_lse: torch.Tensor, valid: torch.Tensor, unit: float
) -> torch.Tensor:
    """(10,) float64: worst element, its index, found, exact; the same for the LSE; sums of squares."""
    reference, reference_lse, size = gates.exact(problem, block)
    found, found_lse = found.double(), found_lse.double()
    dtype = problem.q.dtype
    no_key = block.hidden.all(-1)
    ratio = (found - reference).abs() / (unit * size.clamp(min=torch.finfo(dtype).tiny))
    ratio = torch.where(no_key[..., None], torch.where(found == 0, 0.0, math.inf), ratio)
    ratio = torch.where(valid[..., None], ratio.nan_to_num(nan=math.inf, posinf=math.inf), -1.0)
    plain_error = gates.plain(problem, block).double() - reference
    counted = plain_error.isfinite() & valid[..., None]
    squares = torch.where(counted, (found - reference).square(), 0.0).nan_to_num(nan=math.inf, posinf=math.inf).sum()
    plain_squares = torch.where(counted, plain_error, 0.0).square().sum()
    allowed = gates.LSE_ABSOLUTE + gates.LSE_RELATIVE * reference_lse.abs()
    empty = reference_lse == -math.inf
    lse_ratio = torch.where(
        empty, torch.where(found_lse == -math.inf, 0.0, math.inf), (found_lse - reference_lse).abs() / allowed
    )
    lse_ratio = torch.where(valid, lse_ratio.nan_to_num(nan=math.inf, posinf=math.inf), -1.0)
    worst, at = ratio.flatten().max(0)
    worst_lse, at_lse = lse_ratio.flatten().max(0)
    values = [worst, at, found.flatten()[at], reference.flatten()[at]]
    values += [worst_lse, at_lse, found_lse.flatten()[at_lse], reference_lse.flatten()[at_lse]]
    return torch.stack([x.double() for x in [*values, squares, plain_squares]])


def elsewhere_written(made: Made, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """How many elements of out and LSE in rows of no sequence lost their poison. out must be of new_results."""
    unowned = ~rows_that_count(made)
    return ((bits(out)[unowned] != POISON_BITS).sum() + (lse[unowned] != LSE_POISON).sum()).double()


def conclude(batch: Batch, numbers: list[list[float]], places: list[Any], written: int, rows: int) -> Judged:
    """Numbers of all blocks -> verdict with the place of the worst element."""

    def place(block: int, index: int, columns: int) -> str:
        sequences, first, r, group = places[block]
        rest, column = divmod(index, columns)
        rest, row_head = divmod(rest, r * group)
        sequence, head_k = divmod(rest, batch.heads_k)
        where = (
            f"sequence {sequences[sequence]}, head {head_k * group + row_head % group}, row {first + row_head // group}"
        )
        return where + (f", column {column}" if columns > 1 else "")

    tally = gates.Tally()
    for i, n in enumerate(numbers):
        if n[0] > tally.elementwise:
            tally.elementwise = n[0]
            tally.elementwise_at = f"{place(i, int(n[1]), batch.dims[1])}: found {n[2]:.6g}, exact {n[3]:.6g}"
        if n[4] > tally.lse:
            tally.lse = n[4]
            tally.lse_at = f"{place(i, int(n[5]), 1)}: found {n[6]:.6g}, exact {n[7]:.6g}"
        tally.squares += n[8]
        tally.plain_squares += n[9]
    result = gates.verdict(tally, True)
    if rows < ROWS_FOR_RMS and not result.passed and result.elementwise <= gates.ELEMENTWISE_BOUND:
        # With so few rows the ratio of two random errors says nothing; judge_all looks at many such batches together.
        passed = (result.lse_ratio or 0.0) <= 1.0
        result = dataclasses.replace(result, passed=passed)
    if written:
        text = f"{written} elements of out and LSE were written in rows of no sequence; {result.message}"
        result = dataclasses.replace(result, passed=False, message=text)
    return Judged(result, tally.squares, tally.plain_squares, rows)


@dataclass
class Pool:
    """Squares of the errors of batches that are too small for an RMS ratio of their own, each weighed alike."""

    ratios: list[float] = field(default_factory=list)

    def add(self, judged: Judged) -> None:
        if judged.rows < ROWS_FOR_RMS and judged.plain_squares > 0 and judged.rows >= 8:
            self.ratios.append(math.sqrt(judged.squares / judged.plain_squares))

    def problem(self) -> str:
        if len(self.ratios) < 20:
            return ""
        median = sorted(self.ratios)[len(self.ratios) // 2]
        return "" if median <= gates.RMS_BOUND else f"{len(self.ratios)} small batches: median RMS ratio {median:.3g}"


def problem_of(batch: Batch, pool: Pool | None = None) -> str:
    """Runs and judges a batch: "" or a text that starts with the reproduction line."""
    try:
        made = make(batch)
        judged = verdict(made, *attend(made))
    except Exception as error:
        return f"{batch.line()}\n{type(error).__name__}: {error}"
    support.WORST.add(judged.result, batch)
    if pool is not None:
        pool.add(judged)
    return "" if judged.result else f"{batch.line()}\n{judged.result.message}"


def judge(batch: Batch) -> None:
    """Fails with the reproduction line unless the batch passes the gates."""
    judge_all([batch])


def judge_all(batches: Iterable[Batch]) -> int:
    """Every batch; reports up to MAX_REPORTED failures. Returns how many batches there were."""
    problems, count, pool = [], 0, Pool()
    for batch in batches:
        count += 1
        problem = problem_of(batch, pool)
        if problem:
            problems.append(problem)
            if len(problems) == MAX_REPORTED or "CUDA error" in problem or "illegal" in problem:
                break
    if not problems and pool.problem():
        problems.append(pool.problem())
    if problems:
        pytest.fail(f"{len(problems)} of {count} batches so far failed\n" + "\n".join(problems), pytrace=False)
    return count


def fail(batch: Batch, text: str) -> None:
    pytest.fail(f"{batch.line()}\n{text}", pytrace=False)


def require_same(batch: Batch, what: str, found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """Fails unless out and LSE have the same bits; names the first difference."""
    for name, a, b in zip(("out", "lse"), found, expected, strict=True):
        if same_bits(a, b):
            continue
        if a.shape != b.shape:
            fail(batch, f"{what}: {name} has shape {tuple(a.shape)} instead of {tuple(b.shape)}")
        different = (bits(a) != bits(b)).nonzero()
        at = tuple(different[0].tolist())
        fail(batch, f"{what}: {name} differs in {len(different)} of {a.numel()} elements, first at {at}: "
                    f"{float(a.contiguous()[at])!r} instead of {float(b.contiguous()[at])!r}")  # fmt: skip


def judged_results(made: Made, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the call, which must pass the gates."""
    results = attend(made, **given)
    judged = verdict(made, *results)
    if not judged.result:
        fail(made.batch, judged.result.message)
    return results


def of_sequence(made: Made, results: tuple[torch.Tensor, torch.Tensor], b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """out (q, Hq, Dv) and lse (q, Hq) of one sequence."""
    out, lse = by_row(made, *results)
    start = offsets(n + made.batch.extra_q for n in made.batch.q_lengths)[b]
    rows = slice(start, start + made.batch.q_lengths[b])
    return out[rows], lse[rows]


def alone(made: Made, b: int) -> Made:
    """Sequence `b` as a batch of its own, on the same memory of K and V (and so on the same pages)."""
    batch = made.batch
    single = batch.but(q_lengths=(batch.q_lengths[b],), k_lengths=(batch.k_lengths[b],), why=f"{batch.why}, one alone")
    start = offsets(n + batch.extra_q for n in batch.q_lengths)[b]
    q = made.q[b : b + 1] if batch.dense_q else made.q[start : start + batch.q_lengths[b] + batch.extra_q]
    rows = torch.arange(batch.k_lengths[b], device=q.device) + offsets(batch.k_lengths)[b]
    lengths = dict(made.lengths)
    for name in ("seqused_q", "seqused_k", "page_table", "cache_batch_idx", "cache_seqlens", "cache_leftpad"):
        if lengths.get(name) is not None:
            lengths[name] = lengths[name][b : b + 1]
    if "cp_tot_seqused_k" in lengths:
        lengths["cp_tot_seqused_k"] = lengths["cp_tot_seqused_k"][b : b + 1]
    k, v = made.k, made.v
    if batch.keys == "packed":
        first = offsets(n + batch.extra_k for n in batch.k_lengths)[b]
        last = first + batch.k_lengths[b] + batch.extra_k
        k, v = k[first:last], v[first:last]
        lengths["cu_seqlens_k"] = int32([0, last - first])
    elif batch.keys == "dense" and not batch.batch_idx:
        k, v = k[b : b + 1], v[b : b + 1]
    if not batch.dense_q:
        lengths["cu_seqlens_q"] = int32([0, batch.q_lengths[b] + batch.extra_q])
        if lengths.get("max_seqlen_q") is not None:
            lengths["max_seqlen_q"] = batch.q_lengths[b] + batch.extra_q
    if lengths.get("max_seqlen_k") is not None:
        lengths["max_seqlen_k"] = max(1, batch.k_lengths[b] + batch.extra_k)
    part = slice(b, b + 1)
    return Made(
        single, q, k, v, made.truth_k[rows], made.truth_v[rows], made.q_lengths[part], made.k_lengths[part],
        torch.zeros_like(made.q_starts[part]), torch.zeros_like(made.k_starts[part]), made.k_totals[part],
        made.slots[rows], lengths, made.s_aux, None if made.leftpad is None else made.leftpad[part],
    )  # fmt: skip


def permuted(made: Made, order: list[int]) -> Made:
    """The same sequences in another order; on the same memory of K and V, unless they are packed, whose order is that of
    the sequences.
    """
    batch = made.batch
    index = int64(order)
    starts = offsets(n + batch.extra_q for n in batch.q_lengths)
    q_lengths, k_lengths = (tuple(x[i] for i in order) for x in (batch.q_lengths, batch.k_lengths))
    lengths = dict(made.lengths)
    names = ("seqused_q", "seqused_k", "page_table", "cache_batch_idx", "cache_seqlens", "cache_leftpad")
    for name in (*names, "cp_tot_seqused_k"):
        if lengths.get(name) is not None:
            lengths[name] = lengths[name][index].contiguous()
    k, v, slots = made.k, made.v, made.slots
    if batch.keys == "packed":
        k, v, slots = packed_keys_moved(made, order)
        lengths["cu_seqlens_k"] = int32(offsets(n + batch.extra_k for n in k_lengths))
    if batch.keys == "dense" and not batch.batch_idx:
        lengths["cache_batch_idx"] = index.to(torch.int32)
    if batch.dense_q:
        q = made.q[index].contiguous()
    else:
        pieces = [made.q[starts[i] : starts[i + 1]] for i in order] + [made.q[starts[-1] :]]
        q = torch.cat(pieces)
        lengths["cu_seqlens_q"] = int32(offsets(n + batch.extra_q for n in q_lengths))
    new_starts = int64(offsets(n + batch.extra_q for n in q_lengths)[:-1])
    changed = batch.but(q_lengths=q_lengths, k_lengths=k_lengths, why=f"{batch.why}, permuted")
    return Made(
        changed, q, k, v, made.truth_k, made.truth_v, made.q_lengths[index], made.k_lengths[index],
        new_starts, made.k_starts[index], made.k_totals[index], slots, lengths, made.s_aux,
        None if made.leftpad is None else made.leftpad[index].contiguous(),
    )  # fmt: skip


def packed_keys_moved(made: Made, order: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K, V and slots with the rows of packed sequences in another order, those that do not count with them."""
    batch = made.batch
    starts = offsets(n + batch.extra_k for n in batch.k_lengths)
    total = made.k.shape[0]
    row = torch.arange(total, device=made.k.device)
    rows = torch.cat([*(row[starts[i] : starts[i + 1]] for i in order), row[starts[-1] :]])
    place = torch.empty_like(row)
    place[rows] = row
    moved = storage((total, batch.heads_k), batch.dims, batch.strides, made.k.dtype, 0.0)
    for target, source in zip(moved, (made.k, made.v), strict=True):
        target.copy_(source[rows])
    return *moved, place[made.slots]
