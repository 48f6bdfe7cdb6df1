"""Whether a result is right: `testing.gates` on sampled rows of sampled sequences."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hopper_attention.bench.case import Case
from hopper_attention.bench.inputs import Inputs, sequence_kv
from hopper_attention.testing import gates

SEQUENCES = 8
ROWS_WANTED = 1024  # (row, head) pairs of a check, if the case has them
ROWS_FOR_RMS = 512  # below, the ratio of two random errors says nothing
PEER_ALLOWANCE = 2.0  # peers must compute the same function; how accurate they are is their affair


@dataclass(frozen=True)
class Verdict:
    """passed, the worst ratios found, and what is wrong ("" if nothing is)."""

    passed: bool
    elementwise: float
    rms: float | None
    lse: float | None
    message: str


def sampled(size: int, wanted: int, seed: int) -> list[int]:
    """Up to `wanted` of range(size), sorted, with both ends."""
    if size <= wanted:
        return list(range(size))
    inner = random.Random(seed).sample(range(1, size - 1), max(0, wanted - 2))
    return sorted({0, size - 1, *inner})


def groups(
    case: Case, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor, int]]:
    """(out, lse, q, k, v, keys) as dense batches: one of all sequences if their lengths are equal and K, V contiguous,
    else one for each sampled sequence.
    """
    if case.call == "dense":
        yield out, lse, inputs.q, inputs.k, inputs.v, case.seqlen_k
        return
    longest = max(range(case.batch), key=lambda index: case.k_lengths[index])
    for index in sorted({longest, *sampled(case.batch, SEQUENCES, 1)}):
        k, v = sequence_kv(case, inputs, index)
        if case.call == "varlen":
            start = sum(case.q_lengths[:index])
            part = slice(start, start + case.q_lengths[index])
            found, q = out[None, part], inputs.q[None, part]
            found_lse = None if lse is None else lse[None, :, part]
        else:
            found, q = out[index : index + 1], inputs.q[index : index + 1]
            found_lse = None if lse is None else lse[index : index + 1]
        yield found, found_lse, q, k[None], v[None], case.k_lengths[index]


def judge(case: Case, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None, allowance: float = 1.0) -> Verdict:
    """Gates times `allowance` for one result: out in the layout of q, lse (B, Hq, Sq) or (Hq, T) or None. Synchronises."""
    worst = {"elementwise": 0.0, "rms": None, "lse": None}
    problems = []
    for found, found_lse, q, k, v, keys in groups(case, inputs, out, lse):
        queries, units = q.shape[1], q.shape[0] * q.shape[2]
        picked = sampled(queries, max(16, ROWS_WANTED // units), 2)
        rows = torch.tensor(picked, device=q.device)
        begin, end = gates.visible_intervals(
            queries, keys, causal=case.causal, window_size=case.window, device=q.device
        )
        result = gates.check(
            found[:, rows],
            None if found_lse is None else found_lse[:, :, rows],
            q[:, rows],
            k,
            v,
            softcap=case.softcap,
            s_aux=inputs.sinks,
            intervals=(begin[rows], end[rows]),
        )
        enough = len(picked) * units >= ROWS_FOR_RMS
        worst["elementwise"] = max(worst["elementwise"], result.elementwise)
        if enough:
            worst["rms"] = max(worst["rms"] or 0.0, result.rms_ratio)
        if result.lse_ratio is not None:
            worst["lse"] = max(worst["lse"] or 0.0, result.lse_ratio)
        good = result.elementwise <= gates.ELEMENTWISE_BOUND * allowance
        good &= not enough or result.rms_ratio <= gates.RMS_BOUND * allowance
        good &= (result.lse_ratio or 0.0) <= allowance
        if not good:
            problems.append(result.message)
    return Verdict(not problems, worst["elementwise"], worst["rms"], worst["lse"], "; ".join(problems[:1]))
