"""Lengths, tables and metadata that lie: nothing outside the buffers is touched, nothing hangs, the next call is right.

Each group runs in a process of its own under a watchdog, because a fault would take the context of the others with it.
Every buffer lies between guard bands in one allocation; whatever the kernels write beside `out`, LSE and workspace is
seen there. What they read from garbage is not judged, but what no lie concerns keeps its bits.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
from gpu import batches, support  # noqa: E402
from gpu.batches import Batch, attend, make  # noqa: E402
from gpu.support import same_bits  # noqa: E402
from reliability._memory import Arena, synchronize, watched  # noqa: E402

pytestmark = pytest.mark.gpu

WATCHDOG_SECONDS = 90
BAND = 0xA5
GROUPS = ("page_table", "cu_seqlens_q", "cu_seqlens_k", "seqused", "cache", "scheduler_metadata", "append")
SHAPE = {"q_lengths": (1, 200, 0, 5, 64, 1), "k_lengths": (900, 200, 70, 2000, 64, 1)}


def guarded(batch: Batch) -> tuple[Arena, batches.Made, tuple[torch.Tensor, torch.Tensor]]:
    made, arena = make(batch), Arena(BAND, 256 << 20 if support.DEVICE == "cuda" else 32 << 20)
    made.q, made.k, made.v = (arena.take(x) for x in (made.q, made.k, made.v))
    made.lengths = {n: arena.take(x) if isinstance(x, torch.Tensor) else x for n, x in made.lengths.items()}
    out, lse = batches.new_results(made)
    return arena, made, (arena.take(out), arena.take(lse))


def random_int32(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator(support.DEVICE).manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator, device=support.DEVICE).to(torch.int32)


def lies(name: str, right: torch.Tensor) -> dict[str, torch.Tensor]:
    """Wrong values of an int32 tensor, each with its reason."""
    n = right.shape[-1]
    found = {
        "random bits": random_int32(tuple(right.shape), 1),
        "zeros": torch.zeros_like(right),
        "minus one": torch.full_like(right, -1),
        "largest": torch.full_like(right, 2**31 - 1),
        "smallest": torch.full_like(right, -(2**31)),
        "a million too many": right + 1_000_000,
        "reversed": right.flip(-1).contiguous(),
        "negative": -right,
    }
    if name.startswith("cu_seqlens"):
        zigzag = right.clone()
        zigzag[1::2] = 0
        found["zigzag"] = zigzag
        last = right.clone()
        last[-1] = 2**30
        found["last far too large"] = last
        first = right.clone()
        first[0] = -(2**20)
        found["first negative"] = first
    if name == "page_table":
        some = right.clone()
        some[:, ::2] = 2147480000
        found["every second page out of range"] = some
    assert n
    return found


def kept_by_kernels(name: str, target: torch.Tensor, sequences: int) -> torch.Tensor:
    """Where nobody writes: in a schedule, all but the two counters of drawn items (`ScheduleFact` in schedule.h)."""
    kept = torch.ones_like(target, dtype=torch.bool)
    if name == "scheduler_metadata":
        stride = (sequences + 3) // 4 * 4
        kept[0] = kept[1 + 3 * stride + 3] = False
    return kept


def bases() -> dict[str, list[tuple[Batch, str]]]:
    """For each group: batches, and the argument that lies in them."""
    paged = batches.main_dims(Batch("paged", **SHAPE, keys="paged", causal=True, heads_q=8, num_splits=0))
    packed = paged.but(keys="packed", why="packed")
    cache = paged.but(call="cache", why="cache")
    dense = paged.but(call="cache", keys="dense", batch_idx=True, leftpad=9, why="dense cache", window=(300, 0))
    used = paged.but(extra_q=3, why="used")
    pages = [paged.but(page_size=n, why=f"pages of {n}") for n in (1, 16, 24, 128)]
    single = paged.but(q_lengths=(1,) * 6, why="decode", num_splits=7)
    return {
        "page_table": [(b, "page_table") for b in (*pages, single, cache)],
        "cu_seqlens_q": [(b, "cu_seqlens_q") for b in (paged, packed, cache, single)],
        "cu_seqlens_k": [(b, "cu_seqlens_k") for b in (packed, packed.but(extra_k=5, num_splits=3))],
        "seqused": [
            *((b, "seqused_k") for b in (paged, *pages, single, packed.but(extra_k=5))),
            (used, "seqused_q"),
        ],
        "cache": [(cache, "cache_seqlens")]
        + [(dense, name) for name in ("cache_seqlens", "cache_batch_idx", "cache_leftpad")],
        "scheduler_metadata": [(b, "scheduler_metadata") for b in (paged, packed, single, cache)],
        "append": [(b, name) for b in (cache, dense) for name in ("cache_seqlens", "cu_seqlens_k_new")]
        + [(cache, "page_table")],
    }


def check_group(group: str) -> int:
    """Every lie of a group; AssertionError with the reason if one does damage. Returns how many were told."""
    told = 0
    for batch, name in bases()[group]:
        for invariant in (False, True):
            told += check(batch.but(batch_invariant=invariant), name, group == "append")
    return told


def check(batch: Batch, name: str, append: bool) -> int:
    arena, made, results = guarded(batch)
    given = {}
    if append:
        count = 3 * batch.size
        shape = (count, batch.heads_k)
        given["k"] = arena.take(torch.ones(*shape, batch.head_dim, dtype=made.k.dtype, device=made.k.device))
        given["v"] = arena.take(torch.ones(*shape, batch.dims[1], dtype=made.v.dtype, device=made.v.device))
        given["cu_seqlens_k_new"] = arena.take(batches.int32(range(0, count + 1, 3)))
    if name == "scheduler_metadata":
        if not batches.has_schedules():
            return 0
        given[name] = arena.take(batches.schedule(made))
    target = given[name] if name in given else made.lengths[name]
    right = target.clone()
    before = {n: x.clone() for n, x in (("q", made.q), ("k", made.k), ("v", made.v))}
    attend(made, results, **given)
    expected = tuple(x.clone() for x in results)
    for why, wrong in lies(name, right).items():
        target.copy_(wrong)
        with watched(BAND) as allocations:
            attend(made, results, **given)
        synchronize()
        said = f"{batch.why}, {name}: {why}, batch_invariant {batch.batch_invariant}"
        for broken, where in ((allocations, "beside the workspace"), (arena, "outside the buffers")):
            assert int(broken.broken()) == 0, f"{said}: {int(broken.broken())} bytes {where} were written"
        for n, x in before.items():
            if append and n in "kv":
                getattr(made, n).copy_(x)  # an append may write anywhere inside the cache
            assert same_bits(getattr(made, n), x), f"{said}: {n} was written"
        kept = kept_by_kernels(name, target, len(batch.q_lengths))
        assert torch.equal(target[kept], wrong[kept]), f"{said}: the lie itself was written"
        target.copy_(right)
        results[0].view(torch.int16).fill_(batches.POISON_BITS)
        results[1].fill_(batches.LSE_POISON)
        attend(made, results, **given)
        for a, b in zip(results, expected, strict=True):
            assert same_bits(a, b), f"{said}: the next call is wrong"
        for n, x in before.items():
            if append:
                getattr(made, n).copy_(x)
    return len(lies(name, right))


@functools.cache
def started() -> dict[str, tuple[subprocess.Popen, float]]:
    """A process for each group and when it began; all at once, since most of their time is start-up."""
    code = (
        "import sys; from gpu import support, test_malformed; support.DEVICE = sys.argv[1]; "
        "print('told', test_malformed.check_group(sys.argv[2]))"
    )
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, "PYTHONPATH": path}
    return {
        group: (
            subprocess.Popen([sys.executable, "-c", code, support.DEVICE, group], env=environment, **options),
            time.monotonic(),
        )
        for group in GROUPS
    }


@pytest.mark.parametrize("group", GROUPS)
def test_lies(group):
    process, began = started()[group]
    try:
        output, _ = process.communicate(timeout=max(1.0, began + WATCHDOG_SECONDS - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"{group}: no answer in {WATCHDOG_SECONDS} s: {output}", pytrace=False)
    assert process.returncode == 0 and "told" in output, output
    assert int(output.split()[-1]) > 10 or not batches.has_schedules()


def test_a_lie_about_one_sequence_leaves_the_others_alone():
    """Page ids and lengths of one sequence are wrong: with batch_invariant every other sequence keeps its bits."""
    batch = batches.main_dims(Batch("one liar", **SHAPE, keys="paged", causal=True, heads_q=8, batch_invariant=True))
    made = make(batch)
    expected = batches.judged_results(made)
    liar = 3
    for name, value in (("page_table", 2147480000), ("page_table", -7), ("seqused_k", 2**31 - 1), ("seqused_k", -5)):
        wrong = made.lengths[name].clone()
        wrong[liar] = value
        found = attend(made, **{name: wrong})
        for b in range(batch.size):
            if b != liar:
                pair = (batches.of_sequence(made, results, b) for results in (found, expected))
                batches.require_same(batch, f"{name} {value} in sequence {liar}, sequence {b}", *pair)


def test_pages_out_of_range_read_as_zero():
    """As the reference has it: finite results, and the keys of such a page count with zeros."""
    batch = batches.main_dims(Batch("zero pages", (1, 9), (64, 200), keys="paged", page_size=16, heads_q=8))
    made = make(batch)
    table = made.lengths["page_table"].clone()
    table[0, 1], table[1, 0] = 2147480000, -3
    for b, page in ((0, 1), (1, 0)):
        start = batches.offsets(batch.k_lengths)[b] + 16 * page
        made.truth_k[start : start + 16] = 0
        made.truth_v[start : start + 16] = 0
    made.lengths["page_table"] = table
    batches.judged_results(made)


def test_check_metadata_names_the_lie():
    """On the tensors of a call: silent when they are right, the argument by name when they are not."""
    for name, batch in (
        ("page_table", Batch("a page that is not there", **SHAPE, keys="paged")),
        ("seqused_k", Batch("more keys than pages", **SHAPE, keys="paged")),
        ("cu_seqlens_q", Batch("decreasing offsets", **SHAPE)),
        ("cu_seqlens_k", Batch("decreasing offsets of keys", **SHAPE)),
        ("cache_batch_idx", Batch("a row that is not there", **SHAPE, call="cache", keys="dense", batch_idx=True)),
    ):
        made = make(batches.main_dims(batch))
        hopper_attention.check_metadata(made.q, made.k, **made.lengths)
        wrong = made.lengths[name].clone()
        wrong[1 if wrong.dim() == 1 else (3, 1)] = 2147480000
        with pytest.raises(ValueError, match=name):
            hopper_attention.check_metadata(made.q, made.k, **{**made.lengths, name: wrong})
