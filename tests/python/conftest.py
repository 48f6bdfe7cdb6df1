"""What gpu tests need, and the fixture that stands in for a GPU."""

from __future__ import annotations

import pytest

from hopper_attention import _core


def missing_for_gpu_tests() -> str:
    """Why gpu tests cannot run here; "" if they can."""
    if not _core.built_kernels():
        return "this build has no kernels"
    try:
        _core.require_supported_device(0)
    except RuntimeError as error:
        return str(error)
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


def pytest_collection_modifyitems(config, items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = missing_for_gpu_tests() if marked else ""
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"no GPU to test on: {reason}"))


@pytest.fixture
def recorder():
    """`_core` with launches recorded instead of made: any CUDA tensor, even a made-up one, can be passed."""
    _core.stub_backend(_core.device_info("H100"))
    yield _core
    _core.stub_backend(None)
