"""A call with its tensors, whichever function it is of, for sections that only repeat it and compare bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gpu import batches, support
from gpu.batches import Batch
from gpu.support import Case
from hopper_attention.testing.gates import GateResult
from reliability._memory import different

Results = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Subject:
    """call(results, **given) fills (out, lse); new_results() makes them, full of poison."""

    line: str
    call: Callable[..., Any]
    new_results: Callable[[], Results]
    judge: Callable[[Results], GateResult]

    def expected(self) -> Results:
        results = self.new_results()
        self.call(results)
        return results


def small(shape: Case | Batch) -> Case | Batch:
    """Of a shape what the reference on the CPU can repeat."""
    if isinstance(shape, Case):
        return dataclasses.replace(shape, batch=1, seqlen_q=min(shape.seqlen_q, 9), seqlen_k=40)
    return shape.but(
        q_lengths=tuple(min(n, 1 if shape.dense_q else 3) for n in shape.q_lengths),
        k_lengths=tuple(min(n, 20) for n in shape.k_lengths),
    )


def subject(of: Case | Batch, metadata: bool = False) -> Subject:
    """metadata: of a step, made once and passed to every call; calls on other streams need a subject of their own."""
    if isinstance(of, Case):
        return of_case(support.main_dims(of))
    return of_batch(batches.main_dims(of), metadata)


def of_case(case: Case) -> Subject:
    tensors = support.make_inputs(case)
    shape = (case.batch, case.seqlen_q, case.heads_q, case.dims[1])

    def new_results() -> Results:
        out = torch.full(shape, batches.POISON_BITS, dtype=torch.int16, device=support.DEVICE)
        lse = torch.full((case.batch, case.heads_q, case.seqlen_q), batches.LSE_POISON, device=support.DEVICE)
        return out.view(support.DTYPES[case.dtype]), lse

    return Subject(
        case.line(),
        lambda results, **given: support.attend(case, tensors, out=results[0], softmax_lse=results[1], **given),
        new_results,
        lambda results: support.verdict(case, tensors, *results),
    )


def of_batch(batch: Batch, metadata: bool) -> Subject:
    made = batches.make(dataclasses.replace(batch, metadata=False))
    options = {}
    if metadata and batches.has_schedules():
        options["scheduler_metadata"] = batches.schedule(made)
    return Subject(
        batch.line(),
        lambda results, **given: batches.attend(made, results, **{**options, **given}),
        lambda: batches.new_results(made),
        lambda results: batches.verdict(made, *results).result,
    )


def differences(found: Results, expected: Results) -> torch.Tensor:
    """How many elements of out and LSE have other bits, on the device."""
    return different(found[0], expected[0]) + different(found[1], expected[1])


def poison(results: Results) -> None:
    results[0].view(torch.int16).fill_(batches.POISON_BITS)
    results[1].fill_(batches.LSE_POISON)
