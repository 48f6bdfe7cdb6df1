"""Prints the first match of a path below the import path, or nothing: where pip put the files of a wheel."""

from __future__ import annotations

import sys
from pathlib import Path

for entry in sys.path:
    candidate = Path(entry or ".") / sys.argv[1]
    if entry and candidate.exists():
        print(candidate)
        break
