"""scikit-build-core as the build backend, asking for the CUDA compiler only when kernels are to be compiled."""

from __future__ import annotations

import os

from build_requirements import kernel_requirements
from scikit_build_core import build as _backend

build_sdist = _backend.build_sdist
build_wheel = _backend.build_wheel
build_editable = _backend.build_editable
prepare_metadata_for_build_wheel = _backend.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = _backend.prepare_metadata_for_build_editable
get_requires_for_build_sdist = _backend.get_requires_for_build_sdist

_OFF = {"", "0", "OFF", "FALSE", "NO", "N"}


def _kernel_requirements(config_settings: dict | None) -> list[str]:
    def setting(name: str) -> str:
        return (config_settings or {}).get(f"cmake.define.{name}", os.environ.get(name, ""))

    if setting("HOPPER_ATTENTION_HOST_ONLY").upper() not in _OFF or setting("HOPPER_ATTENTION_PREBUILT"):
        return []
    return kernel_requirements(cutlass_given=bool(setting("HOPPER_ATTENTION_CUTLASS_INCLUDE")))


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    return _backend.get_requires_for_build_wheel(config_settings) + _kernel_requirements(config_settings)


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    return _backend.get_requires_for_build_editable(config_settings) + _kernel_requirements(config_settings)
