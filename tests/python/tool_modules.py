"""Programs of tools/ as modules: their names have no .py."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import pathlib
import sys
from types import ModuleType

TOOLS = pathlib.Path(__file__).parents[2] / "tools"


def tool_module(name: str) -> ModuleType:
    """tools/`name`, executed anew at each call, and from then on in sys.modules, where dataclasses look."""
    loader = importlib.machinery.SourceFileLoader(name, str(TOOLS / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    sys.modules[name] = module
    loader.exec_module(module)
    return module
