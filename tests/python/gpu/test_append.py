"""The append kernel against the reference: the same bits in the caches, in rotated queries and in all memory around them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hopper_attention import _core, reference  # noqa: E402
from hopper_attention.reference.keys import rotate  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GUARD = 4096  # elements before and behind every written tensor; a multiple of 8


def append(*args: Any, **options: Any) -> None:
    """`_core.append` on the current stream, also with a torch that does not tell it through DLPack."""
    if DEVICE == "cuda":
        options["stream"] = torch.cuda.current_stream().cuda_stream
    _core.append(*args, **options)


@dataclass(frozen=True)
class Case:
    """Lists of lengths mean a packed tensor. page_size 0 is a contiguous cache of `slots`; rotary_dim 0 no rotation."""

    why: str
    used: list[int] | int
    new: list[int] | int = 1
    queries: list[int] | int = 1
    batch: int = 3
    heads_q: int = 4
    heads_k: int = 2
    head_dim: int = 128
    head_dim_v: int = 0  # 0: head_dim
    dtype: str = "bf16"
    slots: int = 96
    page_size: int = 0
    pages: int = 40
    table: str = "shuffled"
    batch_idx: list[int] | None = None
    rotary_dim: int = 0
    interleaved: bool = True
    causal: bool = True
    table_dtype: str = ""  # of cos and sin; "": dtype
    positions: int = 128
    rotary_seqlens: list[int] | None = None
    leftpad: list[int] | None = None
    layout: str = "separate"
    odd_tables: bool = False
    seed: int = 0


ROTARY = {"rotary_dim": 128}
CASES = [
    Case("one key of each sequence", [0, 5, 95]),
    Case("the same length as a number", 17),
    Case("a negative length counts as 0", [-3, -(2**31), 4]),
    Case("lengths at and past the end drop everything", [96, 97, 2**31 - 1]),
    Case("the last keys do not fit", [95, 90, 0], new=8),
    Case("more new keys than slots", [0, 1, 50], new=200, slots=64),
    Case("packed new keys, one sequence has none", [0, 5, 70], new=[7, 0, 40]),
    Case("packed new keys, more than the rows of a warp", [3, 60, 0], new=[33, 1, 90]),
    Case("rows of the cache by index, two outside", [4, 9, 2], batch_idx=[4, -1, 6]),
    Case("rows of the cache by index", [4, 9, 2], new=5, batch_idx=[5, 0, 3]),
    Case("across page borders", [15, 16, 17], new=40, page_size=16),
    Case("pages of one key", [3, 0, 7], new=4, page_size=1, slots=10),
    Case("pages of 24, K and V interleaved in one tensor", [23, 24, 1], new=30, page_size=24, layout="interleaved"),
    Case("pages of K and V by turns, counted together", [23, 24, 1], new=30, page_size=16, layout="by turns"),
    Case("heads before keys in memory", [23, 24, 1], new=30, page_size=16, layout="heads first"),
    Case("garbage page ids drop what they would hold", [10, 30, 0], new=30, page_size=16, table="garbage"),
    Case("pages end before the new keys do", [90, 96, 80], new=20, page_size=16),
    Case("rows of the cache and of new keys with gaps", [3, 40, 94], new=3, layout="gaps"),
    Case("head dims 192 and 128", [3, 40, 94], new=3, head_dim=192, head_dim_v=128),
    Case("head dim 8", [3, 40, 94], new=3, head_dim=8, heads_k=1, heads_q=3),
    Case("head dim 256, fp16", [3, 40, 94], new=3, head_dim=256, dtype="fp16"),
    Case("head dim 80, ten heads", [3, 40, 94], new=3, head_dim=80, heads_k=10, heads_q=20, dtype="fp16"),
    Case("heads that do not fill their last block", [3, 40, 94], new=3, head_dim=256, heads_k=9, heads_q=18, rotary_dim=64),
    Case("rotation, interleaved", [0, 5, 95], new=2, queries=2, **ROTARY),
    Case("rotation, halves", [0, 5, 95], new=2, queries=2, interleaved=False, **ROTARY),
    Case("rotation of a part of the columns", [0, 5, 9], new=4, queries=3, rotary_dim=64),
    Case("rotation of a part of the columns, halves", [0, 5, 9], new=4, queries=3, rotary_dim=64, interleaved=False),
    Case("queries all at the start", [0, 5, 9], new=4, queries=4, causal=False, **ROTARY),
    Case("queries all at the start, halves", [9, 5, 0], new=4, queries=4, causal=False, interleaved=False, **ROTARY),
    Case("positions past the table", [120, 60, 200], new=8, queries=8, slots=300, positions=64, **ROTARY),
    Case("positions given", [3, 60, 9], new=2, queries=2, rotary_seqlens=[50, -7, 2**31 - 1], **ROTARY),
    Case("no row of the cache: at position 0", [3, 60, 9], new=2, queries=2, batch_idx=[1, 77, 2], **ROTARY),
    Case("cos and sin in fp32", [3, 60, 9], new=2, queries=2, table_dtype="fp32", **ROTARY),
    Case("cos and sin in fp32, halves", [3, 60, 9], new=2, queries=2, table_dtype="fp32", interleaved=False, **ROTARY),
    Case("fp16, halves", [3, 60, 9], new=2, queries=2, dtype="fp16", interleaved=False, **ROTARY),
    Case("rotary dim 2", [3, 60, 9], new=2, queries=2, rotary_dim=2),
    Case("rotary dim 2, halves", [3, 60, 9], new=2, queries=2, rotary_dim=2, interleaved=False),
    Case("rotary dim 20 of 40", [3, 60, 9], new=2, queries=2, head_dim=40, rotary_dim=20),
    Case("rotary dim 36 of 40, halves", [3, 60, 9], new=2, queries=2, head_dim=40, rotary_dim=36, interleaved=False),
    Case("tables that start within a vector", [3, 60, 9], new=2, queries=2, odd_tables=True, **ROTARY),
    Case("tables within a vector, fp32", [3, 60, 9], new=2, odd_tables=True, table_dtype="fp32", **ROTARY),
    Case("packed queries and keys", [3, 60, 9], new=[2, 0, 9], queries=[3, 5, 0], **ROTARY),
    Case("packed queries, dense keys", [3, 60, 9], new=2, queries=[3, 0, 40], **ROTARY),
    Case("64 heads of q for one of k", [3, 60, 9], new=2, queries=2, heads_q=64, heads_k=1, **ROTARY),
    Case("leftpad moves neither slots nor positions", [30, 60, 9], new=2, queries=2, leftpad=[2, 7, 9], **ROTARY),
    Case("no queries", [3, 60, 9], new=2, queries=0, **ROTARY),
    Case("no new keys, queries rotate all the same", [3, 60, 9], new=0, queries=2, **ROTARY),
    Case("everything, paged", [15, 60, 9], new=[20, 1, 3], queries=[4, 1, 3], page_size=16, table="garbage",
         layout="interleaved", interleaved=False, rotary_dim=64, rotary_seqlens=[1, 2, 3]),
]  # fmt: skip


def batch_of(case: Case) -> int:
    return len(case.used) if isinstance(case.used, list) else case.batch


def guarded(view_shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator):
    """(all memory, function from all memory to the view)."""
    span = 1 + sum((n - 1) * s for n, s in zip(view_shape, strides, strict=True) if n > 0)
    memory = torch.randn(span + 2 * GUARD, generator=generator).to(dtype)
    return memory, lambda m: torch.as_strided(m, view_shape, strides, GUARD)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))


def make_caches(case: Case, generator: torch.Generator):
    """[(memory, functions to views of it)]: K and V in one memory or in two."""
    dtype = DTYPES[case.dtype]
    rows, slots = (case.pages, case.page_size) if case.page_size else (max(7, batch_of(case)), case.slots)
    if not case.page_size and case.batch_idx is None:
        rows = batch_of(case)
    k_shape = (rows, slots, case.heads_k, case.head_dim)
    v_shape = (*k_shape[:-1], case.head_dim_v or case.head_dim)
    if case.layout == "interleaved":
        both = (rows, 2, slots, case.heads_k, case.head_dim)
        memory, view = guarded(both, contiguous_strides(both), dtype, generator)
        return [(memory, (lambda m: view(m)[:, 0], lambda m: view(m)[:, 1]))]
    if case.layout == "by turns":
        both = (2 * rows, slots, case.heads_k, case.head_dim)
        memory, view = guarded(both, contiguous_strides(both), dtype, generator)
        return [(memory, (lambda m: view(m)[:-1], lambda m: view(m)[1:]))]
    made = []
    for shape in (k_shape, v_shape):
        strides = contiguous_strides(shape)
        if case.layout == "heads first":
            n, s, h, d = shape
            strides = (h * s * d, d, s * d, 1)
        elif case.layout == "gaps":
            n, s, h, d = shape
            strides = (s * (h * (d + 8) + 16) + 24, h * (d + 8) + 16, d + 8, 1)
        memory, view = guarded(shape, strides, dtype, generator)
        made.append((memory, (view,)))
    return made


def make_table(case: Case, generator: torch.Generator) -> torch.Tensor | None:
    if not case.page_size:
        return None
    batch, width = batch_of(case), -(-case.slots // case.page_size)
    table = torch.randperm(case.pages, generator=generator)[: batch * width].reshape(batch, width)
    if case.layout == "by turns":
        table *= 2
    if case.table == "garbage":
        for i, bad in zip(range(0, batch * width, 4), itertools.cycle([-1, case.pages, 2147480000, -(2**31)])):
            table.view(-1)[i] = bad
    # A row stride of its own, and garbage behind each row.
    wide = torch.full((batch, width + 3), 2147480000, dtype=torch.int32)
    wide[:, :width] = table.to(torch.int32)
    return wide[:, :width]


def packed(lengths: list[int] | int, batch: int) -> tuple[tuple[int, ...], torch.Tensor | None]:
    """Leading shape of a tensor of these lengths, with three rows behind all sequences if packed, and cu_seqlens."""
    if isinstance(lengths, int):
        return (batch, lengths), None
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return (int(starts[-1]) + 3,), starts


def with_row_gap(x: torch.Tensor) -> torch.Tensor:
    """The same values with 24 elements between tokens, as in a slice of a packed projection."""
    heads, dim = x.shape[-2:]
    wide = torch.full((*x.shape[:-2], heads * dim + 24), float("nan"), dtype=x.dtype, device=x.device)
    view = wide[..., : heads * dim].unflatten(-1, (heads, dim))
    view.copy_(x)
    return view


def int32s(values: list[int] | None) -> torch.Tensor | None:
    return None if values is None else torch.tensor(values, dtype=torch.int64).to(torch.int32)


def moved(x: Any) -> Any:
    return x.to(DEVICE) if isinstance(x, torch.Tensor) else x


def rotated_queries(case: Case, q: torch.Tensor, starts_q, used, cos, sin, before: torch.Tensor) -> torch.Tensor:
    """What q_rotated holds after the call, by rotate() of the reference; rows outside all sequences as before."""
    capacity = -(-case.slots // case.page_size) * case.page_size if case.page_size else case.slots
    expected = before.clone()
    tables = [t.float().numpy() for t in (cos, sin)]
    for b in range(batch_of(case)):
        rows = (b,) if starts_q is None else (slice(int(starts_q[b]), int(starts_q[b + 1])),)
        has_row = case.batch_idx is None or 0 <= case.batch_idx[b] < 7
        start = min(max(used[b], 0), capacity if has_row else 0)
        if case.rotary_seqlens is not None:
            start = case.rotary_seqlens[b]
        x = q[rows].float().numpy()
        positions = start + np.arange(len(x), dtype=np.int64) * case.causal
        expected[rows] = torch.from_numpy(rotate(x, positions, *tables, case.interleaved)).to(q.dtype)
    return expected


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(torch.int16)


def require_same(case: Case, name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    wrong = (bits(found) != bits(expected)).nonzero()
    assert len(wrong) == 0, f"{case}: {name}: {len(wrong)} elements differ, first {wrong[:5].tolist()}"


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.why)
def test_the_same_bits_as_the_reference(case):
    generator = torch.Generator().manual_seed(case.seed)
    dtype, batch = DTYPES[case.dtype], batch_of(case)
    used = case.used if isinstance(case.used, list) else [case.used] * batch
    caches = make_caches(case, generator)
    table = make_table(case, generator)
    new_shape, starts_k = packed(case.new, batch)
    q_shape, starts_q = packed(case.queries, batch)
    k, v = (
        torch.randn(*new_shape, case.heads_k, d, generator=generator).to(dtype)
        for d in (case.head_dim, case.head_dim_v or case.head_dim)
    )
    q = torch.randn(*q_shape, case.heads_q, case.head_dim, generator=generator).to(dtype)
    if case.layout == "gaps":
        k, v, q = (with_row_gap(x) for x in (k, v, q))
    cos = sin = None
    if case.rotary_dim:
        half, offset = case.rotary_dim // 2, 1 if case.odd_tables else 0
        angles = torch.rand(case.positions, half + offset, generator=generator) * 6.3
        table_dtype = DTYPES[case.table_dtype or case.dtype]
        cos, sin = (f(angles).to(table_dtype)[:, offset:] for f in (torch.cos, torch.sin))

    expected = [memory.clone() for memory, _ in caches]
    expected_views = [f(m) for m, (_, views) in zip(expected, caches, strict=True) for f in views]
    lengths = int32s(case.used) if isinstance(case.used, list) else case.used
    reference.flash_attn_with_kvcache(
        q, *expected_views, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths,
        cache_batch_idx=int32s(case.batch_idx), cache_leftpad=int32s(case.leftpad), page_table=table,
        cu_seqlens_q=starts_q, cu_seqlens_k_new=starts_k, rotary_seqlens=int32s(case.rotary_seqlens),
        causal=case.causal, rotary_interleaved=case.interleaved,
    )  # fmt: skip

    memories = [moved(memory.clone()) for memory, _ in caches]
    k_cache, v_cache = (f(m) for m, (_, views) in zip(memories, caches, strict=True) for f in views)
    inputs = [moved(x) for x in (k, v, q)]
    if case.layout == "gaps":
        inputs = [with_row_gap(x) for x in inputs]
    tables = {}
    q_memory, q_view = guarded(tuple(q.shape), contiguous_strides(tuple(q.shape)), dtype, generator)
    rotated_memory = moved(q_memory.clone())
    if case.rotary_dim:
        moved_tables = (moved(t._base if t._base is not None else t)[:, offset:] for t in (cos, sin))
        tables = dict(zip(("rotary_cos", "rotary_sin"), moved_tables, strict=True))
        tables.update(q=inputs[2], q_rotated=q_view(rotated_memory), cu_seqlens_q=moved(starts_q))
    wide_table = None if table is None else moved(table._base)[:, : table.shape[1]]
    append(
        inputs[0], inputs[1], k_cache, v_cache, seqused_k=moved(lengths) if isinstance(case.used, list) else None,
        seqused_k_all=-1 if isinstance(case.used, list) else case.used, cu_seqlens_k_new=moved(starts_k),
        page_table=wide_table, cache_batch_idx=moved(int32s(case.batch_idx)),
        rotary_seqlens=moved(int32s(case.rotary_seqlens)), rotary_interleaved=case.interleaved,
        rotate_q_per_position=case.causal, **tables,
    )  # fmt: skip
    for name, found, wanted in zip(("first cache", "second cache"), memories, expected, strict=False):
        require_same(case, name, found, wanted)
    if case.rotary_dim:
        wanted = q_memory.clone()
        q_view(wanted).copy_(rotated_queries(case, q, starts_q, used, cos, sin, q_view(q_memory)))
        require_same(case, "q_rotated and what is around it", rotated_memory, wanted)
    for name, found, given in zip(("k", "v", "q"), inputs, (k, v, q), strict=True):
        require_same(case, f"{name}, which is an input", found, given)
    changed = any(bool((bits(m) != bits(e)).any()) for (m, _), e in zip(caches, expected, strict=True))
    drops_all = case.why in ("lengths at and past the end drop everything", "no new keys, queries rotate all the same")
    assert changed != drops_all, "the case tests nothing"


@pytest.mark.parametrize("batch", [1, 31, 32, 33, 64, 257, 1000, 4096])
def test_large_batches_of_packed_tokens_find_their_sequences(batch):
    generator = torch.Generator().manual_seed(batch)
    new = torch.randint(0, 4, (batch,), generator=generator) * (torch.rand(batch, generator=generator) > 0.4)
    new[-1] = 2
    case = Case("large batch", used=torch.randint(0, 5, (batch,), generator=generator).tolist(), new=new.tolist(),
                queries=new.flip(0).tolist(), slots=8, head_dim=64, heads_q=2, heads_k=1, rotary_dim=32)  # fmt: skip
    test_the_same_bits_as_the_reference(case)


def test_a_long_prompt():
    case = Case("long", used=[5, 0], new=[3000, 1], queries=[3000, 1], slots=4096, head_dim=64, rotary_dim=64,
                heads_q=1, heads_k=1, positions=2000)  # fmt: skip
    test_the_same_bits_as_the_reference(case)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_bit_pattern_is_copied(dtype):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    k = moved(patterns.view(1, 256, 2, 128)).view(DTYPES[dtype])
    v = moved(patterns.flip(0).contiguous().view(1, 256, 2, 128)).view(DTYPES[dtype])
    k_cache, v_cache = torch.zeros_like(k), torch.zeros_like(v)
    append(k, v, k_cache, v_cache, seqused_k_all=0)
    assert torch.equal(bits(k_cache), bits(k)) and torch.equal(bits(v_cache), bits(v))


@pytest.mark.parametrize("interleaved", [True, False])
def test_columns_behind_the_rotary_dim_keep_every_bit(interleaved):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    k = moved(patterns.view(1, 256, 2, 128)).view(torch.bfloat16)
    q, q_rotated = k.clone(), torch.zeros_like(k)
    k_cache = torch.zeros_like(k)
    for half in (2, 3, 8, 0):
        cos, sin = (moved(torch.ones(4, half, dtype=torch.bfloat16)) for _ in range(2))
        append(k, k.clone(), k_cache, torch.zeros_like(k), seqused_k_all=0, rotary_cos=cos, rotary_sin=sin,
                     q=q, q_rotated=q_rotated, rotary_interleaved=interleaved)  # fmt: skip
        for found in (k_cache, q_rotated):
            assert torch.equal(bits(found[..., 2 * half :]), bits(k[..., 2 * half :]))


STARTS = {
    "decreasing": [0, 10, 5, 12, 20],
    "past the tensor": [0, 5, 1000, 2000, 2**31 - 1],
    "negative": [-50, -3, 4, 9, 20],
    "reversed": [20, 12, 8, 4, 0],
    "all extreme": [2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 2**31 - 1],
}


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize("paged", [False, True])
def test_malformed_starts_touch_nothing_outside(name, paged):
    generator = torch.Generator().manual_seed(0)
    case = Case("malformed", used=[3, 0, 9, 2], page_size=16 if paged else 0, slots=32, head_dim=64)
    caches = make_caches(case, generator)
    memories = [moved(m.clone()) for m, _ in caches]
    k_cache, v_cache = (f(m) for m, (_, views) in zip(memories, caches, strict=True) for f in views)
    k, v = (moved(torch.randn(20, 2, 64, generator=generator).bfloat16()) for _ in range(2))
    q_memory, q_view = guarded((20, 4, 64), (256, 64, 1), torch.bfloat16, generator)
    rotated = moved(q_memory.clone())
    starts = moved(int32s(STARTS[name]))
    cos, sin = (moved(torch.rand(8, 16, generator=generator).bfloat16()) for _ in range(2))
    table = make_table(case, generator)
    append(
        k, v, k_cache, v_cache, seqused_k=moved(int32s(case.used)), cu_seqlens_k_new=starts,
        page_table=None if table is None else moved(table), rotary_cos=cos, rotary_sin=sin,
        q=moved(torch.randn(20, 4, 64, generator=generator).bfloat16()), q_rotated=q_view(rotated), cu_seqlens_q=starts,
    )  # fmt: skip
    for memory, before in [*zip(memories, (m for m, _ in caches), strict=True), (rotated, q_memory)]:
        for part in (slice(0, GUARD), slice(-GUARD, None)):
            assert torch.equal(bits(memory[part]), bits(before[part]))
    test_the_same_bits_as_the_reference(CASES[0])


def test_offsets_beyond_32_bits():
    """A cache of over 2^31 elements: the last page is the one that is written."""
    if DEVICE == "cpu":
        pytest.skip("8 GiB")
    pages, size = 4200, 256
    try:
        cache = torch.zeros(pages, 2, size, 8, 256, dtype=torch.bfloat16, device=DEVICE)
    except torch.OutOfMemoryError:
        pytest.skip("not enough memory")
    k, v = (torch.randn(1, 3, 8, 256, device=DEVICE).bfloat16() for _ in range(2))
    table = torch.tensor([[0, pages - 1]], dtype=torch.int32, device=DEVICE)
    append(k, v, cache[:, 0], cache[:, 1], seqused_k_all=2 * size - 3, page_table=table)
    assert torch.equal(cache[-1, 0, -3:], k[0]) and torch.equal(cache[-1, 1, -3:], v[0])
    assert int(torch.count_nonzero(cache[-1])) == int(torch.count_nonzero(k) + torch.count_nonzero(v))
    assert int(torch.count_nonzero(cache[:-1:97])) == 0


def test_a_graph_replays_with_new_lengths_and_pages():
    """Captured in a side stream; replayed with other contents of all tensors of integers."""
    if DEVICE == "cpu":
        pytest.skip("graphs need a GPU")
    batch, size, width = 5, 16, 4
    make = lambda *shape: torch.randn(*shape, device=DEVICE).bfloat16()  # noqa: E731
    k, v, q = make(batch, 3, 2, 128), make(batch, 3, 2, 128), make(batch, 3, 4, 128)
    cos, sin = make(64, 64), make(64, 64)
    caches = make(40, size, 2, 128), make(40, size, 2, 128)
    used = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
    table = torch.zeros(batch, width, dtype=torch.int32, device=DEVICE)
    rotated = torch.empty_like(q)

    def call(k_cache, v_cache, to):
        append(k, v, k_cache, v_cache, seqused_k=used, page_table=table, rotary_cos=cos, rotary_sin=sin, q=q,
                     q_rotated=to, rotate_q_per_position=True)  # fmt: skip

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(*caches, rotated)
    for step in range(3):
        used.copy_(torch.tensor([0, 13, 31, 62, 200]) + step)
        table.copy_(torch.randperm(40)[: batch * width].view(batch, width))
        eager = [x.clone() for x in (*caches, rotated)]
        call(*eager)
        graph.replay()
        for found, wanted in zip((*caches, rotated), eager, strict=True):
            assert torch.equal(bits(found), bits(wanted))


def test_a_decode_step_of_64_sequences_takes_4_microseconds():
    """With rotary embedding, over pages of 16, in a graph of 40 appends to memory that L2 does not hold."""
    if DEVICE == "cpu":
        pytest.skip("times need a GPU")
    batch, sets = 64, 40
    used = torch.full((batch,), 1000, dtype=torch.int32, device=DEVICE)
    cos, sin = (torch.randn(4096, 64, device=DEVICE).bfloat16() for _ in range(2))

    def one_set() -> dict[str, Any]:
        k, v = (torch.randn(batch, 1, 8, 128, device=DEVICE).bfloat16() for _ in range(2))
        q = torch.randn(batch, 1, 32, 128, device=DEVICE).bfloat16()
        cache = torch.zeros(256, 2, 16, 8, 128, device=DEVICE, dtype=torch.bfloat16)
        table = torch.randint(0, 256, (batch, 64), device=DEVICE, dtype=torch.int32)
        return {"k_new": k, "v_new": v, "k_cache": cache[:, 0], "v_cache": cache[:, 1], "page_table": table, "q": q,
                "q_rotated": torch.empty_like(q)}  # fmt: skip

    given = [one_set() for _ in range(sets)]
    options = {"seqused_k": used, "rotary_cos": cos, "rotary_sin": sin, "rotate_q_per_position": True}
    append(**given[0], **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in given:
            append(**one, **options)
    times = []
    for _ in range(30):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / sets)
    median = sorted(times)[len(times) // 2]
    print(f"append + rotary, batch 64, page 16, 32/8 heads, d128: {median:.2f} us")
    assert median <= 4.0


def test_random_calls():
    """Everything at once, in any combination."""
    rng = np.random.default_rng(0)
    for seed in range(60):
        batch = int(rng.integers(1, 9))
        head_dim = int(rng.choice([8, 40, 64, 96, 128, 192, 256]))
        heads_k = int(rng.choice([1, 2, 3, 8]))
        page_size = int(rng.choice([0, 0, 1, 7, 16, 64]))
        slots = int(rng.integers(1, 100))

        def counts(high, batch=batch):
            dense = rng.random() < 0.5
            return int(rng.integers(0, high)) if dense else rng.integers(0, high, batch).tolist()

        layouts = ["separate", "gaps", "heads first", *(["interleaved"] if page_size else [])]
        case = Case(
            why=f"random {seed}", used=rng.integers(-5, slots + 20, batch).tolist(), new=counts(40), queries=counts(20),
            heads_k=heads_k, heads_q=heads_k * int(rng.integers(1, 6)), head_dim=head_dim,
            dtype=str(rng.choice(["bf16", "fp16"])), slots=slots, page_size=page_size, pages=batch * 100 + 7,
            table=str(rng.choice(["shuffled", "garbage"])), layout=str(rng.choice(layouts)),
            batch_idx=rng.permutation(9)[:batch].tolist() if not page_size and rng.random() < 0.4 and batch < 8 else None,
            rotary_dim=int(rng.choice([0, head_dim, 2 * int(rng.integers(1, head_dim // 2 + 1))])),
            interleaved=bool(rng.random() < 0.5), causal=bool(rng.random() < 0.5),
            table_dtype=str(rng.choice(["", "fp32"])), positions=int(rng.integers(1, 200)),
            rotary_seqlens=rng.integers(-9, 200, batch).tolist() if rng.random() < 0.3 else None, seed=seed,
        )  # fmt: skip
        try:
            test_the_same_bits_as_the_reference(case)
        except AssertionError as error:
            if "the case tests nothing" not in str(error):
                raise


def test_kvcache_calls_append_and_rotate():
    """flash_attn_with_kvcache on the device leaves the caches as the reference does, and q alone."""
    import hopper_attention

    if not any(k.tile.head_dim == 128 and k.dtype == "bfloat16" for k in hopper_attention.built_kernels()):
        pytest.skip("this build has no kernel for bf16 and head dim 128")
    for page_size, interleaved in itertools.product((0, 16), (True, False)):
        generator = torch.Generator().manual_seed(page_size)
        case = Case("kvcache", used=[15, 60, 9], page_size=page_size, slots=96)
        caches = make_caches(case, generator)
        table = make_table(case, generator)
        k, v = (torch.randn(3, 5, 2, 128, generator=generator).bfloat16() for _ in range(2))
        q = torch.randn(3, 5, 4, 128, generator=generator).bfloat16()
        cos, sin = (f(torch.rand(128, 32, generator=generator) * 6.3).bfloat16() for f in (torch.cos, torch.sin))
        results = []
        for to in (lambda x: x, moved):
            views = [f(to(m.clone())) for m, functions in caches for f in functions]
            q_there = to(q)
            out = hopper_attention.flash_attn_with_kvcache(
                q_there, *views, to(k), to(v), rotary_cos=to(cos), rotary_sin=to(sin),
                cache_seqlens=to(int32s(case.used)), page_table=None if table is None else to(table), causal=True,
                rotary_interleaved=interleaved,
            )  # fmt: skip
            assert torch.equal(bits(q_there), bits(q))
            results.append((out.float().cpu(), *views))
        for found, wanted in zip(results[1][1:], results[0][1:], strict=True):
            assert torch.equal(bits(found), bits(wanted))
        assert float((results[1][0] - results[0][0]).abs().max()) < 2e-2
