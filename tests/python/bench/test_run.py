"""A case from its tensors to its entry, on the CPU: the public functions run the reference there, and so does a
stand-in for FA3. Times are made up; who is timed and who is not is what counts.
"""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

torch = pytest.importorskip("torch")

from hopper_attention.bench import check, goals, inputs, peers, record, run, suites, timing  # noqa: E402
from hopper_attention.bench.suites import Case, decode_case, varlen_case  # noqa: E402

FAKE_FA3 = str(pathlib.Path(__file__).parent / "fake_fa3.py")
CASES = [
    Case("prefill", "causal, grouped heads", 2, 65, 65, 4, 2, 64),
    Case("prefill", "full, more keys than queries", 1, 40, 70, 4, 2, 32, causal=False),
    Case("engine", "two head dims", 1, 40, 40, 2, 2, 48, 32),
    Case("engine", "window and sinks", 1, 70, 70, 4, 2, 64, window=(20, 0), sinks=True),
    Case("engine", "softcap, fp16", 1, 70, 70, 4, 2, 64, softcap=5.0, dtype="fp16"),
    varlen_case("engine", "different lengths", (3, 40, 17), 4, 2),
    varlen_case("varlen", "equal lengths", (30, 30), 4, 2),
    Case(
        "mixed",
        "prompts and queries",
        2,
        40,
        50,
        4,
        2,
        64,
        call="varlen",
        page_size=16,
        lengths=(40, 50),
        queries=(40, 1),
    ),
    Case("engine", "pages", 2, 9, 50, 4, 2, 64, call="varlen", page_size=16),
    decode_case(3, 40, 4, 2),
    decode_case(3, 40, 4, 2, page_size=0),
    decode_case(3, 40, 4, 2, lengths=(5, 40, 21)),
    decode_case(2, 40, 4, 2, seqlen_q=4),
    decode_case(2, 40, 4, 2, window=(7, 0)),
]
VARLEN = next(case for case in CASES if case.name == "equal lengths")
DENSE = CASES[0]


@pytest.fixture(autouse=True)
def few_sets(monkeypatch):
    monkeypatch.setattr(inputs, "COLD_BYTES", 100e3)


def made_up_times(calls, seconds, fill=False):
    """Makes every call once more, over NaN, as the replays of a graph would, and says 10 us, 20 us, ..."""
    found = timing.Measured()
    for index, (name, one_each) in enumerate(calls.items()):
        timing.fill_with_nan(one_each[-1]())
        for call in one_each:
            found.last[name] = call()
        found.samples[name] = [10.0 * (index + 1)] * 3
    return found


def run_on_cpu(case, names=("fa3",), extra=(), **given):
    found = peers.implementations(list(names), "fa3.so", FAKE_FA3)
    return run.run_case(case, [*found, *extra], device="cpu", measure=given.pop("measure", made_up_times), **given)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_kind_of_call_is_made_judged_and_timed(case):
    entry = run_on_cpu(case)
    assert entry["status"] == "ok" and entry["reason"] == ""
    assert {"ours", "fa3"} <= set(entry["results"])
    for name, result in entry["results"].items():
        assert result["check"]["passed"] and result["us"] > 0 and len(result["samples"]) == 3, name
        assert result["check"]["lse"] is not None and result["check"]["replayed"]
    assert ("ours, no metadata" in entry["results"]) == (case.call == "varlen")
    assert ("ours, dense" in entry["results"]) == (case is VARLEN)


class Broken(peers.Ours):
    """Ours with one defect."""

    def __init__(self, name, defect):
        self.name, self.defect = name, defect

    def prepare(self, case, sets):
        prepared = super().prepare(case, sets)
        result = prepared.result

        def spoiled(pair):
            out, lse = (x.clone() for x in result(pair))
            self.defect(out, lse)
            return out, lse

        prepared.result = spoiled
        return prepared


def scale_v(out, lse):
    out.mul_(1.05)


def stale_row(out, lse):
    out[..., -1:, :, :] = out[..., :1, :, :]


def not_written(out, lse):
    out[..., 0, 0] = torch.nan


def shifted_lse(out, lse):
    lse += 0.01


@pytest.mark.parametrize("defect", [scale_v, stale_row, not_written, shifted_lse])
@pytest.mark.parametrize("case", [DENSE, VARLEN], ids=lambda case: case.name)
def test_a_wrong_answer_of_a_peer_is_not_timed(case, defect):
    entry = run_on_cpu(case, extra=[Broken("peer", defect)])
    assert entry["left_out"]["peer"].startswith("wrong: ")
    assert not entry["results"]["peer"]["check"]["passed"] and "us" not in entry["results"]["peer"]
    assert entry["status"] == "ok" and entry["results"]["ours"]["us"] > 0


def test_a_wrong_answer_of_ours_ends_the_case():
    entry = run.run_case(DENSE, [Broken("ours", scale_v), peers.Ours()], device="cpu", measure=made_up_times)
    assert entry["status"] == "wrong" and "elementwise" in entry["reason"]
    assert "us" not in entry["results"]["ours"]


class Stale(peers.Ours):
    """Right when called for the first time; later calls return without writing."""

    def __init__(self, name, peer_of=None):
        self.name = name

    def prepare(self, case, sets):
        prepared = super().prepare(case, sets)

        def once(call):
            kept = []

            def repeated():
                if not kept:
                    kept.append(call())
                return kept[0]

            return repeated

        prepared.calls = [once(call) for call in prepared.calls]
        return prepared


@pytest.mark.parametrize("case", [DENSE, VARLEN, CASES[-1]], ids=lambda case: case.name)
def test_what_replays_write_is_judged(case):
    entry = run_on_cpu(case, extra=[Stale("peer")])
    assert entry["left_out"]["peer"].startswith("wrong: replayed: ") and record.time_us(entry, "peer") is None
    assert entry["status"] == "ok" and record.time_us(entry) is not None
    entry = run.run_case(case, [Stale("ours")], device="cpu", measure=made_up_times)
    assert entry["status"] == "wrong" and entry["reason"].startswith("replayed: ")
    assert entry["results"]["ours"]["check"]["replayed"] is False and record.time_us(entry) is None


@pytest.mark.parametrize("name", ["ours", "fa3"])
def test_replays_that_cannot_be_judged_have_no_time(name, monkeypatch):
    real, seen = check.judge, []

    def second_raises(*given):
        seen.append(given)
        if len(seen) > 2 and len(given[2].shape) and (len(seen) == 3) == (name == "ours"):
            raise RuntimeError("judge: out of memory")
        return real(*given)

    monkeypatch.setattr(check, "judge", second_raises)
    entry = run_on_cpu(DENSE)
    assert record.time_us(entry, name) is None and entry["left_out"][name] == "judge: out of memory"
    assert entry["results"][name]["check"]["message"] == "replayed: judge: out of memory"
    assert entry["status"] == ("failed" if name == "ours" else "ok")


def compared(name, case):
    return dataclasses.replace(case, within=(suites.Within("ours", name, 1.5),))


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("ours, no sinks", Case("engine", "sinks", 1, 40, 40, 4, 2, 64, sinks=True)),
        ("ours, bf16", Case("engine", "fp16", 1, 40, 40, 4, 2, 64, dtype="fp16")),
        ("ours, one query", decode_case(2, 40, 4, 2, seqlen_q=4)),
    ],
)
def test_what_a_case_is_compared_with_is_judged_and_timed_in_turn(name, case):
    entry = run_on_cpu(compared(name, case))
    assert entry["results"][name]["check"]["passed"] and entry["results"][name]["check"]["replayed"]
    (verdict,) = goals.of_case({"ceilings": {}}, entry)
    assert verdict.found == pytest.approx(10.0 / entry["results"][name]["us"]) and verdict.reached
    assert name not in run_on_cpu(case)["results"]


def test_what_a_case_is_compared_with_computes_its_own_case():
    """Sinks, the data type and all but the last query are gone."""
    case = compared("ours, one query", decode_case(2, 40, 4, 2, seqlen_q=4))
    sets = inputs.make(case, "cpu")
    changed = next(p for p in peers.implementations([], None, None) if p.name == "ours, one query").prepare(case, sets)
    out, lse = changed.result(changed.calls[0]())
    assert out.shape == (2, 1, 4, 128) and lse.shape == (2, 4, 1) and changed.case.seqlen_q == 1
    assert torch.equal(changed.sets[0].q[:, 0], sets[0].q[:, 3]) and changed.sets[0].cu_q.tolist() == [0, 1, 2]
    case = Case("engine", "sinks", 1, 40, 40, 4, 2, 64, dtype="fp16", sinks=True)
    (one,) = inputs.make(case, "cpu")
    assert peers.without_sinks(case, one)[1].sinks is None and not peers.without_sinks(case, one)[0].sinks
    assert peers.as_bf16(case, one)[1].k.dtype == torch.bfloat16 and peers.as_bf16(case, one)[0].dtype == "bf16"


class Raising(peers.Implementation):
    def __init__(self, name, error):
        self.name, self.error = name, error

    def prepare(self, case, sets):
        raise self.error


@pytest.mark.parametrize(
    ("error", "status"),
    [(NotImplementedError("head_dim: no kernel"), "skipped"), (RuntimeError("launch failed\nmore"), "failed")],
)
def test_ours_without_a_kernel_is_skipped_and_a_failure_is_one(error, status):
    entry = run.run_case(DENSE, [Raising("ours", error), peers.Ours()], device="cpu", measure=made_up_times)
    assert entry["status"] == status and entry["reason"] == str(error).splitlines()[0]
    assert entry["results"] == {}


def test_peers_are_measured_without_ours_if_asked():
    class Other(peers.Ours):
        name = "peer"

    missing = Raising("ours", NotImplementedError("no kernel"))
    entry = run.run_case(DENSE, [missing, Other()], device="cpu", measure=made_up_times, without_ours=True)
    assert entry["status"] == "skipped" and entry["results"]["peer"]["us"] == 10.0


def test_what_cannot_be_captured_is_left_out():
    def measure(calls, seconds, fill):
        found = made_up_times(calls, seconds)
        del found.samples["fa3"]
        found.failures["fa3"] = RuntimeError("not in a graph")
        return found

    entry = run_on_cpu(DENSE, measure=measure)
    assert entry["left_out"]["fa3"] == "not in a graph" and entry["status"] == "ok"
    assert "us" not in entry["results"]["fa3"]


def test_a_case_can_name_its_peers():
    entry = run_on_cpu(dataclasses.replace(DENSE, peers=("fa3",)), names=("flash", "fa3"))
    assert "flash" not in entry["results"] and "fa3" in entry["results"]
    entry = run_on_cpu(dataclasses.replace(VARLEN, peers=("fa3",)))
    assert {"fa3", "fa3, metadata"} <= set(entry["results"])


def test_sdpa_is_called_with_heads_first():
    entry = run_on_cpu(DENSE, names=("flash",))
    assert entry["results"]["flash"]["check"]["passed"] and entry["results"]["flash"]["check"]["lse"] is None


def fa3_arguments(case, name="fa3"):
    fa3 = next(p for p in peers.implementations(["fa3"], "fa3.so", FAKE_FA3) if p.name == name)
    prepared = fa3.prepare(case, inputs.make(case, "cpu"))
    prepared.calls[0]()
    return fa3.library.SEEN[-1]


def test_fa3_gets_its_convention():
    """Splits up to 512 queries or with pages; metadata with pages and for decode; a window in the place of causal."""
    long = Case("engine", "", 1, 513, 513, 1, 1, 8)
    assert fa3_arguments(long)["num_splits"] == 1 and fa3_arguments(long)["metadata"] is None
    assert fa3_arguments(dataclasses.replace(long, seqlen_q=512, seqlen_k=512))["num_splits"] == 0
    paged = fa3_arguments(dataclasses.replace(long, call="varlen", page_size=16))
    assert paged["num_splits"] == 0 and int(paged["metadata"][0]) == 16
    contiguous = fa3_arguments(decode_case(2, 40, 4, 2, page_size=0))
    assert contiguous["num_splits"] == 0 and int(contiguous["metadata"][0]) == 0
    packed = fa3_arguments(VARLEN, "fa3, metadata")
    assert packed["num_splits"] == 1 and packed["metadata"] is not None and fa3_arguments(VARLEN)["metadata"] is None
    assert fa3_arguments(long)["causal"] and fa3_arguments(long)["window"] == (-1, -1)
    windowed = fa3_arguments(dataclasses.replace(long, window=(20, 0), sinks=True))
    assert not windowed["causal"] and windowed["window"] == (20, 0)
    assert windowed["sinks"].dtype == torch.bfloat16


def test_fa3_is_left_out_without_a_library_and_an_error_if_it_cannot_be_loaded():
    names = [found.name for found in peers.implementations(list(peers.PEERS), None, None)]
    ours = ["", ", dense", ", no metadata", ", batch_invariant", ", no sinks", ", bf16", ", one query"]
    assert names == [*(f"ours{what}" for what in ours), "cudnn", "flash", "triton"]
    with pytest.raises(OSError, match="missing.so"):
        peers.implementations(["fa3"], "missing.so", FAKE_FA3)
    with pytest.raises(OSError):
        peers.implementations(["fa3"], "/no/such/fa3.so", None)


def test_inputs_are_random_and_repeatable_and_cold():
    case = decode_case(2, 40, 4, 2)
    sets = inputs.make(case, "cpu")
    assert len(sets) == -(-100_000 // case.kv_bytes()) > 1
    tables = torch.stack([s.page_table for s in sets])
    assert tables.unique().numel() == tables.numel() == sets[0].k.shape[0]  # no page twice
    assert not torch.equal(sets[0].q, sets[1].q)
    again = inputs.make(case, "cpu")
    assert torch.equal(again[1].q, sets[1].q) and torch.equal(again[0].k, sets[0].k)
    assert abs(float(sets[0].k.float().std()) - 1) < 0.1
    assert inputs.number_of_sets(DENSE) == 1


def test_every_decode_case_reads_cold_memory(monkeypatch):
    monkeypatch.setattr(inputs, "COLD_BYTES", 250e6)
    for case in suites.decode():
        sets = inputs.number_of_sets(case)
        assert sets * case.kv_bytes() >= 200e6, case.name
        held = sets * max(case.k_lengths) * case.batch * case.heads_k * (case.head_dim + case.dv) * 2
        assert held <= 75e9, case.name


def test_sequences_are_found_in_every_layout():
    for case in (VARLEN, *(c for c in CASES if c.call == "cache")):
        (first, *_) = inputs.make(case, "cpu")
        for index, length in enumerate(case.k_lengths):
            k, v = inputs.sequence_kv(case, first, index)
            assert k.shape == (length, 2, 128) and v.shape == (length, 2, 128)
    paged = next(c for c in CASES if c.page_size and c.call == "cache")
    (first, *_) = inputs.make(paged, "cpu")
    k, _ = inputs.sequence_kv(paged, first, 1)
    assert torch.equal(k[17], first.k[int(first.page_table[1, 1]), 1])


def test_sampled_rows_have_both_ends():
    assert check.sampled(5, 8, 0) == [0, 1, 2, 3, 4]
    found = check.sampled(1000, 16, 0)
    assert len(found) == 16 and found[0] == 0 and found[-1] == 999 and found == sorted(found)


def test_slices_rounds_and_orders():
    assert timing.repeats_for(2000.0) == 1 and timing.repeats_for(10.0) == 200
    assert timing.rounds_for(10_000.0, 0.4) == 40 and timing.rounds_for(1e6, 0.4) == timing.FEWEST_ROUNDS
    names = ["a", "b", "c"]
    orders = [timing.rotated(names, turn) for turn in range(6)]
    assert all(sorted(order) == names for order in orders)
    assert sorted(order[0] for order in orders) == ["a", "a", "b", "b", "c", "c"]
    assert len({tuple(order) for order in orders}) == 6
    assert timing.spread([1.0]) == 0.0 and timing.spread([9.0, 10.0, 11.0]) == pytest.approx(0.1)


class FakeReplay:
    """Takes 7 us the first time a graph of it is timed, then 5 us for each call of `slow`, 1 us of others."""

    started: list[str] = []
    us_of_slow = 5.0

    def __init__(self, calls, repeat=1):
        self.names = [call() for call in calls]
        if "bad" in self.names:
            raise RuntimeError("cannot be captured")
        self.last = torch.zeros(2)
        self.count = len(calls) * repeat
        self.us = self.us_of_slow if "slow" in self.names else 1.0

    def time(self):
        return self.us

    def start(self):
        self.started.append(self.names[0])
        return lambda: 7.0 if len(self.started) <= 2 else self.us


def test_rounds_are_interleaved_and_the_first_does_not_count(monkeypatch):
    monkeypatch.setattr(timing, "Replay", FakeReplay)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(FakeReplay, "started", [])
    calls = {"slow": [lambda: "slow"], "bad": [lambda: "bad"], "fast": [lambda: "fast", lambda: "fast"]}
    found = timing.measure(calls, 0.02)
    rounds = int(0.02e6 / (2000 + 2000))
    assert found.samples == {"slow": [5.0] * rounds, "fast": [1.0] * rounds}
    assert str(found.failures["bad"]) == "cannot be captured"
    assert all(found.last[name].isnan().all() for name in ("slow", "fast")) and "bad" not in found.last
    pairs = [tuple(FakeReplay.started[i : i + 2]) for i in range(0, len(FakeReplay.started), 2)]
    assert len(pairs) == rounds + 1 and {frozenset(pair) for pair in pairs} == {frozenset(("slow", "fast"))}
    assert {pairs[0], pairs[1]} == {("slow", "fast"), ("fast", "slow")}


def test_all_of_the_time_is_used_if_asked(monkeypatch):
    """Rounds are bounded; slices of short calls grow instead, and long calls take as many rounds as fit."""
    monkeypatch.setattr(timing, "Replay", FakeReplay)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(FakeReplay, "started", [])
    seconds = 0.4
    for us in (5.0, 1000.0):
        monkeypatch.setattr(FakeReplay, "us_of_slow", us, raising=False)
        repeats = timing.repeats_for(us, seconds * 1e6 / timing.MOST_ROUNDS)
        found = timing.measure({"slow": [lambda: "slow"]}, seconds, True)
        assert len(found.samples["slow"]) * repeats * us == pytest.approx(seconds * 1e6, rel=0.03)
    assert len(timing.measure({"slow": [lambda: "slow"]}, seconds).samples["slow"]) == timing.MOST_ROUNDS
