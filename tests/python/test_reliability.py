"""tools/reliability and the scorecard: parts, budgets, hangs, merging, what is committed; the readers of machine code."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from reliability import binary_facts, harness, scorecard
from reliability.harness import Budget, Failures, merged, result

ROOT = Path(__file__).resolve().parents[2]


def test_the_pages_and_the_report_are_those_of_the_data():
    entries, report = scorecard.load(), scorecard.load(scorecard.REPORT)
    hint = "run tools/reliability --page"
    assert report.get("reliability") == scorecard.of_report(entries), hint
    assert scorecard.PAGE.read_text(encoding="utf-8") == scorecard.page(entries, report), hint
    assert scorecard.FEATURES.read_text(encoding="utf-8") == scorecard.features_page(), hint


def test_what_is_committed_did_all_that_a_section_has():
    for name, entry in scorecard.load().items():
        assert entry["cases"] >= entry["count"] and "less was asked for" not in entry["figures"], name


def test_every_hazard_names_what_is_there():
    sections = set(scorecard.section_names()) | {row.section for row in scorecard.ROWS}
    for hazard in scorecard.HAZARDS:
        assert set(hazard.sections) <= sections, hazard.what
        for name in hazard.tests:
            assert (ROOT / "tests" / "python" / "gpu" / name).exists(), name
        assert hazard.sections or hazard.tests, hazard.what


def test_every_hazard_has_figure_command_and_date():
    """Of sections that have run; each cell of the table is filled."""
    report = scorecard.load(scorecard.REPORT)
    entry = {"cases": 7, "count": 7, "failures": [], "figures": {"shown": 1}, "command": "tools/reliability x",
             "date": "today", "kernel_sources_sha256": "0123456789"}  # fmt: skip
    entries = {row.section: entry for row in scorecard.ROWS}
    text = scorecard.page(entries, report).split("## Hazards")[1]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == len(scorecard.HAZARDS)
    assert all(len(row) == 6 and all(cell.strip(" |") for cell in row) and "not run" not in row[2] for row in rows)
    assert scorecard.evidence(scorecard.HAZARDS[0], {}, report)[0] == "not run"
    only_tests = scorecard.Hazard("x", "y", tests=("test_grid.py",))
    assert scorecard.evidence(only_tests, {}, report)[0].endswith("tests passed, 0 failed")
    named = scorecard.Hazard("x", "y", ("poison",), figures=("shown",))
    assert scorecard.evidence(named, entries, report) == (
        "7 random calls, no failures; shown 1", "`tools/reliability x`", "today, `01234567`"
    )  # fmt: skip


def test_what_somebody_has_to_say_of_the_report_stands_under_the_scorecard():
    report = {**scorecard.load(scorecard.REPORT), "remark": "of other kernels"}
    assert "of other kernels" in scorecard.page({}, report).split("## Hazards")[0].splitlines()
    del report["remark"]
    assert "of other kernels" not in scorecard.page({}, report)


def test_every_section_has_what_the_runner_needs():
    pytest.importorskip("torch")
    for name in scorecard.section_names():
        module = harness.section(name)
        assert module.TITLE and module.NEEDS in ("nothing", "gpu", "2 gpus") and module.__doc__
        assert module.COUNT >= 0 and module.SECONDS > 0 and module.PARTS > 0 and callable(module.run)


def test_parts_share_the_numbers():
    parts = [list(Budget(10, 9.0, part=part, parts=3).numbers()) for part in range(3)]
    assert sorted(sum(parts, [])) == list(range(10)) and parts[1] == [1, 4, 7]
    assert list(Budget(10, 0.0).numbers()) == []


def test_merging():
    a = result(3, ["x"], worst_error=1.5, calls=2, least_room=5.0, note="first")
    b = {**result(4, [], worst_error=2.5, calls=3, least_room=1.0, note="second"), "unfinished": ["z"]}
    assert merged([a, b]) == {
        "cases": 7,
        "failures": ["x"],
        "unfinished": ["z"],
        "figures": {"worst error": 2.5, "calls": 5, "least room": 1.0, "note": "first"},
    }
    failures = Failures()
    for i in range(harness.MAX_FAILURES + 3):
        failures.add(str(i))
    assert failures.texts()[-1] == "and 3 more"


SECTIONS = {
    "fine": "return result(sum(1 for _ in budget.numbers()), worst_value=1.5, part_of_it=1)",
    "wrong": "failures = Failures(); failures.add('two is wrong'); return result(1, failures)",
    "raises": "raise KeyError('no such thing')",
    "dies": "import os, signal; print('last words', flush=True); os.kill(os.getpid(), signal.SIGKILL)",
    "hangs": "import time; time.sleep(600)",
    "idle": "return result(0)",
    "slow": "return result(1)",
    "half": "return {**result(sum(1 for _ in budget.numbers())), 'unfinished': ['graph 3: 40 of 100 replays']}",
    "beside_fa3": "return {**result(1), 'count': 1}",
}


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    """A copy of the runner with sections of its own -> function that runs them: (status, text, JSON)."""
    root = tmp_path_factory.mktemp("runner")
    folder = root / "tests" / "python" / "reliability"
    folder.mkdir(parents=True)
    (root / "tools").mkdir()
    for name in ("tools/reliability", "tools/kernel_sources_hash", "tests/python/reliability/harness.py",
                 "tests/python/reliability/scorecard.py"):  # fmt: skip
        (root / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    for name, body in SECTIONS.items():
        (folder / f"{name}.py").write_text(
            textwrap.dedent(f'''
                """A section."""
                from reliability.harness import Failures, result
                TITLE, NEEDS, COUNT, SECONDS, PARTS, SILENCE = "{name}", "nothing", 10, 20, 3, 3.0
                def run(budget):
                    {body}
            '''),
            encoding="utf-8",
        )

    def run(*arguments):
        out = root / "out.json"
        command = [sys.executable, str(root / "tools" / "reliability"), *arguments, "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout + done.stderr, json.loads(out.read_text()) if out.exists() else {}

    return run


def test_a_section_that_passes(runner):
    status, text, found = runner("fine", "--jobs", "2", "--scale", "2", "--seed", "3")
    assert status == 0 and "passed: 1 sections" in text, text
    entry = found["fine"]
    assert (entry["cases"], entry["count"], entry["failures"]) == (20, 20, [])
    assert entry["figures"] == {"worst value": 1.5, "part of it": 3}
    assert entry["command"] == "tools/reliability fine --scale 2 --seed 3"
    assert len(entry["kernel_sources_sha256"]) == 64 and entry["date"].endswith("UTC")


@pytest.mark.parametrize(
    ("name", "said"),
    [("wrong", "two is wrong"), ("raises", "no such thing"), ("dies", "ended with status -9\nlast words"),
     ("hangs", "no sign of life for 3 s"), ("idle", "ran nothing")],
)  # fmt: skip
def test_sections_that_fail(runner, name, said):
    began = time.monotonic()
    status, text, found = runner(name, "--jobs", "3")
    assert status == 1 and "FAILED" in text, text
    assert said in found[name]["failures"][0]
    assert time.monotonic() - began < 60
    assert name != "hangs" or "time.sleep" in found[name]["failures"][0] or "run" in found[name]["failures"][0]


@pytest.mark.parametrize(("name", "said"), [("slow", "3 of 10 cases"), ("half", "graph 3: 40 of 100 replays")])
def test_less_than_was_asked_is_a_failure_unless_less_time_was_given(runner, name, said):
    status, _, found = runner(name)
    assert status == 1 and said in found[name]["failures"][0]
    status, _, found = runner(name, "--seconds", "60")
    assert status == 1
    status, _, found = runner(name, "--seconds", "5")
    assert (status, found[name]["failures"]) == (0, [])
    assert found[name]["figures"]["less was asked for"].startswith(f"5 of 20 s; {said}")


def test_fewer_cases_that_were_asked_for_are_said(runner):
    status, text, found = runner("fine", "--scale", "0.6")
    assert status == 0 and found["fine"]["count"] == 6
    assert found["fine"]["figures"]["less was asked for"] == "0.6 of 10 cases" and "less was asked for" in text


def test_only_sections_with_fa3_show_its_paths(runner):
    _, _, found = runner("fine", "beside_fa3", "--fa3", "a.so", "--fa3-py", "a.py")
    assert found["fine"]["command"] == "tools/reliability fine"
    assert found["beside_fa3"]["command"] == "tools/reliability beside_fa3 --fa3 a.so --fa3-py a.py"


def test_what_is_over_the_limit_is_killed(runner):
    status, _, found = runner("hangs", "fine", "--jobs", "1", "--limit", "1")
    assert status == 1
    texts = [text for entry in found.values() for text in entry["failures"]]
    assert any("killed by --limit" in text for text in texts) and any("not begun" in text for text in texts)


def test_sections_that_were_not_run_keep_what_they_say(runner):
    runner("fine")
    _, _, found = runner("wrong")
    assert found["fine"]["cases"] and found["wrong"]["failures"]


KERNEL = "_ZN16hopper_attention16attention_kernelIiEEvT_"
SASS = f"""
Fatbin elf code:
================
arch = sm_90a
code version = [1,8]

\tcode for sm_90
\t\tFunction : {KERNEL}
\t.headerflags\t@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;     /* 0x00000a00ff017b82 */
                                                              /* 0x000fe20000000800 */
        /*0010*/              @!P0 ACQBULK ;                  /* 0x0000000000007919 */
        /*0020*/              @P1 HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ; /* 0x0 */
        /*0030*/                   EXIT ;
"""
USAGE = f" Function {KERNEL}:\n  REG:168 STACK:0 SHARED:1024 LOCAL:0 TEXTURE:0\n"


def test_machine_code_is_read():
    (kernel,) = binary_facts.read_code(SASS.splitlines(keepends=True))
    assert (kernel.name, kernel.architecture) == (KERNEL, "sm_90a")
    assert dict(kernel.opcodes) == {"LDC": 1, "ACQBULK": 1, "HGMMA": 1, "EXIT": 1}
    resources = binary_facts.read_resources(USAGE.splitlines())
    assert resources == {KERNEL: (168, 0, 0)}
    assert binary_facts.faults_of_code([kernel], resources) == []


PLANTED = {
    "no HGMMA": ("HGMMA.64x64x16.F32.BF16", "HMMA.16816"),
    "does not wait": ("ACQBULK", "NOP"),
    "uses local memory": ("EXIT ;", "STL [R1], R2 ;"),
    "built for sm_80": ("arch = sm_90a", "arch = sm_80"),
    "no attention kernel": ("attention_kernel", "another_kernel__"),
    "stack frame of 16": ("STACK:0", "STACK:16"),
    "no resource usage": ("REG:", "REGISTERS:"),
}


@pytest.mark.parametrize("said", PLANTED)
def test_planted_faults_are_found(said):
    old, new = PLANTED[said]
    kernels = binary_facts.read_code(SASS.replace(old, new).splitlines(keepends=True))
    resources = binary_facts.read_resources(USAGE.replace(old, new).splitlines())
    faults = binary_facts.faults_of_code(kernels, resources)
    assert any(said in fault for fault in faults), faults


LOG = f"""seconds: 12
ptxas info    : Compiling entry function '{KERNEL}' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers
"""


def test_what_ptxas_said_must_be_of_the_kernels_of_the_library():
    kernels = binary_facts.read_code(SASS.splitlines(keepends=True))
    assert binary_facts.faults_of_logs({"a": LOG}, kernels) == []
    assert binary_facts.faults_of_logs({}, kernels) == [binary_facts.NO_LOGS]
    assert (
        "functions spill"
        in binary_facts.faults_of_logs({"a": LOG.replace("0 bytes spill l", "8 bytes spill l")}, kernels)[0]
    )
    other = LOG.replace(KERNEL, "another")
    assert binary_facts.faults_of_logs({"a": LOG, "b": other}, kernels) == [
        "another: ptxas speaks of it, but it is not in the library"
    ]
    assert (
        binary_facts.faults_of_logs({"b": other}, kernels)[0]
        == f"{KERNEL}: in the library, but ptxas said nothing of it"
    )


def test_a_second_code_object_of_a_kernel_is_found():
    kernels = 2 * binary_facts.read_code(SASS.splitlines(keepends=True))
    faults = binary_facts.faults_of_code(kernels, binary_facts.read_resources(USAGE.splitlines()))
    assert faults == [f"{KERNEL}: 2 code objects for one architecture"]
