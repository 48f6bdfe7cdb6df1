"""scikit-build-core as the build backend, asking for the CUDA compiler only when kernels are to be compiled."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from scikit_build_core import build as _backend

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

build_sdist = _backend.build_sdist
build_wheel = _backend.build_wheel
build_editable = _backend.build_editable
prepare_metadata_for_build_wheel = _backend.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = _backend.prepare_metadata_for_build_editable
get_requires_for_build_sdist = _backend.get_requires_for_build_sdist

_FALSE = {"", "0", "OFF", "FALSE", "NO", "N"}


def _setting(name: str, config_settings: dict | None) -> str:
    """The value of a CMake option as pip's --config-settings or the environment give it."""
    return (config_settings or {}).get(f"cmake.define.{name}", os.environ.get(name, ""))


def kernel_requirements(config_settings: dict | None = None) -> list[str]:
    """The wheels that compile kernels; the compiler's own are left out where CUDACXX names a compiler."""
    if _setting("HOPPER_ATTENTION_HOST_ONLY", config_settings).upper() not in _FALSE:
        return []
    if _setting("HOPPER_ATTENTION_PREBUILT", config_settings):
        return []
    with (Path(__file__).parents[1] / "pyproject.toml").open("rb") as file:
        pins = tomllib.load(file)["tool"]["hopper-attention"]
    needed = []
    if not _setting("HOPPER_ATTENTION_CUTLASS_INCLUDE", config_settings):
        needed += pins["cutlass"]
    if not os.environ.get("CUDACXX"):
        needed += pins["cuda-compiler"]
    return needed


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    return _backend.get_requires_for_build_wheel(config_settings) + kernel_requirements(config_settings)


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    return _backend.get_requires_for_build_editable(config_settings) + kernel_requirements(config_settings)
