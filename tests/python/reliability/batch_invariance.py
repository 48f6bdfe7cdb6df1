"""With batch_invariant a sequence has the same bits alone, among its neighbours, in another order, and in padded batches.

A victim is one sequence of a random batch. It is computed in the batch and alone; every third batch also in another
order, every third with empty sequences behind it. Splits of fixed size cut only sequences with few queries and many
keys, which random batches rarely have: some sequences of most batches get them, and are victims first.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from gpu import batches, support
from gpu.batches import Batch, Made
from gpu.fixed_splits import MOST_ROWS, cut_sequences, plan_of
from gpu.test_random_batches import random_batch
from reliability._memory import different
from reliability.harness import Budget, Failures, result

TITLE = "Batch invariance: a sequence alone and with neighbours, the same bits"
NEEDS = "gpu"
COUNT = 2000
SECONDS = 120
PARTS = 2

MOST_VICTIMS = 8  # of one batch
SMALL = 1 << 14
SPLITS = (0, 1, 7)
LONG = (4095, 4096, 4097, 4225, 5000, 8191, 8193, 9000, 12289, 13000)  # keys around the cuts and between them
MOST_LONG = 8  # sequences of a batch that get so many
MOST_LONG_KV = 1 << 26  # elements of K with them, and of a dense cache, in which all sequences take as much
LEAST_CUT = 0.25  # of the victims
ENOUGH = 200  # victims of which that share is asked


def run(budget: Budget) -> dict[str, Any]:
    failures, cases, cut, reordered, padded = Failures(), 0, 0, 0, 0
    share = -(-budget.count // budget.parts)
    number = budget.part - budget.parts
    while cases < share and budget.left() > 0:
        number += budget.parts
        budget.alive(cases, share)
        batch = batch_of(budget.seed + number)
        if batch is None:
            continue
        try:
            made = batches.make(batch)
            together = batches.attend(made)
            victims = victims_of(batch, number, share - cases)
            cases += len(victims)
            cut += len(set(victims) & set(cut_sequences(batch)))
            answers = {f"sequence {b} alone": alone_differs(made, together, b) for b in victims}
            if number % 3 == 1:
                reordered += 1
                answers.update(reordered_differs(made, together, victims, number))
            if number % 3 == 2 and batch.keys == "paged" and batch.call == "varlen":
                padded += 1
                answers["with empty sequences behind"] = padded_differs(made, together, 1 + number % 40)
            counts = torch.stack(list(answers.values())).tolist() if answers else []
            problems = [f"{n} elements differ: {what}" for what, n in zip(answers, counts, strict=True) if n]
        except Exception as error:
            problems = [f"{type(error).__name__}: {error}"]
        for problem in problems:
            failures.add(f"{problem}\n{batch.line()}")
    if cases >= ENOUGH and cut < LEAST_CUT * cases:
        failures.add(f"only {cut} of {cases} victims have keys in several splits, at least {LEAST_CUT:.0%} are needed")
    return result(
        cases, failures, victims_in_several_splits=cut, batches_in_another_order=reordered, padded_batches=padded
    )


def batch_of(seed: int) -> Batch | None:
    """A random batch with neighbours and not too many of them, batch-invariant."""
    batch = random_batch(seed) if support.DEVICE == "cuda" else random_batch(seed, SMALL, SMALL)
    if not 2 <= batch.size <= 64:
        return None
    # By threes, since the number modulo 3 says what else is done with a batch.
    splits = SPLITS[seed // 3 % 3]
    batch = batch.but(batch_invariant=True, slack=max(batch.slack, 0), num_splits=splits, forced=())
    return with_long_sequences(batch, seed) if seed // 9 % 6 else batch


def with_long_sequences(batch: Batch, seed: int) -> Batch:
    """Some of its sequences, as many as memory allows, get few queries and many keys, which a mask mostly leaves visible.
    A dense q has as few queries of the others.
    """
    r = random.Random(seed)
    most_queries = MOST_ROWS // plan_of(batch).packed_heads
    q_lengths, k_lengths = list(batch.q_lengths), list(batch.k_lengths)
    if batch.dense_q and q_lengths[0] > most_queries:
        q_lengths = [r.randint(1, most_queries)] * batch.size
    for b in r.sample(range(batch.size), min(MOST_LONG, (batch.size + 1) // 2)):
        before, k_lengths[b] = k_lengths[b], r.choice(LONG)
        rows = sum(k_lengths) if batch.keys != "dense" else batch.size * max(k_lengths)
        if rows * batch.heads_k * batch.head_dim > MOST_LONG_KV:
            k_lengths[b] = before
        elif not batch.dense_q:
            q_lengths[b] = r.choice((1, r.randint(1, most_queries)))
    changes = {} if r.random() < 0.2 else {"window": (-1, 0) if batch.window != (-1, -1) else (-1, -1), "chunk": 0}
    return batch.but(q_lengths=tuple(q_lengths), k_lengths=tuple(k_lengths), **changes)


def victims_of(batch: Batch, seed: int, most: int) -> list[int]:
    """Sequences that have queries: some of those that are cut, then others, at random."""
    found = [b for b in range(batch.size) if batch.q_lengths[b]]
    random.Random(seed).shuffle(found)
    cut = set(cut_sequences(batch))
    found.sort(key=lambda b: b not in cut)
    return found[: min(MOST_VICTIMS, most)]


def pair_differs(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return different(found[0], expected[0]) + different(found[1], expected[1])


def alone_differs(made: Made, together: tuple[torch.Tensor, ...], b: int) -> torch.Tensor:
    single = batches.alone(made, b)
    found = batches.of_sequence(single, batches.attend(single), 0)
    return pair_differs(found, batches.of_sequence(made, together, b))


def reordered_differs(
    made: Made, together: tuple[torch.Tensor, ...], victims: list[int], seed: int
) -> dict[str, torch.Tensor]:
    order = list(range(made.batch.size))
    random.Random(seed).shuffle(order)
    other = batches.permuted(made, order)
    results = batches.attend(other)
    return {
        f"sequence {b} at place {order.index(b)}": pair_differs(
            batches.of_sequence(other, results, order.index(b)), batches.of_sequence(made, together, b)
        )
        for b in victims
    }


def padded_differs(made: Made, together: tuple[torch.Tensor, ...], more: int) -> torch.Tensor:
    lengths = dict(made.lengths)
    last = lengths["cu_seqlens_q"][-1:]
    lengths["cu_seqlens_q"] = torch.cat([lengths["cu_seqlens_q"], last.expand(more)])
    for name in ("seqused_q", "seqused_k", "cp_tot_seqused_k"):
        if lengths.get(name) is not None:
            lengths[name] = torch.nn.functional.pad(lengths[name], (0, more))
    lengths["page_table"] = torch.nn.functional.pad(lengths["page_table"], (0, 0, 0, more), value=batches.UNUSED_SLOT)
    found = batches.attend(made, **lengths, **no_metadata(made))
    return pair_differs(found, together)


def no_metadata(made: Made) -> dict[str, Any]:
    """A schedule of the batch does not fit the padded one."""
    return {"scheduler_metadata": None} if made.batch.metadata else {}
