"""flash_attn_combine and merge_states before the launch: wrong arguments of made-up CUDA tensors, what the Python layer
allocates and passes on. Right calls here have no rows: there is no memory behind the tensors.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import hopper_attention
from fake_cuda import CPU, CUDA, FastTensor, SlowTensor
from hopper_attention import _core, interface, merging

PARTS, LOGS, OUT, LSE = (3, 2, 5, 4, 64), (3, 2, 5, 4), (2, 5, 4, 64), (2, 5, 4)
MERGE_LSE = (2, 4, 5)


def right_combine(**changes):
    given = {
        "out_partial": FastTensor(PARTS, "fp32"),
        "lse_partial": FastTensor(LOGS, "fp32"),
        "out": FastTensor(OUT, "bf16"),
        "lse": FastTensor(LSE, "fp32"),
    }
    return {**given, **changes}


def right_merge(**changes):
    given = {
        "out_a": FastTensor(OUT),
        "lse_a": FastTensor(MERGE_LSE, "fp32"),
        "out_b": FastTensor(OUT),
        "lse_b": FastTensor(MERGE_LSE, "fp32"),
        "out": FastTensor(OUT),
        "lse": FastTensor(MERGE_LSE, "fp32"),
    }
    return {**given, **changes}


def no_rows(call):
    """The same tensors with 0 queries."""
    return {
        name: type(x)(
            tuple(0 if n == 5 else n for n in x.shape), "fp32" if "lse" in name or "partial" in name else "bf16"
        )
        for name, x in call.items()
    }


WRONG_COMBINE = {
    "bf16 parts": (TypeError, "^out_partial: dtype must be fp32, found bf16", {"out_partial": FastTensor(PARTS)}),
    "float64 parts": (TypeError, "^out_partial: dtype", {"out_partial": FastTensor(PARTS, "fp64")}),
    "fp16 lse_partial": (TypeError, "^lse_partial: dtype", {"lse_partial": FastTensor(LOGS, "fp16")}),
    "fp8 out": (TypeError, "^out: dtype must be fp32, bf16 or fp16", {"out": FastTensor(OUT, "fp8")}),
    "parts of rank 4": (ValueError, "^out_partial: .*4 dims", {"out_partial": FastTensor(OUT, "fp32")}),
    "fewer LSEs": (ValueError, "^lse_partial: dim 0", {"lse_partial": FastTensor((2, *LSE), "fp32")}),
    "another batch": (ValueError, "^out: dim 0", {"out": FastTensor((3, 5, 4, 64))}),
    "head dim 60": (
        ValueError,
        "^out_partial: .*multiple of 8, found 60",
        {"out_partial": FastTensor((3, 2, 5, 4, 60), "fp32")},
    ),
    "head dim 520": (
        NotImplementedError,
        "^out_partial: .*at most 512",
        {"out_partial": FastTensor((3, 2, 5, 4, 520), "fp32")},
    ),
    "LSE on the CPU": (ValueError, "^lse_partial: .*CPU", {"lse_partial": FastTensor(LOGS, "fp32", device=(CPU, 0))}),
    "out on another GPU": (ValueError, "^out: .*cuda:1", {"out": FastTensor(OUT, device=(CUDA, 1))}),
    "rows of 66 floats": (
        ValueError,
        "^out_partial: stride of dim 0 .*multiple of 4",
        {"out_partial": FastTensor(PARTS, "fp32", strides=(2642, 1320, 264, 66, 1))},
    ),
    "misaligned parts": (
        ValueError,
        "^out_partial: the address",
        {"out_partial": FastTensor(PARTS, "fp32", data=1 << 40 | 4)},
    ),
    "no lse": (ValueError, "^lse: .*none was given", {"lse": None}),
}

WRONG_MERGE = {
    "dtypes differ": (TypeError, "^out_b: dtype .*bf16, found fp16", {"out_b": FastTensor(OUT, "fp16")}),
    "float64": (TypeError, "^out_a: dtype", {"out_a": FastTensor(OUT, "fp64")}),
    "bf16 LSE": (TypeError, "^lse_a: dtype", {"lse_a": FastTensor(MERGE_LSE)}),
    "LSE not transposed": (ValueError, "^lse_a: dim 1", {"lse_a": FastTensor(LSE, "fp32")}),
    "packed out_b": (ValueError, "^out_b: .*3 dims", {"out_b": FastTensor((10, 4, 64))}),
    "out of another shape": (ValueError, "^out: dim 1", {"out": FastTensor((2, 6, 4, 64))}),
    "out_b on the CPU": (ValueError, "^out_b: .*CPU", {"out_b": FastTensor(OUT, device=(CPU, 0))}),
    "last stride 2": (
        ValueError,
        "^out_a: stride of the last dim",
        {"out_a": FastTensor(OUT, strides=(2560, 512, 128, 2))},
    ),
    "out shares memory with out_b": (
        ValueError,
        "^out: shares memory with out_b",
        {"out_b": FastTensor(OUT, data=1 << 41), "out": FastTensor(OUT, data=1 << 41)},
    ),
    "out half on out_a": (
        ValueError,
        "^out: shares memory with out_a",
        {"out_a": FastTensor(OUT, data=1 << 41), "out": FastTensor(OUT, data=(1 << 41) + 128)},
    ),
    "lse shares memory with lse_b": (
        ValueError,
        "^lse: shares memory with lse_b",
        {"lse_b": FastTensor(MERGE_LSE, "fp32", data=1 << 41), "lse": FastTensor(MERGE_LSE, "fp32", data=1 << 41)},
    ),
    "negative stride": (
        ValueError,
        "^lse_b: stride of dim 2 .* is -1",
        {"lse_b": FastTensor(MERGE_LSE, "fp32", strides=(20, 5, -1))},
    ),
}


@pytest.mark.parametrize("why", WRONG_COMBINE)
def test_wrong_arguments_of_combine(why):
    error, message, changes = WRONG_COMBINE[why]
    with pytest.raises(error, match=message):
        _core.combine(**right_combine(**changes))


@pytest.mark.parametrize("why", WRONG_MERGE)
def test_wrong_arguments_of_merge_states(why):
    error, message, changes = WRONG_MERGE[why]
    call = right_merge(**changes)
    with pytest.raises(error, match=message):
        _core.merge_states(**call)
    with pytest.raises(error, match=message):
        hopper_attention.merge_states(**call)


def test_calls_without_rows_launch_nothing():
    _core.combine(**no_rows(right_combine()))
    merge = no_rows(right_merge())
    _core.merge_states(**merge)
    found = hopper_attention.merge_states(**merge)
    assert found == (merge["out"], merge["lse"])


def test_results_are_needed_for_tensors_that_cannot_allocate_them():
    call = right_merge()
    with pytest.raises(TypeError, match="^out: is needed"):
        hopper_attention.merge_states(call["out_a"], call["lse_a"], call["out_b"], call["lse_b"])
    with pytest.raises(TypeError, match="^out_partial: a torch tensor is needed, found FastTensor"):
        hopper_attention.flash_attn_combine(FastTensor(PARTS, "fp32"), FastTensor(LOGS, "fp32"))


def test_tensors_through_dlpack():
    with pytest.raises(ValueError, match="^lse_b: dim 2"):
        _core.merge_states(**right_merge(lse_b=SlowTensor((2, 4, 6), "fp32")))


@pytest.fixture
def calls(monkeypatch):
    """(function, arguments) of calls to `_core`; every tensor counts as a CUDA tensor."""
    pytest.importorskip("torch")
    made = []
    spy = SimpleNamespace(
        combine=lambda *args: made.append(("combine", args)), merge_states=lambda *args: made.append(("merge", args))
    )
    monkeypatch.setattr(merging, "_core", spy)
    monkeypatch.setattr(interface, "on_cuda", lambda name, x: True)
    return made


def test_combine_allocates_out_and_a_transposed_lse(calls):
    torch = pytest.importorskip("torch")
    parts, logs = torch.zeros(PARTS), torch.zeros(LOGS)
    out, lse = hopper_attention.flash_attn_combine(parts, logs)
    assert out.shape == OUT and out.dtype == torch.float32 and out.is_contiguous()
    assert lse.shape == LSE and lse.dtype == torch.float32 and lse.transpose(1, 2).is_contiguous()
    name, args = calls[0]
    assert name == "combine" and args[0] is parts and args[1] is logs and args[2] is out and args[3] is lse


@pytest.mark.parametrize("given", ["torch.bfloat16", "bfloat16"])
def test_out_dtype(calls, given):
    torch = pytest.importorskip("torch")
    parts, logs = torch.zeros(PARTS), torch.zeros(LOGS)
    dtype = torch.bfloat16 if given.startswith("torch") else given
    assert hopper_attention.flash_attn_combine(parts, logs, out_dtype=dtype)[0].dtype == torch.bfloat16
    with pytest.raises(TypeError, match="^out_dtype: must be float32, bfloat16 or float16"):
        hopper_attention.flash_attn_combine(parts, logs, out_dtype=torch.int32)
    with pytest.raises(TypeError, match="^out: dtype must be out_dtype"):
        hopper_attention.flash_attn_combine(parts, logs, out=torch.zeros(OUT), out_dtype=dtype)
    out = torch.zeros(OUT, dtype=torch.bfloat16)
    assert hopper_attention.flash_attn_combine(parts, logs, out, dtype)[0] is out
    assert hopper_attention.flash_attn_combine(parts, logs, out)[0] is out, "its dtype is the default"


def test_merge_states_allocates_contiguous_results(calls):
    torch = pytest.importorskip("torch")
    a = torch.zeros(2, 4, 5, 64, dtype=torch.float16).transpose(1, 2)
    lse_a = torch.zeros(5, 4, 2).permute(2, 1, 0)
    out, lse = hopper_attention.merge_states(a, lse_a, a, lse_a)
    assert out.shape == OUT and out.dtype == torch.float16 and out.is_contiguous()
    assert lse.shape == MERGE_LSE and lse.dtype == torch.float32 and lse.is_contiguous()
    assert hopper_attention.merge_states(a, lse_a, a, lse_a, out=a, lse=lse_a) == (a, lse_a)
    assert calls[1][1][4] is a and calls[1][1][5] is lse_a


SHAPES = {
    "flash_attn_combine": {"out_partial": PARTS, "lse_partial": LOGS, "out": OUT},
    "merge_states": {
        "out_a": OUT,
        "lse_a": MERGE_LSE,
        "out_b": OUT,
        "lse_b": MERGE_LSE,
        "out": OUT,
        "lse": MERGE_LSE,
    },
}


@pytest.mark.parametrize(
    ("function", "name"), [(function, name) for function, shapes in SHAPES.items() for name in shapes], ids=str
)
def test_tensors_that_require_grad(calls, function, name):
    torch = pytest.importorskip("torch")
    given = {x: torch.zeros(shape, requires_grad=x == name) for x, shape in SHAPES[function].items()}
    with pytest.raises(NotImplementedError, match=f"^{name}: requires grad"):
        getattr(hopper_attention, function)(**given)
    assert not calls
    with torch.inference_mode():
        getattr(hopper_attention, function)(**given)
    assert len(calls) == 1


@pytest.mark.parametrize("function", SHAPES)
def test_tensors_of_an_older_torch_come_without_their_grad(calls, monkeypatch, function):
    """Its `__dlpack__` refuses tensors that require grad; the caller gets back the tensors that it gave."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(merging, "stream_comes_with_tensors", lambda: False)
    monkeypatch.setattr(merging, "current_stream", lambda x: 7)
    given = {name: torch.zeros(shape, requires_grad=True) for name, shape in SHAPES[function].items()}
    with torch.no_grad():
        found = getattr(hopper_attention, function)(**given)
    _, args = calls[0]
    assert args[-1] == 7
    assert not any(x.requires_grad for x in args[:-1])
    seen = {x.data_ptr() for x in args[:-1]}
    assert all(x.data_ptr() in seen for x in given.values()), "the same memory"
    assert found[0] is given["out"] and ("lse" not in given or found[1] is given["lse"])


def test_a_wrong_rank_of_the_parts(calls):
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="^out_partial: must have shape .*found 4 dims"):
        hopper_attention.flash_attn_combine(torch.zeros(OUT), torch.zeros(LSE))
