"""What inference engines add to attention, each in terms of `standard_attention` or `attention_by_heads`.

These say what the public functions mean; functions.py computes the same in blocks. Sequences are numpy arrays or CPU
tensors.
"""

from __future__ import annotations

import numpy as np

from hopper_attention.reference.arrays import algorithm
from hopper_attention.reference.attention import standard_attention
from hopper_attention.reference.heads import attention_by_heads
from hopper_attention.reference.mask import Mask, dense_mask, lengths


@algorithm
def varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, *, scale=None, mask=Mask()):
    """Sequences packed one after the other: sequence b has the queries cu_seqlens_q[b] .. cu_seqlens_q[b + 1].

    q (Tq, Hq, D), k (Tk, Hk, D), v (Tk, Hk, Dv), cu_seqlens_* (B + 1,) -> out (Tq, Hq, Dv), LSE (Hq, Tq). Rows
    outside all sequences are 0 and -inf here. Each sequence is attention of its own: no query sees another sequence's
    keys.
    """
    out = np.zeros((*q.shape[:2], v.shape[2]), q.dtype)
    lse = np.full((q.shape[1], len(q)), -np.inf, q.dtype)
    for b in range(len(cu_seqlens_q) - 1):
        rows, keys = slice(*cu_seqlens_q[b : b + 2]), slice(*cu_seqlens_k[b : b + 2])
        seen = dense_mask(mask, lengths(rows.stop - rows.start, keys.stop - keys.start))
        out[rows], lse[:, rows] = attention_by_heads(q[rows], k[keys], v[keys], scale=scale, mask=seen)
    return out, lse


@algorithm
def paged_attention(q, k_pages, v_pages, page_table, seqused_k, *, scale=None, mask=Mask()):
    """Key j of sequence b is row j mod page_size of page page_table[b, j // page_size].

    q (B, Sq, Hq, D), k_pages (pages, page_size, Hk, D), page_table (B, n), seqused_k (B,) -> out (B, Sq, Hq, Dv),
    LSE (B, Hq, Sq). Slots of the table past the length are not looked at.
    Source: Kwon et al., PagedAttention (2023).
    """
    out = np.zeros((*q.shape[:3], v_pages.shape[3]), q.dtype)
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf, q.dtype)
    for b in range(len(q)):
        j = np.arange(seqused_k[b])
        place = page_table[b, j // k_pages.shape[1]], j % k_pages.shape[1]
        seen = dense_mask(mask, lengths(q.shape[1], len(j)))
        out[b], lse[b] = attention_by_heads(q[b], k_pages[place], v_pages[place], scale=scale, mask=seen)
    return out, lse


@algorithm
def windowed_attention(q, k, v, left=-1, right=-1, *, chunk=0, scale=None):
    """Query i stands at p = i + M - N and sees the keys p - left .. p + right; with `chunk` only those of p's own
    chunk.

    -1 is unlimited; causal is right = 0. q (N, D), k (M, D), v (M, Dv) -> out (N, Dv), LSE (N,).
    Source: Beltagy et al., Longformer (2020), section 3.1; chunks as in Llama 4.
    """
    return standard_attention(q, k, v, scale=scale, mask=dense_mask(Mask(left, right, chunk), lengths(len(q), len(k))))


@algorithm
def soft_capped_attention(q, k, v, softcap, *, scale=None, mask=None):
    """Scores are softcap * tanh(q k^T scale / softcap), in (-softcap, softcap), and only then masked.

    q (N, D), k (M, D), v (M, Dv) -> out (N, Dv), LSE (N,).
    Source: Gemma 2 report (2024), section 2.
    """
    return standard_attention(q, k, v, scale=scale, mask=mask, softcap=softcap)


@algorithm
def sink_attention(q, k, v, sink, *, scale=None, mask=None):
    """softmax over the scores and one more logit `sink` (a number), whose share of the probability goes nowhere.

    q (N, D), k (M, D), v (M, Dv) -> out (N, Dv) and LSE (N,), ln(sum_j exp(S_ij) + exp(sink)); a row that sees no key
    gives 0 and the sink.
    Source: gpt-oss model card (2025); Xiao et al., attention sinks (2023).
    """
    return standard_attention(q, k, v, scale=scale, mask=mask, sink=sink)
