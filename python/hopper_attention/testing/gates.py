"""Whether a result is as accurate as its dtype allows: three gates against a float64 reference of the same inputs.

| gate | bound | catches |
|---|---|---|
| elementwise: max abs(o - ref) / (u * sum_j p_j abs(v_j)) | 2.5 | one wrong element, one stale row, mask off by one |
| RMS error / RMS error of plain PyTorch in the dtype of q | 1.25 | systematic drift, wrong scale |
| LSE: abs(lse - ref) / (2e-4 + 2^-19 abs(ref)), and exact pattern of -inf | 1 | scale, base, splits, mask counts |

u is 2^-8 for bf16 and 2^-11 for fp16. Plain PyTorch is softmax(q k^T * scale) v with every step in the dtype of q, on
the same device. Each gate alone misses defects that another one finds (tests/python/test_gates.py). Needs torch; works
on any device, in blocks, so that memory stays below a few GB for any lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

ELEMENTWISE_BOUND = 2.5
RMS_BOUND = 1.25
LSE_ABSOLUTE = 2e-4
LSE_RELATIVE = 2.0**-19
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

_BLOCK_SCORES = 1 << 24  # scores of one block: 128 MiB in float64
_BLOCK_KEYS = 1 << 25  # elements of K or V of one block: 256 MiB in float64
_INF = math.inf


@dataclass(frozen=True)
class GateResult:
    """What `check` found. `passed` is the verdict; `lse_ratio` is None if no LSE was given."""

    elementwise: float
    rms_ratio: float
    lse_ratio: float | None
    passed: bool
    message: str

    def __bool__(self) -> bool:
        return self.passed


def visible_intervals(
    seqlen_q: int,
    seqlen_k: int,
    *,
    causal: bool = False,
    window_size: Any = (-1, -1),
    attention_chunk: int | None = 0,
    device: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [begin, end) that each query sees: two (seqlen_q,) int64 tensors. The meaning is visible() in
    interval_mask.h.
    """
    left, right = (-1, -1) if window_size is None else window_size
    right = 0 if causal else right
    diagonal = torch.arange(seqlen_q, device=device) + (seqlen_k - seqlen_q)
    begin = torch.zeros_like(diagonal) if left < 0 else diagonal - left
    end = torch.full_like(diagonal, seqlen_k) if right < 0 else (diagonal + right + 1).clamp(max=seqlen_k)
    if attention_chunk:
        first = torch.div(diagonal, attention_chunk, rounding_mode="floor") * attention_chunk
        begin = torch.maximum(begin, first)
        end = torch.minimum(end, first + attention_chunk)
    end = end.clamp(min=0)
    return torch.minimum(begin.clamp(min=0), end), end


@dataclass(frozen=True)
class Block:
    """Some query rows of some (batch, head) pairs: q (U, R, D), k (U, Sk, D), v (U, Sk, Dv), hidden (R, Sk), sink (U,
    1) or None.
    """

    units: slice
    rows: slice
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    hidden: torch.Tensor
    sink: torch.Tensor | None


@dataclass
class Problem:
    """Inputs with batch and heads as one axis of U = B * Hq units; K and V of a unit are looked up, not copied."""

    q: torch.Tensor  # (B, Sq, Hq, D)
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    softcap: float
    sinks: torch.Tensor | None
    begin: torch.Tensor  # (Sq,)
    end: torch.Tensor
    keys: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.keys = torch.arange(self.k.shape[1], device=self.q.device)

    @property
    def units(self) -> int:
        return self.q.shape[0] * self.q.shape[2]

    def blocks(self) -> Iterator[Block]:
        """All rows of all units once, in blocks of bounded size."""
        seqlen_q, keys = self.q.shape[1], max(self.k.shape[1], 1)
        rows = max(1, min(seqlen_q, _BLOCK_SCORES // keys))
        width = max(self.k.shape[3], self.v.shape[3])
        units = max(1, min(_BLOCK_SCORES // (keys * rows), _BLOCK_KEYS // (keys * width)))
        for unit in range(0, self.units, units):
            for row in range(0, seqlen_q, rows):
                yield self.block(slice(unit, min(unit + units, self.units)), slice(row, min(row + rows, seqlen_q)))

    def block(self, units: slice, rows: slice) -> Block:
        heads_q, heads_k = self.q.shape[2], self.k.shape[2]
        unit = torch.arange(units.start, units.stop, device=self.q.device)
        batch, head = unit // heads_q, unit % heads_q
        head_k = head // (heads_q // heads_k)
        hidden = (self.keys < self.begin[rows, None]) | (self.keys >= self.end[rows, None])
        sink = None if self.sinks is None else self.sinks[head, None]
        return Block(
            units, rows, self.q[batch, rows, head], self.k[batch, :, head_k], self.v[batch, :, head_k], hidden, sink
        )


def scores_of(problem: Problem, block: Block, dtype: torch.dtype) -> torch.Tensor:
    """Masked scores (U, R, Sk), every step in `dtype`."""
    scores = block.q.to(dtype) @ block.k.to(dtype).transpose(-1, -2) * problem.scale
    if problem.softcap:
        scores = torch.tanh(scores / problem.softcap) * problem.softcap
    return scores.masked_fill(block.hidden, -_INF)


def exact(problem: Problem, block: Block) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float64: out (U, R, Dv), LSE (U, R) and the error scale sum_j p_j abs(v_j) (U, R, Dv)."""
    scores = scores_of(problem, block, torch.float64)
    lse = torch.logsumexp(scores, -1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -_INF)
    if block.sink is not None:
        lse = torch.logaddexp(lse, block.sink.double())
    p = torch.exp(scores - lse.masked_fill(lse == -_INF, 0.0)[..., None])
    v = block.v.double()
    return p @ v, lse, p @ v.abs()


def plain(problem: Problem, block: Block) -> torch.Tensor:
    """Plain PyTorch in the dtype of q: (U, R, Dv)."""
    scores = scores_of(problem, block, problem.q.dtype)
    if block.sink is not None:
        sink = block.sink.to(scores.dtype)[..., None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    p = torch.softmax(scores, -1)[..., : block.k.shape[1]]
    return torch.where(block.hidden.all(-1)[..., None], 0, p @ block.v)


@dataclass
class Tally:
    """The worst element and the sums of squares over all blocks."""

    elementwise: float = 0.0
    elementwise_at: str = ""
    lse: float = 0.0
    lse_at: str = ""
    squares: float = 0.0
    plain_squares: float = 0.0

    @property
    def rms_ratio(self) -> float:
        if self.squares == 0.0:
            return 0.0
        return math.sqrt(self.squares / self.plain_squares) if self.plain_squares else _INF


def check(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    s_aux: torch.Tensor | None = None,
    intervals: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> GateResult:
    """The three gates for one dense result.

    out (B, Sq, Hq, Dv) and lse (B, Hq, Sq) or None are what is judged; q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk,
    Hk, Dv) bf16 or fp16, all on one device. Options as in `flash_attn_func`; `intervals` (begin, end), each (Sq,),
    replaces the mask options. Raises ValueError if shapes or dtypes do not belong together. Synchronises.
    """
    if q.dtype not in UNIT:
        raise ValueError(f"q: dtype must be bf16 or fp16, found {q.dtype}")
    expected = (*q.shape[:3], v.shape[3])
    if tuple(out.shape) != expected or out.dtype != q.dtype:
        raise ValueError(f"out: must be {expected} {q.dtype}, found {tuple(out.shape)} {out.dtype}")
    if lse is not None and (tuple(lse.shape) != (q.shape[0], q.shape[2], q.shape[1]) or lse.dtype != torch.float32):
        raise ValueError(f"lse: must be (batch, heads, seqlen_q) float32, found {tuple(lse.shape)} {lse.dtype}")
    if intervals is None:
        intervals = visible_intervals(
            q.shape[1],
            k.shape[1],
            causal=causal,
            window_size=window_size,
            attention_chunk=attention_chunk,
            device=q.device,
        )
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    problem = Problem(q, k, v, scale, softcap, s_aux, *intervals)
    tally = Tally()
    with torch.no_grad():
        for block in problem.blocks():
            unit = torch.arange(block.units.start, block.units.stop, device=q.device)
            batch, head = unit // q.shape[2], unit % q.shape[2]
            found = out[batch, block.rows, head].double()  # (U, R, Dv)
            found_lse = None if lse is None else lse[batch, head, block.rows].double()
            judge_block(tally, problem, block, found, found_lse)
    return verdict(tally, lse is not None)


def judge_block(
    tally: Tally, problem: Problem, block: Block, found: torch.Tensor, found_lse: torch.Tensor | None
) -> None:
    """Adds one block to the tally."""
    if found.numel() == 0:
        return
    dtype = problem.q.dtype
    reference, reference_lse, size = exact(problem, block)
    error = found - reference
    # Below the smallest normal number of the dtype the distance of its values stays the same.
    ratio = error.abs() / (UNIT[dtype] * size.clamp(min=torch.finfo(dtype).tiny))
    no_key = block.hidden.all(-1)[None, :, None].expand_as(found)
    ratio = torch.where(no_key, torch.where(found == 0, 0.0, _INF), ratio).nan_to_num(nan=_INF, posinf=_INF)
    worst, index = ratio.flatten().max(0)
    if float(worst) > tally.elementwise:
        tally.elementwise = float(worst)
        tally.elementwise_at = where(problem, block, ratio.shape, int(index), found, reference)
    plain_error = plain(problem, block).double() - reference
    counted = plain_error.isfinite()  # fp16 scores of plain PyTorch can overflow
    tally.squares += float((error.square() * counted).nan_to_num(nan=_INF, posinf=_INF).sum())
    tally.plain_squares += float(torch.where(counted, plain_error, 0.0).square().sum())
    if found_lse is None:
        return
    allowed = LSE_ABSOLUTE + LSE_RELATIVE * reference_lse.abs()
    lse_ratio = (found_lse - reference_lse).abs() / allowed
    empty = reference_lse == -_INF
    lse_ratio = torch.where(empty, torch.where(found_lse == -_INF, 0.0, _INF), lse_ratio).nan_to_num(
        nan=_INF, posinf=_INF
    )
    worst, index = lse_ratio.flatten().max(0)
    if float(worst) > tally.lse:
        tally.lse = float(worst)
        tally.lse_at = where(problem, block, lse_ratio.shape, int(index), found_lse, reference_lse)


def where(
    problem: Problem, block: Block, shape: torch.Size, index: int, found: torch.Tensor, reference: torch.Tensor
) -> str:
    """The place of element `index` of a block, and what was found and expected there."""
    place = []
    rest = index
    for size in reversed(shape):
        place.append(rest % size)
        rest //= size
    unit, row, *column = reversed(place)
    unit += block.units.start
    heads = problem.q.shape[2]
    text = f"batch {unit // heads}, head {unit % heads}, row {row + block.rows.start}" + (
        f", column {column[0]}" if column else ""
    )
    return f"{text}: found {float(found.flatten()[index]):.6g}, exact {float(reference.flatten()[index]):.6g}"


def verdict(tally: Tally, with_lse: bool) -> GateResult:
    """Numbers -> result with a message for a person."""
    rms_ratio = tally.rms_ratio
    failures = []
    if not tally.elementwise <= ELEMENTWISE_BOUND:
        failures.append(f"elementwise {tally.elementwise:.3g} > {ELEMENTWISE_BOUND} at {tally.elementwise_at}")
    if not rms_ratio <= RMS_BOUND:
        failures.append(f"RMS error {rms_ratio:.3g} x plain PyTorch > {RMS_BOUND}")
    if with_lse and not tally.lse <= 1.0:
        failures.append(f"LSE error {tally.lse:.3g} x allowed at {tally.lse_at}")
    numbers = f"elementwise {tally.elementwise:.3g}, RMS {rms_ratio:.3g}" + (
        f", LSE {tally.lse:.3g}" if with_lse else ""
    )
    message = "; ".join(failures) if failures else f"passed: {numbers}"
    return GateResult(tally.elementwise, rms_ratio, tally.lse if with_lse else None, not failures, message)
