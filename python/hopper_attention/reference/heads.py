"""Several heads: multi-head, grouped-query and multi-query attention differ in one index."""

from __future__ import annotations

import numpy as np

from hopper_attention.reference.arrays import algorithm
from hopper_attention.reference.attention import standard_attention


@algorithm
def attention_by_heads(q, k, v, *, scale=None, mask=None):
    """Query head h attends with K/V head h // (Hq / Hk): MHA is Hk = Hq, GQA 1 < Hk < Hq, MQA Hk = 1. K is never
    repeated.

    q (N, Hq, D), k (M, Hk, D), v (M, Hk, Dv), Hq a multiple of Hk -> out (N, Hq, Dv), LSE (Hq, N).
    Passes: K and V once for each query head; once for each K/V head if the group shares a tile (pack_group).
    Source: Vaswani et al. (2017), section 3.2.2; Shazeer (2019), MQA; Ainslie et al. (2023), GQA.
    """
    heads_q, heads_k = q.shape[1], k.shape[1]
    if heads_q % heads_k:
        raise ValueError(f"q has {heads_q} heads and k {heads_k}; a multiple is needed")
    out = np.zeros((*q.shape[:2], v.shape[2]), q.dtype)
    lse = np.full((heads_q, len(q)), -np.inf, q.dtype)
    for h in range(heads_q):
        of_group = h // (heads_q // heads_k)
        out[:, h], lse[h] = standard_attention(q[:, h], k[:, of_group], v[:, of_group], scale=scale, mask=mask)
    return out, lse


def pack_group(q, heads_k, head_k):
    """The queries of one group as rows of one matrix, row = query * heads + head, as the kernel's tiles have them.

    q (N, Hq, D) -> (N * Hq / Hk, D): one product with K serves the whole group, and the mask sees query = row // heads.
    """
    group = q.shape[1] // heads_k
    return q[:, head_k * group : (head_k + 1) * group].reshape(-1, q.shape[2])
