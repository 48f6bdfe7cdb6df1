"""K and V in pages: every page size, bitwise equal to contiguous keys, and nothing but a sequence's keys is ever seen."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from gpu import batches, support  # noqa: E402
from gpu.batches import (  # noqa: E402
    POISONS,
    UNUSED_SLOT,
    Batch,
    attend,
    int32,
    int64,
    judge_all,
    judged_results,
    main_dims,
    make,
    require_same,
)
from gpu.fixed_splits import cut_sequences, plan_of  # noqa: E402
from gpu.support import MAIN  # noqa: E402
from gpu.test_grid import name_of, on  # noqa: E402

pytestmark = pytest.mark.gpu

PAGES = (1, 2, 3, 4, 5, 7, 8, 16, 20, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128, 176, 192, 256, 512, 1000, 1024)
STRIDES = ("contiguous", "interleaved", "heads first", "K page, V page")
DECODE = {"q_lengths": (1, 1, 1, 1, 1), "k_lengths": (1, 700, 64, 0, 2300)}
SPECULATE = {"q_lengths": (4, 4, 4, 4), "k_lengths": (4, 700, 64, 2300)}
CHUNK = {"q_lengths": (130, 64, 300), "k_lengths": (900, 64, 1500)}
MIXED = {"q_lengths": (1, 200, 1, 0, 5, 33), "k_lengths": (900, 200, 0, 70, 2000, 300)}
SHAPES = {"decode": DECODE, "4 queries": SPECULATE, "chunk of a prompt": CHUNK, "mixed": MIXED}
# Around splits of fixed size and beyond: 16 query rows, up to 64 of them, and beside prefill.
CUTS = {
    "decode, cut": {"q_lengths": (1, 4, 1, 1, 4), "k_lengths": (4095, 4096, 4097, 9000, 13000)},
    "up to 64 rows, cut": {"q_lengths": (16, 1, 5, 16), "k_lengths": (9000, 13000, 4097, 4096)},
    "mixed, cut": {"q_lengths": (130, 1, 16, 0), "k_lengths": (4500, 9000, 4097, 13000)},
}


def around(page: int, count: int = 4) -> tuple[int, ...]:
    """Lengths beside the first borders of pages."""
    return tuple(sorted({max(0, page * i + d) for i in range(count) for d in (-1, 0, 1)}))


@pytest.mark.usefixtures("either_tile")
@pytest.mark.parametrize("page", PAGES)
def test_lengths_around_page_borders(page):
    keys = around(page)
    few, many = (1,) * len(keys), tuple(min(k + i % 3, 300) for i, k in enumerate(keys))
    judge_all(
        main_dims(
            Batch(
                f"lengths beside borders of pages of {page}, {kind}",
                queries,
                keys,
                keys="paged",
                page_size=page,
                call=call,
                causal=causal,
                num_splits=splits,
                poison=poison,
                heads_q=8,
            )
        )
        for kind, queries, splits in (("decode", few, 1), ("decode", few, 0), ("decode", few, 3), ("prompts", many, 1))
        for call, causal, poison in (("varlen", True, "nan"), ("cache", False, "inf"))
    )


@pytest.mark.parametrize("page", (1, 4, 8, 16, 24, 64, 128, 256))
@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_kernels(kernel, page):
    judge_all(
        Batch(
            f"pages of {page}, {kind}, {mask}, {strides}",
            **shape,
            keys="paged",
            page_size=page,
            heads_q=8,
            strides=strides,
            num_splits=splits,
            **on(kernel, **options),
        )
        for i, (kind, shape) in enumerate(SHAPES.items())
        for j, (mask, options) in enumerate(
            {
                "full": {},
                "causal": {"causal": True},
                "window": {"window": (100, 0)},
                "causal chunks with softcap and sinks": {"causal": True, "chunk": 200, "softcap": 9.0, "sinks": "fp32"},
            }.items()
        )
        for strides, splits in ((STRIDES[(i + j) % 4], (0, 1, 2, 7)[(i + 2 * j) % 4]),)
    )


def same_splits(batch: Batch) -> tuple[tuple[str, object], ...]:
    """To be forced on both calls; their tiles follow from head dims, dtype and class alone, so that they are the same."""
    return (("num_splits", batch.num_splits),) if batch.num_splits > 1 and not batch.batch_invariant else ()


def require_equal_to_contiguous(paged: Batch) -> None:
    """Bitwise, with the same tile and splits."""
    made = make(paged)
    found = judged_results(made)
    contiguous = make(paged.but(keys="packed"))
    assert torch.equal(contiguous.truth_k, made.truth_k), "the two batches have other values"
    require_same(paged, "pages against contiguous keys", found, judged_results(contiguous))


@pytest.mark.parametrize("invariant", [False, True], ids=["forced", "batch_invariant"])
@pytest.mark.parametrize("page", (1, 4, 7, 8, 16, 24, 64, 128, 256))
@pytest.mark.parametrize("kind", SHAPES)
def test_pages_equal_contiguous_keys(kind, page, invariant):
    for splits in (1, 3):
        paged = main_dims(Batch(f"{kind}, pages of {page} and contiguous", **SHAPES[kind], keys="paged",
                                page_size=page, causal=True, heads_q=8, num_splits=splits, batch_invariant=invariant))  # fmt: skip
        require_equal_to_contiguous(paged.but(forced=same_splits(paged)))


@pytest.mark.parametrize("page", (1, 7, 16, 24, 64, 256))
@pytest.mark.parametrize("kind", CUTS)
def test_pages_equal_contiguous_keys_in_several_splits(kind, page):
    """batch_invariant: a cut lies at the same key, wherever pages end."""
    paged = main_dims(Batch(f"{kind}, pages of {page} and contiguous", **CUTS[kind], keys="paged", page_size=page,
                            causal=True, heads_q=8, num_splits=0, batch_invariant=True))  # fmt: skip
    assert len(cut_sequences(paged)) >= 2, plan_of(paged).explain()
    require_equal_to_contiguous(paged)


@pytest.mark.parametrize("kind", {**SHAPES, **CUTS})
def test_page_sizes_do_not_change_a_bit(kind):
    """batch_invariant: tile and cuts depend on the sequence alone, not on the size of its pages."""
    expected = None
    for page in (8, 16, 64, 128, 256):
        case = main_dims(Batch(f"{kind}, pages of {page}", **{**SHAPES, **CUTS}[kind], keys="paged", page_size=page,
                               causal=True, heads_q=8, num_splits=0, batch_invariant=True))  # fmt: skip
        assert bool(cut_sequences(case)) == (kind in CUTS), plan_of(case).explain()
        found = judged_results(make(case))
        if expected is not None:
            require_same(case, "pages of 8", found, expected)
        expected = found


def moved(made: batches.Made, seed: int) -> None:
    """The same keys on other pages, in a larger pool that holds poison elsewhere; the table follows."""
    poison = float("inf")
    page, table = made.batch.page_size, made.lengths["page_table"]
    count = made.k.shape[0]
    generator = torch.Generator(support.DEVICE).manual_seed(seed)
    order = torch.randperm(count + 7, generator=generator, device=support.DEVICE)
    for name in ("k", "v"):
        old = getattr(made, name)
        new = torch.full((count + 7, *old.shape[1:]), poison, dtype=old.dtype, device=old.device)
        new[order[:count]] = old
        setattr(made, name, new)
    used = (table >= 0) & (table < count)
    made.lengths["page_table"] = torch.where(used, order[table.clamp(0, count - 1).long()].to(torch.int32), table)
    made.slots = order[made.slots // page] * page + made.slots % page


@pytest.mark.parametrize("page", (1, 4, 16, 24, 128))
@pytest.mark.parametrize("kind", SHAPES)
def test_shuffled_pages(kind, page):
    case = main_dims(Batch(f"{kind}, shuffled pages of {page}", **SHAPES[kind], keys="paged", page_size=page,
                           causal=True, heads_q=8, num_splits=0))  # fmt: skip
    made = make(case)
    expected = judged_results(made)
    for seed in range(3):
        moved(made, seed)
        require_same(case, f"shuffle {seed}", attend(made), expected)


WATCHED = [
    Batch("decode", **DECODE, num_splits=0),
    Batch("decode in a window", **DECODE, window=(100, 0), num_splits=2),
    Batch("causal chunks", **CHUNK, causal=True, chunk=200),
    Batch("window that frees early pages", **CHUNK, window=(70, 0)),
    Batch("mixed", **MIXED, causal=True),
    Batch("mixed in a window, sinks", **MIXED, window=(300, 0), sinks="fp32"),
]


def pages_seen(made: batches.Made) -> torch.Tensor:
    """Flat rows of the pool that some query of their sequence may see."""
    seen = []
    for b, (queries, keys) in enumerate(zip(made.batch.q_lengths, made.batch.k_lengths, strict=True)):
        if queries == 0 or keys == 0:
            seen.append(torch.zeros(keys, dtype=torch.bool, device=support.DEVICE))
            continue
        row = torch.arange(queries, device=support.DEVICE)
        seen.append(~batches.hidden_keys(made, int64([b]), row, keys)[0].all(0))
    return made.slots[torch.cat(seen)]


@pytest.mark.parametrize("page", (1, 4, 7, 16, 24, 64, 256))
@pytest.mark.parametrize("case", WATCHED, ids=lambda b: b.why)
def test_unused_memory_never_counts(case, page):
    """Whatever lies in rows that no query sees, behind the lengths, before a window, on pages of nobody, in slots of
    the table that are not used: no bit of the result changes.
    """
    case = main_dims(case.but(keys="paged", page_size=page, heads_q=8, why=f"{case.why}, pages of {page}"))
    made = make(case.but(poison="zero"))
    expected = judged_results(made)
    seen = torch.zeros(made.k.shape[0] * page, dtype=torch.bool, device=support.DEVICE)
    seen[pages_seen(made)] = True
    hidden = (~seen).nonzero().flatten()
    table = made.lengths["page_table"].clone()
    columns = torch.arange(table.shape[1], device=table.device)
    unused = columns[None] >= -(-made.lengths["seqused_k"][:, None] // page)
    assert bool(unused.any()) and len(hidden)
    slots = (UNUSED_SLOT, -1, -(2**31), 2**31 - 1, made.k.shape[0], 0)
    for i, (name, value) in enumerate(POISONS.items()):
        for x in (made.k, made.v):
            batches.put_rows(x, hidden, torch.full((len(hidden), *x.shape[2:]), value, dtype=x.dtype, device=x.device))
        made.lengths["page_table"] = torch.where(unused, slots[i], table).to(torch.int32)
        require_same(case, f"{name} in unused rows, {slots[i]} in unused slots", attend(made), expected)
    for slot in slots:
        made.lengths["page_table"] = torch.where(unused, slot, table).to(torch.int32)
        require_same(case, f"{slot} in unused slots", attend(made), expected)


@pytest.mark.parametrize("page", (1, 16, 20, 64))
@pytest.mark.parametrize("queries", [(1, 4, 0), (70, 300, 1)], ids=["few queries", "many queries"])
def test_strides_that_are_multiples_of_16_bytes(queries, page):
    """Gaps behind each head and each row, behind those of V others than behind those of K: the bits of full pages."""
    case = main_dims(Batch(f"gaps in pages of {page}", queries, (900, 400, 77), keys="paged", page_size=page, heads_q=8,
                           causal=True))  # fmt: skip
    expected = judged_results(make(case))
    require_same(case, "with gaps", judged_results(make(case.but(strides="gaps"))), expected)


def test_pages_that_a_window_has_left_may_be_gone():
    """Engines free them and leave any number in their slots of the table."""
    for page in (1, 4, 16, 64):
        case = main_dims(Batch(f"freed pages of {page} before a window", (1, 40, 4), (3000, 2000, 999), keys="paged",
                               page_size=page, window=(200, 0), heads_q=8, num_splits=0))  # fmt: skip
        made = make(case)
        expected = judged_results(made)
        table = made.lengths["page_table"].clone()
        for b, (queries, keys) in enumerate(zip(case.q_lengths, case.k_lengths, strict=True)):
            table[b, : (keys - queries - 200) // page] = UNUSED_SLOT
        require_same(case, "freed pages", attend(made, page_table=table), expected)


def test_tables_with_free_row_strides():
    case = main_dims(Batch("a table inside a wider one", **MIXED, keys="paged", page_size=16, causal=True))
    made = make(case)
    expected = judged_results(made)
    table = made.lengths["page_table"]
    wide = torch.full((table.shape[0], table.shape[1] + 13), -5, dtype=torch.int32, device=support.DEVICE)
    wide[:, 5 : 5 + table.shape[1]] = table
    require_same(case, "row stride", attend(made, page_table=wide[:, 5 : 5 + table.shape[1]]), expected)


def test_a_page_shared_by_all_sequences():
    """A common prefix is stored once."""
    case = main_dims(Batch("shared prefix", (1, 1, 9), (200, 260, 300), keys="paged", page_size=16, heads_q=8,
                           causal=True, num_splits=0))  # fmt: skip
    made = make(case)
    table = made.lengths["page_table"].clone()
    table[:, :8] = table[0, :8]
    shared = int64([i for b in range(3) for i in range(128)])
    first = made.k_starts.repeat_interleave(128)
    made.truth_k[first + shared] = made.truth_k[shared]
    made.truth_v[first + shared] = made.truth_v[shared]
    made.lengths["page_table"] = table
    judged_results(made)


@pytest.mark.parametrize("page", (1, 4, 16, 64))
def test_offsets_beyond_32_bits(page):
    """A pool whose pages lie so far apart that the last ones are beyond 2^31 elements and 2^32 bytes."""
    if support.DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("not enough free GPU memory for two pools of 5 GiB")
    if support.DEVICE == "cpu":
        pytest.skip("takes 10 GiB")
    case = main_dims(Batch(f"pages of {page} beyond 2^31 elements", (1, 60), (900, 700), keys="paged", page_size=page,
                           causal=True, num_splits=2))  # fmt: skip
    made = make(case)
    expected = judged_results(made)
    for name in ("k", "v"):
        old = getattr(made, name)
        count, stride = old.shape[0], ((2**31 + 2**27) // old.shape[0]) // 64 * 64
        memory = torch.empty(stride * count, dtype=old.dtype, device=old.device)
        view = memory.as_strided(old.shape, (stride, *old.stride()[1:]))
        setattr(made, name, view.copy_(old))
    require_same(case, "page stride", attend(made), expected)


def test_many_pages_in_one_table():
    """100,000 keys in pages of 1 and of 16, of which each sequence uses its own number."""
    r = random.Random(0)
    for page in (1, 16):
        keys = tuple(r.choice((0, 1, 300, 20000, 100000)) for _ in range(4))
        judge_all([main_dims(Batch(f"{max(keys)} keys in pages of {page}", (1, 2, 1, 3), keys, keys="paged",
                                   page_size=page, heads_q=4, heads_k=1, causal=True, num_splits=0))])  # fmt: skip


def test_a_table_of_the_wrong_kind_is_refused():
    made = make(main_dims(Batch("wrong tables", (5, 3), (50, 3), keys="paged")))
    table = made.lengths["page_table"]
    for wrong in (table.long(), table[:1], table.t().contiguous().t(), table[0]):
        with pytest.raises((TypeError, ValueError), match="page_table"):
            attend(made, page_table=wrong)
    with pytest.raises((TypeError, ValueError), match="seqused_k"):
        attend(made, seqused_k=None)
    with pytest.raises((TypeError, ValueError), match="cu_seqlens_k"):
        attend(made, cu_seqlens_k=int32([0, 5, 8]))
