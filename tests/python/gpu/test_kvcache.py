"""flash_attn_with_kvcache: caches of both kinds, rows picked by index, left padding, appended keys, rotary embedding."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
from gpu import batches, support  # noqa: E402
from gpu.batches import (  # noqa: E402
    Batch,
    attend,
    fail,
    int64,
    judge_all,
    judged_results,
    main_dims,
    make,
    require_same,
)
from gpu.support import MAIN, bits, same_bits, small_masks  # noqa: E402
from gpu.test_grid import name_of, on  # noqa: E402

pytestmark = pytest.mark.gpu

KEYS = (1, 700, 0, 64, 2300)
LAYOUTS = {
    "dense": {"keys": "dense"},
    "dense, rows by index": {"keys": "dense", "batch_idx": True},
    "pages of 1": {"keys": "paged", "page_size": 1},
    "pages of 16": {"keys": "paged", "page_size": 16},
    "pages of 24": {"keys": "paged", "page_size": 24},
    "pages of 256": {"keys": "paged", "page_size": 256},
}
QUERIES = {
    "one query": {"q_lengths": (1,) * 5, "dense_q": True},
    "4 queries": {"q_lengths": (4,) * 5, "dense_q": True},
    "70 queries": {"q_lengths": (70,) * 5, "dense_q": True},
    "ragged queries": {"q_lengths": (1, 130, 5, 0, 9)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("queries", QUERIES)
def test_layouts(queries, layout):
    judge_all(
        main_dims(
            Batch(
                f"{queries}, {layout}, {mask}, leftpad {leftpad}",
                k_lengths=KEYS,
                call="cache",
                heads_q=8,
                leftpad=leftpad,
                num_splits=splits,
                extra_k=30 if layout.startswith("dense") else 0,
                batch_invariant=invariant,
                metadata=splits != 2,
                **QUERIES[queries],
                **LAYOUTS[layout],
                **options,
            )
        )
        for mask, options in (
            ("full", {}),
            ("causal", {"causal": True}),
            ("window and sinks", {"window": (50, 0), "sinks": "bf16"}),
            ("chunks and softcap", {"chunk": 90, "causal": True, "softcap": 5.0}),
        )
        for leftpad, splits, invariant in ((0, 0, False), (0, 1, True), (37, 2, False), (37, 0, True))
    )


@pytest.mark.parametrize("mask", small_masks())
@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_masks(kernel, mask):
    judge_all(
        Batch(
            f"{mask}, {layout}, {splits} splits",
            q_lengths=(queries,) * 5,
            k_lengths=KEYS,
            call="cache",
            dense_q=True,
            heads_q=16,
            num_splits=splits,
            **LAYOUTS[layout],
            **on(kernel, **small_masks()[mask]),
        )
        for layout, queries, splits in (("dense", 1, 0), ("pages of 16", 1, 3), ("pages of 24", 4, 2), ("dense", 9, 1))
    )


@pytest.mark.parametrize("queries", [3, 200])
@pytest.mark.parametrize("by_index", [False, True], ids=["", "rows by index"])
def test_cache_seqlens_as_an_int(by_index, queries):
    """The plan is that of a dense call, with rows by index, too."""
    case = main_dims(Batch("all as long", (queries,) * 4, (77,) * 4, call="cache", keys="dense", dense_q=True, extra_k=9,
                           batch_idx=by_index, causal=True, heads_q=8, num_splits=0))  # fmt: skip
    for batch, lengths in ((case, 77), (case.but(extra_k=0, why="the whole cache"), None)):
        made = make(batch)
        found = judged_results(made, cache_seqlens=lengths)
        if queries == 3:  # the same tile
            require_same(batch, f"cache_seqlens {lengths}", found, judged_results(made))


@pytest.mark.parametrize("queries", [1, 3, 200])
@pytest.mark.parametrize("page", [1, 16, 64])
def test_cache_seqlens_as_an_int_of_pages(page, queries):
    case = main_dims(Batch(f"all as long, pages of {page}", (queries,) * 4, (77,) * 4, call="cache", keys="paged",
                           page_size=page, dense_q=True, causal=True, heads_q=8, num_splits=0))  # fmt: skip
    judged_results(make(case), cache_seqlens=77)


def test_an_index_outside_the_cache_has_no_keys():
    case = main_dims(Batch("rows that are not there", (2,) * 3, (40, 50, 60), call="cache", keys="dense", dense_q=True,
                           batch_idx=True, causal=True))  # fmt: skip
    made = make(case)
    expected = judged_results(made)
    index = made.lengths["cache_batch_idx"].clone()
    for wrong in (-1, made.k.shape[0], 2147480000):
        index[1] = wrong
        out, lse = attend(made, cache_batch_idx=index)
        require_same(case, "the others", (out[::2], lse[::2]), (expected[0][::2], expected[1][::2]))
        if not bool((out[1] == 0).all() and (lse[1] == -torch.inf).all()):
            fail(case, f"sequence 1, whose index is {wrong}, does not give 0 and -inf")


def test_unused_memory_of_a_dense_cache_never_counts():
    for leftpad in (0, 45):
        case = main_dims(Batch("poison in a dense cache", (4,) * 5, KEYS, call="cache", keys="dense", dense_q=True,
                               extra_k=300, leftpad=leftpad, causal=True, window=(130, 0), heads_q=8, num_splits=0,
                               poison="zero"))  # fmt: skip
        made = make(case)
        expected = judged_results(made)
        used = torch.zeros(made.k.shape[0] * made.k.shape[1], dtype=torch.bool, device=support.DEVICE)
        used[made.slots] = True
        unused = (~used).nonzero().flatten()
        for value in (float("nan"), float("inf"), -3e4):
            for x in (made.k, made.v):
                filled = torch.full((len(unused), *x.shape[2:]), value, dtype=x.dtype, device=x.device)
                batches.put_rows(x, unused, filled)
            require_same(case, f"{value} in unused rows, leftpad {leftpad}", attend(made), expected)


def rotated(x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool):
    """x (n, H, D) rotated at positions (n,) in float32 and rounded to its dtype."""
    half = cos.shape[1]
    positions = positions.clamp(0, cos.shape[0] - 1)
    c, s = (table[positions][:, None].float() for table in (cos, sin))
    y = x.float().clone()
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = x[..., first].float(), x[..., second].float()
    y[..., first], y[..., second] = a * c - b * s, b * c + a * s
    return y.to(x.dtype)


@dataclasses.dataclass
class Append:
    """New keys behind those of a made batch: the batch as it is before, and after with the truth about all keys."""

    before: batches.Made
    after: batches.Made
    arguments: dict


def appended(case: Batch, new: tuple[int, ...], ragged: bool, rotary: str, rotary_dim: int = 64) -> Append:
    """`case` describes the state after the append; new (B,): how many of its last keys are appended by the call."""
    after = make(case)
    device, size = support.DEVICE, case.size
    generator = torch.Generator(device).manual_seed(case.seed + 1)
    counts = int64(new)
    starts_new = batches.offsets(new)
    owner = torch.repeat_interleave(torch.arange(size, device=device), counts, output_size=starts_new[-1])
    within = torch.arange(starts_new[-1], device=device) - int64(starts_new)[owner]
    rows = (after.k_starts + after.k_lengths - counts)[owner] + within  # of the truth
    k_new, v_new = after.truth_k[rows].clone(), after.truth_v[rows].clone()
    used_before = after.lengths["cache_seqlens"] - counts.to(torch.int32)
    arguments = {"cache_seqlens": used_before}
    before_q = after.q
    if rotary:
        interleaved = rotary == "interleaved"
        angle = torch.rand(5000, rotary_dim // 2, generator=generator, device=device) * 6.28
        cos, sin = (f(angle).to(after.q.dtype) for f in (torch.cos, torch.sin))
        k_truth = rotated(k_new, used_before[owner].long() + within, cos, sin, interleaved)
        after.truth_k[rows] = k_truth
        arguments.update(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved)
        moving = case.causal or case.window != (-1, -1) or case.chunk > 0
        flat = after.q.reshape(-1, *after.q.shape[-2:])
        row = torch.arange(len(flat), device=device)
        of_row = (torch.searchsorted(after.q_starts.contiguous(), row, right=True) - 1).clamp(min=0)
        positions = used_before[of_row].long() + (row - after.q_starts[of_row]) * int(moving)
        after.q = rotated(flat, positions, cos, sin, interleaved).view(after.q.shape)
    before = dataclasses.replace(after, q=before_q, k=after.k.clone(), v=after.v.clone())
    gone = after.slots[rows]
    batches.put_rows(after.k, gone, after.truth_k[rows])
    poison = float("nan")
    for x in (before.k, before.v):
        batches.put_rows(x, gone, torch.full((len(gone), *x.shape[2:]), poison, dtype=x.dtype, device=device))
    if ragged:
        arguments["cu_seqlens_k_new"] = batches.int32(starts_new)
        arguments.update(k=k_new, v=v_new)
    else:
        arguments.update(k=k_new.unflatten(0, (size, -1)), v=v_new.unflatten(0, (size, -1)))
    return Append(before, after, arguments)


APPENDS = [
    ("one key", (1,) * 5, (1, 700, 33, 64, 2300), (1,) * 5),
    ("4 keys across borders", (4,) * 5, (4, 17, 33, 66, 2300), (4,) * 5),
    ("a prompt", (70,) * 3, (70, 71, 400), (70,) * 3),
    ("ragged", (1, 9, 0, 40), (5, 9, 70, 140), (1, 9, 0, 40)),
    ("to an empty cache", (3, 3), (3, 3), (3, 3)),
]


@pytest.mark.parametrize("rotary", ["", "interleaved", "halves"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "pages of 256"])
@pytest.mark.parametrize("why, queries, keys, new", APPENDS, ids=[a[0] for a in APPENDS])
def test_append(why, queries, keys, new, layout, rotary):
    """The cache afterwards: new keys where they belong, every other byte as before; the result: over all keys."""
    for mask in ({"causal": True}, {}, {"window": (40, 0)}):
        case = main_dims(
            Batch(
                f"append {why}, {layout}, {rotary or 'no'} rotary, {mask}",
                queries,
                keys,
                call="cache",
                dense_q=len(set(queries)) == 1,
                heads_q=8,
                num_splits=0,
                extra_k=9 if layout.startswith("dense") else 0,
                **LAYOUTS[layout],
                **mask,
            )
        )
        setup = appended(case, new, why == "ragged", rotary)
        q_before = setup.before.q.clone()
        results = attend(setup.before, **setup.arguments)
        for name in ("k", "v"):
            found, wanted = getattr(setup.before, name), getattr(setup.after, name)
            if rotary and name == "k":  # another order of multiply and add may round to the neighbour
                off = found.float() - wanted.float()
                good = bool((off.abs() <= wanted.float().abs() * 2**-7 + 1e-6)[~wanted.isnan()].all())
                good = good and torch.equal(found.isnan(), wanted.isnan())
            else:
                good = same_bits(found, wanted)
            if not good:
                different = (bits(found) != bits(wanted)).nonzero()
                fail(case, f"the cache of {name} differs in {len(different)} elements, first {different[0].tolist()}")
        if not same_bits(setup.before.q, q_before):
            fail(case, "q was modified")
        judged = batches.verdict(setup.after, *results)
        if not judged.result:
            fail(case, judged.result.message)


def test_appended_keys_beyond_the_capacity_are_dropped():
    for layout in ("dense", "pages of 16", "pages of 1"):
        case = main_dims(Batch(f"no room, {layout}", (2,) * 3, (64, 62, 30), call="cache", dense_q=True,
                               **LAYOUTS[layout]))  # fmt: skip
        made = make(case)
        expected_k, expected_v = made.k.clone(), made.v.clone()
        capacity = made.k.shape[1] if layout == "dense" else made.lengths["page_table"].shape[1] * case.page_size
        lengths = torch.full((3,), capacity, dtype=torch.int32, device=support.DEVICE)
        new = torch.ones(3, 2, case.heads_k, case.head_dim, dtype=made.k.dtype, device=support.DEVICE)
        if layout != "dense":  # the last pages of shorter sequences are nobody's
            assert bool((made.lengths["page_table"] < 0).any() or (made.lengths["page_table"] > made.k.shape[0]).any())
        attend(made, cache_seqlens=lengths, k=new, v=new)
        if not same_bits(made.k, expected_k) or not same_bits(made.v, expected_v):
            fail(case, "something was written although nothing fits")
        if layout != "dense":
            lengths = torch.full((3,), 64, dtype=torch.int32, device=support.DEVICE)  # sequence 2 has no pages there
            attend(made, cache_seqlens=lengths, k=new, v=new)
            changed = (bits(made.k) != bits(expected_k)).any(-1).any(-1).nonzero()
            owned = made.lengths["page_table"]
            valid = {int(p) for p in owned.flatten() if 0 <= p < made.k.shape[0]}
            if not {int(p) for p in changed[:, 0]} <= valid:
                fail(case, "a page of nobody was written")


def test_rotary_seqlens_replace_the_lengths():
    case = main_dims(Batch("rotary at other positions", (1,) * 3, (5, 70, 300), call="cache", keys="paged",
                           dense_q=True, causal=True))  # fmt: skip
    setup = appended(case, (1,) * 3, False, "interleaved")
    again = appended(case, (1,) * 3, False, "interleaved")
    expected = attend(setup.before, **setup.arguments)
    same = {**again.arguments, "rotary_seqlens": again.arguments["cache_seqlens"].clone()}
    require_same(case, "rotary_seqlens as the lengths", attend(again.before, **same), expected)
    other = appended(case, (1,) * 3, False, "interleaved")
    moved = {**other.arguments, "rotary_seqlens": other.arguments["cache_seqlens"] + 9}
    out, _ = attend(other.before, **moved)
    if same_bits(out, expected[0]):
        fail(case, "rotary_seqlens changed nothing")


def test_results_are_allocated():
    case = main_dims(Batch("out and LSE made by the call", (3,) * 4, (40, 50, 600, 3), call="cache", keys="paged",
                           dense_q=True, causal=True, num_splits=0))  # fmt: skip
    made = make(case)
    expected = judged_results(made)
    require_same(case, "allocated", attend(made, out=None, softmax_lse=None), expected)
    only = hopper_attention.flash_attn_with_kvcache(made.q, made.k, made.v, causal=True, **made.lengths)
    require_same(case, "only out", (only, expected[1]), expected)
