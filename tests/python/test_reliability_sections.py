"""The sections of tools/reliability on the CPU, where the reference stands in for the kernels: they run, what is right
passes, and each rejects a defect planted in the calls.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from gpu import batches, support  # noqa: E402
from gpu.fixed_splits import cut_sequences  # noqa: E402
from reliability import (  # noqa: E402
    _memory,
    batch_invariance,
    big_tensors,
    graphs,
    malformed_metadata,
    pairs,
    poison,
    reruns,
    sanitizer,
    soak,
    threads,
    two_gpus,
)
from reliability._engine import Engine, random_model  # noqa: E402
from reliability.harness import Budget  # noqa: E402

SECTIONS = {
    poison: 13,
    reruns: 20,
    batch_invariance: 10,
    graphs: 8,
    threads: 8,
    two_gpus: 5,
    big_tensors: big_tensors.COUNT,
}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(support, "DEVICE", "cpu")
    monkeypatch.setattr(support, "WORST", support.Worst())
    count = torch.get_num_threads()
    torch.set_num_threads(1)  # for many small calls
    yield
    torch.set_num_threads(count)


def failures(section, count: int) -> list[str]:
    return section.run(Budget(count, 60.0))["failures"]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda m: m.__name__.split(".")[-1])
def test_the_reference_passes(section):
    found = section.run(Budget(SECTIONS[section], 60.0))
    assert not found["failures"]
    assert found["cases"] >= SECTIONS[section]


def test_parts_share_the_cases():
    for section in (reruns, batch_invariance, graphs):
        counts = [section.run(Budget(20, 60.0, part=part, parts=2))["cases"] for part in range(2)]
        assert counts == [10, 10], section.__name__


def test_no_section_takes_the_place_of_the_runner():
    """`merge` is what the runner calls with the results of all parts, if a section has one."""
    assert not any(hasattr(section, "merge") for section in (*SECTIONS, soak, malformed_metadata, sanitizer))


def test_a_short_soak():
    found = soak.run(Budget(0, 2.0))
    assert not found["failures"]
    assert found["figures"]["checked"] > 3 and found["figures"]["samples of memory"] > 0


def changed(monkeypatch, change) -> None:
    """Calls of all sections give their results to change(made, results, call number) before anybody looks at them."""
    original, calls = batches.attend, []

    def attend(made, results=None, **given):
        found = original(made, results, **given)
        calls.append(None)
        change(made, found, len(calls))
        return found

    monkeypatch.setattr(batches, "attend", attend)


def flip(x: torch.Tensor) -> None:
    """Another value in the first element."""
    if x.numel():
        x.view(-1)[0] = x.view(-1)[0] + 1


def test_poison_that_reaches_a_result_is_seen(monkeypatch):
    changed(monkeypatch, lambda made, found, n: found[0].add_(made.k.float().sum() * 0))
    assert any("elements of out differ" in text for text in failures(poison, 4))


def test_a_written_input_is_seen(monkeypatch):
    changed(monkeypatch, lambda made, found, n: made.v.fill_(1) if n % 2 == 0 else None)
    assert any("elements of the input v were changed" in text for text in failures(poison, 4))


def test_a_byte_beside_the_results_is_seen(monkeypatch):
    def write_beside(made, found, n):
        if n % 2 == 0 and found[0].numel():
            memory = torch.tensor([], dtype=torch.uint8).set_(found[0].untyped_storage())
            memory[found[0].storage_offset() * 2 + found[0].nbytes] = 0

    changed(monkeypatch, write_beside)
    assert any("bytes beside out and LSE" in text for text in failures(poison, 4))


def test_a_row_of_no_sequence_is_seen(monkeypatch):
    changed(monkeypatch, lambda made, found, n: found[0].copy_(torch.nan_to_num(found[0])) if n % 2 == 0 else None)
    assert any("rows of no sequence" in text for text in failures(poison, 4))


def test_other_bits_in_a_rerun_are_seen(monkeypatch):
    changed(monkeypatch, lambda made, found, n: flip(found[0]) if n % 7 == 0 else None)
    assert any("elements differed" in text for text in failures(reruns, 60))


def test_other_bits_in_a_thread_are_seen(monkeypatch):
    def change(made, found, n):
        if threading.current_thread() is not threading.main_thread():
            found[1].zero_()

    changed(monkeypatch, change)
    assert any("elements differed" in text for text in failures(threads, 16))


class FakeEvent:
    """Done after it was asked so many times."""

    def __init__(self, asks: int) -> None:
        self.asks = asks

    def query(self) -> bool:
        self.asks -= 1
        return self.asks < 0


class FakeStream:
    def __init__(self, asks: int) -> None:
        self.asks = asks

    def record_event(self) -> FakeEvent:
        return FakeEvent(self.asks)


@pytest.mark.parametrize("asks, beside", [((1000, 1000), 50), ((1000, 0), 0), ((0, 1000), 0)])
def test_reruns_are_beside_lanes_that_are_not_done(monkeypatch, asks, beside):
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    hog, work = reruns.Hog(), []
    hog.lanes = [reruns.Lane(FakeStream(n), lambda: work.append(None)) for n in asks]
    for _ in range(50):
        queued = hog.fill()
        assert [len(lane.queued) for lane in hog.lanes] == [reruns.AHEAD] * 2
        hog.wait(FakeEvent(3), queued)
    assert (hog.waited, hog.beside) == (50, beside) and len(work) >= 2 * reruns.AHEAD
    assert ("at least 90 %" in hog.problem()) == (beside == 0)
    hog.waited, hog.beside = 1000, 899
    assert hog.problem().startswith("89.9 % of the reruns")


def test_reruns_that_there_was_no_time_for_are_unfinished():
    found = reruns.run(Budget(2000, 0.5))
    assert found["cases"] < 2000 and found["figures"]["least reruns of a shape"] < 100
    assert f"{found['figures']['least reruns of a shape']} of 100 reruns of " in " ".join(found["unfinished"])


@pytest.mark.parametrize("late", [threads.LateDense, threads.LateBatch])
def test_a_call_before_its_late_producer_is_seen(monkeypatch, late):
    monkeypatch.setattr(late, "produce", lambda self: None)
    assert any("late producer" in text and "elements differ" in text for text in failures(threads, 8))


def test_a_neighbour_that_counts_is_seen(monkeypatch):
    changed(monkeypatch, lambda made, found, n: found[1].add_(made.batch.size))
    assert any("alone" in text for text in failures(batch_invariance, 10))


def test_a_share_of_the_victims_is_cut(monkeypatch):
    """Of those that each part draws for a GPU, for every kind of comparison: without cuts they show little."""
    monkeypatch.setattr(support, "DEVICE", "cuda")  # to draw for, nothing is computed
    victims, cut = collections.Counter(), collections.Counter()
    parts = batch_invariance.PARTS
    for part in range(parts):
        left = batch_invariance.COUNT // parts
        for number in itertools.count(part, parts):
            batch = batch_invariance.batch_of(number)
            if batch is not None:
                chosen = batch_invariance.victims_of(batch, number, left)
                left -= len(chosen)
                for kind in (f"part {part}", f"comparison {number % 3}", f"{batch.keys} keys"):
                    victims[kind] += len(chosen)
                    cut[kind] += len(set(chosen) & set(cut_sequences(batch)))
            if left <= 0:
                break
    assert len(victims) == parts + 3 + 3
    shares = {kind: cut[kind] / n for kind, n in victims.items()}
    assert min(shares.values()) > 1.1 * batch_invariance.LEAST_CUT, shares


def test_too_few_victims_that_are_cut_are_a_failure(monkeypatch):
    monkeypatch.setattr(batch_invariance, "ENOUGH", 5)
    monkeypatch.setattr(batch_invariance, "cut_sequences", lambda batch: [])
    assert any("only 0 of 10 victims" in text for text in failures(batch_invariance, 10))


def test_what_is_done_with_a_batch_says_nothing_of_its_splits():
    """Every kind of comparison with every number of splits, and every kind of poison with every junk id."""
    found = [(number % 3, batch_invariance.batch_of(number)) for number in range(400)]
    assert {(n, batch.num_splits) for n, batch in found if batch} == {(n, x) for n in range(3) for x in (0, 1, 7)}
    ids = {(number % 2, poison.junk_id(poison.batch_of(number))) for number in range(50)}
    assert ids == {(n, x) for n in range(2) for x in poison.JUNK_IDS}


def test_a_graph_that_remembers_its_lengths_is_seen(monkeypatch):
    class Stale(graphs.Replayed):
        """Replays nothing: what the results were when it was captured."""

        def replay(self):
            pass

    monkeypatch.setattr(graphs, "Replayed", Stale)
    assert any("elements differ from eager" in text for text in failures(graphs, 4))


def test_replays_that_there_was_no_time_for_are_unfinished():
    class Late(Budget):
        """Whose time is over after the graph and its first replay."""

        asked = 0

        def left(self) -> float:
            self.asked += 1
            return 1.0 if self.asked <= 2 else 0.0

    assert graphs.run(Late(1, 60.0))["unfinished"] == [f"graph 0: 1 of {graphs.replays()} replays"]


def test_workspaces_have_room_for_a_rotated_q():
    sizes = {}
    for seed in range(60):
        model = random_model(seed, 40)
        if model.kind == "append":
            engine = Engine(model, seed)
            engine.set(seed)
            engine.take_workspace()
            q = max(q.numel() * q.element_size() for q in engine.q)
            held = 0 if engine.workspace is None else engine.workspace.numel()
            assert held >= (q if model.rotary else 0)
            sizes.setdefault(model.rotary, []).append(held)
    assert sizes[True] and sizes[False]


def test_pairs_that_no_call_had_are_unfinished(monkeypatch):
    found = pairs.run(Budget(2, 60.0))
    assert pairs.merge([found])["unfinished"] == [] and len(found["seen"]) == len(found["asked"]) > 100
    monkeypatch.setattr(pairs.test_pairs, "problem_of", lambda number, *rest: "wrong" if number else "")
    found = pairs.run(Budget(2, 60.0))
    assert pairs.merge([found])["unfinished"][0].startswith("no right call with {")


@pytest.mark.parametrize(
    "damage, said",
    [
        ("page", "memory outside the buffers was read"),
        ("beside", "bytes outside the buffers were written"),
        ("query", "q was written"),
        ("state", "the next call is wrong"),
    ],
)
def test_damage_by_a_lie_is_seen(monkeypatch, damage, said):
    """The calls of a stage are: right, lying, right again."""

    def change(made, found, n):
        if n % 3 == 2 and damage == "page":
            found[0].view(-1)[0] = float("nan")
        elif n % 3 == 2 and damage == "query":
            flip(made.q)
        elif n % 3 == 2 and damage == "beside":
            memory = torch.tensor([], dtype=torch.uint8).set_(made.q.untyped_storage())
            memory[_memory.GUARD - 1] = 7
        elif n % 3 == 0 and damage == "state":
            found[1].zero_()

    changed(monkeypatch, change)
    assert said in malformed_metadata.tell(0)[1]


def test_every_target_can_lie():
    """On the CPU, where there are no schedules: every target with every lie, and the right calls are right."""
    malformed = {}
    for number in range(3 * len(malformed_metadata.TARGETS)):
        is_case, problem = malformed_metadata.tell(number)
        assert not problem
        name = malformed_metadata.TARGETS[number % len(malformed_metadata.TARGETS)]
        malformed[name] = malformed.get(name, 0) + is_case
    assert {name for name, count in malformed.items() if not count} <= {"scheduler_metadata"}


def test_lies_that_change_nothing_are_drawn_again(monkeypatch):
    """The page table of one sequence of no keys can say what it likes; its right offsets are drawn again."""
    batch = batches.Batch("no keys", (1,), (0,), keys="paged", page_size=16, poison="zero")
    stage = malformed_metadata.Stage(batch, False, False)
    for why in malformed_metadata.LIES:
        targets = {"page_table": stage.target("page_table")}
        assert malformed_metadata.tell_lies(stage, targets, why, random.Random(0)) is None
    batch = batches.Batch("same offsets", (5, 5), (7, 7), poison="zero")
    stage = malformed_metadata.Stage(batch, False, False)
    targets = {"cu_seqlens_q": stage.target("cu_seqlens_q")}
    right, lie = targets["cu_seqlens_q"].clone(), malformed_metadata.lie
    monkeypatch.setattr(malformed_metadata, "LIES", ("largest",))
    monkeypatch.setattr(malformed_metadata, "lie", lambda why, x, r: x if why == "truth" else lie(why, x, r))
    wrong = malformed_metadata.tell_lies(stage, targets, "truth", random.Random(0))
    assert stage.refused() and not torch.equal(wrong["cu_seqlens_q"], right)


def test_appends_of_right_calls_have_room():
    for keys in ("paged", "dense"):
        shape = {"keys": keys, "call": "cache", "page_size": 4, "poison": "zero", "causal": True}
        for dense_q in (False, True):
            batch = batches.Batch("append", (1, 1), (5, 8), **shape, dense_q=dense_q)
            stage = malformed_metadata.Stage(batch, True, True)
            assert stage.refused() == "" and sum(stage.append.new) > 0
            stage.call()
            assert stage.verdict() == ""
            stage.made.k.view(-1)[0] += 1
            assert "the cache is not" in stage.verdict()


@pytest.mark.parametrize(
    "tell, said",
    [
        (lambda number: (True, "damage"), "damage"),
        (lambda number: os._exit(3), "the process died, exit 3"),
        (lambda number: os.kill(os.getpid(), signal.SIGKILL), "the process died, exit -9"),
        (lambda number: time.sleep(60), "no answer in 1 s"),
        (lambda number: 1 / 0, "ZeroDivisionError"),
    ],
    ids=["damage", "exit", "signal", "hang", "exception"],
)
def test_what_becomes_of_a_fork_is_seen(monkeypatch, tell, said):
    monkeypatch.setattr(malformed_metadata, "tell", tell)
    monkeypatch.setattr(malformed_metadata, "WATCHDOG", 1)
    answer = malformed_metadata.in_a_fork(0)
    assert answer["malformed"] and answer["problem"].startswith(said)


def test_cases_run_in_forks_and_are_malformed():
    found = malformed_metadata.run(Budget(7, 60.0))
    assert not found["failures"] and found["cases"] == 7
    assert found["figures"]["processes"] - found["figures"]["lies that change nothing"] == 7


def test_a_nursery_that_dies_or_hangs_is_replaced(monkeypatch):
    script = "import sys, os, time\nfor line in sys.stdin:\n"
    script += "    n = int(line)\n    os._exit(3) if n == 1 else time.sleep(60) if n == 3 else None\n"
    script += '    print(\'@@{"malformed": true, "problem": ""}\', flush=True)\n'
    popen, started = malformed_metadata.subprocess.Popen, []

    def start(command, **options):
        started.append(command)
        return popen([command[0], "-c", script], **options)

    monkeypatch.setattr(malformed_metadata.subprocess, "Popen", start)
    monkeypatch.setattr(malformed_metadata, "WATCHDOG", -14)
    monkeypatch.setattr(malformed_metadata, "FIRST", 10)
    found = malformed_metadata.run(Budget(5, 60.0))
    assert found["cases"] == 5 and len(started) == 3
    assert "case 1: the process that forks died, exit 3" in found["failures"][0]
    assert "case 3: no answer in" in found["failures"][1] and len(found["failures"]) == 2


def test_allocations_between_bands():
    found = _memory.Allocations(0xA5, 0xFF)
    place = found.room(torch.empty(10, dtype=torch.uint8, device="meta"))
    assert found.workspace_bytes == 10 and bool((place == 0xFF).all()) and not int(found.broken())
    found.made[0][0][_memory.GUARD - 1] = 0
    assert int(found.broken()) == 1


def memory(name: str, growth: float, until: float = math.inf, known: float = 1.0, alone: bool = True) -> list[str]:
    """What a soak of four minutes says if memory of `name` grows by so many MiB a minute until then."""
    watch = soak.Watch(alone)
    watch.known = known
    column = soak.Watch.COLUMNS.index(name)
    for i in range(41):
        values = [500.0] * len(soak.Watch.COLUMNS)
        values[column] += growth * min(i / 10, until)
        watch.samples.append((i / 10, *values))
    return watch.problems()


@pytest.mark.parametrize("name", soak.Watch.COLUMNS)
def test_memory_that_grows_is_seen(name):
    assert memory(name, 30.0) == [f"memory of {name} grows by 30.00 MiB a minute, allowed 4.0"]
    assert memory(name, 30.0, until=1.0) == [] == memory(name, 0.0)  # caches that fill in the first pass
    assert "did not come twice" in memory(name, 30.0, known=math.inf)[0]
    assert "did not come twice" in memory(name, 0.0, known=2.5)[0]


def test_memory_beside_torch_is_judged_only_alone():
    assert memory("GPU beside torch", 30.0, alone=False) == []
    assert memory("torch reserved", 30.0, alone=False) != []
    watch = soak.Watch(alone=False)
    watch.sample()
    assert "GPU beside torch MiB per minute (not judged, others use the GPU)" in watch.figures()


def test_a_second_pass_of_the_soak_with_other_bits_is_seen(monkeypatch):
    monkeypatch.setattr(soak, "ROUNDS", 2)
    monkeypatch.setattr(soak, "SAMPLE_EVERY", 2)
    found = soak.run(Budget(0, 4.0))
    assert not found["failures"] and found["figures"]["compared with the first pass"] > 0
    assert found["figures"]["shapes"] == 2 * soak.SHAPES and found["figures"]["graphs"] == 0
    prints = {}
    counts = dict.fromkeys(found["figures"], 0) | dict.fromkeys(("compared_with_the_first_pass", "replays"), 0)
    assert soak.one_round(1, [None], counts, prints)[1] == ""
    prints[1, 3][1] += 1
    assert "other bits than in the first pass" in soak.one_round(1, [None], counts, prints)[1]


def test_fingerprints_see_values_and_places():
    out, lse = torch.arange(6, dtype=torch.bfloat16), torch.arange(3, dtype=torch.float32)
    prints = [soak.fingerprint(x) for x in ((out, lse), (out.flip(0), lse), (out, lse + 1), (out, lse))]
    assert prints[0] == prints[3] and len({tuple(x) for x in prints}) == 3


def test_a_graph_that_differs_beside_eager_calls_is_seen(monkeypatch):
    counts = {"checked": 0, "compared_with_the_first_pass": 0, "graphs": 0, "replays": 0, "merges": 0}
    assert soak.one_round(soak.GRAPH_EVERY, [None, None], counts, {})[1] == ""
    assert counts["graphs"] == 1 and counts["replays"] == 2
    monkeypatch.setattr(soak.Replayed, "replay", lambda self: None)
    assert "elements of graphs differ" in soak.one_round(soak.GRAPH_EVERY, [None, None], counts, {})[1]


def test_missing_programs_of_the_sanitizer_are_a_failure(monkeypatch):
    monkeypatch.setenv("HOPPER_ATTENTION_SANITIZER", "/nowhere")
    assert "was not found" in failures(sanitizer, 1)[0]


SANITIZER = """#!{python}
import sys
if "--help" in sys.argv:
    print("Version 2026.4.0.0\\n  --check-tensor-ops arg")
    raise SystemExit
assert sys.argv[1] == "--tool" and "--port" in sys.argv
plant = sys.argv[sys.argv.index("--plant") + 1] if "--plant" in sys.argv else ""
assert ("--malformed" in sys.argv) == (sys.argv[2] == "memcheck" and not plant)
errors = {finds}
print("driver: 9 right, 0 wrong, 1 not built\\n========= ERROR SUMMARY: %d errors" % errors)
raise SystemExit(99 if errors else 0)
"""
DRIVER = """#!{python}
print("{plants}")
"""
PLANTS = "memcheck memcheck-tensor racecheck synccheck initcheck"


@pytest.mark.parametrize(
    "finds, plants, status, said",
    [
        ("1 if plant else 0", PLANTS, 0, None),
        ("1 if plant and plant != 'racecheck' else 0", PLANTS, 1, "plant-racecheck: was not found"),
        ("1 if plant or sys.argv[2] == 'initcheck' else 0", PLANTS, 1, "initcheck-0: exit status 99, 1 errors"),
        ("1 if plant else 0", PLANTS.replace("synccheck", ""), 1, "synccheck: no bug was planted for it"),
        ("1 if plant else 0", "", 1, "memcheck: no bug was planted for it"),
    ],
    ids=["right", "a tool that is blind", "a finding", "a tool that was not tried", "no plants"],
)
def test_the_script_of_the_sanitizer(tmp_path, finds, plants, status, said):
    for name, text in (("sanitizer", SANITIZER), ("driver", DRIVER)):
        (tmp_path / name).write_text(
            text.replace("{python}", sys.executable).replace("{finds}", finds).replace("{plants}", plants)
        )
        (tmp_path / name).chmod(0o755)
    out = tmp_path / "out.json"
    command = [sys.executable, sanitizer.ROOT / "tools" / "sanitize", "--driver", tmp_path / "driver", "--sanitizer"]
    command += [tmp_path / "sanitizer", "--shards", "2", "--out", out]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["cases"] == 72 and found["figures"]["memcheck cases"] == 18
    assert not found["failures"] if said is None else said in found["failures"][0]
