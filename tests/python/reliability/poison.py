"""Whatever lies in memory that a call does not use, it never reaches a result, and nothing but results is written.

Each case runs twice. Clean: zeros in all that is unused. Poisoned: NaN, infinity or garbage in rows of q of no sequence,
rows past the lengths, keys that no query of their sequence sees (before windows, after the diagonal, of sequences
without queries), pages of nobody, gaps of strides, the workspace and `out`; ids far out of range in unused slots of the
page table and, in every second case, in slots of pages that no query sees; slots of a cache that keys are appended to;
parts without keys that are merged. Results must have the same bits; rows of no sequence and slots of no key keep their
poison, the bands around out, LSE, workspace and metadata and all inputs their bytes.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch

import hopper_attention
from gpu import batches, support
from gpu.batches import LSE_POISON, POISON_BITS, POISONS, Batch, Made, int64
from gpu.layouts import surrounded
from gpu.support import Case, bits
from gpu.test_random import random_case
from gpu.test_random_batches import random_batch
from hopper_attention.testing import gates
from reliability._memory import Arena, different, watched
from reliability.harness import Budget, Failures, result

TITLE = "Poisoned memory: bits of the clean run, bands and inputs intact"
NEEDS = "gpu"
COUNT = 1000
SECONDS = 120
PARTS = 2

KINDS = ("nan", "inf", "garbage")
JUNK_IDS = (batches.UNUSED_SLOT, -1, -(2**31), 2**31 - 1)
# Of ten cases two call flash_attn_func, one appends, and one in twenty merges; the others are random batches.
DENSE, APPENDS, MERGES = (4, 9), 6, 12
SMALL = 1 << 14  # scores and elements of K of a case on the CPU


def run(budget: Budget) -> dict[str, Any]:
    failures, cases, arena = Failures(), 0, Arena(0xA5, 16 << 20)
    counts = {"guarded_workspaces": 0, "poisoned_keys": 0, "dense_cases": 0, "appends": 0, "merges": 0}
    for number in budget.numbers():
        cases += 1
        try:
            problem = problem_of(number, budget.seed + number, arena, counts)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            failures.add(f"case {number}: {problem}\n{reproduction(number, budget.seed + number)}")
    if batches.has_schedules() and cases > 50 and not counts["guarded_workspaces"]:
        failures.add("no workspace was seen: nothing guards what the library allocates")
    return result(cases, failures, **counts)


def problem_of(number: int, seed: int, arena: Arena, counts: dict[str, int]) -> str:
    """ "" or what was found."""
    kind = KINDS[number % 3]
    if number % 10 in DENSE and support.MAIN:
        counts["dense_cases"] += 1
        return dense_problem(dense_case(seed), kind, arena)
    if number % 10 == APPENDS:
        counts["appends"] += 1
        return append_problem(seed, kind, arena)
    if number % 20 == MERGES:
        counts["merges"] += 1
        return merge_problem(seed, kind, arena)
    return batch_problem(batch_of(seed), kind, number % 2 == 0, arena, counts)


def reproduction(number: int, seed: int) -> str:
    return (
        'reproduce: PYTHONPATH="tests/python:$PYTHONPATH" python -c "import collections; '
        "from reliability.poison import *; "
        f'print(problem_of({number}, {seed}, Arena(0xA5), collections.Counter()))"'
    )


def batch_of(seed: int) -> Batch:
    return random_batch(seed) if support.DEVICE == "cuda" else random_batch(seed, SMALL, SMALL)


def junk_id(batch: Batch) -> int:
    """By twos, since odd and even seeds have other pages poisoned."""
    return JUNK_IDS[batch.seed // 2 % len(JUNK_IDS)]


def dense_case(seed: int) -> Case:
    case = random_case(seed)
    if support.DEVICE == "cuda":
        return case
    return dataclasses.replace(case, batch=1, seqlen_q=case.seqlen_q % 70 + 1, seqlen_k=case.seqlen_k % 70 + 1)


def never_seen(made: Made) -> torch.Tensor:
    """(rows of truth_k,) bool: keys that no query of their sequence sees."""
    batch = made.batch
    unseen = torch.ones(len(made.truth_k), dtype=torch.bool, device=support.DEVICE)
    for sequences, first, last in batches.blocks(batch):
        chosen = int64(sequences)
        keys = max(1, *(batch.k_lengths[b] for b in sequences))
        row = torch.arange(first, last, device=support.DEVICE)
        key = torch.arange(keys, device=support.DEVICE)
        hidden = batches.hidden_keys(made, chosen, row, keys)
        hidden = (hidden | (row >= made.q_lengths[chosen][:, None])[:, :, None]).all(1)
        counts = key < made.k_lengths[chosen][:, None]
        place = (made.k_starts[chosen][:, None] + key)[counts]
        unseen[place] &= hidden[counts]
    return unseen


def set_pages(made: Made, unseen: torch.Tensor | None, junk: int) -> None:
    """Writes `junk` into slots of the page table that hold no key; with `unseen`, no key that a query sees."""
    table = made.lengths["page_table"]
    batch = made.batch
    total = len(made.truth_k)
    sequence = torch.arange(batch.size, device=support.DEVICE).repeat_interleave(made.k_lengths, output_size=total)
    slot = torch.arange(total, device=support.DEVICE) - made.k_starts[sequence]
    if made.leftpad is not None:
        slot = slot + made.leftpad.long()[sequence]
    counts = torch.ones(total, dtype=torch.bool, device=support.DEVICE) if unseen is None else ~unseen
    needed = torch.zeros_like(table, dtype=torch.bool)
    needed[sequence[counts], slot[counts] // batch.page_size] = True
    made.lengths["page_table"] = torch.where(needed, table, junk).to(torch.int32)


def inputs_of(made: Made) -> dict[str, torch.Tensor]:
    named = {"q": made.q, "k": made.k, "v": made.v, "s_aux": made.s_aux, **made.lengths}
    return {name: x for name, x in named.items() if isinstance(x, torch.Tensor)}


def batch_problem(batch: Batch, kind: str, freed_pages: bool, arena: Arena, counts: dict[str, int]) -> str:
    """ "" or what was found."""
    clean, dirty = (batches.make(dataclasses.replace(batch, poison=poison)) for poison in ("zero", kind))
    unseen = never_seen(dirty)
    for name in ("k", "v"):
        batches.put_rows(getattr(dirty, name), dirty.slots[unseen], POISONS[kind])
    counts["poisoned_keys"] += int(unseen.sum())
    if batch.keys == "paged":
        set_pages(clean, None, 0)
        set_pages(dirty, unseen if freed_pages else None, junk_id(batch))
    with watched(inside=0) as allocations:
        expected = batches.attend(clean)
    counts["guarded_workspaces"] += allocations.workspace_bytes > 0
    before = {name: x.clone() for name, x in inputs_of(dirty).items()}
    results = batches.new_results(dirty)
    arena.clear(*results)
    results = tuple(arena.take(x) for x in results)
    with watched(inside=0xFF) as allocations:
        batches.attend(dirty, results)
    rows = batches.rows_that_count(dirty)
    found, wanted = (batches.by_row(dirty, *x) for x in (results, expected))
    answers = {
        "elements of out differ from the clean run": different(found[0][rows], wanted[0][rows]),
        "elements of LSE differ from the clean run": different(found[1][rows], wanted[1][rows]),
        "elements of out were not written": (bits(found[0][rows]) == POISON_BITS).sum(),
        "elements of LSE were not written": (found[1][rows] == LSE_POISON).sum(),
        "elements were written in rows of no sequence": batches.elsewhere_written(dirty, *found),
        "bytes beside out and LSE were written": arena.broken(),
        "bytes beside workspace and metadata were written": allocations.broken(),
    }
    for name, x in inputs_of(dirty).items():
        answers[f"elements of the input {name} were changed"] = different(x, before[name])
    return said(answers)


def dense_problem(case: Case, kind: str, arena: Arena) -> str:
    """ "" or what was found."""
    tensors = support.make_inputs(case)
    expected = support.attend(case, tensors)
    options = {"causal": case.causal, "window_size": case.window, "attention_chunk": case.chunk}
    begin, end = gates.visible_intervals(case.seqlen_q, case.seqlen_k, **options)
    seen = end > begin
    low, high = (int(begin[seen].min()), int(end[seen].max())) if bool(seen.any()) else (0, 0)
    dirty = {**tensors, **{name: surrounded(tensors[name]) for name in ("q", "k", "v")}}
    for name in ("k", "v"):
        dirty[name][:, :low] = POISONS[kind]
        dirty[name][:, high:] = POISONS[kind]
    before = support.snapshot(dirty)
    arena.clear(*expected)
    out, lse = (arena.room(tuple(x.shape), x.dtype) for x in expected)
    out.view(torch.int16).fill_(POISON_BITS)
    lse.fill_(LSE_POISON)
    with watched(inside=0xFF) as allocations:
        support.attend(case, dirty, out=out, softmax_lse=lse)
    answers = {
        "elements of out differ from the clean run": different(out, expected[0]),
        "elements of LSE differ from the clean run": different(lse, expected[1]),
        "bytes beside out and LSE were written": arena.broken(),
        "bytes beside the workspace were written": allocations.broken(),
    }
    for name, x in before.items():
        answers[f"elements of the input {name} were changed"] = different(dirty[name], x)
    return said(answers)


def append_problem(seed: int, kind: str, arena: Arena) -> str:
    """A cache call that appends, among poison: "" or what was found."""
    r = random.Random(seed)
    new, size, most = r.randint(1, 4), r.choice((1, 3, 8, 33)), 900 if support.DEVICE == "cuda" else 30
    keys = r.choice(("paged", "paged", "dense"))
    batch = batches.main_dims(
        Batch(
            f"{new} keys appended among poison",
            (r.choice((1, 1, new)),) * size,
            tuple(new + r.choice((0, 1, 15, 16, r.randint(1, most))) for _ in range(size)),
            call="cache",
            dense_q=True,
            keys=keys,
            page_size=r.choice((1, 4, 16, 24, 128)),
            extra_k=5 if keys == "dense" else 0,
            heads_q=8,
            heads_k=r.choice((1, 2, 8)),
            dtype=r.choice(("bf16", "fp16")),
            causal=True,
            num_splits=r.choice((0, 1, 7)),
            seed=seed,
        )
    )
    clean, dirty = (batches.make(batch.but(poison=poison)) for poison in ("zero", kind))
    wanted_cache = dirty.k.clone(), dirty.v.clone()
    last = dirty.k_starts[:, None] + dirty.k_lengths[:, None] - new + torch.arange(new, device=support.DEVICE)
    given = {
        "k": dirty.truth_k[last],
        "v": dirty.truth_v[last],
        "cache_seqlens": (dirty.k_lengths - new).to(torch.int32),
    }
    for made, value in ((clean, 0.0), (dirty, POISONS[kind])):
        for name in ("k", "v"):
            batches.put_rows(getattr(made, name), made.slots[last.flatten()], value)
    with watched(inside=0):
        expected = batches.attend(clean, **given)
    before = {name: x.clone() for name, x in inputs_of(dirty).items() if name not in "kv"}
    results = batches.new_results(dirty)
    arena.clear(*results)
    results = tuple(arena.take(x) for x in results)
    with watched(inside=0xFF) as allocations:
        batches.attend(dirty, results, **given)
    answers = {
        "elements of out differ from the clean run": different(results[0], expected[0]),
        "elements of LSE differ from the clean run": different(results[1], expected[1]),
        "elements of the cache of k are wrong": different(dirty.k, wanted_cache[0]),
        "elements of the cache of v are wrong": different(dirty.v, wanted_cache[1]),
        "bytes beside out and LSE were written": arena.broken(),
        "bytes beside the workspace were written": allocations.broken(),
    }
    for name, x in before.items():
        answers[f"elements of the input {name} were changed"] = different(inputs_of(dirty)[name], x)
    return said(answers)


def merge_problem(seed: int, kind: str, arena: Arena) -> str:
    """combine of parts of which some have no keys and hold poison: "" or what was found."""
    r = random.Random(seed)
    generator = torch.Generator(support.DEVICE).manual_seed(seed)
    parts, rows, columns = (
        r.choice((1, 2, 7, 40)),
        (r.randint(1, 3), r.randint(1, 70), r.randint(1, 9)),
        8 * r.randint(1, 32),
    )
    dtype = r.choice((torch.float32, torch.bfloat16, torch.float16))
    out = torch.randn(parts, *rows, columns, generator=generator, device=support.DEVICE)
    lse = torch.randn(parts, *rows, generator=generator, device=support.DEVICE)
    dead = torch.rand(lse.shape, generator=generator, device=support.DEVICE) < 0.3
    lse = torch.where(dead, r.choice((-torch.inf, torch.inf)), lse)
    clean, dirty = (torch.where(dead[..., None], value, out) for value in (0.0, POISONS[kind]))
    expected = hopper_attention.flash_attn_combine(clean, lse, out_dtype=dtype)
    before = dirty.clone(), lse.clone()
    arena.clear(expected[0])
    place = arena.room(tuple(expected[0].shape), dtype)
    with watched(inside=0xFF) as allocations:
        found = hopper_attention.flash_attn_combine(dirty, lse, out=place)
    return said(
        {
            "elements of out differ from the clean run": different(found[0], expected[0]),
            "elements of LSE differ from the clean run": different(found[1], expected[1]),
            "bytes beside out were written": arena.broken(),
            "bytes beside the LSE were written": allocations.broken(),
            "elements of out_partial were changed": different(dirty, before[0]),
            "elements of lse_partial were changed": different(lse, before[1]),
        }
    )


def said(answers: dict[str, torch.Tensor]) -> str:
    """The answers that are not 0. One synchronisation."""
    numbers = torch.stack([x.long() for x in answers.values()]).tolist()
    return ", ".join(f"{n} {text}" for text, n in zip(answers, numbers, strict=True) if n)
