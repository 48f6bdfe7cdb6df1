"""How long a call keeps Python busy, with the launch stubbed: CPU tensors play the part of CUDA tensors, and everything but
the CUDA calls is real. Limits are multiples of torch.add's time in the same process, so that a slow machine moves both;
they leave half as much again as the calls took when they were set.
"""

from __future__ import annotations

import contextlib
import timeit

import pytest

from hopper_attention import cache, interface, schedule, watching

torch = pytest.importorskip("torch")

from hopper_attention.bench import host, inputs  # noqa: E402

CALLS, REPEATS = 50, 200  # short windows, so that some of them are undisturbed
# Times of torch.add.
LIMITS = {
    "dense": 1.5,
    "dense, out allocated": 2.6,
    "paged": 2.1,
    "paged, out allocated": 3.3,
    "paged cache": 2.1,
    "paged, schedule made (2 launches)": 2.1,
    "paged, mixed batch (3 launches)": 2.2,
    "paged cache, append (2 launches)": 2.6,
    "paged, through the dispatcher": 8.6,
}


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


def least_us(call):
    return min(timeit.repeat(call, number=CALLS, repeat=REPEATS)) / CALLS * 1e6


def in_adds(call, mode=contextlib.nullcontext):
    """The time of a call under a mode in times of torch.add without it: the least of three comparisons, since other
    processes only add time.
    """
    x = torch.randn(1024)
    found = []
    for _ in range(3):
        with mode():
            us = least_us(call)
        found.append(us / least_us(lambda: torch.add(x, x)))
    return min(found)


def test_every_case_of_the_benchmark_without_cuda_calls_is_bounded():
    assert set(LIMITS) == {case.name for case in host.CASES}


@pytest.mark.parametrize("case", host.HOST_CASES, ids=lambda case: case.case.name)
def test_host_time(timed, case):
    if not timed.has_exchange_api(torch.Tensor):
        pytest.skip("torch < 2.10 has no exchange API")
    with torch.inference_mode():
        call = host.our_call(case, inputs.make(case.case, "cpu")[0])
        before = timed.launches(), timed.appends()
        call()
        assert (timed.launches(), timed.appends()) == (before[0] + 1, before[1] + case.appends), "a launch is missing"
        found = in_adds(call, host.passing_mode if case.under_mode else contextlib.nullcontext)
    assert found <= LIMITS[case.case.name]


def test_a_slower_call_is_noticed(timed, monkeypatch):
    """What reading a few tensors by way of Python, 3 us, would cost; so would the long way of a call."""
    case = host.HOST_CASES[0]
    real = watching.is_traced

    def slow():
        [dict.fromkeys(range(12)) for _ in range(6)]
        return real()

    monkeypatch.setattr(watching, "is_traced", slow)
    with torch.inference_mode():
        assert in_adds(host.our_call(case, inputs.make(case.case, "cpu")[0])) > LIMITS["dense"]


def test_the_stub_ends(timed):
    timed.stub_backend(None)
    timed.count_host_memory_as_cuda(False)
    q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="^q: must be on a CUDA device"):
        timed.forward(q, q, q, q)
