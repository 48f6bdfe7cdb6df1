"""FlashAttention-2: queries outside, an accumulator that is divided once, and the backward from O and LSE."""

from __future__ import annotations

import numpy as np

from hopper_attention.reference.arrays import algorithm, divide, log_sum, safe
from hopper_attention.reference.attention import scaled_scores


@algorithm
def flash_attention_2(q, k, v, *, scale=None, mask=None, block_q=64, block_k=64):
    """For each block i of queries, for each block j of keys, with S = mask(scale Q_i K_j^T):

        m' = max(m, rowmax(S)),  P~ = exp(S - m'),
        l = exp(m - m') l + rowsum(P~),  O = exp(m - m') O + P~ V_j

    and after the last block O_i = O / l, L_i = m + ln(l). Blocks of queries are independent: they are the parallel
    work.
    Passes: Q, O and L once; K and V once for each block of queries.
    Source: Dao, FlashAttention-2 (2023), Algorithm 1.
    """
    out = np.zeros((len(q), v.shape[1]), q.dtype)
    lse = np.full(len(q), -np.inf, q.dtype)
    for first_row in range(0, len(q), block_q):
        i = slice(first_row, first_row + block_q)
        accumulator = np.zeros_like(out[i])
        maximum = np.full((len(accumulator), 1), -np.inf, q.dtype)
        total = np.zeros((len(accumulator), 1), q.dtype)
        for first_key in range(0, len(k), block_k):
            j = slice(first_key, first_key + block_k)
            scores = scaled_scores(q[i], k[j], scale, None if mask is None else mask[i, j])
            new_max = np.maximum(maximum, scores.max(axis=1, keepdims=True))
            p = np.exp(scores - safe(new_max))
            rescale = np.exp(maximum - safe(new_max))
            total = total * rescale + p.sum(axis=1, keepdims=True)
            accumulator = accumulator * rescale + p @ v[j]
            maximum = new_max
        out[i] = divide(accumulator, total)
        lse[i] = log_sum(maximum, total)[:, 0]
    return out, lse


@algorithm
def flash_attention_2_backward(q, k, v, out, lse, dout, *, scale=None, mask=None, block_q=64, block_k=64):
    """Gradients (dq, dk, dv) from O and LSE, P recomputed: with D = rowsum(dO * O) and, for each pair of blocks,

        P = exp(S - L),  dV_j += P^T dO_i,  dP = dO_i V_j^T,
        dS = P * (dP - D),  dQ_i += scale dS K_j,  dK_j += scale dS^T Q_i

    lse (N,) and dout (N, Dv) as forward returned and received. Rows that see no key have L = -inf and give no gradient.
    Passes: O and dO once for D; K, V, dK, dV once; Q, dO, dQ once for each block of keys.
    Source: Dao, FlashAttention-2 (2023), Algorithm 2.
    """
    scale = q.dtype.type(q.shape[-1] ** -0.5 if scale is None else scale)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    delta = (dout * out).sum(axis=1, keepdims=True)
    shift = safe(lse)[:, None]
    for first_key in range(0, len(k), block_k):
        j = slice(first_key, first_key + block_k)
        for first_row in range(0, len(q), block_q):
            i = slice(first_row, first_row + block_q)
            scores = scaled_scores(q[i], k[j], scale, None if mask is None else mask[i, j])
            p = np.exp(scores - shift[i])
            dv[j] += p.T @ dout[i]
            ds = p * (dout[i] @ v[j].T - delta[i])
            dq[i] += scale * (ds @ k[j])
            dk[j] += scale * (ds.T @ q[i])
    return dq, dk, dv
