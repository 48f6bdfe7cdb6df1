"""How long a call keeps Python busy, with the launch stubbed: CPU tensors play the part of CUDA tensors, and everything but
the CUDA calls is real. Limits are multiples of a yardstick's time, taken in turns with the call, so that a slow or busy machine
moves both: medians of such turns differ by 3% from run to run, with and without other processes on the cores. A CPU may be
half as fast again as another in Python and no faster in C++, so the yardstick is of the call's kind: torch.add, torch.add under
the same mode, or Python alone. Limits leave 30% for other CPUs and versions of Python and torch: a call that takes twice as
long, or asks Python for one thing more of 0.5 us, does not pass.
"""

from __future__ import annotations

import contextlib
import functools
import re
import statistics
import timeit

import pytest

import hopper_attention
from hopper_attention import cache, interface, schedule, watching

torch = pytest.importorskip("torch")

from hopper_attention.bench import host, inputs  # noqa: E402

CALLS, TURNS = 50, 100  # short windows, so that most of them are undisturbed
TRIES = 12  # before a time is too long
# Times of torch.add, where the case has a mode under that mode.
LIMITS = {
    "dense": 1.35,
    "dense, out allocated": 2.3,
    "paged": 1.9,
    "paged, out allocated": 2.95,
    "paged cache": 1.9,
    "paged, schedule made (2 launches)": 1.9,
    "paged, mixed batch (3 launches)": 2.0,
    "paged cache, append (2 launches)": 2.25,
    "paged, through the dispatcher": 2.55,
}
SCHEDULE_LIMIT = 2.7  # times of only_python()


@pytest.fixture
def timed(monkeypatch, recorder):
    recorder.time_backend(recorder.device_info("H100"))
    recorder.count_host_memory_as_cuda(True)
    for module in (interface, cache, schedule):
        monkeypatch.setattr(module, "on_cuda", lambda name, x: True)
    monkeypatch.setattr(schedule, "_core", _WithoutSchedules(recorder))
    yield recorder
    recorder.count_host_memory_as_cuda(False)


class _WithoutSchedules:
    """`_core`, whose schedule kernel has no stub."""

    def __init__(self, core):
        self.schedule_size = core.schedule_size

    def make_schedule(self, *args, **options):
        pass


@functools.cache
def add():
    x = torch.randn(1024)
    return lambda: torch.add(x, x)


def only_python():
    """What a function of many options is made of: calls with keywords, numbers, a dict."""

    def options(a, b=1, c=2, d=3, *, e=4, f=None, g=None):
        return {"a": a, "b": b, "c": c, "d": d, "e": e, "f": f, "g": g}

    total = 0
    for i in range(10):
        total += len(options(i, b=i, e=total))
    return total


def in_yardsticks(call, yardstick, mode):
    """The time of a call in times of the yardstick's, both under the mode: the median of turns."""
    ours, other = timeit.Timer(call), timeit.Timer(yardstick)
    found = []
    for _ in range(TURNS):
        with mode():
            found.append(ours.timeit(CALLS) / other.timeit(CALLS))
    return statistics.median(found)


def least(limit, call, yardstick, mode=contextlib.nullcontext):
    """The first time within the limit, else the least of TRIES."""
    found = []
    while len(found) < TRIES and (not found or found[-1] > limit):
        found.append(in_yardsticks(call, yardstick, mode))
    return min(found)


def mode_of(case):
    return host.passing_mode if case.under_mode else contextlib.nullcontext


def test_every_case_of_the_benchmark_without_cuda_calls_is_bounded():
    assert set(LIMITS) == {case.name for case in host.CASES}


@pytest.mark.parametrize("case", host.HOST_CASES, ids=lambda case: case.case.name)
def test_as_many_launches_as_the_name_says(case):
    """Calls that once took several may need fewer by a better plan; then another call has to take their place."""
    shape = case.case
    plan = hopper_attention.plan(
        device="H200", batch=shape.batch, max_seqlen_q=shape.seqlen_q, max_seqlen_k=shape.most_keys,
        heads_q=shape.heads_q, heads_kv=shape.heads_k, head_dim=shape.head_dim, head_dim_v=shape.dv, dtype="bf16",
        causal=shape.causal, page_size=shape.page_size or None, num_splits=case.splits,
        lengths_on_device=shape.call != "dense", total_q=sum(shape.q_lengths) if shape.call == "varlen" else None,
    )  # fmt: skip
    text = plan.explain()
    makes_schedule = "a kernel makes it first" in text and "metadata" in case.without
    attention = 2 if ", and a decode kernel" in text else 1
    merges = not re.search(r"^  splits +1:", text, re.MULTILINE)
    said = re.search(r"\((\d) launches\)", shape.name)
    assert makes_schedule + attention + merges + case.appends == (int(said[1]) if said else 1), text


@pytest.mark.parametrize("case", host.HOST_CASES, ids=lambda case: case.case.name)
def test_host_time(timed, case):
    if not timed.has_exchange_api(torch.Tensor):
        pytest.skip("torch < 2.10 has no exchange API")
    with torch.inference_mode():
        call = host.our_call(case, inputs.make(case.case, "cpu")[0])
        before = timed.launches(), timed.appends()
        call()
        assert (timed.launches(), timed.appends()) == (before[0] + 1, before[1] + case.appends), "a launch is missing"
        limit = LIMITS[case.case.name]
        assert least(limit, call, add(), mode_of(case)) <= limit


@pytest.mark.parametrize("case", host.HOST_CASES, ids=lambda case: case.case.name)
def test_twice_the_time_is_noticed(timed, case):
    with torch.inference_mode():
        call = host.our_call(case, inputs.make(case.case, "cpu")[0])
        limit = LIMITS[case.case.name]
        assert least(limit, lambda: (call(), call()), add(), mode_of(case)) > limit


def test_a_slower_call_is_noticed(timed, monkeypatch):
    """By what reading a tensor by way of Python would cost."""
    case = host.HOST_CASES[0]
    real = watching.is_traced

    def slow():
        dict.fromkeys(range(20))
        return real()

    monkeypatch.setattr(watching, "is_traced", slow)
    with torch.inference_mode():
        call = host.our_call(case, inputs.make(case.case, "cpu")[0])
        assert least(LIMITS["dense"], call, add()) > LIMITS["dense"]


@pytest.fixture
def make_schedule(timed):
    used = torch.ones(64, dtype=torch.int32)
    out = torch.empty(1 + 4 * 64, dtype=torch.int32)
    with torch.inference_mode():
        yield lambda: interface.get_scheduler_metadata(
            64, 1, 4096, 32, 8, 128, used, torch.bfloat16, page_size=16, causal=True, out=out
        )


def test_host_time_of_a_schedule(make_schedule):
    assert least(SCHEDULE_LIMIT, make_schedule, only_python) <= SCHEDULE_LIMIT


def test_twice_the_time_of_a_schedule_is_noticed(make_schedule):
    assert least(SCHEDULE_LIMIT, lambda: (make_schedule(), make_schedule()), only_python) > SCHEDULE_LIMIT


def test_the_stub_ends(timed):
    timed.stub_backend(None)
    timed.count_host_memory_as_cuda(False)
    q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="^q: must be on a CUDA device"):
        timed.forward(q, q, q, q)
