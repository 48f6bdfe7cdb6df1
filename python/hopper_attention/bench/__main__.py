"""`python -m hopper_attention.bench`. Exit status: 0 all answers right, 1 a wrong answer or a failed call of ours, 2
nothing could be measured.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from hopper_attention.bench import compare, kernels, record, suites, table
from hopper_attention.bench.peers import PEERS, Implementation, implementations
from hopper_attention.bench.progress import Progress

EXTRA_SUITES = ("host", "io")
QUICK_SECONDS = 0.08


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m hopper_attention.bench", description="Speed beside the peers, every answer checked."
    )
    found.add_argument("--suite", default="prefill", choices=[*suites.SUITES, *EXTRA_SUITES, "all"])
    found.add_argument("--filter", metavar="EXPR", help="Python over a case's fields: 'head_dim == 128 and causal'")
    found.add_argument("--list", action="store_true", help="print the cases and their work; needs no GPU")
    found.add_argument("--peers", default=",".join(PEERS), help="comma-separated, of %(default)s; '' for none")
    found.add_argument("--fa3", metavar="PATH", help="the FlashAttention-3 library (.so or .so.xz)")
    found.add_argument("--fa3-py", metavar="FILE", help="Python file with load, forward, scheduler_metadata for it")
    found.add_argument("--without-ours", action="store_true", help="measure peers where ours has no kernel, too")
    found.add_argument("--quick", action="store_true", help="a fifth of the time for each case")
    found.add_argument("--json", metavar="OUT", help="write the report")
    found.add_argument("--plot", metavar="DIR", help="write prefill.png and decode.png (needs matplotlib)")
    found.add_argument("--compare", metavar="OLD", help="an earlier report, to print the change")
    found.add_argument("--report", metavar="OLD", help="measure nothing: table, plots, comparison of this report")
    return found


class CannotRun(Exception):
    """Nothing can be measured; the message is one sentence."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; errors of usage exit with status 2, as argparse does."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    try:
        old = record.load(options.compare) if options.compare else None
        if options.report:
            return finish(record.load(options.report), options, old)
        peers = [name for name in options.peers.split(",") if name]
        unknown = sorted(set(peers) - set(PEERS))
        if unknown:
            raise CannotRun(f"--peers: no {', '.join(unknown)}; there are {', '.join(PEERS)}.")
        cases = [] if options.suite in EXTRA_SUITES else suites.select(options.suite, options.filter)
        if options.list:
            return list_cases(cases + extra_cases(options.suite))
        if not cases and options.suite not in EXTRA_SUITES:
            raise CannotRun(f"--filter {options.filter!r} leaves no case of suite {options.suite}.")
        require_gpu()
        report = measure(options, given, cases, load_peers(peers, options))
    except (CannotRun, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return finish(report, options, old)


def load_peers(peers: list[str], options: argparse.Namespace) -> list[Implementation]:
    try:
        return implementations(peers, options.fa3, options.fa3_py)
    except OSError as error:
        raise CannotRun(f"--fa3 {options.fa3}: {error}") from error


def require_gpu() -> None:
    """Raises CannotRun unless torch is there and the kernels can run."""
    import hopper_attention

    try:
        import torch  # noqa: F401
    except ImportError:
        raise CannotRun("The benchmark needs torch, for tensors, CUDA graphs and SDPA: install torch.") from None
    facts = hopper_attention.info()
    if not facts["ready"]:
        raise CannotRun(f"The benchmark needs a GPU that runs the kernels: {facts['message']}")


def extra_cases(suite: str) -> list[suites.Case]:
    """The cases of host and io, which have tables of their own and no filter."""
    from hopper_attention.bench import host, traffic

    found = {"host": host.CASES, "io": traffic.CASES, "all": host.CASES + traffic.CASES}
    return found.get(suite, [])


def list_cases(cases: list[suites.Case]) -> int:
    """One line for each case: its name, its work, what it calls."""
    for case in cases:
        work = f"{case.kv_bytes() / 1e6:10.1f} MB" if case.is_decode else f"{case.flops() / 1e9:10.1f} GFLOP"
        sys.stdout.write(f"{case.suite:8} {work}  {case.call:6}  {case.name}\n")
    sys.stdout.write(f"{len(cases)} cases\n")
    return 0


def measure(
    options: argparse.Namespace, given: list[str], cases: list[suites.Case], found: list[Implementation]
) -> dict[str, Any]:
    """The report. A lost GPU ends it early, with what there is."""
    from hopper_attention.bench import host, run, timing, traffic

    warnings.filterwarnings("ignore", module="torch")
    report = run.new_report(given)
    report["machine"] = run.machine()
    seconds = QUICK_SECONDS if options.quick else None
    with Progress(len(cases)) as progress:
        if cases:
            report["ceilings"] = timing.ceilings(options.quick)
        try:
            for case in cases:
                entry = run.run_case(case, found, seconds=seconds, without_ours=options.without_ours)
                report["cases"].append(entry)
                progress.step(table.one_line(entry))
                save(report, options.json)
            if options.suite in (*kernels.SUITES, "all"):
                report["kernels"] = kernels.measure(options.suite, found, options.quick, progress.say)
                save(report, options.json)
            if options.suite in ("host", "all"):
                report["host"] = host.measure(found, options.quick)
            if options.suite in ("io", "all"):
                report["traffic"] = traffic.measure(progress.say)
        except run.DeviceLost as lost:
            report["cases"].append(lost.args[0])
            progress.say(f"the GPU is lost, the run ends here: {lost.args[0]['reason']}")
    return report


def save(report: dict[str, Any], path: str | None) -> None:
    """Writes the JSON file after every case, so that an interrupted run leaves one."""
    if path:
        pathlib.Path(path).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def finish(report: dict[str, Any], options: argparse.Namespace, old: dict[str, Any] | None) -> int:
    """Table, JSON, plots, comparison; the exit status."""
    table.show(report)
    if old is not None:
        sys.stdout.write("\n" + table.plain(compare.compare(old, report)) + "\n")
    save(report, options.json)
    if options.plot:
        from hopper_attention.bench import plots

        try:
            for path in plots.draw(report, options.plot):
                sys.stdout.write(f"figure: {path}\n")
        except ImportError:
            sys.stderr.write("--plot needs matplotlib: pip install 'hopper-attention[bench]'.\n")
    failed = any(entry["status"] in ("wrong", "failed") for entry in report["cases"])
    return 1 if failed or kernels.any_failed(report.get("kernels", [])) else 0


if __name__ == "__main__":
    raise SystemExit(main())
