"""Tensors over 2^31 elements and over 2^32 bytes, page id x stride over 2^31, a batch of 65,536.

What the far ends of such tensors give is compared with the same values in small tensors, bitwise where the same kernel
computes both, else by the gates. Memory that no call may read holds NaN.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

import hopper_attention
from gpu import batches, support
from gpu.batches import Batch
from hopper_attention.testing import gates
from reliability._memory import different
from reliability._subjects import differences
from reliability.harness import Budget, Failures, result

TITLE = "Over 2^31 elements and 2^32 bytes, page id x stride over 2^31, batch 65,536"
NEEDS = "gpu"
SECONDS = 150
PARTS = 1
SILENCE = 240

DTYPE, HEAD_DIM = "bf16", 128
ROW = 8 * HEAD_DIM  # elements of a token of 8 heads


def limit() -> int:
    """The number of elements that tensors exceed; on the CPU a small one, which tests this file."""
    return 2**31 if support.DEVICE == "cuda" else 1 << 15


def batch_of(why: str, **given: Any) -> Batch:
    return batches.main_dims(Batch(why, **{"heads_q": 8, "heads_k": 8, "causal": True, "dtype": DTYPE, **given}))


def far(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor full of NaN."""
    return torch.full(shape, float("nan"), dtype=dtype, device=support.DEVICE)


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=support.DEVICE).normal_()


def said(what: str, count: torch.Tensor) -> str:
    return f"{int(count)} elements differ: {what}" if int(count) else ""


def judged(out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> str:
    """Gates of one sequence: out (Sq, Hq, D), lse (Hq, Sq)."""
    found = gates.check(out[None], lse[None], q[None], k[None], v[None], **options)
    # With few rows the ratio of two random errors says nothing.
    right = found.elementwise <= gates.ELEMENTWISE_BOUND and (found.lse_ratio or 0.0) <= 1.0
    return "" if right else found.message


def pages(page: int, strides: str) -> str:
    """The last pages of a cache of more than `limit` elements, for K and V each or, interleaved, together."""
    batch = batch_of(
        f"pages of {page}", q_lengths=(1, 70, 5), k_lengths=(900, 300, 64), keys="paged", page_size=page, num_splits=0,
        strides=strides,
    )  # fmt: skip
    made = batches.make(batch)
    expected = batches.attend(made)
    few = made.k.shape[0]
    row = batch.heads_k * batch.head_dim * (2 if strides == "K page, V page" else 1)
    many = limit() // (page * row) + few + 3
    big = batches.storage((many, page, batch.heads_k), batch.dims, strides, made.k.dtype, float("nan"))
    if max(i * n for i, n in zip((many, 1), (big[0].stride(0), 1), strict=True)) <= limit():
        return "the cache is too small to show anything"
    for place, small in zip(big, (made.k, made.v), strict=True):
        place[many - few :] = small
    table = made.lengths["page_table"]
    moved = torch.where((table >= 0) & (table < few), table + (many - few), table).to(torch.int32)
    made.k, made.v = big
    return said("pages at the end of a large cache", differences(batches.attend(made, page_table=moved), expected))


def append_to_pages() -> str:
    """New keys, rotated, go to the last pages of a large cache."""
    batch = batch_of(
        "append", q_lengths=(1,) * 3, k_lengths=(900, 300, 65), keys="paged", call="cache", dense_q=True, num_splits=0
    )
    made = batches.make(batch)
    before = batches.int32([890, 290, 60])
    shape = (3, 1, batch.heads_k)
    new = {name: normal(*shape, d, dtype=made.k.dtype) for name, d in zip("kv", batch.dims, strict=True)}
    angles = torch.linspace(0, 300, 1000, device=support.DEVICE)[:, None].expand(1000, batch.head_dim // 2).contiguous()
    given = {**new, "rotary_cos": angles.cos().to(made.k.dtype), "rotary_sin": angles.sin().to(made.k.dtype)}
    few = made.k.shape[0]
    many = limit() // (batch.page_size * batch.heads_k * batch.head_dim) + few + 3
    big = batches.storage((many, batch.page_size, batch.heads_k), batch.dims, "contiguous", made.k.dtype, float("nan"))
    for place, small in zip(big, (made.k, made.v), strict=True):
        place[many - few :] = small
    expected = batches.attend(made, cache_seqlens=before, **given)
    table = made.lengths["page_table"]
    moved = torch.where((table >= 0) & (table < few), table + (many - few), table).to(torch.int32)
    small = made.k, made.v
    made.k, made.v = big
    count = differences(batches.attend(made, cache_seqlens=before, page_table=moved, **given), expected)
    for place, wanted in zip(big, small, strict=True):
        count = count + different(place[many - few :], wanted)
    return said("append to the last pages", count)


def dense_cache() -> str:
    """The second sequence of a cache begins beyond `limit`; keys are appended there."""
    batch = batch_of(  # batch_invariant: the depth of the cache bounds the lengths, and with them the splits
        "dense cache", q_lengths=(1, 1), k_lengths=(700, 900), keys="dense", call="cache", dense_q=True,
        num_splits=0, batch_invariant=True,
    )  # fmt: skip
    made = batches.make(batch)
    before = batches.int32([690, 880])
    new = {name: normal(2, 2, batch.heads_k, d, dtype=made.k.dtype) for name, d in zip("kv", batch.dims, strict=True)}
    small = made.k.clone(), made.v.clone()
    expected = batches.attend(made, cache_seqlens=before, **new)
    written = made.k, made.v
    depth = limit() // (batch.heads_k * batch.head_dim) + 1000
    count = torch.zeros((), dtype=torch.int64, device=support.DEVICE)
    made.k, made.v = (far((2, depth, *x.shape[2:]), x.dtype) for x in small)
    for place, x in zip((made.k, made.v), small, strict=True):
        place[:, : x.shape[1]] = x
    found = batches.attend(made, cache_seqlens=before, **new)
    for place, x in zip((made.k, made.v), written, strict=True):
        count = count + different(place[:, : x.shape[1]], x)
    return said("the second sequence of a dense cache", count + differences(found, expected))


def long_sequence() -> str:
    """One sequence whose keys alone are more than `limit` elements."""
    dtype, (d, dv) = support.DTYPES[(case := batch_of("", q_lengths=(1,), k_lengths=(1,))).dtype], case.dims
    keys = limit() // (8 * d) + 77
    q, k, v = normal(1, 1, 8, d, dtype=dtype), normal(1, keys, 8, d, dtype=dtype), normal(1, keys, 8, dv, dtype=dtype)
    v[:, -50:] += 3  # the last keys count visibly
    q = q * 0.05
    q[..., 0] = 6
    k[:, -50:, :, 0] = 20
    out, lse = hopper_attention.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=batches.int32([keys]), causal=True, return_softmax_lse=True
    )
    return judged(out[0], lse[0], q[0], k[0], v[0], causal=True)


def packed_queries() -> str:
    """q and out of more than `limit` elements; the last sequences against calls of their own."""
    case = batch_of("", q_lengths=(1,), k_lengths=(1,))
    dtype, (d, dv) = support.DTYPES[case.dtype], case.dims
    heads, rows, keys = 64, 64, 24
    count = limit() // (heads * d * rows) + 3
    q = normal(count * rows, heads, d, dtype=dtype)
    k, v = normal(count * keys, 8, d, dtype=dtype), normal(count * keys, 8, dv, dtype=dtype)
    starts_q, starts_k = (batches.int32(range(0, count * n + 1, n)) for n in (rows, keys))
    out, lse = hopper_attention.flash_attn_varlen_func(
        q, k, v, starts_q, starts_k, rows, keys, causal=True, return_attn_probs=True
    )
    if q.numel() <= limit():
        return "q is too small to show anything"
    for b in (0, count // 2, count - 2, count - 1):
        at, at_k = slice(b * rows, (b + 1) * rows), slice(b * keys, (b + 1) * keys)
        problem = judged(out[at], lse[:, at], q[at], k[at_k], v[at_k], causal=True)
        if problem:
            return f"sequence {b} of {count}: {problem}"
    return ""


def packed_keys() -> str:
    """The last of the packed sequences of k lies beyond `limit`."""
    batch = batch_of("packed keys", q_lengths=(70, 5), k_lengths=(100, 900), extra_k=1)
    made = batches.make(batch)
    expected = batches.attend(made)
    first = limit() // (batch.heads_k * batch.head_dim) + 200
    big = [far((first + 902, *x.shape[1:]), x.dtype) for x in (made.k, made.v)]
    for place, x in zip(big, (made.k, made.v), strict=True):
        place[:100] = x[:100]
        place[first : first + 900] = x[101:1001]
    made.k, made.v = big
    found = batches.attend(made, cu_seqlens_k=batches.int32([0, first, first + 901]))
    return said("the last of packed sequences of keys", differences(found, expected))


def large_dense_batch() -> str:
    """Batch 65,536 of flash_attn_func, all tensors over `limit` elements."""
    case = batch_of("", q_lengths=(1,), k_lengths=(1,))
    dtype, (d, dv) = support.DTYPES[case.dtype], case.dims
    size = 65536 if support.DEVICE == "cuda" else 20
    q = normal(size, 17, 16, d, dtype=dtype)
    k, v = normal(size, 33, 8, d, dtype=dtype), normal(size, 33, 8, dv, dtype=dtype)
    out, lse = hopper_attention.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    if min(q.numel(), k.numel()) <= limit() and d == HEAD_DIM:
        return "q and k are too small to show anything"
    places = [0, size // 2, size - 3, size - 2, size - 1]
    for b in places:
        problem = judged(out[b], lse[b], q[b], k[b], v[b], causal=True)
        if problem:
            return f"sequence {b} of {size}: {problem}"
    return ""


def large_ragged_batch(kind: str) -> str:
    """Batch 65,536 with lengths, every sequence judged."""
    r = random.Random(5)
    size = 65536 if support.DEVICE == "cuda" else 40
    k_lengths = tuple(r.choice((0, 1, 7, 16, 17, r.randint(1, 64))) for _ in range(size))
    q_lengths = (1,) * size if kind == "decode" else tuple(r.choice((0, 1, 1, 3)) for _ in range(size))
    shape = {"call": "cache", "dense_q": True} if kind == "decode" else {}
    batch = batch_of(
        f"batch {size}, {kind}", q_lengths=q_lengths, k_lengths=k_lengths, keys="paged", head_dim=64, heads_q=2,
        heads_k=1, num_splits=0, metadata=True, **shape,
    )  # fmt: skip
    made = batches.make(batch)
    found = batches.verdict(made, *batches.attend(made))
    return "" if found.result else found.result.message


def large_lse() -> str:
    """An LSE of more than 2^32 bytes, with q and out of many more elements."""
    dtype = support.DTYPES[batch_of("", q_lengths=(1,), k_lengths=(1,), head_dim=8).dtype]
    heads, rows, keys, d = 128, 512, 16, 8
    if support.MAIN and not support.supported(d, d):
        return ""
    count = limit() // 2 // (heads * rows) + 2
    q = normal(count * rows, heads, d, dtype=dtype)
    k, v = normal(count * keys, 8, d, dtype=dtype), normal(count * keys, 8, d, dtype=dtype)
    starts_q, starts_k = (batches.int32(range(0, count * n + 1, n)) for n in (rows, keys))
    out, lse = hopper_attention.flash_attn_varlen_func(q, k, v, starts_q, starts_k, rows, keys, return_attn_probs=True)
    for b in (0, count // 2, count - 2, count - 1):
        at, at_k = slice(b * rows, (b + 1) * rows), slice(b * keys, (b + 1) * keys)
        problem = judged(out[at], lse[:, at], q[at], k[at_k], v[at_k])
        if problem:
            return f"sequence {b} of {count}: {problem}"
    return ""


def combine() -> str:
    """Parts of more than `limit` elements; the last rows against a call of their own."""
    heads, d = 16, 128
    rows = limit() // (2 * heads * d) + 64
    parts = normal(2, 1, rows, heads, d, dtype=torch.float32)
    lse = normal(2, 1, rows, heads, dtype=torch.float32)
    out, total = hopper_attention.flash_attn_combine(parts, lse, out_dtype=torch.bfloat16)
    last = slice(rows - 100, rows)
    wanted = hopper_attention.flash_attn_combine(
        parts[:, :, last].contiguous(), lse[:, :, last].contiguous(), out_dtype=torch.bfloat16
    )
    return said("combine, last rows", differences((out[:, last], total[:, last]), wanted))


def merge_states() -> str:
    """Two results of more than `limit` elements, merged into the first."""
    heads, d = 16, 128
    rows = limit() // (heads * d) + 64
    a, b = (normal(1, rows, heads, d, dtype=torch.bfloat16) for _ in range(2))
    lse_a, lse_b = (normal(1, heads, rows, dtype=torch.float32) for _ in range(2))
    last = slice(rows - 100, rows)
    wanted = hopper_attention.merge_states(
        *(a[:, last].clone(), lse_a[:, :, last].clone(), b[:, last].clone(), lse_b[:, :, last].clone())
    )
    out, lse = hopper_attention.merge_states(a, lse_a, b, lse_b, out=a)
    return said("merge_states, last rows", differences((out[:, last], lse[:, :, last]), wanted))


CHECKS: list[tuple[Callable[..., str], tuple, float]] = [  # what, arguments, GiB that it needs
    *((pages, (page, "contiguous"), 9.0) for page in (1, 16, 24, 64, 256)),
    (pages, (16, "K page, V page"), 9.0),
    (pages, (1, "interleaved"), 18.0),
    (append_to_pages, (), 9.0),
    (dense_cache, (), 18.0),
    (long_sequence, (), 18.0),
    (packed_queries, (), 11.0),
    (packed_keys, (), 9.0),
    (large_dense_batch, (), 20.0),
    (large_ragged_batch, ("decode",), 8.0),
    (large_ragged_batch, ("mixed",), 8.0),
    (large_lse, (), 42.0),
    (combine, (), 12.0),
    (merge_states, (), 10.0),
]
COUNT = len(CHECKS)


def run(budget: Budget) -> dict[str, Any]:
    failures, cases, left_out = Failures(), 0, 0
    for number in budget.numbers(len(CHECKS)):
        function, given, gib = CHECKS[number]
        name = " ".join([function.__name__, *map(str, given)])
        if support.DEVICE == "cuda":
            torch.cuda.empty_cache()
            if torch.cuda.mem_get_info()[0] < gib * 2**30:
                left_out += 1
                failures.add(f"{name}: not run, {gib} GiB of free GPU memory are needed")
                continue
        cases += 1
        try:
            with torch.inference_mode():
                problem = function(*given)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            failures.add(f"{name}: {problem}")
    return result(cases, failures, checks_without_memory=left_out)
