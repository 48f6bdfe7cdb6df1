"""FlashAttention-2 forward in Triton, written from the paper (arXiv:2307.08691, Algorithm 1) as a peer to measure.

One program for a block of queries of one head; K and V blocks pass by; O stays unscaled until the end. Exponentials are
base 2 with the scale folded in, as in every fast implementation. Importing this module needs torch and triton.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

HEAD_DIMS = (64, 128, 256)
# (rows, keys, warps, stages) to choose from, by head dim; the fastest is found at the first call.
CHOICES = {
    64: ((128, 128, 8, 2), (128, 64, 4, 3), (128, 64, 8, 3)),
    128: ((128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 3)),
    256: ((128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2)),
}


@triton.jit
def forward_blocks(
    o, m, l, q, k_ptrs, v_ptrs, k_step, v_step, first, last, rows, seqlen_k, offset,
    scale_log2, N: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Key blocks [first, last): o (M, D), row maxima m and row sums l (M,) are carried on."""
    keys = tl.arange(0, N)
    for n in range(first, last):
        key = n * N + keys
        if MASKED:
            inside = (key < seqlen_k)[:, None]
            k = tl.load(k_ptrs + n * k_step, mask=inside, other=0.0)
        else:
            k = tl.load(k_ptrs + n * k_step)
        s = tl.dot(q, tl.trans(k))
        if MASKED:
            visible = key[None, :] < seqlen_k
            if CAUSAL:
                visible = visible & (key[None, :] <= rows[:, None] + offset)
            s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
        p = tl.exp2(s * scale_log2 - m_safe[:, None])
        alpha = tl.exp2(m - m_safe)
        l = l * alpha + tl.sum(p, 1)
        o = o * alpha[:, None]
        v = tl.load(v_ptrs + n * v_step, mask=inside, other=0.0) if MASKED else tl.load(v_ptrs + n * v_step)
        o = tl.dot(p.to(v.dtype), v, o)
        m = m_new
    return o, m, l


@triton.jit
def forward_kernel(
    Q, K, V, O, LSE, scale_log2,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, o_batch, o_row, o_head,
    heads, group, seqlen_q, seqlen_k,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(Sq / M), B * Hq). LSE (B, Hq, Sq) contiguous; the last query sees the last key."""
    block = tl.program_id(0)
    if CAUSAL:
        block = tl.num_programs(0) - 1 - block  # the longest first
    unit = tl.program_id(1)
    batch, head = (unit // heads).to(tl.int64), (unit % heads).to(tl.int64)
    rows = block * M + tl.arange(0, M)
    columns = tl.arange(0, D)
    keys = tl.arange(0, N)
    row_inside = (rows < seqlen_q)[:, None]
    q_ptrs = Q + batch * q_batch + head * q_head + rows.to(tl.int64)[:, None] * q_row + columns[None, :]
    q = tl.load(q_ptrs, mask=row_inside, other=0.0)
    k_ptrs = K + batch * k_batch + (head // group) * k_head + keys[:, None] * k_row + columns[None, :]
    v_ptrs = V + batch * v_batch + (head // group) * v_head + keys[:, None] * v_row + columns[None, :]

    k_step, v_step = k_row.to(tl.int64) * N, v_row.to(tl.int64) * N
    offset = seqlen_k - seqlen_q
    if CAUSAL:
        end = tl.maximum(tl.minimum(seqlen_k, (block + 1) * M + offset), 0)
        full = tl.maximum(tl.minimum(block * M + offset + 1, seqlen_k), 0) // N
    else:
        end = seqlen_k
        full = seqlen_k // N
    o = tl.zeros([M, D], dtype=tl.float32)
    m = tl.full([M], float("-inf"), dtype=tl.float32)
    l = tl.zeros([M], dtype=tl.float32)
    o, m, l = forward_blocks(
        o, m, l, q, k_ptrs, v_ptrs, k_step, v_step, 0, full, rows, seqlen_k, offset, scale_log2, N, False, CAUSAL
    )
    o, m, l = forward_blocks(
        o, m, l, q, k_ptrs, v_ptrs, k_step, v_step, full, tl.cdiv(end, N), rows, seqlen_k, offset, scale_log2,
        N, True, CAUSAL,
    )  # fmt: skip

    empty = l == 0.0
    o = o * tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, l))[:, None]
    o_ptrs = O + batch * o_batch + head * o_head + rows.to(tl.int64)[:, None] * o_row + columns[None, :]
    tl.store(o_ptrs, o.to(O.dtype.element_ty), mask=row_inside)
    lse = tl.where(empty, float("-inf"), (m + tl.log2(tl.where(empty, 1.0, l))) * 0.6931471805599453)
    tl.store(LSE + unit.to(tl.int64) * seqlen_q + rows, lse, mask=rows < seqlen_q)


def configs() -> list[triton.Config]:
    """All choices of all head dims; `fitting` keeps those of the call's."""
    every = {choice: d for d, choices in CHOICES.items() for choice in choices}
    return [triton.Config({"M": m, "N": n}, num_warps=warps, num_stages=stages) for m, n, warps, stages in every]


def fitting(found: list[triton.Config], arguments: dict, **given: object) -> list[triton.Config]:
    """Those of `found` that CHOICES lists for the head dim of the call."""
    head_dim = {**arguments, **given}["D"]
    wanted = CHOICES[int(head_dim)]
    return [c for c in found if (c.kwargs["M"], c.kwargs["N"], c.num_warps, c.num_stages) in wanted]


tuned_kernel = triton.autotune(configs(), key=["D", "CAUSAL"], prune_configs_by={"early_config_prune": fitting})(
    forward_kernel
)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    tile: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (B, Sq, Hq, D), k and v (B, Sk, Hk, D), last stride 1 -> out like q, lse (B, Hq, Sq) float32, natural log.

    A query that sees no key gives 0 and -inf. tile (rows, keys), one of CHOICES, replaces the search for the fastest. Raises
    NotImplementedError for other head dims than 64, 128, 256.
    """
    batch, seqlen_q, heads, head_dim = q.shape
    if head_dim not in HEAD_DIMS or v.shape[3] != head_dim:
        raise NotImplementedError(f"head_dim: must be one of {HEAD_DIMS}, found {head_dim} and {v.shape[3]}")
    out = torch.empty_like(q) if out is None else out
    if lse is None:
        lse = torch.empty(batch, heads, seqlen_q, dtype=torch.float32, device=q.device)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    strides = [x.stride(axis) for x in (q, k, v, out) for axis in (0, 1, 2)]
    arguments = (q, k, v, out, lse, scale * math.log2(math.e), *strides)
    lengths = (heads, heads // k.shape[2], seqlen_q, k.shape[1], head_dim)
    if tile is not None:
        rows, keys, warps, stages = next(choice for choice in CHOICES[head_dim] if choice[:2] == tile)
        grid = (triton.cdiv(seqlen_q, rows), batch * heads)
        forward_kernel[grid](*arguments, *lengths, M=rows, N=keys, CAUSAL=causal, num_warps=warps, num_stages=stages)
        return out, lse
    tuned_kernel[lambda meta: (triton.cdiv(seqlen_q, meta["M"]), batch * heads)](*arguments, *lengths, CAUSAL=causal)
    return out, lse
