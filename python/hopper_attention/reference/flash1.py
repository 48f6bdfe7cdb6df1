"""FlashAttention-1 forward: keys outside, queries inside, the output kept normalised in memory."""

from __future__ import annotations

import numpy as np

from hopper_attention.reference.arrays import algorithm, divide, log_sum, safe
from hopper_attention.reference.attention import scaled_scores


def dropout_keep(seed, rows, keys, probability):
    """(N, M) bool: which P_ij survive. A hash (SplitMix64) of (seed, row, key): every tile, and a backward pass, can
    compute its part again without storing N M bits. rows (N,), keys (M,): indices.
    """
    with np.errstate(over="ignore"):
        z = (
            np.uint64(seed)
            + np.asarray(rows, np.uint64)[:, None] * np.uint64(0x1_0000_0000)
            + np.asarray(keys, np.uint64)
        )
        z = (z + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53 >= probability


@algorithm
def flash_attention_1(q, k, v, *, scale=None, mask=None, dropout=0.0, seed=0, block_q=64, block_k=64):
    """For each block j of keys, for each block i of queries, with S = mask(scale Q_i K_j^T):

        m~ = rowmax(S),  P~ = exp(S - m~),  l~ = rowsum(P~),
        m' = max(m_i, m~),  l' = exp(m_i - m') l_i + exp(m~ - m') l~,
        O_i = (l_i exp(m_i - m') O_i + exp(m~ - m') dropout(P~) V_j) / l'

    Dropout sets P~ to 0 with probability `dropout` and divides the rest by 1 - dropout; l counts all of P~, so that the
    softmax itself stays exact. Returns out (N, Dv) and LSE (N,), m + ln(l).
    Passes: K and V once; Q, O, l and m once for each key block, O read and written.
    Source: Dao et al., FlashAttention (2022), Algorithm 2.
    """
    out = np.zeros((len(q), v.shape[1]), q.dtype)
    maximum = np.full((len(q), 1), -np.inf, q.dtype)
    total = np.zeros((len(q), 1), q.dtype)
    for first_key in range(0, len(k), block_k):
        j = slice(first_key, first_key + block_k)
        for first_row in range(0, len(q), block_q):
            i = slice(first_row, first_row + block_q)
            scores = scaled_scores(q[i], k[j], scale, None if mask is None else mask[i, j])
            block_max = scores.max(axis=1, keepdims=True)
            p = np.exp(scores - safe(block_max))
            new_max = np.maximum(maximum[i], block_max)
            old_weight = np.exp(maximum[i] - safe(new_max)) * total[i]
            new_weight = np.exp(block_max - safe(new_max))
            new_total = old_weight + new_weight * p.sum(axis=1, keepdims=True)
            if dropout > 0:
                rows, keys = np.arange(len(q))[i], np.arange(len(k))[j]
                p = np.where(dropout_keep(seed, rows, keys, dropout), p / (1 - dropout), 0).astype(q.dtype)
            out[i] = divide(old_weight * out[i] + new_weight * (p @ v[j]), new_total)
            maximum[i], total[i] = new_max, new_total
    return out, log_sum(maximum, total)[:, 0]
