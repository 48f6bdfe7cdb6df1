"""Includes and imports go in the direction that docs/architecture.md says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
INCLUDE = re.compile(r'^\s*#\s*include\s+(?:<([^>]+)>|"([^"]+)")', re.MULTILINE)
SEARCHED = [ROOT / "include", ROOT / "src", ROOT / "python" / "bindings"]
FOREIGN = re.compile(r"^(torch|ATen|c10|nanobind|Python)\b|^pybind11|^Python\.h")
CUTE = re.compile(r"^(cute|cutlass)/")
CUDA = re.compile(r"^(cuda|cuda_.*|cublas.*|nv.*)(\.h|/)")

PUBLIC = sorted((ROOT / "include").rglob("*.h"))
HOST = sorted([*(ROOT / "src/host").glob("*.h"), *(ROOT / "src/host").glob("*.cpp")])
KERNELS = sorted((ROOT / "src/kernels").glob("*.h"))
BINDINGS = sorted([*(ROOT / "python/bindings").glob("*.h"), *(ROOT / "python/bindings").glob("*.cpp")])

LOADERS = ["tma_loader.h", "gather_loader.h"]
EPILOGUES = ["epilogue.h", "swapped_epilogue.h"]
POLICIES = ["interval_mask.h", "tile_scheduler.h", *LOADERS, *EPILOGUES]
MAINLOOPS = ["mainloop.h", "swapped_mainloop.h"]
ROLES = ["scheduler_warp.h", "producers.h", "consumers.h"]
ABOVE_POLICIES = [*MAINLOOPS, *ROLES, "attention_kernel.h", "attention_entries.h"]
ENDS_OF_TILES = ["output_rows.h", "cluster_merge.h", "tile_exchange.h", "merge_parts.h", "joint_merge.h"]
WORK = ["schedule.h", "work_source.h", "parted_tile.h"]
DATA = ["params.h", "tile_work.h", "page_ids.h"]


def resolve(name: str, where: Path) -> Path | None:
    """The file of this repository that `name` means in `where`; None if it is none."""
    found = (folder / name for folder in [where.parent, *SEARCHED] if (folder / name).is_file())
    return next(found, None)


def includes(file: Path) -> tuple[list[str], list[Path]]:
    """Names of included files of others, and included files of this repository."""
    foreign, own = [], []
    for angle, quoted in INCLUDE.findall(file.read_text(encoding="utf-8")):
        target = resolve(quoted, file) if quoted else None
        assert target is not None or not quoted, f"{file.name} includes {quoted}, which is not in the repository"
        own.append(target) if target else foreign.append(angle)
    return foreign, own


def closure(file: Path) -> tuple[set[str], set[Path]]:
    """Everything that `file` includes, directly or not. Fails on a cycle."""
    foreign: set[str] = set()
    own: set[Path] = set()

    def visit(current: Path, path: list[Path]) -> None:
        assert current not in path, "include cycle: " + " -> ".join(p.name for p in [*path, current])
        theirs, ours = includes(current)
        foreign.update(theirs)
        for target in ours:
            if target not in own or target in path:
                own.add(target)
                visit(target, [*path, current])

    visit(file, [])
    return foreign, own


def kernel(name: str) -> Path:
    return ROOT / "src/kernels" / name


def names(files: set[Path]) -> set[str]:
    return {file.name for file in files}


def by_name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def test_files_were_found():
    assert len(PUBLIC) >= 4 and len(HOST) >= 10 and len(KERNELS) >= 20 and len(BINDINGS) >= 5
    foreign, own = closure(kernel("attention_kernel.h"))
    assert any(CUTE.search(name) for name in foreign) and kernel("mainloop.h") in own


@pytest.mark.parametrize("file", PUBLIC, ids=by_name)
def test_public_headers_see_only_the_standard_library(file):
    foreign, own = closure(file)
    assert all(target.is_relative_to(ROOT / "include") for target in own)
    assert [name for name in foreign if "/" in name or "." in name] == []


@pytest.mark.parametrize("file", HOST, ids=by_name)
def test_host_code_sees_neither_cute_nor_python(file):
    foreign, own = closure(file)
    assert [name for name in foreign if CUTE.search(name) or FOREIGN.search(name)] == []
    assert "cute.h" not in names(own)
    assert all(not target.is_relative_to(ROOT / "python") for target in own)


@pytest.mark.parametrize("file", KERNELS, ids=by_name)
def test_kernels_see_neither_torch_nor_the_host_code(file):
    foreign, own = closure(file)
    assert [name for name in foreign if FOREIGN.search(name)] == []
    outside = {by_name(target) for target in own if not target.is_relative_to(ROOT / "src/kernels")}
    assert outside <= {"include/hopper_attention/types.h"}


@pytest.mark.parametrize("file", BINDINGS, ids=by_name)
def test_the_binding_sees_the_public_api_only(file):
    foreign, own = closure(file)
    assert all(not target.is_relative_to(ROOT / "src") for target in own)
    assert [name for name in foreign if CUTE.search(name) or CUDA.search(name) or name.startswith("torch")] == []


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_includes_the_mainloop_or_another_policy(policy):
    _, direct = includes(kernel(policy))
    assert names(set(direct)).isdisjoint({*POLICIES, *ABOVE_POLICIES} - {policy})
    _, reached = closure(kernel(policy))
    assert names(reached).isdisjoint(ABOVE_POLICIES)


def test_mask_and_scheduler_reach_no_other_policy_and_loader_and_epilogue_not_each_other():
    for policy in ("interval_mask.h", "tile_scheduler.h"):
        assert names(closure(kernel(policy))[1]).isdisjoint(set(POLICIES) - {policy})
    for policy in (*LOADERS, *EPILOGUES):
        assert names(closure(kernel(policy))[1]).isdisjoint({*LOADERS, *EPILOGUES} - {policy})


def test_only_the_kernels_look_for_work():
    """Loader, mainloop and epilogue get a TileWork; whoever shares it out knows none of them."""
    for file in (*LOADERS, *EPILOGUES, *MAINLOOPS, *ENDS_OF_TILES):
        assert names(closure(kernel(file))[1]).isdisjoint({"work_source.h", "parted_tile.h"})
    for file in WORK:
        foreign, own = closure(kernel(file))
        assert [name for name in foreign if CUTE.search(name)] == []
        assert names(own).isdisjoint({*LOADERS, *EPILOGUES, *MAINLOOPS, *ENDS_OF_TILES, "tile_work.h"})


@pytest.mark.parametrize("mainloop", MAINLOOPS)
def test_a_mainloop_knows_neither_loader_nor_epilogue(mainloop):
    assert names(closure(kernel(mainloop))[1]).isdisjoint({*LOADERS, *EPILOGUES})


@pytest.mark.parametrize("file", ENDS_OF_TILES)
def test_what_ends_a_tile_knows_no_policy_that_it_could_call_and_no_mainloop(file):
    assert names(closure(kernel(file))[1]).isdisjoint({*LOADERS, *EPILOGUES, *ABOVE_POLICIES})


def test_loader_and_epilogue_reach_mask_and_scheduler_as_data_only():
    """Through params.h, tile_work.h and page_ids.h."""

    def reached(file: Path) -> set[str]:
        """Names of all that `file` includes, directly or not, but for what those three include."""
        direct = {target for target in includes(file)[1] if target.name not in DATA}
        return names(direct).union(*map(reached, direct))

    for policy in (*LOADERS, *EPILOGUES):
        assert reached(kernel(policy)).isdisjoint({"interval_mask.h", "tile_scheduler.h"})
    assert {"cluster_merge.h", "output_rows.h", "sink.h"} <= reached(kernel("epilogue.h"))


def imported_modules(file: Path) -> set[str]:
    """Modules that a Python file names in imports, at whatever depth."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name}: relative import"
            found.add(node.module)
    return found


@pytest.mark.parametrize("file", sorted((ROOT / "python/hopper_attention/reference").glob("*.py")), ids=by_name)
def test_the_reference_imports_only_itself(file):
    ours = {name for name in imported_modules(file) if name.split(".")[0] == "hopper_attention"}
    assert all(name == "hopper_attention.reference" or name.startswith("hopper_attention.reference.") for name in ours)


def test_every_kernel_header_has_its_place_in_the_table():
    table = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split("## Who includes whom")[1]
    assert [file.name for file in KERNELS if f"`{file.name}`" not in table] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=by_name)
def test_files_that_a_page_names_exist(page):
    quoted = re.findall(r"`((?:src|include|python|tests|docs|examples|tools|cmake)/[\w./-]*\w)`", page.read_text())
    assert [name for name in quoted if not (ROOT / name).exists() and name != "tests/gpu_report.json"] == []
