"""`python -m hopper_attention.cmake_dir` prints what CMAKE_PREFIX_PATH needs for find_package(hopper_attention)."""

from __future__ import annotations

from pathlib import Path

if __name__ == "__main__":
    print(Path(__file__).resolve().parent)
