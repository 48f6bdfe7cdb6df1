"""Lengths, page ids and schedules that lie: nothing outside the buffers is read or written, nothing hangs, the next call
is right.

Every tensor lies between bands of the byte 0xFF, as do workspace and results; what was written there is seen. What was
read there is seen, too: as floats the bands are NaN, while everything inside the buffers is finite, so a NaN in a result
came from outside. A case is a call that is malformed: `check_metadata` refuses it, or its schedule is not the right one;
lies that change nothing are no cases. Its right call is judged against float64. Each runs in a process of its own, a fork
of one that has loaded everything and never used the GPU; an alarm ends it after WATCHDOG seconds, whatever it waits for.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch

import hopper_attention
from gpu import appended, batches, support
from gpu.batches import LSE_POISON, POISON_BITS, Batch, Made
from gpu.support import bits, same_bits
from reliability._memory import Arena, synchronize, watched
from reliability.harness import Budget, Failures, result

TITLE = "Malformed metadata on the device: nothing outside the buffers, no hang, the next call right"
NEEDS = "gpu"
COUNT = 300
SECONDS = 240
PARTS = 8

WATCHDOG = 60  # seconds for one case, in which the GPU is used for the first time
FIRST = 90  # seconds for a process to load everything
BAND = 0xFF
NEW = 3  # keys that a sequence appends, at most
DRAWS = 50  # of lies, until one is malformed

# What lies; "append x" is x in a call that appends, "rotary x" in one that also rotates.
TARGETS = (
    "page_table",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_k",
    "seqused_q",
    "cache_seqlens",
    "cache_batch_idx",
    "cache_leftpad",
    "cp_tot_seqused_k",
    "scheduler_metadata",
    "append cache_seqlens",
    "append page_table",
    "append cache_batch_idx",
    "append cu_seqlens_k_new",
    "rotary rotary_seqlens",
    "rotary cache_seqlens",
    "rotary cu_seqlens_q",
    "scheduler_metadata",
    "page_table",
    "everything",
)
LIES = (
    "random bits",
    "zeros",
    "minus one",
    "largest",
    "smallest",
    "a million too many",
    "negative",
    "reversed",
    "one value random",
    "one bit flipped",
    "one value too large",
    "small random",
    "decreasing",
    "just past the end",
)


def run(budget: Budget) -> dict[str, Any]:
    failures, cases, processes = Failures(), 0, 0
    share = len(range(budget.part, budget.count, budget.parts))
    nursery: Nursery | None = None
    number = budget.part - budget.parts
    try:
        while cases < share and budget.left() > 0:
            number += budget.parts
            budget.alive(cases, share)
            nursery = nursery or Nursery()
            processes += 1
            answer = nursery.ask(budget.seed + number)
            cases += bool(answer["malformed"] or answer["problem"])
            if answer["problem"]:
                failures.add(f"case {number}: {answer['problem']}\n{reproduction(budget.seed + number)}")
            if nursery.lost:
                nursery = None
    finally:
        if nursery is not None:
            nursery.stop()
    return result(cases, failures, processes=processes, lies_that_change_nothing=processes - cases)


def reproduction(number: int) -> str:
    return (
        'reproduce: PYTHONPATH="tests/python:$PYTHONPATH" python -c '
        f'"from reliability.malformed_metadata import *; print(tell({number}))"'
    )


class Nursery:
    """A process that answers numbers of cases with what a fork of it found. lost: it cannot be asked again."""

    def __init__(self) -> None:
        paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        code = f"from reliability import malformed_metadata as m; m.serve({support.DEVICE!r})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.lost = False
        self.patience = FIRST
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def ask(self, number: int) -> dict[str, Any]:
        """malformed: whether it was a case; problem: "" or what was found."""
        said: list[str] = []
        try:
            self.process.stdin.write(f"{number}\n")
            self.process.stdin.flush()
            while True:
                line = self.lines.get(timeout=self.patience)
                if line is None:
                    return self.gone(f"the process that forks died, exit {self.process.wait()}: {tail(said)}")
                if line.startswith("@@"):
                    self.patience = WATCHDOG + 15  # more than the alarm of a fork
                    answer = json.loads(line[2:])
                    answer["problem"] += tail(said) if answer["problem"] else ""
                    return answer
                said.append(line)
        except queue.Empty:
            self.process.kill()
            return self.gone(f"no answer in {self.patience} s: {tail(said)}")
        except BrokenPipeError:
            return self.gone(f"the process that forks died before the case: {self.process.wait()}")

    def gone(self, problem: str) -> dict[str, Any]:
        self.lost = True
        return {"malformed": False, "problem": problem}

    def stop(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()


def tail(lines: list[str]) -> str:
    return "".join(lines)[-1500:]


def serve(device: str) -> None:
    """Numbers of cases from stdin, answers to stdout. Nothing here may use the GPU, or its forks could not."""
    support.DEVICE = device
    torch.set_num_threads(1)
    for line in sys.stdin:
        answer = in_a_fork(int(line))
        sys.stdout.write("@@" + json.dumps(answer) + "\n")
        sys.stdout.flush()


def in_a_fork(number: int) -> dict[str, Any]:
    """What `tell` finds in a process of its own, or what became of that."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(WATCHDOG)
        try:
            malformed, problem = tell(number)
        except BaseException as error:
            malformed, problem = True, f"{type(error).__name__}: {error}"
        os.write(writer, json.dumps({"malformed": malformed, "problem": problem[:3000]}).encode())
        os._exit(0)  # whatever the GPU still does
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGALRM:
        return {"malformed": True, "problem": f"no answer in {WATCHDOG} s\n"}
    if status or not said:
        return {"malformed": True, "problem": f"the process died, exit {status}\n"}
    return json.loads(said)


def base(target: str, r: random.Random) -> tuple[Batch, bool, bool]:
    """A batch in which `target` can lie, whether its call appends, whether it rotates."""
    size = r.choice((1, 2, 6, 9, 33))
    decode = r.random() < 0.4
    most = 2000 if support.DEVICE == "cuda" else 30
    q_lengths = tuple(1 if decode else r.choice((0, 1, 1, 5, 64, 200 if size < 10 else 3)) for _ in range(size))
    k_lengths = tuple(r.choice((0, 1, 64, 70, r.randint(1, most), most // 2)) for _ in range(size))
    if support.DEVICE != "cuda":
        q_lengths, k_lengths = tuple(min(q, 7) for q in q_lengths), tuple(min(k, 30) for k in k_lengths)
    name = target.split()[-1]
    appends, rotates = target.startswith(("append", "rotary")), target.startswith("rotary")
    if appends:
        k_lengths = tuple(k + NEW for k in k_lengths)
    cache = name.startswith("cache") or appends
    keys = r.choice(("paged", "paged", "packed")) if not cache else r.choice(("paged", "dense"))
    keys = {"page_table": "paged", "cu_seqlens_k": "packed", "cache_batch_idx": "dense"}.get(name, keys)
    batch = Batch(
        f"{target} lies",
        q_lengths,
        k_lengths,
        heads_q=8,
        heads_k=r.choice((1, 2, 8)),
        keys=keys,
        page_size=r.choice((1, 4, 16, 16, 24, 64, 128)),
        call="cache" if cache else "varlen",
        dense_q=cache and decode and not name.startswith("cu_seqlens"),
        extra_q=4 if name == "seqused_q" else 0,
        extra_k=9 if name == "seqused_k" and keys != "paged" else 0,
        batch_idx=name == "cache_batch_idx",
        leftpad=9 if name == "cache_leftpad" else 0,
        cp_world=2 if name == "cp_tot_seqused_k" else 1,
        causal=r.random() < 0.7,
        window=r.choice(((-1, -1), (-1, -1), (300, 0))),
        num_splits=r.choice((0, 0, 1, 7)),
        batch_invariant=r.random() < 0.3,
        dtype=r.choice(("bf16", "fp16")),
        poison="zero",
        seed=r.randrange(1 << 20),
    )
    dims = r.choice([d for d in support.HEAD_DIMS if d[0] % 16 == 0]) if r.random() < 0.3 else (128, 128)
    return batches.main_dims(batch.but(head_dim=dims[0], head_dim_v=dims[1])), appends, rotates


def lie(why: str, right: torch.Tensor, r: random.Random) -> torch.Tensor:
    """A wrong value of an int32 tensor."""
    wrong = right.clone().long().flatten()
    place = r.randrange(max(1, len(wrong)))
    most = int(wrong.abs().max()) if len(wrong) else 0
    generator = torch.Generator(right.device).manual_seed(r.randrange(1 << 30))

    def uniform(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, wrong.shape, generator=generator, device=right.device)

    if why == "random bits":
        wrong = uniform(-(2**31), 2**31)
    elif why == "zeros":
        wrong.zero_()
    elif why in ("minus one", "largest", "smallest"):
        wrong.fill_({"minus one": -1, "largest": 2**31 - 1, "smallest": -(2**31)}[why])
    elif why == "a million too many":
        wrong += 1_000_000
    elif why == "negative":
        wrong = -wrong - 1
    elif why == "reversed":
        wrong = wrong.flip(0)
    elif why == "one value random":
        wrong[place] = r.randrange(-(2**31), 2**31)
    elif why == "one bit flipped":
        wrong[place] = wrong[place] ^ (1 << r.randrange(31))
    elif why == "one value too large":
        wrong[place] = 2**30
    elif why == "small random":
        wrong = uniform(-2, most + 3)
    elif why == "decreasing":
        wrong = wrong.sort(descending=True).values
    elif why == "just past the end":
        wrong += 1
    else:
        raise ValueError(why)
    return wrong.clamp(-(2**31), 2**31 - 1).to(torch.int32).view(right.shape)


def with_new_keys(batch: Batch, rotates: bool) -> appended.Appended:
    """A call that appends the last keys of the batch, at least one; rotated from positions that it names, if at all."""
    rotary = ("halves", "interleaved")[batch.seed % 2] if rotates else ""
    for seed in itertools.count(batch.seed):
        call = appended.append(batch, seed, rotary, not batch.dense_q, NEW)
        if rotates:
            call.given.setdefault("rotary_seqlens", call.made.lengths["cache_seqlens"].clone())
        if sum(call.new) and (not rotates or int(call.given["rotary_seqlens"].min()) >= 0):
            return call


class Stage:
    """A batch whose tensors all lie in an arena, and its call."""

    def __init__(self, batch: Batch, appends: bool, rotates: bool) -> None:
        call = with_new_keys(batch, rotates) if appends else None
        made = batches.make(batch) if call is None else call.made
        self.batch, self.made, self.append = batch, made, call
        given = {} if call is None else call.given
        results = batches.new_results(made)
        tensors = [made.q, made.k, made.v, *results]
        tensors += [x for x in (*given.values(), *made.lengths.values()) if isinstance(x, torch.Tensor)]
        metadata = torch.zeros(1 + 4 * (batch.size + 4), dtype=torch.int32, device=made.q.device)
        self.arena = Arena(BAND, 1 << 20)
        self.arena.clear(*tensors, metadata)
        take = self.arena.take
        made.q, made.k, made.v = (take(x) for x in (made.q, made.k, made.v))
        made.lengths = {n: take(x) if isinstance(x, torch.Tensor) else x for n, x in made.lengths.items()}
        self.given = {n: take(x) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
        self.results = tuple(take(x) for x in results)
        self.kept = {"q": made.q.clone(), "k": made.k.clone(), "v": made.v.clone()}

    def add_metadata(self) -> None:
        self.given["scheduler_metadata"] = self.arena.take(batches.schedule(self.made))

    def target(self, name: str) -> torch.Tensor | None:
        return self.given.get(name, self.made.lengths.get(name))

    def call(self) -> int:
        """Bytes beside workspace, metadata and rotated q that were written."""
        self.results[0].view(torch.int16).fill_(POISON_BITS)
        self.results[1].fill_(LSE_POISON)
        with watched(BAND, inside=0) as allocations:
            batches.attend(self.made, self.results, **self.given)
        synchronize()
        return int(allocations.broken())

    def verdict(self) -> str:
        """What is wrong with the results of a right call, and with the cache after it."""
        made = self.made
        judged_q = made.q if self.append is None else self.append.judged_q
        judged = batches.verdict(dataclasses.replace(made, q=judged_q), *self.results).result
        if self.append is not None and not all(map(same_bits, (made.k, made.v), self.append.cache)):
            return "the cache is not what the append leaves"
        return "" if judged else judged.message

    def refused(self) -> str:
        """What `check_metadata` says of the call, "" if it is right."""
        known = inspect.signature(hopper_attention.check_metadata).parameters
        given = {n: x for n, x in {**self.made.lengths, **self.given}.items() if n in known and n not in "qkv"}
        try:
            hopper_attention.check_metadata(self.made.q, self.made.k, k_new=self.given.get("k"), **given)
        except ValueError as error:
            return str(error)
        return ""

    def restore(self) -> None:
        if self.append is not None:
            self.made.k.copy_(self.kept["k"])
            self.made.v.copy_(self.kept["v"])

    def damage(self) -> str:
        """What a call with a lie did beyond giving wrong numbers."""
        out, lse = self.results
        if int(self.arena.broken()):
            return f"{int(self.arena.broken())} bytes outside the buffers were written"
        if bool((out.isnan() & (bits(out) != POISON_BITS)).any() | lse.isnan().any()):
            return "a result is NaN: memory outside the buffers was read"
        made: Made = self.made
        if not same_bits(made.q, self.kept["q"]):
            return "q was written"
        for name in ("k", "v"):
            x = getattr(made, name)
            if self.append is not None and bool(x.isnan().any()):
                return f"the cache of {name} has NaN: memory outside the buffers was read"
            if self.append is None and not same_bits(x, self.kept[name]):
                return f"{name} was written"
        return ""


def tell(number: int) -> tuple[bool, str]:
    """(whether the call was malformed, "" or the damage) of a case."""
    r = random.Random(number)
    target = TARGETS[number % len(TARGETS)]
    why = LIES[number // len(TARGETS) % len(LIES)] if number < len(TARGETS) * len(LIES) else r.choice(LIES)
    name = target.split()[-1]
    batch, appends, rotates = base("page_table" if target == "everything" else target, r)
    stage = Stage(batch, appends, rotates)
    plain = not batch.extra_q and batch.cp_world == 1 and not appends  # what a schedule can be made for
    if batches.has_schedules() and plain and (name in ("scheduler_metadata", "everything") or r.random() < 0.3):
        stage.add_metadata()
    names = ["page_table", "cu_seqlens_q", "seqused_k", "scheduler_metadata"] if name == "everything" else [name]
    targets = {n: stage.target(n) for n in names}
    targets = {n: x for n, x in targets.items() if x is not None}
    if not targets:
        return False, ""
    said = f"{target}: {why}, {batch.size} sequences, keys {batch.keys}, page size {batch.page_size}, {batch.dims}"
    if refusal := stage.refused():
        return True, f"{said}: check_metadata refuses the right call: {refusal}"
    stage.call()
    expected = [x.clone() for x in (*stage.results, stage.made.k, stage.made.v)]
    if problem := stage.verdict():
        return True, f"{said}: the right call is wrong: {problem}"
    stage.restore()
    right = {n: x.clone() for n, x in targets.items()}
    wrong = tell_lies(stage, targets, why, r)
    if wrong is None:
        return False, ""
    beside = stage.call()
    problem = stage.damage()
    if beside:
        problem = f"{beside} bytes beside the workspace were written"
    for n, x in targets.items():
        if not problem and not torch.equal(x, wrong[n]) and n != "scheduler_metadata":
            problem = f"{n} itself was written"
        x.copy_(right[n])
    stage.restore()
    beside = stage.call()
    found = [*stage.results, stage.made.k, stage.made.v]
    if not problem and (beside or not all(same_bits(a, b) for a, b in zip(found, expected, strict=True))):
        problem = "the next call is wrong"
    return True, f"{said}: {problem}" if problem else ""


def tell_lies(
    stage: Stage, targets: dict[str, torch.Tensor], why: str, r: random.Random
) -> dict[str, torch.Tensor] | None:
    """Writes lies to the targets until the call is malformed; None, and the truth again, if no lie is."""
    right = {n: x.clone() for n, x in targets.items()}
    for _ in range(DRAWS):
        wrong = {n: lie(why, x, r) for n, x in right.items()}
        for n, x in targets.items():
            x.copy_(wrong[n])
        other_schedule = set(targets) == {"scheduler_metadata"} and not torch.equal(*map(only, (wrong, right)))
        if other_schedule or stage.refused():
            return wrong
        why = r.choice(LIES)
    for n, x in targets.items():
        x.copy_(right[n])
    return None


def only(values: dict[str, torch.Tensor]) -> torch.Tensor:
    (value,) = values.values()
    return value
