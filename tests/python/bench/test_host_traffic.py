"""Host time and DRAM bytes: what surrounds the GPU."""

from __future__ import annotations

import time

import pytest

from hopper_attention.bench import host, traffic

RAW = """==PROF== Connected to process 1
"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"
"","","Mbyte","Kbyte"
"0","prefill","1,234.5","10"
"1","combine","0.5","5"
"""


def test_host_time_is_time_for_each_call():
    waits = []
    us = host.time_calls([lambda: time.sleep(50e-6)], 3, lambda: waits.append(1))
    assert 50 <= us < 5000 and len(waits) == 5


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
