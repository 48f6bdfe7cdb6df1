"""The command line: what it lists, refuses and returns. No GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bench import made_up
from hopper_attention import _core
from hopper_attention.bench import __main__ as command
from hopper_attention.bench import record, suites


def test_list(capsys):
    assert command.main(["--list", "--suite", "prefill", "--filter", "head_dim == 64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "12 cases" and len(lines) == 13 and lines[0].endswith("d64 full 512")


@pytest.mark.parametrize("suite", [*suites.SUITES, "host", "io", "all"])
def test_every_suite_has_cases(suite, capsys):
    assert command.main(["--list", "--suite", suite]) == 0
    assert not capsys.readouterr().out.startswith("0 cases")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--filter", "head_dim =="], "--filter 'head_dim =='"),
        (["--filter", "head_dim == 1"], "leaves no case of suite prefill"),
        (["--peers", "fa3,fa9"], "--peers: no fa9; there are cudnn, flash, triton, fa3."),
        (["--compare", "/no/such/file"], "/no/such/file"),
        (["--report", "/no/such/file"], "/no/such/file"),
    ],
)
def test_wrong_arguments_give_one_line_and_status_2(arguments, message, capsys):
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_an_unknown_suite_is_argparses_error(capsys):
    with pytest.raises(SystemExit) as found:
        command.main(["--suite", "no-such"])
    assert found.value.code == 2 and "no-such" in capsys.readouterr().err


def test_without_torch_one_sentence(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert command.main([]) == 2
    assert capsys.readouterr().err == ("The benchmark needs torch, for tensors, CUDA graphs and SDPA: install torch.\n")


@pytest.mark.skipif(bool(_core.built_kernels()), reason="this build has kernels")
def test_without_kernels_one_sentence(capsys):
    pytest.importorskip("torch")
    assert command.main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith("The benchmark needs a GPU") and error.count("\n") == 1


def written(tmp_path, report):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    return str(path)


def test_an_earlier_report_is_shown_and_compared(tmp_path, capsys):
    path = written(tmp_path, made_up.full())
    copy = tmp_path / "copy.json"
    assert command.main(["--report", path, "--compare", path, "--json", str(copy)]) == 0
    text = capsys.readouterr().out
    assert "prefill: our speed" in text and "relative to FA3: geometric mean +0.0 %" in text
    assert json.loads(copy.read_text()) == made_up.full()


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("skipped", 0), ("wrong", 1), ("failed", 1)])
def test_the_exit_status_tells_whether_all_answers_are_right(tmp_path, status, code, capsys):
    report = made_up.full()
    report["cases"][3]["status"] = status
    assert command.main(["--report", written(tmp_path, report)]) == code


def test_plots_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command.main(["--report", written(tmp_path, made_up.full()), "--plot", str(tmp_path)]) == 0
    assert capsys.readouterr().err == "--plot needs matplotlib: pip install 'hopper-attention[bench]'.\n"


def test_progress_without_a_terminal_is_lines(capsys):
    with command.Progress(2) as progress:
        progress.step("first")
        progress.say("between")
        progress.step("second")
    assert capsys.readouterr().err == "[1/2] first\nbetween\n[2/2] second\n"


@pytest.fixture
def pretended(monkeypatch):
    """No GPU is asked: cases take made-up times. Returns what `run_case` was given."""
    torch = pytest.importorskip("torch")
    from hopper_attention.bench import run, timing

    given = []

    def run_case(case, found, **options):
        given.append((case, [i.name for i in found], options))
        if case.seqlen_q == 8192:
            lost = made_up.entry(case)
            lost.update(status="failed", reason="ours: an illegal memory access was encountered")
            raise run.DeviceLost(lost)
        return made_up.entry(case, ours=100.0)

    monkeypatch.setattr(command, "require_gpu", lambda: None)
    monkeypatch.setattr(run, "run_case", run_case)
    monkeypatch.setattr(run, "machine", lambda: {"device": "pretended", "torch": torch.__version__})
    monkeypatch.setattr(timing, "ceilings", lambda quick: {"matmul_tflops": 1.0, "read_gbs": 1.0, "copy_gbs": 1.0})
    return given


def test_a_run_writes_its_report(pretended, tmp_path, capsys):
    path = tmp_path / "out.json"
    arguments = ["--filter", "head_dim == 64 and causal and seqlen_q < 8192", "--peers", "flash", "--json", str(path)]
    assert command.main([*arguments, "--quick"]) == 0
    report = record.load(str(path))
    assert [entry["case"]["seqlen_q"] for entry in report["cases"]] == [512, 1024, 2048, 4096]
    assert report["command"].startswith("python -m hopper_attention.bench --filter 'head_dim == 64 and")
    assert report["machine"]["device"] == "pretended" and report["ceilings"]["read_gbs"] == 1.0
    assert pretended[0][1][0] == "ours" and pretended[0][1][-1] == "flash"
    assert pretended[0][2] == {"seconds": command.QUICK_SECONDS, "without_ours": False}
    found = capsys.readouterr()
    assert "[4/4] prefill / d64 causal 4k: 100.0 us" in found.err and "d64 causal 4k" in found.out


def test_a_lost_gpu_ends_the_run_and_keeps_what_there_is(pretended, tmp_path, capsys):
    path = tmp_path / "out.json"
    assert command.main(["--filter", "head_dim == 64 and causal", "--json", str(path)]) == 1
    assert [entry["status"] for entry in record.load(str(path))["cases"]] == ["ok"] * 4 + ["failed"]
    assert "the GPU is lost" in capsys.readouterr().err


def test_a_library_that_cannot_be_loaded_gives_one_line(pretended, capsys):
    assert command.main(["--fa3", "/no/such/fa3.so"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("--fa3 /no/such/fa3.so: ") and pretended == []


def test_a_package_names_its_kernel_sources(tmp_path):
    """The build writes what tools/kernel_sources_hash prints; a package without it has none."""
    import pathlib

    import hopper_attention
    from hopper_attention.bench import run

    found = run.kernel_sources(pathlib.Path(hopper_attention.__file__).parent)
    assert found is not None and len(found) == 64 and run.kernel_sources(tmp_path) is None
    tool = pathlib.Path(__file__).parents[3] / "tools" / "kernel_sources_hash"
    if tool.exists():
        printed = subprocess.run([sys.executable, tool], capture_output=True, text=True, check=True).stdout.strip()
        assert found == printed
        file = tmp_path / "hash"
        for _ in range(2):
            subprocess.run([sys.executable, tool, file], check=True)
            assert run.kernel_sources(tmp_path) is None and file.read_text().strip() == printed
