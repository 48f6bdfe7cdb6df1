"""Split-KV: attention over parts of the keys, and two ways to put the parts together.

With S_i the scores of part i, o_i = softmax(S_i) V_i and L_i = ln(sum exp S_i), the whole is

    L = ln(sum_i exp(L_i)),   o = sum_i exp(L_i - L) o_i.
"""

from __future__ import annotations

import numpy as np

from hopper_attention.reference.arrays import algorithm, safe
from hopper_attention.reference.attention import standard_attention


def split_bounds(keys: int, num_splits: int, block: int) -> list[tuple[int, int]]:
    """`num_splits` ranges [begin, end) that cover `keys`, cut at multiples of `block`, as even as blocks allow. Later
    ones are empty when there are fewer blocks than splits.
    """
    blocks = -(-keys // block)
    share, rest = divmod(blocks, num_splits)
    ends = np.cumsum([share + (n < rest) for n in range(num_splits)]) * block
    return [(min(keys, int(b)), min(keys, int(e))) for b, e in zip([0, *ends[:-1]], ends, strict=True)]


@algorithm
def split_kv_attention(q, k, v, num_splits, *, scale=None, mask=None, block=64):
    """Each part of the keys on its own (in the kernel: on its own SM), then `combine`. Returns out (N, Dv), LSE (N,).

    Passes: K and V once in total, Q once for each split; the parts' O and LSE, num_splits N (Dv + 1) elements in
    float32, are written and read once: worth it when there are too few queries to fill the SMs.
    Source: Dao, Haziza, Massa, Sizov, Flash-Decoding (2023).
    """
    outs, lses = [], []
    for begin, end in split_bounds(len(k), num_splits, block):
        part_mask = None if mask is None else mask[:, begin:end]
        out, lse = standard_attention(q, k[begin:end], v[begin:end], scale=scale, mask=part_mask)
        outs.append(out)
        lses.append(lse)
    return combine_parts(np.stack(outs), np.stack(lses))


@algorithm
def combine_parts(outs, lses):
    """All parts at once: maximum of the LSEs, sum, weights. outs (S, ..., D), lses (S, ...) -> out (..., D), LSE (...).

    Guards: a part without keys has LSE -inf (some kernels write +inf), and its out may hold anything. Its weight is 0
    and its out is replaced, not multiplied, because 0 * NaN is NaN. If no part has keys, the result is 0 and -inf;
    the maximum is then replaced by 0, because -inf - -inf is NaN.
    Passes: LSEs and outs once, result once.
    Source: Flash-Decoding (2023), the last step.
    """
    lses = np.where(np.isposinf(lses), -np.inf, lses).astype(lses.dtype)
    maximum = safe(lses.max(axis=0, initial=-np.inf).astype(lses.dtype))
    weights = np.exp(lses - maximum)
    total = weights.sum(axis=0)
    with np.errstate(divide="ignore"):
        lse = maximum + np.log(total)
    # Not exp(L_i - L): L is rounded in units of its own size, and all of that would reach the weights.
    weights = weights / np.where(total == 0, 1, total).astype(total.dtype)
    out = np.zeros(outs.shape[1:], outs.dtype)
    for part_out, weight in zip(outs, weights[..., None], strict=True):
        out += np.where(weight == 0, 0, part_out) * weight
    return out, lse


@algorithm
def sequential_merge(outs, lses):
    """Ring attention's way: parts come one after the other and only the result so far, (o, L), is kept,

        L' = L + ln(1 + exp(L_i - L)),   o' = exp(L - L') o + exp(L_i - L') o_i.

    The same formula as `combine_parts` for two parts, applied S - 1 times. It differs in what it needs and in what it
    rounds: `combine_parts` must hold all S parts, takes one maximum and weighs each part once, in a fixed order; here
    memory does not grow with S, and a transfer can overlap the next part, but every step normalises and rounds again,
    so that the error grows with S and the last bits depend on the order in which parts arrive. Guards are the same.
    Shapes as combine_parts.
    Passes: each part once, the result S times.
    Source: Liu, Zaharia, Abbeel, Ring Attention (2023), section 3.
    """
    out = np.zeros(outs.shape[1:], outs.dtype)
    lse = np.full(lses.shape[1:], -np.inf, lses.dtype)
    for part_out, part_lse in zip(outs, lses, strict=True):
        out, lse = combine_parts(np.stack([out, part_out]), np.stack([lse, part_lse]))
    return out, lse
