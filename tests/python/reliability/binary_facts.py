"""What the built library contains, read from its machine code; needs no GPU, but cuobjdump and nvdisasm.

They are looked for in CUOBJDUMP, on PATH and in the triton package; tools/test fetches them. What ptxas said is read from
the build tree, which the library lies in or HOPPER_ATTENTION_BUILD_DIR names; it must be of the kernels of this library.
A case is a kernel.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from reliability.harness import Budget, Failures, result
from tool_modules import tool_module

TITLE = "What the built library contains"
NEEDS = "nothing"
COUNT = 1
SECONDS = 300
PARTS = 1

ARCHITECTURE = "sm_90a"
ATTENTION = "attention_kernel"
WARPGROUP_MMA, WAIT = "HGMMA", "ACQBULK"  # ACQBULK: griddepcontrol.wait of programmatic dependent launch
NO_LOGS = "what ptxas said was not found: HOPPER_ATTENTION_BUILD_DIR must name the build tree of the library"
LOCAL_MEMORY = {"LDL", "STL"}
_ARCH = re.compile(r"^arch = (\S+)")
_FUNCTION = re.compile(r"^\s*Function\s*:?\s*([A-Za-z_]\w*)\s*:?\s*$")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)")
_ENTRY = re.compile(r"Compiling entry function '(\S+)'")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+).*? LOCAL:(\d+)")


@dataclass
class Kernel:
    """A kernel of one code object."""

    name: str
    architecture: str
    opcodes: Counter[str] = field(default_factory=Counter)


def find_cuobjdump() -> str:
    """Its path; RuntimeError if there is none."""
    places = [os.environ.get("CUOBJDUMP"), shutil.which("cuobjdump")]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        places.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"))
    for place in places:
        if place and os.access(place, os.X_OK):
            return place
    raise RuntimeError("cuobjdump: not found in CUOBJDUMP, on PATH or in the triton package")


def missing() -> str:
    try:
        find_cuobjdump()
        return "" if ptxas_logs(library_path()) else NO_LOGS
    except (RuntimeError, ImportError) as error:
        return str(error)


def dump(cuobjdump: str, option: str, library: Path) -> Iterable[str]:
    """The lines that it prints; nvdisasm is looked for beside it."""
    path = os.pathsep.join([str(Path(cuobjdump).parent), os.environ.get("PATH", "")])
    command = [cuobjdump, option, str(library)]
    process = subprocess.Popen(
        command, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "PATH": path},
    )  # fmt: skip
    last = ""
    for line in process.stdout:
        last = line.strip() or last
        yield line
    if process.wait() != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {last}")


def read_code(lines: Iterable[str]) -> list[Kernel]:
    """The kernels in what `cuobjdump -sass` prints."""
    kernels: list[Kernel] = []
    architecture, opcodes = "", Counter()
    for line in lines:
        if found := _INSTRUCTION.match(line):
            opcodes[found[1]] += 1
        elif found := _FUNCTION.match(line):
            kernels.append(Kernel(found[1], architecture))
            opcodes = kernels[-1].opcodes
        elif found := _ARCH.match(line):
            architecture = found[1]
    return kernels


def read_resources(lines: Iterable[str]) -> dict[str, tuple[int, int, int]]:
    """Registers, stack frame and local memory in bytes of each kernel, as `cuobjdump -res-usage` prints them."""
    found: dict[str, tuple[int, int, int]] = {}
    name = ""
    for line in lines:
        if function := _FUNCTION.match(line):
            name = function[1]
        elif name and (numbers := _RESOURCES.search(line)):
            found[name] = tuple(map(int, numbers.groups()))
            name = ""
    return found


def faults_of_code(kernels: list[Kernel], resources: dict[str, tuple[int, int, int]]) -> list[str]:
    """What must not be in the machine code of the library."""
    found = [f"{k.name}: built for {k.architecture}" for k in kernels if k.architecture != ARCHITECTURE]
    names = Counter(k.name for k in kernels)
    found += [f"{name}: {count} code objects for one architecture" for name, count in names.items() if count > 1]
    if not any(ATTENTION in name for name in names):
        found.append("no attention kernel in the library")
    for kernel in kernels:
        if LOCAL_MEMORY & set(kernel.opcodes):
            counts = {name: kernel.opcodes[name] for name in sorted(LOCAL_MEMORY)}
            found.append(f"{kernel.name}: uses local memory {counts}")
        if ATTENTION in kernel.name and not kernel.opcodes[WARPGROUP_MMA]:
            found.append(f"{kernel.name}: no {WARPGROUP_MMA}")
        if ATTENTION in kernel.name and not kernel.opcodes[WAIT]:
            found.append(f"{kernel.name}: does not wait for the kernel before it ({WAIT})")
        _, stack, local = resources.get(kernel.name, (0, -1, -1))
        if stack < 0:
            found.append(f"{kernel.name}: no resource usage")
        elif stack or local:
            found.append(f"{kernel.name}: stack frame of {stack} bytes, {local} bytes of local memory")
    return found


def figures_tool() -> ModuleType:
    """tools/figures, which knows the symbols of a library and what ptxas says."""
    return tool_module("figures")


def forbidden_imports(library: Path) -> list[str]:
    """Symbols that the library would take from others to end the process."""
    tool = figures_tool()
    return [name for name in tool.symbols(library, "--undefined-only") if tool.FORBIDDEN.match(name)]


def ptxas_logs(library: Path) -> dict[str, str]:
    """What ptxas said of each kernel file, by its name; empty where the build tree is not known."""
    build = Path(os.environ.get("HOPPER_ATTENTION_BUILD_DIR") or library.parents[2])
    return {log.stem: log.read_text(encoding="utf-8") for log in sorted((build / "ptxas").glob("*.txt"))}


def faults_of_logs(logs: dict[str, str], kernels: list[Kernel]) -> list[str]:
    """Spills, frames and notes, and kernels that only the logs or only the library has."""
    if not logs:
        return [NO_LOGS]
    read_report = figures_tool().read_report
    found = [f"ptxas, {name}: {text}" for name, log in logs.items() for text in read_report(log).faults()]
    said = {kernel for log in logs.values() for kernel in _ENTRY.findall(log)}
    built = {kernel.name for kernel in kernels}
    found += [f"{name}: in the library, but ptxas said nothing of it" for name in sorted(built - said)]
    found += [f"{name}: ptxas speaks of it, but it is not in the library" for name in sorted(said - built)]
    return found


def library_path() -> Path:
    import hopper_attention

    return (Path(hopper_attention.__file__).parent / "libhopper_attention.so").resolve()


def run(budget: Budget) -> dict:
    library, failures = library_path(), Failures()
    cuobjdump = find_cuobjdump()
    budget.alive(0, 1, "reads machine code")
    kernels = read_code(dump(cuobjdump, "-sass", library))
    resources = read_resources(dump(cuobjdump, "-res-usage", library))
    for text in faults_of_code(kernels, resources):
        failures.add(text)
    ptx = [line for line in dump(cuobjdump, "-lptx", library) if line.startswith("PTX file")]
    for line in ptx:
        failures.add(f"the library holds PTX, which another GPU would compile: {line.strip()}")
    imports = forbidden_imports(library)
    for name in imports:
        failures.add(f"the library imports {name}, which ends the process")
    logs = ptxas_logs(library)
    for text in faults_of_logs(logs, kernels):
        failures.add(text)
    reports = [figures_tool().read_report(log) for log in logs.values()]
    attention = [k for k in kernels if ATTENTION in k.name]
    figures = {
        "attention kernels": len(attention),
        f"with {WARPGROUP_MMA}": sum(k.opcodes[WARPGROUP_MMA] > 0 for k in attention),
        f"that wait for the kernel before ({WAIT})": sum(k.opcodes[WAIT] > 0 for k in attention),
        "LDL and STL": sum(k.opcodes[name] for k in kernels for name in LOCAL_MEMORY),
        "stack frames": sum(stack > 0 for _, stack, _ in resources.values()),
        "code objects of each kernel": max(Counter(k.name for k in kernels).values(), default=0),
        "architectures": ", ".join(sorted({k.architecture for k in kernels})) or "none",
        "imports that end the process": len(imports),
        "kernels that ptxas spoke of": sum(r.kernels for r in reports),
        "spills": sum(r.spills for r in reports),
        "notes of serialised WGMMA": sum(r.wgmma_notes for r in reports),
    }
    return result(len(kernels), failures, **figures)
