"""A seeded random run of varlen, paged and cache calls: combinations that nobody thought of, judged by all gates.

Everything that a call must not read holds poison, and every row that it must not write is looked at afterwards.
"""

from __future__ import annotations

import os
import random

import pytest

torch = pytest.importorskip("torch")

from gpu import support  # noqa: E402
from gpu.batches import INPUT_KINDS, POISONS, Batch, judge, judge_all  # noqa: E402

pytestmark = pytest.mark.gpu

BATCHES = int(os.environ.get("HOPPER_ATTENTION_RANDOM_BATCHES", "4800"))
PARTS = 8
MOST_SCORES = 1 << 23  # heads * queries * keys of all sequences of one batch
MOST_KV = 1 << 23  # elements of K of one batch
PAGES = (1, 2, 4, 7, 8, 12, 16, 24, 32, 40, 64, 96, 128, 176, 256, 512, 1024)
SPLITS = (0, 1, 2, 3, 7, 128)
RATIOS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 64, 128)
SIZES = (1, 2, 3, 4, 5, 8, 16, 31, 32, 33)
LARGE_SIZES = (64, 255, 256, 257, 992, 993, 2048, 4096)
MOST_SHARES = 4  # of what is left, that a sequence may take where all share it
KINDS = ("decode", "few queries", "prefill", "chunk of a prompt", "mixed", "tiny", "large batch")
EDGES = (0, 1, 2, 63, 64, 65, 79, 80, 81, 111, 112, 113, 127, 128, 129, 175, 176, 177, 191, 192, 193, 255, 256, 257)


def key_length(r: random.Random, page: int, longest: int) -> int:
    around = page * r.randint(0, 4) + r.choice((-1, 0, 1))
    found = r.choice((r.choice(EDGES), around, r.randint(1, 400), r.randint(200, 2000), r.randint(1000, 9000)))
    return max(0, min(found, longest))


def query_length(r: random.Random, kind: str, keys: int) -> int:
    if kind == "decode" or (kind == "mixed" and r.random() < 0.7):
        return r.choice((1, 1, 1, 1, 1, 0)) if kind == "mixed" else 1
    if kind in ("few queries", "large batch"):
        return r.randint(0, 9)
    if kind == "tiny":
        return r.randint(0, 3)
    if kind == "chunk of a prompt":
        return r.randint(1, max(1, min(keys, 512)))
    return r.choice((r.choice(EDGES), r.randint(1, 400), r.randint(200, 1500), keys))


def lengths(
    r: random.Random, kind: str, size: int, page: int, heads: int, dim: int, row: int, most_scores: int, most_kv: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Queries and keys of each sequence, within the budgets; row: elements of a key of all heads, dim: elements of a
    query of one head. Where the budgets are for few sequences, those that have something lie all over the batch.
    """
    longest = {"tiny": 3, "large batch": 300}.get(kind, 9000)
    even = r.random() < 0.15
    shared = size >= min(LARGE_SIZES) and r.random() < 0.5  # budgets, by all sequences: all short instead of few long
    shares = 1 if even else MOST_SHARES
    left = {"scores": most_scores, "kv": most_kv, "q": 2 * most_kv}
    least = {"scores": heads, "kv": row, "q": heads * dim}
    pairs = []
    for others in reversed(range(size)):
        may = {name: min(n, max(least[name], shares * n // (others + 1))) if shared else n for name, n in left.items()}
        k = min(key_length(r, page, longest), may["kv"] // row)
        q = query_length(r, kind, k)
        if even and pairs:
            q, k = pairs[0]
        if heads * q * k > may["scores"]:
            q = max(1, may["scores"] // (heads * max(k, 1)))
            k = min(k, may["scores"] // (heads * q))
        q, k = (q, k) if q * k * heads <= may["scores"] and k * row <= may["kv"] else (min(q, 1), 0)
        q = min(q, may["q"] // (heads * dim))
        left["q"] -= q * heads * dim
        left["scores"] -= heads * q * k
        left["kv"] -= k * row
        pairs.append((q, k))
    r.shuffle(pairs)
    q_lengths, k_lengths = zip(*pairs, strict=True)
    return q_lengths, k_lengths


def random_batch(seed: int, most_scores: int = MOST_SCORES, most_kv: int = MOST_KV) -> Batch:
    """The batch of a seed; the same on every machine with the same kernels."""
    r = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    dtype = r.choice(sorted({dtype for dtype, _ in support.MAIN}) or ["bf16", "fp16"])
    head_dim, head_dim_v = r.choice(support.built_dims(dtype) or support.HEAD_DIMS)
    if r.random() < 0.4 and (not support.MAIN or (dtype, (128, 128)) in support.MAIN):
        head_dim, head_dim_v = 128, 128  # what most models have
    ratio = r.choice(RATIOS)
    heads_k = 1 if ratio > 16 else r.choice((1, 1, 2, 3, 8))
    size = r.choice(LARGE_SIZES) if kind == "large batch" else r.choice(SIZES)
    call, keys = r.choice((("varlen", "packed"), ("varlen", "paged"), ("cache", "paged"), ("cache", "dense")))
    page = r.choice(PAGES if r.random() < 0.5 else (1, 4, 8, 16, 24, 64, 128, 256))
    q_lengths, k_lengths = lengths(
        *(r, kind, size, page, ratio * heads_k, head_dim, heads_k * head_dim), most_scores, most_kv
    )
    dense_q = call == "cache" and r.random() < 0.6
    if dense_q:
        q_lengths = (max(1, min(max(q_lengths), most_kv // (size * ratio * heads_k * head_dim), 70)),) * size
        if sum(k_lengths) * q_lengths[0] * ratio * heads_k > 2 * most_scores:
            q_lengths = (1,) * size
    leftpad = r.choice((0, 0, 1, 70)) if call == "cache" else 0
    if size * leftpad * heads_k * head_dim > most_kv:
        leftpad = 0
    if keys == "dense" and size * (max(k_lengths) + 80) * heads_k * head_dim > 4 * most_kv:
        keys = "paged"
    while page > 8 and size * page * heads_k * head_dim > 4 * most_kv:  # poison in the rest of the pages
        page = r.choice([smaller for smaller in PAGES if smaller < page])
    cp_world = r.choice((1,) * 12 + (2, 3, 4))
    window = r.choice(((r.randint(0, 300), r.randint(0, 300)), (r.randint(0, 300), -1), (-1, r.randint(0, 300)),
                       (r.randint(0, 4000), 0), (127, 0)))  # fmt: skip
    invariant, slack = r.random() < 0.2, r.choice((0, 0, 7, 100000, -1))
    extra_q = r.choice((0, 0, 0, 5)) if call == "varlen" else 0
    return Batch(
        f"random {seed}, {kind}",
        q_lengths,
        k_lengths,
        heads_q=ratio * heads_k,
        heads_k=heads_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        call=call,
        keys=keys,
        page_size=page,
        strides=r.choice(("contiguous", "contiguous", "interleaved", "heads first", "K page, V page")),
        dense_q=dense_q,
        extra_q=extra_q,
        extra_k=r.choice((0, 0, 9)) if keys != "paged" else 0,
        tail_q=r.choice((0, 3, 130)),
        leftpad=leftpad,
        batch_idx=keys == "dense" and r.random() < 0.5,
        cp_world=cp_world,
        cp_rank=r.randrange(cp_world),
        causal=r.random() < 0.6,
        window=window if r.random() < 0.3 else (-1, -1),
        chunk=r.choice((0, 0, 0, 0, 0, r.randint(1, 600), 128)),
        softcap=r.choice((0.0, 0.0, 0.0, 0.0, round(r.uniform(0.5, 80.0), 3))),
        sinks=r.choice(("", "", "fp32", "bf16", "fp16")),
        scale=r.choice((None, None, None, round(r.uniform(0.01, 0.3 if dtype == "bf16" else 0.15), 4))),
        num_splits=r.choice(SPLITS),
        # Of many queries, few are so long that the plan cuts them.
        forced=(("num_splits", r.choice((2, 3, 7, 128))),) if not invariant and r.random() < 0.3 else (),
        metadata=r.random() < 0.5,  # beside extra_q: they count rows that seqused_q leaves out
        batch_invariant=invariant,
        slack=0 if invariant and size > 64 else slack,  # the workspace grows with both
        poison=r.choice(sorted(POISONS)),
        inputs=r.choice(["normal"] * 6 + INPUT_KINDS),
        seed=seed,
        given_by=f"random_batch({seed})",
    )


@pytest.mark.parametrize("part", range(PARTS))
def test_random_batches(part):
    support.WORST.random += judge_all(random_batch(seed) for seed in range(part, BATCHES, PARTS))


__all__ = ["judge", "random_batch"]  # for reproduction lines
