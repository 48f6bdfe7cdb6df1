"""tools/compare_builds without a GPU: its cases, where builds come from, who runs when, the judgement, the table."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

from tool_modules import tool_module

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
from hopper_attention.bench import inputs, run, timing  # noqa: E402

ROOT = pathlib.Path(__file__).parents[3]
TOOL = ROOT / "tools" / "compare_builds"
HERE = pathlib.Path(hopper_attention.__file__).parents[1]
pytestmark = pytest.mark.skipif(not TOOL.exists(), reason="tools/ is not beside these tests")


@pytest.fixture
def tool():
    return tool_module("compare_builds")


@pytest.fixture
def options(tool, monkeypatch):
    def given(*text):
        monkeypatch.setattr(sys, "argv", ["compare_builds", *text])
        return tool.arguments()

    return given


@pytest.mark.parametrize(
    "given, message",
    [
        ([], "a build is needed: NAME=PATH"),
        (["a.whl"], "NAME=PATH is needed, found 'a.whl'"),
        (["a="], "NAME=PATH is needed, found 'a='"),
        (["a=x", "b=y", "a=z"], "two builds have one name: a b a"),
        (["a=x", "--suite", "small,slow"], "no slow; there are small, more, tiles, long, d64"),
        (["a=x", "--only", "d64("], "is no regular expression"),
        (["a=x", "--rounds", "0"], "an integer of 1 or more is needed, found '0'"),
    ],
    ids=str,
)
def test_what_is_wrong_with_arguments_is_said(options, capsys, given, message):
    with pytest.raises(SystemExit, match="2"):
        options(*given)
    assert message in capsys.readouterr().err


def test_cases_have_names_of_their_own_and_can_be_chosen(tool, options):
    every = tool.selected(options("a=x", "--suite", "small,more,tiles,long,d64"))
    names = [one.case.name for one in every]
    assert len(set(names)) == len(names) == 18 + 2 + 24 + 3 + 11 * (2 + 3) + 5 * 2 + 3 * 12
    assert {one.case.call for one in tool.small()} == {"dense", "varlen", "cache"}
    assert all(one.case.batch * one.case.seqlen_q in (8000, 8192) and one.tile for one in tool.tiles())
    assert not any(one.tile for one in tool.small() + tool.more() + tool.long() + tool.d64())
    l2 = 60 << 20
    assert all(one.case.kv_bytes() > 2 * l2 and one.case.seqlen_q == 1 for one in tool.long())
    assert {one.case.page_size for one in tool.long()} == {0, 16}
    assert all(one.case.head_dim == 64 and one.case.page_size == 16 for one in tool.d64())
    chosen = tool.selected(options("a=x", "--only", "^8/1 512|b16"))
    assert [one.case.name for one in chosen] == ["8/1 512 on 512", "8/1 512 on 8192", "decode b16 1024"]
    with pytest.raises(tool.CannotRun, match=r"'d64' leaves no case of small: 8/1 512 on 512, 8/1 1024 on 1024"):
        tool.selected(options("a=x", "--only", "d64"))


def test_a_build_is_a_wheel_a_folder_with_one_or_an_installed_package(tool, tmp_path):
    wheel, other = tmp_path / "new" / "one.whl", tmp_path / "two" / "b.whl"
    for path in (wheel, other, tmp_path / "two" / "a.whl", tmp_path / "site" / "hopper_attention" / "__init__.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert tool.located("new", wheel) == tool.located("new", wheel.parent) == wheel
    assert tool.located("old", tmp_path / "site") == tmp_path / "site"
    for path, message in (
        (tmp_path / "none.whl", "new: there is no .*none.whl"),
        (tmp_path, "new: one wheel or an installed package is needed in .*; wheels there: none"),
        (other.parent, "new: one wheel .*; wheels there: a.whl, b.whl"),
    ):
        with pytest.raises(tool.CannotRun, match=message):
            tool.located("new", path)


def test_without_a_wheel_or_a_gpu_nothing_is_started(tool, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(subprocess, "run", lambda *a, **b: pytest.fail("something was started"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["compare_builds", f"old={HERE}", f"new={tmp_path}/no.whl"])
    assert tool.main() == 2 and "new: there is no " in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["compare_builds", f"old={HERE}"])
    assert tool.main() == 2 and "a Hopper GPU is needed, and torch finds no GPU" in capsys.readouterr().err


def wheel_of(folder, platform):
    """A wheel of a package that only has a name."""
    path = folder / f"hopper_attention-9.0-py3-none-{platform}.whl"
    info = "hopper_attention-9.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hopper_attention/__init__.py", "")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: hopper-attention\nVersion: 9.0\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-{platform}\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_wheels_are_installed_beside_each_other(tool, tmp_path):
    # In another process: to look for pip in this one makes setuptools leave distutils alone, which Inductor's tests need.
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode != 0:
        pytest.skip("there is no pip here")
    scratch = tmp_path / "scratch"
    for name in ("old", "new"):
        folder = tool.installed(name, wheel_of(tmp_path, "any"), scratch)
        assert folder == scratch / name and (folder / "hopper_attention" / "__init__.py").is_file()
    assert tool.installed("here", HERE, scratch) == HERE
    with pytest.raises(tool.CannotRun, match="^other: .*not a supported wheel"):
        tool.installed("other", wheel_of(tmp_path, "win_arm64"), scratch)


def package(folder, text):
    """An installed package whose __init__.py is `text`, with the folders that `use` looks into."""
    for inner in ("", "bench", "testing"):
        path = folder / "hopper_attention" / inner / "__init__.py"
        path.parent.mkdir(parents=True)
        path.write_text("" if inner else text)
    return folder


def test_kernels_are_of_the_build_and_cases_of_this_checkout(tmp_path):
    folder = package(tmp_path, "def info(): return {'ready': True}")
    code = (
        "import importlib.machinery as m, importlib.util as u, pathlib, sys\n"
        f"loader = m.SourceFileLoader('tool', {str(TOOL)!r})\n"
        "sys.modules['tool'] = tool = u.module_from_spec(u.spec_from_loader('tool', loader))\n"
        f"loader.exec_module(tool); tool.use(pathlib.Path({str(folder)!r}))\n"
        "import hopper_attention, hopper_attention.testing.gates\n"
        "from hopper_attention.bench import check, inputs, peers, run, suites, timing\n"
        "print(hopper_attention.__file__, check.__file__, hopper_attention.testing.gates.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    source = ROOT / "python" / "hopper_attention"
    expected = [folder / "hopper_attention" / "__init__.py", source / "bench/check.py", source / "testing/gates.py"]
    assert done.stdout.split() == [str(path) for path in expected], done.stderr


def test_a_process_says_why_its_build_cannot_run(tool, options, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    given = options("a=x", "--timeout", "100")
    with pytest.raises(tool.CannotRun, match="^cannot run its kernels: .*(driver|GPU|kernels)"):
        tool.process(HERE, 0, given)
    with pytest.raises(tool.CannotRun, match="^this: cannot run its kernels: "):
        tool.rounds({"this": HERE}, given)
    (tmp_path / "empty" / "hopper_attention").mkdir(parents=True)
    with pytest.raises(tool.CannotRun, match=f"is that of {HERE}.*, not that of {tmp_path}/empty"):
        tool.process(tmp_path / "empty", 0, given)
    broken = package(tmp_path / "broken", "raise OSError('no such library')")
    assert tool.process(broken, 0, given) == "OSError: no such library"
    silent = package(tmp_path / "silent", "import os; os._exit(7)")
    assert tool.process(silent, 0, given) == "exit status 7"
    slow = package(tmp_path / "slow", "import time; time.sleep(60)")
    assert tool.process(slow, 0, options("a=x", "--timeout", "1")) == "did not end within 1 s"


class Eager:
    """timing.Replay without a graph: makes the call again, over what was filled with NaN, and says a time."""

    made: list = []

    def __init__(self, calls, repeat):
        self.calls, self.repeat, self.times = calls, repeat, iter(range(1, 100))
        self.last = calls[0]()
        self.made.append(self)

    def time(self):
        assert self.calls[0]() is not None
        return float(next(self.times))


@pytest.fixture
def on_cpu(tool, options, monkeypatch):
    """measure() of three cases with made-up times."""
    monkeypatch.setattr(Eager, "made", [])
    monkeypatch.setattr(timing, "Replay", Eager)
    monkeypatch.setattr(run, "machine", lambda: {"device": "none"})
    kinds = ({"causal": False}, {"call": "varlen", "lengths": (9, 30)}, {"call": "cache", "page_size": 16})
    cases = [tool.call(given.get("call", "dense"), 2, 1, 30, 4, 2, 32, **given) for given in kinds]
    monkeypatch.setitem(tool.SUITES, "small", lambda: cases)

    def measured(*text, turn=0):
        given = options("a=x", "--calls", "4", "--replays", "5", *text)
        given.turn = turn
        return tool.measure(given, "cpu")

    return measured


def test_every_kind_of_call_is_timed_and_judged(on_cpu):
    found = on_cpu()
    assert found["us"] == dict.fromkeys(["dense", "varlen", "cache"], 4.0), (
        "the median of 2 to 6: the first is not taken"
    )
    assert found["left_out"] == {} and found["check_seconds"] > 0 and found["machine"] == {"device": "none"}
    assert [one.repeat for one in Eager.made] == [4] * 3
    again = on_cpu(turn=1)
    assert again["us"] == found["us"] and "machine" not in again and "check_seconds" not in again
    assert "check_seconds" not in on_cpu("--no-check")


def test_inputs_are_others_in_each_round_and_one_set(on_cpu, monkeypatch):
    made, original = [], inputs.make
    monkeypatch.setattr(inputs, "make", lambda *given, **named: made.append(original(*given, **named)) or made[-1])
    on_cpu("--only", "cache")
    on_cpu("--only", "cache", turn=1)
    on_cpu("--only", "cache", turn=1)
    (first,), (second,), (third,) = made
    assert not torch.equal(first.k, second.k) and torch.equal(second.k, third.k) and bool(first.q.any())


def test_a_result_that_is_wrong_or_not_written_is_found(tool, on_cpu, monkeypatch):
    original = hopper_attention.flash_attn_func

    def off_by_a_little(*given, **named):
        original(*given, **named)[:, :, 1] *= 1.05

    monkeypatch.setattr(hopper_attention, "flash_attn_func", off_by_a_little)
    found = on_cpu()
    assert list(found["left_out"]) == ["dense"] and found["left_out"]["dense"].startswith(tool.WRONG)
    assert tool.judged(found).endswith("1 WRONG")
    calls = iter(range(100))

    def only_the_first_time(*given, **named):
        if next(calls) == 0:
            original(*given, **named)

    monkeypatch.setattr(hopper_attention, "flash_attn_func", only_the_first_time)
    assert list(on_cpu()["left_out"]) == ["dense"], "the replays wrote nothing"


def test_what_a_build_refuses_is_left_out_and_what_fails_is_named(on_cpu, monkeypatch):
    def refuse(*given, **named):
        raise NotImplementedError("no kernel for that\nmore")

    monkeypatch.setattr(hopper_attention, "flash_attn_with_kvcache", refuse)
    found = on_cpu()
    assert found["left_out"] == {"cache": "no kernel for that"} and list(found["us"]) == ["dense", "varlen"]

    def fail(*given, **named):
        raise RuntimeError("launch failed")

    monkeypatch.setattr(hopper_attention, "flash_attn_varlen_func", fail)
    with pytest.raises(RuntimeError, match="^varlen: launch failed"):
        on_cpu()


def test_a_tile_is_forced_in_each_call(tool, monkeypatch):
    seen = []
    monkeypatch.setattr(
        hopper_attention, "flash_attn_func", lambda *a, **b: seen.append(hopper_attention._core.forced())
    )
    core = type("Core", (), {"ForcedPlan": lambda **given: given, "now": None})
    monkeypatch.setattr(core, "force_plan", lambda plan: (core.now, setattr(core, "now", plan))[0], raising=False)
    monkeypatch.setattr(core, "forced", lambda: core.now, raising=False)
    monkeypatch.setattr(hopper_attention, "_core", core)
    monkeypatch.setattr(hopper_attention.testing, "_core", core)
    one = tool.call("", 1, 30, 30, 4, 2, 32, tile=(192, 80))
    tool.prepared(one, inputs.make(one.case, "cpu"))()
    assert (seen[0]["rows"], seen[0]["keys"]) == (192, 80) and core.now is None


def found(us, **left_out):
    return {"us": us, "left_out": left_out, "machine": {"device": "H200"}}


def test_the_table_has_the_least_the_median_and_the_ratio(tool):
    results = {
        "old": [found({"a": 10.0, "b": 20.0}), found({"a": 12.0, "b": 40.0}), found({"a": 11.0, "b": 21.0})],
        "new": [found({"a": 9.0, "b": 30.0}), found({"a": 8.0, "b": 30.0}), found({"a": 9.5, "b": 30.0})],
    }
    rows = tool.compared(results, tool.left_out(results))
    assert rows["a"]["old"] == {"us": [10.0, 12.0, 11.0], "least": 10.0, "median": 11.0, "ratio": 1.0}
    assert rows["a"]["new"] == {"us": [9.0, 8.0, 9.5], "least": 8.0, "median": 9.0, "ratio": 0.8}
    assert rows["b"]["new"]["ratio"] == 1.5
    lines = [line.split() for line in tool.table(["old", "new"], rows, tool.left_out(results))]
    assert lines[0] == ["old", "new"] and lines[1] == ["us", *["least", "median", "ratio"] * 2]
    assert lines[2] == ["a", "10.00", "11.00", "1.000", "8.00", "9.00", "0.800"]
    assert lines[4] == ["geometric", "mean", "1.000", "1.095"], "the root of 0.8 times 1.5"
    widths = {len(line) for line in tool.table(["old", "a name of more than one column"], {}, {})}
    assert len(widths) == 1


def test_wrong_and_missing_cases_have_no_time(tool):
    results = {
        "old": [found({"b": 2.0, "c": 5.0}, a="no kernel"), found({"b": 2.0, "c": 5.0}, a="no kernel")],
        "new": [found({"a": 1.0, "b": 1.0, "c": 4.0}, b="wrong: off"), found({"a": 1.0, "b": 1.0, "c": 6.0})],
        "none": [],
    }
    without = tool.left_out(results)
    rows = tool.compared(results, without)
    assert rows["a"] == {"new": {"us": [1.0, 1.0], "least": 1.0, "median": 1.0, "ratio": None}}
    assert list(rows["b"]) == ["old"] and rows["c"]["new"]["ratio"] == 0.8
    lines = {line.split()[0]: line.split()[1:] for line in tool.table(list(results), rows, without)[2:]}
    assert lines["a"] == ["-", "1.00", "1.00", "-", "-"]
    assert lines["b"] == ["2.00", "2.00", "1.000", "wrong", "-"]
    assert lines["geometric"] == ["mean", "1.000", "0.800", "-"]


@pytest.fixture
def processes(tool, monkeypatch, tmp_path):
    """Runs the tool with processes that are made up: turns of who ran when, and the exit status with the report."""
    monkeypatch.setattr(tool, "require_gpu", lambda: None)
    order = []

    def start(answers, *text):
        def process(folder, turn, options):
            order.append((folder.name, turn))
            return answers(folder.name, turn)

        monkeypatch.setattr(tool, "process", process)
        for name in ("old", "new"):
            (tmp_path / name / "hopper_attention").mkdir(parents=True, exist_ok=True)
        builds = [f"{name}={tmp_path / name}" for name in ("old", "new")]
        monkeypatch.setattr(sys, "argv", ["compare_builds", *builds, "--json", str(tmp_path / "out.json"), *text])
        status = tool.main()
        return order, status, json.loads((tmp_path / "out.json").read_text())

    return start


def test_builds_run_by_turns_and_the_report_has_all(processes, capsys):
    times = {"old": 4.0, "new": 2.0}
    order, status, report = processes(lambda name, turn: found({"a": times[name] + turn}), "--rounds", "3")
    assert order == [("old", 0), ("new", 0), ("new", 1), ("old", 1), ("old", 2), ("new", 2)] and status == 0
    assert report["cases"]["a"]["new"] == {"us": [2.0, 3.0, 4.0], "least": 2.0, "median": 3.0, "ratio": 0.5}
    assert report["builds"]["old"]["machine"] == {"device": "H200"} and report["failed"] == {}
    printed = capsys.readouterr()
    assert "4.00     5.00  1.000" in printed.out and "[round 3/3] new: 1 cases in " in printed.err


def test_a_wrong_result_and_a_failed_build_end_with_1(processes, capsys):
    order, status, report = processes(
        lambda name, turn: found({"a": 1.0}, **({"a": "wrong: x"} if name == "new" else {}))
    )
    assert status == 1 and list(report["cases"]["a"]) == ["old"] and "new, a: wrong: x" in capsys.readouterr().out
    order.clear()
    order, status, report = processes(lambda name, turn: "lost" if (name, turn) == ("new", 1) else found({"a": 1.0}))
    assert status == 1 and report["failed"] == {"new": "lost"} and len(report["cases"]["a"]["new"]["us"]) == 1
    assert [turn for name, turn in order if name == "new"] == [0, 1], "a failed build is not started again"
    assert "new failed: lost" in capsys.readouterr().out
    _, status, report = processes(lambda name, turn: found({"a": 1.0}, b="no kernel"))
    assert status == 0 and report["left_out"]["old"] == {"b": "no kernel"}, "what a build never had is no failure"


def test_help_needs_nothing():
    """Neither the package nor torch: what it is for is read before anything is installed."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-S", TOOL, "--help"], capture_output=True, text=True, env=clean, timeout=60)
    assert done.returncode == 0 and "NAME=PATH" in done.stdout and "--turn" not in done.stdout, done.stderr
