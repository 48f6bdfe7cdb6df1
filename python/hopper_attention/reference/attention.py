"""Attention of one head without tiles: the textbook form, and one pass over the keys.

q (N, D), k (M, D), v (M, Dv); mask (N, M) bool, True where the query sees the key; scale defaults to D ** -0.5. Every
function returns out (N, Dv) and the log-sum-exp of the scores (N,), natural log; a row that sees no key gives 0 and
-inf.
"""

from __future__ import annotations

import numpy as np

from hopper_attention.reference.arrays import algorithm, divide, log_sum, safe


def scaled_scores(q, k, scale=None, mask=None, softcap=0.0):
    """S = q k^T * scale, capped to softcap * tanh(S / softcap) if softcap > 0, then -inf where the mask is False. (N,
    M).
    """
    scores = (q @ k.T) * q.dtype.type(q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    return scores if mask is None else np.where(mask, scores, -np.inf).astype(scores.dtype)


@algorithm
def standard_attention(q, k, v, *, scale=None, mask=None, softcap=0.0, sink=None):
    """O = softmax(q k^T * scale) v, the matrices S and P = softmax(S) written out in full.

    `sink`, a number, is one more logit in the sum that has no value vector: sum_j exp(S_ij) + exp(sink).
    Passes: Q, K, V and O once, S and P each written and read once: 4 N M elements, which is what FlashAttention avoids.
    Source: Dao et al., FlashAttention (2022), Algorithm 0.
    """
    scores = scaled_scores(q, k, scale, mask, softcap)
    maximum = scores.max(axis=1, keepdims=True, initial=-np.inf if sink is None else sink)
    p = np.exp(scores - safe(maximum))
    total = p.sum(axis=1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - safe(maximum))
    return divide(p, total) @ v, log_sum(maximum, total)[:, 0]


@algorithm
def one_pass_attention(q, k, v, *, scale=None, mask=None):
    """Online softmax whose consumer, the sum over v, is rescaled with it: no second pass is left.

        m_j = max(m_{j-1}, s_j),  d_j = d_{j-1} exp(m_{j-1} - m_j) + exp(s_j - m_j),
        o_j = o_{j-1} (d_{j-1} / d_j) exp(m_{j-1} - m_j) + exp(s_j - m_j) / d_j v_j

    Passes: K and V once for each query, nothing of size N M is stored.
    Source: Ye, From Online Softmax to FlashAttention (2023), Algorithm FlashAttention.
    """
    out = np.zeros((len(q), v.shape[1]), q.dtype)
    maximum = np.full((len(q), 1), -np.inf, q.dtype)
    total = np.zeros((len(q), 1), q.dtype)
    for j in range(len(k)):
        score = scaled_scores(q, k[j : j + 1], scale, None if mask is None else mask[:, j : j + 1])
        new_maximum = np.maximum(maximum, score)
        rescale = np.exp(maximum - safe(new_maximum))
        p = np.exp(score - safe(new_maximum))
        new_total = total * rescale + p
        out = out * divide(total * rescale, new_total) + divide(p, new_total) * v[j]
        maximum, total = new_maximum, new_total
    return out, log_sum(maximum, total)[:, 0]
