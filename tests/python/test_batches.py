"""The harness of the gpu tests for varlen, paged and cache calls, proven on the CPU reference: right answers pass, wrong
ones are rejected, and what is never to be touched is watched.
"""

from __future__ import annotations

import collections
import dataclasses

import pytest

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
from gpu import appended, batches, support  # noqa: E402
from gpu.batches import Batch, attend, make, verdict  # noqa: E402
from gpu.test_random_batches import BATCHES, LARGE_SIZES, RATIOS, SPLITS, random_batch  # noqa: E402


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(support, "DEVICE", "cpu")
    monkeypatch.setattr(support, "WORST", support.Worst())


@pytest.mark.parametrize("part", range(4))
def test_the_reference_passes_random_batches(part):
    assert batches.judge_all(random_batch(seed, 1 << 14, 1 << 14) for seed in range(part, 160, 4)) == 40


def test_random_batches_cover_what_the_issues_name():
    seen = collections.defaultdict(set)
    for seed in range(min(BATCHES, 1500)):
        batch = random_batch(seed)
        for name in (
            "num_splits",
            "size",
            "call",
            "keys",
            "causal",
            "metadata",
            "batch_invariant",
            "cp_world",
            "poison",
        ):
            seen[name].add(getattr(batch, name))
        seen["ratio"].add(batch.heads_q // batch.heads_k)
        seen["leftpad"].add(batch.leftpad > 0)
        seen["seqused_q"].add(batch.extra_q > 0)
        if batch.keys == "paged":
            seen["page_size"].add(batch.page_size)
            seen["beside a page"] |= {k % batch.page_size for k in batch.k_lengths if batch.page_size == 16}
        seen["mask"] |= {
            name
            for name in ("window", "chunk", "softcap", "sinks")
            if getattr(batch, name) not in (0, 0.0, "", (-1, -1))
        }
        seen["length"] |= {min(k, 1000) for k in batch.k_lengths}
    assert seen["ratio"] == set(RATIOS) and seen["num_splits"] == set(SPLITS)
    assert seen["page_size"] >= {1, 4, 7, 8, 16, 24, 64, 128, 256}
    assert seen["beside a page"] >= {0, 1, 15} and seen["length"] >= {0, 1, 1000}
    assert seen["size"] >= {1, 31, 32, 33, 255, 256, 257, 4096}
    assert seen["mask"] == {"window", "chunk", "softcap", "sinks"}
    for name in ("causal", "metadata", "batch_invariant", "leftpad", "seqused_q"):
        assert seen[name] == {False, True}, name


def test_sequences_all_over_large_random_batches_have_keys():
    """Where a kernel's second half of a batch has nothing to compute, no mistake in it is seen."""
    upper = collections.defaultdict(list)  # of the sequences of the upper half, what share has queries and keys
    for seed in range(min(BATCHES, 1500)):
        batch = random_batch(seed)
        if batch.size in LARGE_SIZES:
            half = batch.size // 2
            pairs = list(zip(batch.q_lengths[half:], batch.k_lengths[half:], strict=True))
            upper[batch.size].append(sum(q > 0 and k > 0 for q, k in pairs) / len(pairs))
    assert set(upper) == set(LARGE_SIZES)
    for size, shares in upper.items():
        assert sum(share > 0 for share in shares) >= 0.8 * len(shares), (size, shares)
        assert sum(share >= 0.25 for share in shares) >= 0.4 * len(shares), (size, shares)


LENGTHS = {"q_lengths": (1, 5, 0, 40, 3), "k_lengths": (70, 33, 50, 40, 0), "head_dim": 64}
RIGHT = [
    Batch("packed", **LENGTHS, causal=True, heads_q=8),
    Batch("packed, lengths from seqused", **LENGTHS, extra_q=4, extra_k=6, heads_q=8),
    Batch("paged", **LENGTHS, keys="paged", page_size=8, causal=True, window=(20, 0), sinks="fp32", heads_q=8),
    Batch("cache, leftpad", **LENGTHS, call="cache", keys="dense", leftpad=5, batch_idx=True, chunk=16, heads_q=8),
    Batch("cache in pages", **LENGTHS, call="cache", keys="paged", page_size=7, softcap=3.0, heads_q=8),
    Batch("context parallel", **LENGTHS, keys="paged", cp_world=3, cp_rank=1, causal=True, heads_q=8),
    Batch("dense queries", (4,) * 3, (9, 33, 0), call="cache", keys="dense", dense_q=True, causal=True, heads_q=16),
]


def lengths_changed(made, name, by):
    given = made.lengths.get(name)
    return None if given is None else {name: (given + by).clamp(min=0).to(torch.int32)}


def a_key_too_many(made):
    if made.batch.cp_world > 1:
        return None  # the total over all ranks hides it
    return lengths_changed(made, "seqused_k", 1) or lengths_changed(made, "cache_seqlens", 1)


def shifted_pages(made):
    table = made.lengths.get("page_table")
    return None if table is None else {"page_table": table.roll(1, 0).contiguous()}


def one_page_stale(made):
    table = made.lengths.get("page_table")
    if table is None:
        return None
    changed = table.clone()
    last = (made.batch.k_lengths[0] - 1) // made.batch.page_size
    changed[0, last] = table[0, 0]
    return {"page_table": changed}


DEFECTS = {
    "newest key dropped": lambda m: lengths_changed(m, "seqused_k", -1) or lengths_changed(m, "cache_seqlens", -1),
    "a key too many": a_key_too_many,
    "left padding ignored": lambda m: {"cache_leftpad": None} if m.leftpad is not None else None,
    "one slot of padding too many": lambda m: lengths_changed(m, "cache_leftpad", 1),
    "pages of the neighbour": shifted_pages,
    "one stale page": one_page_stale,
    "rows of the cache in order": lambda m: (
        {"cache_batch_idx": torch.arange(m.batch.size, dtype=torch.int32)} if m.batch.batch_idx else None
    ),
    "queries behind seqused_q": lambda m: lengths_changed(m, "seqused_q", 1),
    "mask off by one": lambda m: {"causal": False, "window_size": (m.batch.window[0], 1)} if m.batch.causal else None,
    "scale off by 0.5 %": lambda m: {"softmax_scale": m.batch.head_dim**-0.5 * 1.005},
    "no sinks": lambda m: {"s_aux": None} if m.s_aux is not None else None,
    "no softcap": lambda m: {"softcap": 0.0} if m.batch.softcap else None,
    "no chunks": lambda m: {"attention_chunk": 0} if m.batch.chunk else None,
    "wrong rank": lambda m: {"cp_rank": 0} if m.batch.cp_world > 1 else None,
}


@pytest.mark.parametrize("batch", RIGHT, ids=lambda b: b.why)
def test_a_right_answer_passes(batch):
    made = make(batch)
    judged = verdict(made, *attend(made))
    assert judged.result, judged.result.message
    assert judged.rows == sum(batch.q_lengths) * batch.heads_q


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_wrong_argument_is_rejected(defect):
    applied = 0
    for batch in RIGHT:
        made = make(batch)
        changed = DEFECTS[defect](made)
        if changed is None:
            continue
        applied += 1
        assert not verdict(made, *attend(made, **changed)).result, batch.why
    assert applied


@pytest.mark.parametrize("batch", RIGHT, ids=lambda b: b.why)
def test_a_wrong_element_is_rejected(batch):
    made = make(batch)
    out, lse = attend(made)
    row = next(i for i, counts in enumerate(batches.rows_that_count(made)) if counts)
    flat_out, flat_lse = batches.by_row(made, out, lse)
    spoiled = out.clone()
    batches.by_row(made, spoiled, lse)[0][row, 1, 5] += 0.2
    judged = verdict(made, spoiled, lse)
    assert not judged.result and "head 1, row 0, column 5" in judged.result.message
    spoiled = lse.clone()
    spoiled[(2, row) if lse.dim() == 2 else (0, 2, row)] += 1e-3
    judged = verdict(made, out, spoiled)
    assert not judged.result and "head 2, row 0" in judged.result.message
    assert flat_out.shape[:2] == flat_lse.shape


@pytest.mark.parametrize("batch", [b for b in RIGHT if not b.dense_q], ids=lambda b: b.why)
def test_a_row_of_no_sequence_is_watched(batch):
    made = make(batch)
    unowned = (~batches.rows_that_count(made)).nonzero().flatten()
    assert len(unowned) == batch.tail_q + batch.extra_q * batch.size
    for row in (int(unowned[0]), int(unowned[-1])):
        out, lse = attend(made)
        out[row, 0, 0] = 0.0
        assert "rows of no sequence" in verdict(made, out, lse).result.message
        out, lse = attend(made)
        lse[1, row] = 0.0
        assert not verdict(made, out, lse).result


def test_memory_that_does_not_count_is_poison():
    for batch in RIGHT:
        made = make(batch)
        used = torch.zeros(made.k.shape[0] * (made.k.shape[1] if made.k.dim() == 4 else 1), dtype=torch.bool)
        used[made.slots] = True
        assert int(used.sum()) == sum(batch.k_lengths), batch.why
        k = made.k.reshape(-1, *made.k.shape[-2:])
        assert bool(k[~used].isnan().all()) and not bool(k[used].isnan().any())
        q = made.q.reshape(-1, *made.q.shape[-2:])
        counts = batches.rows_that_count(made)
        assert bool(q[~counts].isnan().all()) and not bool(q[counts].isnan().any())


def test_small_batches_are_judged_by_rms_together():
    pool = batches.Pool([1.5] * 30)
    assert "median RMS ratio 1.5" in pool.problem()
    assert batches.Pool([1.5] * 3 + [1.0] * 30).problem() == ""


def test_reproduction_lines_make_the_same_batch():
    batch = dataclasses.replace(RIGHT[2], seed=7)
    text = batch.line()
    assert eval(text[text.index("judge(") + 6 : -2], {"Batch": Batch}) == batch
    made = random_batch(12)
    assert "gpu.test_random_batches import *; judge(random_batch(12))" in made.line()
    assert "random_batch" not in made.but(page_size=8).line()


@pytest.mark.parametrize("batch", RIGHT, ids=lambda b: b.why)
def test_one_sequence_alone_and_another_order_are_the_same_problems(batch):
    made = make(batch)
    together = attend(made)
    for b in range(batch.size):
        one = batches.alone(made, b)
        results = attend(one)
        assert verdict(one, *results).result
        if batch.q_lengths[b]:
            batches.require_same(
                batch, "alone", batches.of_sequence(one, results, 0), batches.of_sequence(made, together, b)
            )
    order = list(range(batch.size))[::-1]
    other = batches.permuted(made, order)
    results = attend(other)
    assert verdict(other, *results).result
    for place, b in enumerate(order):
        found = batches.of_sequence(other, results, place)
        batches.require_same(batch, "permuted", found, batches.of_sequence(made, together, b))
        rows, moved = (
            x.slots[x.k_starts[i] : x.k_starts[i] + batch.k_lengths[b]] for x, i in ((made, b), (other, place))
        )
        k, k_moved = (x.k.reshape(-1, *x.k.shape[-2:]) for x in (made, other))
        assert torch.equal(k[rows], k_moved[moved]), f"sequence {b} has lost its keys"


def test_check_metadata_is_silent_about_right_batches():
    for seed in range(60):
        batch = random_batch(seed, 1 << 12, 1 << 12)
        made = make(batch)
        mask = {"causal": batch.causal, "window_size": batch.window, "attention_chunk": batch.chunk}
        hopper_attention.check_metadata(made.q, made.k, **made.lengths)
        hopper_attention.check_metadata(made.q, made.k, **made.lengths, **mask)


@pytest.mark.parametrize("batch", [b for b in RIGHT if b.call == "cache"], ids=lambda b: b.why)
def test_check_metadata_is_silent_about_right_appends(batch):
    for seed in range(5):
        call = appended.append(batch, seed, packed=not batch.dense_q)
        starts = call.given.get("cu_seqlens_k_new")
        given = {**call.made.lengths, "cu_seqlens_k_new": starts, "k_new": call.given["k"]}
        hopper_attention.check_metadata(call.made.q, call.made.k, **given)
