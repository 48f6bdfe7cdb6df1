"""Compiler launcher for kernel files: `ptxas_gate.py LOG_DIR NVCC ARGS...` runs nvcc and rejects slow machine code.

What ptxas said is kept in LOG_DIR/<unit>.txt. A unit fails if a kernel spills registers, has a stack frame, or has WGMMA
instructions that ptxas serialised (notes C7510 to C7519, which it prints as mere information), or if ptxas reported nothing;
also if the list of its headers (-MF) is gone, as where two builds of a folder run at once and one takes away the other's:
Ninja would take that for a unit without headers, and never compile it again.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

_ENTRY = re.compile(r"Compiling entry function '(\S+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_WGMMA_NOTE = re.compile(r"\(?C751\d\)?")


@dataclass
class Report:
    """What ptxas said of one unit."""

    kernels: int
    registers: int  # of the kernel that uses most
    spills: int  # functions
    stack_frames: int  # functions
    wgmma_notes: int
    lines: list[str]  # the lines that count as a spill, a frame or a note

    def faults(self) -> list[str]:
        """Why the unit must not be used; empty if it may."""
        found = []
        if self.kernels == 0:
            found.append("ptxas reported no kernel: is -Xptxas=-v missing?")
        if self.spills:
            found.append(f"{self.spills} functions spill registers")
        if self.stack_frames:
            found.append(f"{self.stack_frames} functions have a stack frame")
        if self.wgmma_notes:
            found.append(f"{self.wgmma_notes} notes of serialised WGMMA (C7510 to C7519)")
        return found


def read_report(text: str) -> Report:
    """The report in the output of nvcc with -Xptxas=-v."""
    spills = frames = notes = 0
    lines = []
    for line in text.splitlines():
        frame = _FRAME.search(line)
        spilled = frame is not None and (int(frame[2]) > 0 or int(frame[3]) > 0)
        framed = frame is not None and int(frame[1]) > 0
        noted = _WGMMA_NOTE.search(line) is not None
        spills += spilled
        frames += framed
        notes += noted
        if spilled or framed or noted:
            lines.append(line.strip())
    registers = [int(n) for n in _REGISTERS.findall(text)]
    return Report(len(set(_ENTRY.findall(text))), max(registers, default=0), spills, frames, notes, lines)


def main(log_dir: Path, command: list[str]) -> int:
    output = Path(command[command.index("-o") + 1])
    unit = output.name.removesuffix(".o").removesuffix(".cu")
    start = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    seconds = time.monotonic() - start

    log_dir.mkdir(parents=True, exist_ok=True)
    (log_dir / f"{unit}.txt").write_text(f"seconds: {seconds:.1f}\n{done.stdout}")
    if done.returncode != 0:
        sys.stderr.write(done.stdout)
        return done.returncode

    report = read_report(done.stdout)
    faults = report.faults()
    if "-MF" in command and not Path(command[command.index("-MF") + 1]).is_file():
        faults.append("the list of its headers is gone: does another build of this folder run? Build again")
    if faults:
        output.unlink(missing_ok=True)
        sys.stderr.write("\n".join([f"{unit}: rejected", *faults, *report.lines]) + "\n")
        return 1
    print(f"{unit}: {report.kernels} kernels, at most {report.registers} registers, no spills, {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
