"""Host time and DRAM bytes: what surrounds the GPU."""

from __future__ import annotations

import contextlib
import time

import pytest

from hopper_attention.bench import host, traffic
from hopper_attention.bench.peers import Implementation, Prepared

RAW = """==PROF== Connected to process 1
"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"
"","","Mbyte","Kbyte"
"0","prefill","1,234.5","10"
"1","combine","0.5","5"
"""


def test_host_time_is_time_for_each_call():
    waits, order = [], []

    def sleeping(name, seconds):
        return lambda: order.append(name) or time.sleep(seconds)

    calls = [(sleeping(name, us * 1e-6), contextlib.nullcontext) for name, us in (("short", 100), ("long", 500))]
    short, long = host.time_calls(calls, sleeping("add", 50e-6), 3, lambda: waits.append(1))
    assert 100 <= short.least_us <= short.us and 500 <= long.least_us <= long.us < 50000
    assert 1.5 < long.adds < 10.5 and len(waits) == 17
    assert [order[i] for i in range(0, len(order), host.CALLS)] == ["add", "short", "add", "long"] * 4


class Library(Implementation):
    """Stands in for FA3: an operator of torch behind some Python."""

    name = "fa3"

    def prepare(self, case, sets):
        q = sets[0].q
        return Prepared([lambda: self.forward(q)], lambda out: out)

    def forward(self, q):
        import torch

        return torch.ops.fa3_stand_in.fwd(q + q)


@pytest.fixture
def library(monkeypatch):
    torch = pytest.importorskip("torch")
    made = torch.library.Library("fa3_stand_in", "DEF")
    made.define("fwd(Tensor q) -> Tensor[]")
    seen = []
    made.impl("fwd", lambda q: seen.append(q) or [q.clone()], "CPU")
    monkeypatch.setattr(host, "CALLS", 1)
    monkeypatch.setattr(host, "ROUNDS", 4)
    yield seen
    made._destroy()


def test_the_operator_is_timed_without_the_python_around_it(library):
    import torch

    x = torch.ones(3)
    operator = host.bare_operator(lambda: torch.ops.fa3_stand_in.fwd(x + x), "fa3")
    assert torch.equal(operator()[0], x + x) and operator() and library[0] is library[1], "nothing is added up again"
    with pytest.raises(ValueError, match="has no operator of fa3"):
        host.bare_operator(lambda: x + x, "fa3")


def test_every_case_has_a_row_with_its_limit(library):
    """On the CPU, where the reference answers: what is called, not how fast."""
    rows = host.measure([Library()], quick=True, device="cpu")
    assert rows[0]["implementation"] == "torch.add" and len({tuple(row) for row in rows}) == 1
    ours = {row["case"]: row for row in rows if row["implementation"] == "ours"}
    assert list(ours) == [case.name for case in host.CASES]
    at_5_2_us = [round(row["limit"] * 5.2, 6) for row in ours.values()]
    assert at_5_2_us == [6.0, 9.0, 6.0, 9.0, 6.0, 8.5, 11.0, 8.5, 15.0]
    assert all(row["within"] == ("yes" if row["x torch.add"] <= row["limit"] else "no") for row in ours.values())
    theirs = [row["case"] for row in rows if row["implementation"] == "fa3"]
    assert theirs == ["dense", "paged", "paged cache", "paged, mixed batch (3 launches)"] and library


def test_counted_bytes_are_summed_in_their_units():
    read, written = traffic.parse(RAW)
    assert read == pytest.approx(1235.0e6) and written == pytest.approx(15e3)


@pytest.mark.parametrize("text", ["", "==ERROR== no permission", '"ID","Kernel Name"\n"",""\n"0","x"\n'])
def test_no_counts_are_an_error(text):
    with pytest.raises(ValueError, match="ncu counted nothing"):
        traffic.parse(text)


@pytest.mark.parametrize("case", traffic.CASES, ids=lambda case: case.name)
def test_the_prediction_holds_the_tensors(case):
    compulsory, predicted = traffic.prediction(case, "H200")
    rows = case.batch * case.seqlen_q
    tensors = rows * case.heads_q * 128 * 2 * 2 + rows * case.heads_k * 128 * 2 * 2
    assert compulsory == tensors + rows * case.heads_q * 4
    assert predicted >= compulsory


def test_without_ncu_the_prediction_stands_alone(monkeypatch):
    monkeypatch.setattr(traffic.shutil, "which", lambda *args, **given: None)
    monkeypatch.setattr(traffic, "prediction", lambda case: (10, 20))
    said = []
    rows = traffic.measure(said.append)
    assert len(rows) == len(said) == 3
    assert all(row["remark"] == "ncu is not installed" and row["read MB"] == "-" for row in rows)
    assert len({tuple(row) for row in rows}) == 1
