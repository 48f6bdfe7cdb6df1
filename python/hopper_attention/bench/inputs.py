"""Random tensors of a case, in the layout of its call."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hopper_attention.bench.case import Case

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
COLD_BYTES = 250e6  # K and V that the input sets of a decode case read: five times the L2 of an H200
MOST_BYTES = 70e9  # K and V that they take: where a window leaves most of it unread
UNUSED_PAGE = 2147480000  # slots of a table that hold no page may hold anything
MOST_SETS = 4096


@dataclass
class Inputs:
    """One set. q (B, Sq, Hq, D), or (T, Hq, D) for varlen; k and v likewise, or (pages, page_size, Hk, D) with
    page_table (B, n) int32. cu_q, cu_k (B + 1,) and used_k (B,) int32 for every call; sinks (Hq,) bf16 or None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    used_k: torch.Tensor
    page_table: torch.Tensor | None
    sinks: torch.Tensor | None


def number_of_sets(case: Case) -> int:
    """How many sets a case rotates through: decode must find its K and V outside L2, prefill need not."""
    if not case.is_decode:
        return 1
    keys = max(case.k_lengths) * case.batch
    held = keys * case.heads_k * (case.head_dim + case.dv) * case.element_bytes
    wanted = math.ceil(COLD_BYTES / max(1, case.kv_bytes()))
    return max(1, min(MOST_SETS, wanted, int(MOST_BYTES / max(1, held))))


def make(case: Case, device: torch.device | str, seed: int = 0, sets: int | None = None) -> list[Inputs]:
    """All sets of a case, or so many; the same for the same seed and device. Paged sets share one pool and no page."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = DTYPES[case.dtype]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    def queries(*leading: int) -> torch.Tensor:
        return normal(*leading, case.heads_q, case.head_dim).mul_(case.size_q)

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    packed = case.call == "varlen"
    sets = number_of_sets(case) if sets is None else sets
    q_lengths, k_lengths = case.q_lengths, case.k_lengths
    fixed = {
        "cu_q": int32(offsets(q_lengths)),
        "cu_k": int32(offsets(k_lengths)),
        "used_k": int32(list(k_lengths)),
        "sinks": normal(case.heads_q).to(torch.bfloat16) if case.sinks else None,
    }
    leading_q = (sum(q_lengths),) if packed else (case.batch, case.seqlen_q)
    if case.page_size:
        per_sequence = -(-max(k_lengths) // case.page_size)
        pages = sets * case.batch * per_sequence
        shape = (pages, case.page_size, case.heads_k)
        k, v = normal(*shape, case.head_dim), normal(*shape, case.dv)
        order = torch.randperm(pages, generator=generator, device=device).to(torch.int32)
        width = max(per_sequence, case.room // case.page_size)
        tables = torch.full((sets, case.batch, width), UNUSED_PAGE, dtype=torch.int32, device=device)
        tables[:, :, :per_sequence] = order.reshape(sets, case.batch, per_sequence)
        return [Inputs(queries(*leading_q), k, v, page_table=t, **fixed) for t in tables]
    leading_k = (sum(k_lengths),) if packed else (case.batch, max(k_lengths))
    return [
        Inputs(
            queries(*leading_q),
            normal(*leading_k, case.heads_k, case.head_dim),
            normal(*leading_k, case.heads_k, case.dv),
            page_table=None,
            **fixed,
        )
        for _ in range(sets)
    ]


def offsets(lengths: tuple[int, ...]) -> list[int]:
    """(3, 5) -> [0, 3, 8]."""
    found = [0]
    for length in lengths:
        found.append(found[-1] + length)
    return found


def sequence_kv(case: Case, inputs: Inputs, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K (Sk, Hk, D) and V (Sk, Hk, Dv) of one sequence, whatever the layout."""
    length = case.k_lengths[index]
    if inputs.page_table is not None:
        pages = inputs.page_table[index, : -(-length // case.page_size)].long()
        return tuple(x[pages].flatten(0, 1)[:length] for x in (inputs.k, inputs.v))
    if case.call == "varlen":
        start = sum(case.k_lengths[:index])
        return inputs.k[start : start + length], inputs.v[start : start + length]
    return inputs.k[index, :length], inputs.v[index, :length]
