"""What callers pass for numbers and tensors: the limits of each conversion."""

from __future__ import annotations

import numpy as np
import pytest

from hopper_attention import arguments

LEAST, MOST = -(1 << 63), (1 << 63) - 1


@pytest.mark.parametrize("value", [LEAST, MOST], ids=["least of 64 bits", "most of 64 bits"])
def test_integers_of_64_bits(value):
    assert arguments.integer("num_splits", value) == value
    if value >= -1:
        assert arguments.window((value, value)) == (value, value)
        assert arguments.bound("max_seqlen_q", value) == value


@pytest.mark.parametrize("value", [LEAST - 1, MOST + 1], ids=["one less", "one more"])
@pytest.mark.parametrize(
    ("convert", "name"),
    [
        (lambda x: arguments.integer("num_splits", x), "num_splits"),
        (lambda x: arguments.bound("max_seqlen_q", x), "max_seqlen_q"),
        (lambda x: arguments.window((x, 0)), "window_size"),
        (lambda x: arguments.window((0, x)), "window_size"),
    ],
    ids=["integer", "bound", "left", "right"],
)
def test_longer_integers_are_refused_here(convert, name, value):
    """The bindings would say that no overload fits."""
    with pytest.raises(ValueError, match=f"^{name}: an integer of 64 bits is needed, found {value}"):
        convert(value)


@pytest.mark.parametrize("zero", [0, np.int32(0), np.array(0)], ids=["int", "numpy int", "0-d array"])
def test_a_bound_may_be_zero(zero):
    assert arguments.bound("max_seqlen_q", zero) == 0


@pytest.mark.parametrize("yes", [True, 1, np.True_], ids=repr)
def test_flags(yes):
    assert arguments.flag("causal", yes) is True and arguments.flag("causal", not yes) is False


def test_a_parameter_is_a_tensor():
    torch = pytest.importorskip("torch")
    assert arguments.on_cuda("q", torch.nn.Parameter(torch.zeros(2))) is False


def test_tensors_without_memory_are_named():
    torch = pytest.importorskip("torch")
    with torch._subclasses.FakeTensorMode():
        fake = torch.zeros(2)
    with pytest.raises(TypeError, match="^k: a plain torch.Tensor is needed, found FakeTensor"):
        arguments.on_cuda("k", fake)


def test_a_view_that_negates_is_refused_beside_grad_mode_too():
    """Its memory has the other signs."""
    torch = pytest.importorskip("torch")
    x = torch._neg_view(torch.ones(2, 8))
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), pytest.raises(ValueError, match="^v: is a view that negates its memory; pass v.resolve_neg"):
            arguments.check_torch_inputs(q=torch.ones(2, 8), k=None, v=x)
        with mode():
            arguments.check_torch_inputs(v=x.resolve_neg())
