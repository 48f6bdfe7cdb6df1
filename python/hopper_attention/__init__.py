"""Attention forward for NVIDIA Hopper GPUs, for inference engines.

CUDA tensors run the kernels; CPU torch tensors and numpy arrays run `hopper_attention.reference`: same functions, same
semantics, no GPU needed. Importing this package imports neither torch nor numpy and touches neither GPU nor driver.
`python -m hopper_attention.info` says what works on this machine, `python -m hopper_attention.demo` shows it.

flash_attn_func for sequences of one length, flash_attn_varlen_func for packed ones, with packed or paged keys,
flash_attn_with_kvcache for a cache, with appending; get_scheduler_metadata shares a step's schedule between layers;
flash_attn_combine and merge_states put results over disjoint keys together; check_metadata finds wrong lengths; plan,
is_supported and support_matrix say what would run. `torch_ops` and `integrations`, imported on request, are for torch
operators and for engines.
"""

from __future__ import annotations

from hopper_attention import _core
from hopper_attention._core import Plan
from hopper_attention.check import check_metadata
from hopper_attention.interface import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    merge_states,
)
from hopper_attention.planning import built_kernels, is_supported, plan, support_matrix, warmup

__all__ = [
    "Plan",
    "__version__",
    "built_kernels",
    "check_metadata",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "info",
    "is_supported",
    "merge_states",
    "plan",
    "reference",
    "support_matrix",
    "testing",
    "warmup",
]

__version__: str = _core.version()

_SUBMODULES = ("reference", "testing")  # they import numpy


def info() -> dict:
    """What works on this machine: versions, driver, GPUs, kernels, tensor path; `ready` and `message` sum it up.

    Imports torch, if it is installed. No tensors, no exceptions: what cannot be found out is reported as such.
    """
    from hopper_attention.report import collect

    return collect()


def __getattr__(name: str):
    if name in _SUBMODULES:
        import importlib

        return importlib.import_module(f"hopper_attention.{name}")
    raise AttributeError(f"module 'hopper_attention' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
