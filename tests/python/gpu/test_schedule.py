"""get_scheduler_metadata against the plain model of schedule_model.py, bit for bit."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
import schedule_model  # noqa: E402
from gpu import batches, support  # noqa: E402
from gpu.batches import int32  # noqa: E402
from schedule_model import Mask  # noqa: E402

pytestmark = pytest.mark.gpu

# Around a warp, the fewest threads of the kernel, the most sequences of one thread block, and far beyond.
SIZES = (1, 2, 5, 16, 31, 32, 33, 255, 256, 257, 512, 513, 1000, 4096, 20000)
STEPS = 24  # of each size
MOST_PROMPTS = 40  # of a step, so that int32 holds the sum of all units
DIMS = ((64, 64), (72, 72), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
HEADS = ((8, 8), (8, 2), (12, 4), (40, 8), (7, 1), (64, 1), (128, 1))
KINDS = ("decode", "few queries", "mixed", "prompts", "dense")
MASKS = ("none", "causal", "window", "causal window", "chunk", "chunk and window")


@dataclass(frozen=True)
class Step:
    """Arguments of get_scheduler_metadata as numbers. queries: an int is a dense q; new: an int is max_seqlen_k_new."""

    seed: int
    dims: tuple[int, int]
    heads: tuple[int, int]
    mask: Mask
    queries: int | tuple[int, ...]
    cache: tuple[int, ...]
    leftpad: tuple[int, ...] | None
    new: int | tuple[int, ...]
    batch_invariant: bool

    @property
    def size(self) -> int:
        return len(self.cache)

    def q_lengths(self) -> np.ndarray:
        return np.broadcast_to(self.queries, self.size)

    def k_lengths(self) -> np.ndarray:
        """In the cache and new ones, without padding; a negative length counts as 0."""
        pad = 0 if self.leftpad is None else np.maximum(self.leftpad, 0)
        return np.maximum(0, np.maximum(self.cache, 0) + np.asarray(self.new) - pad)


@functools.cache
def shapes_of(*of: object) -> schedule_model.Shapes:
    return schedule_model.shapes_of(*of)


@functools.cache
def call_of(*of: int) -> schedule_model.Call:
    return schedule_model.call_of(*of)


def cache_length(r: random.Random) -> int:
    kind = r.randrange(6)
    edge = 64 * r.randint(0, 40) + r.choice((-1, 0, 1))
    return (edge, r.choice((-5, 0, 1)), r.randint(0, 300), r.randint(0, 9000), r.randint(0, 100_000), 4096)[kind]


def query_length(r: random.Random, kind: str, prompt: bool) -> int:
    if kind in ("prompts", "mixed") and prompt:
        return r.choice((r.randint(2, 200), r.randint(100, 4000)))
    if kind == "decode" or kind == "mixed":
        return r.choice((1, 1, 1, 0))
    return r.randint(0, 9)


def mask_of(r: random.Random, kind: str) -> Mask:
    left, right, chunk = (
        r.choice((0, 127, r.randint(0, 5000))),
        r.randint(0, 300),
        r.choice((1, 128, r.randint(1, 9000))),
    )
    return {
        "none": Mask(),
        "causal": Mask(right=0),
        "window": Mask(*r.choice(((left, right), (left, -1), (-1, right)))),
        "causal window": Mask(left, 0),
        "chunk": Mask(-1, r.choice((-1, 0)), chunk),
        "chunk and window": Mask(left, right, chunk),
    }[kind]


def random_step(size: int, number: int) -> Step:
    """The same on every machine."""
    seed = 100_000 * number + size
    r = random.Random(seed)
    kind = KINDS[number % len(KINDS)]
    prompts = set(r.sample(range(size), min(size, r.randint(1, MOST_PROMPTS))))
    new = r.choice((0, 0, 1, tuple(r.randint(0, 5) for _ in range(size))))
    return Step(
        seed,
        r.choice(DIMS),
        r.choice(HEADS),
        mask_of(r, MASKS[number % len(MASKS)]),
        r.choice((1, 4, 9)) if kind == "dense" else tuple(query_length(r, kind, b in prompts) for b in range(size)),
        tuple(cache_length(r) for _ in range(size)),
        tuple(r.choice((-3, 0, 1, 70, 300)) for _ in range(size)) if r.random() < 0.3 else None,
        new,
        r.random() < 0.4,
    )


def of_model(step: Step, cuts: int) -> np.ndarray:
    shapes = shapes_of(*step.dims, *step.heads, step.batch_invariant)
    is_small = step.size <= schedule_model.MOST_EVEN_PLACES
    call = call_of(step.size, *step.dims, *step.heads) if is_small else schedule_model.Call()
    if step.batch_invariant:
        call = schedule_model.Call(head_groups=call.head_groups)
    work = schedule_model.work_of(step.q_lengths(), step.k_lengths(), step.mask, shapes)
    return schedule_model.metadata(work, call, cuts)


def of_library(step: Step) -> torch.Tensor:
    r = random.Random(step.seed)
    packed = not isinstance(step.queries, int)
    appends = not isinstance(step.new, int)
    return hopper_attention.get_scheduler_metadata(
        step.size,
        r.choice((1, 256, 4096)) if packed else step.queries,  # bounds are not lengths
        r.choice((1, 900, 131072)),
        *step.heads,
        step.dims[0],
        int32(step.cache),
        headdim_v=step.dims[1],
        cu_seqlens_q=int32(batches.offsets(step.queries)) if packed else None,
        cu_seqlens_k_new=int32(batches.offsets(step.new)) if appends else None,
        max_seqlen_k_new=0 if appends else step.new,
        cache_leftpad=None if step.leftpad is None else int32(step.leftpad),
        page_size=r.choice((None, 1, 16)),
        causal=step.mask.right == 0,
        window_size=(step.mask.left, step.mask.right),
        attention_chunk=step.mask.chunk,
        num_splits=r.choice((0, 1, 7)),
        batch_invariant=step.batch_invariant,
    )


def difference(step: Step, found: np.ndarray, expected: np.ndarray) -> str:
    """The first number that differs, by its name."""
    if found.shape != expected.shape:
        return f"{found.shape} numbers instead of {expected.shape}"
    wrong = np.flatnonzero(found != expected)
    if not len(wrong):
        return ""
    stride = (len(expected) - 1) // len(schedule_model.ARRAYS)
    array, place = divmod(int(wrong[0]) - 1, stride)
    name = "the counter" if array < 0 else f"{schedule_model.ARRAYS[array]}, place {place}"
    return f"{name}: {found[wrong[0]]} instead of {expected[wrong[0]]}, {len(wrong)} numbers differ"


@pytest.mark.parametrize("size", SIZES)
def test_metadata_are_those_of_the_model(size):
    if not batches.has_schedules():
        pytest.skip("no scheduler metadata on this device")
    steps = [random_step(size, number) for number in range(STEPS)]
    found = [of_library(step) for step in steps]
    torch.cuda.synchronize()
    problems = []
    for number, (step, numbers) in enumerate(zip(steps, found, strict=True)):
        made = numbers.cpu().numpy()
        problem = difference(step, made, of_model(step, schedule_model.decisions(made)))
        if problem:
            shown = f"{step.dims}, heads {step.heads}, {step.mask}, batch_invariant {step.batch_invariant}"
            problems.append(f"random_step({size}, {number}) ({shown}): {problem}")
    assert not problems, "\n".join(problems[: support.MAX_REPORTED])
