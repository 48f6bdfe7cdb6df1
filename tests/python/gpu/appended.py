"""Cache calls that append: a cache batch of `batches` whose last keys arrive with the call, rotated or not.

What the cache holds after the call is compared bit by bit, the result goes through the gates.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gpu import batches, support
from gpu.batches import Batch, Made
from hopper_attention.reference.keys import rotate

MOST_SEQUENCES = 64  # each is prepared by itself
POSITIONS = 700


@dataclass
class Appended:
    """made: what the call must be judged by, and its q, k and v, where k and v lack the new keys; q is not rotated."""

    made: Made
    given: dict[str, Any]
    judged_q: torch.Tensor
    cache: tuple[torch.Tensor, torch.Tensor]  # as it must be after the call
    new: list[int] = field(default_factory=list)


def rotated(x: torch.Tensor, positions: np.ndarray, tables: tuple[np.ndarray, np.ndarray], interleaved: bool):
    """rotate() of the reference, rounded to the dtype of x (n, H, D)."""
    return torch.from_numpy(rotate(x.float().cpu().numpy(), positions, *tables, interleaved)).to(x.device, x.dtype)


def append(batch: Batch, seed: int, rotary: str = "", packed: bool = True, most: int = 5) -> Appended:
    """rotary: "", "interleaved" or "halves". packed: new keys with cu_seqlens_k_new, else equally many of each."""
    r = random.Random(seed)
    made = batches.make(batch)
    device, size = support.DEVICE, batch.size
    if packed:
        new = [min(n, r.randint(0, most)) for n in batch.k_lengths]
    else:
        new = [r.randint(0, min([most, *batch.k_lengths]))] * size
    before = batches.used_lengths(made).to(torch.int32) - batches.int32(new)
    starts = batches.offsets(batch.k_lengths)
    rows = [torch.arange(starts[b + 1] - n, starts[b + 1], device=device) for b, n in enumerate(new)]
    every = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64, device=device)
    k, v = made.truth_k[every].clone(), made.truth_v[every].clone()
    given: dict[str, Any] = {}
    judged_q = made.q
    if rotary:
        dim = 2 * r.randint(1, batch.head_dim // 2) if r.random() < 0.5 else batch.head_dim
        angles = torch.rand(POSITIONS, dim // 2, generator=torch.Generator().manual_seed(seed)) * 6.3
        dtype = torch.float32 if r.random() < 0.3 else made.q.dtype
        cos, sin = (f(angles).to(dtype) for f in (torch.cos, torch.sin))
        tables, interleaved = tuple(t.float().numpy() for t in (cos, sin)), rotary == "interleaved"
        given.update(rotary_cos=cos.to(device), rotary_sin=sin.to(device), rotary_interleaved=interleaved)
        first = before.tolist()
        if r.random() < 0.3:
            first = [r.randint(-3, POSITIONS + 20) for _ in new]
            given["rotary_seqlens"] = batches.int32(first)
        moving = batch.causal or batch.window != (-1, -1) or batch.chunk != 0
        judged_q = made.q.clone()
        made.truth_k = made.truth_k.clone()
        q_starts = made.q_starts.tolist()
        for b, n in enumerate(new):
            made.truth_k[rows[b]] = rotated(made.truth_k[rows[b]], first[b] + np.arange(n), tables, interleaved)
            q = judged_q[b] if batch.dense_q else judged_q[q_starts[b] : q_starts[b] + batch.q_lengths[b]]
            q.copy_(rotated(q, first[b] + np.arange(len(q)) * moving, tables, interleaved))
    shape = (-1,) if packed else (size, new[0] if new else 0)
    given["k"], given["v"] = (x.view(*shape, *x.shape[1:]) for x in (k, v))
    slots = made.slots[every]
    for cache, truth in ((made.k, made.truth_k), (made.v, made.truth_v)):
        batches.put_rows(cache, slots, truth[every])
    cache = made.k.clone(), made.v.clone()
    for x in (made.k, made.v):
        poison = torch.full((len(slots), *x.shape[-2:]), batches.POISONS[batch.poison], dtype=x.dtype, device=device)
        batches.put_rows(x, slots, poison)
    made.lengths["cache_seqlens"] = before
    if packed:
        given["cu_seqlens_k_new"] = batches.int32(batches.offsets(new))
    if batch.metadata and batches.has_schedules():
        told = {"cu_seqlens_k_new": given["cu_seqlens_k_new"]} if packed else {"max_seqlen_k_new": shape[1]}
        given["scheduler_metadata"] = batches.schedule(made, **told)
    return Appended(made, given, judged_q, cache, new)


def judge(call: Appended) -> tuple[batches.Judged, str]:
    """Runs the call: the gates, and "" or what is wrong with the memory after it."""
    made = call.made
    before = made.q.clone()
    out, lse = batches.attend(made, **call.given)
    problem = ""
    if not support.same_bits(made.q, before):
        problem = "q was changed"
    for name, found, wanted in zip(("k_cache", "v_cache"), (made.k, made.v), call.cache, strict=True):
        if not support.same_bits(found, wanted):
            wrong = (support.bits(found) != support.bits(wanted)).nonzero()
            problem = f"{name}: {len(wrong)} elements differ, first at {wrong[0].tolist()}"
    made.q = call.judged_q
    return batches.verdict(made, out, lse), problem
