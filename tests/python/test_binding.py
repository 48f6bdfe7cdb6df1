"""What `_core` makes of tensors: every field arrives as it was given, whichever way the tensor came in."""

from __future__ import annotations

import numpy as np
import pytest

import fake_cuda
from fake_cuda import CPU, CUDA, FastTensor, SlowTensor
from hopper_attention import _core

BOTH = pytest.mark.parametrize("tensor", [FastTensor, SlowTensor], ids=["exchange api", "ndarray"])


def call(tensor, **changes):
    """Arguments of a right call."""
    given = {
        "q": tensor((2, 64, 4, 64)),
        "k": tensor((2, 128, 2, 64)),
        "v": tensor((2, 128, 2, 64)),
        "out": tensor((2, 64, 4, 64)),
    }
    return {**given, **changes}


def described(x, dtype):
    return {"data": x.data, "dtype": dtype, "device": x.device[1], "shape": x.shape, "stride": x.strides}


@BOTH
def test_tensors_arrive_unchanged(recorder, tensor):
    args = call(
        tensor,
        k=tensor((2, 128, 2, 64), strides=(128 * 2 * 192, 2 * 192, 192, 1)),
        v=tensor((2, 128, 2, 64), strides=(64 * 128, 64, 2 * 128 * 64, 1)),
        softmax_lse=tensor((2, 4, 64), "fp32"),
        sinks=tensor((4,), "fp16"),
    )
    recorder.forward(**args)
    seen = recorder.last_launch()
    for name in ("q", "k", "v", "out"):
        assert seen[name] == described(args[name], "bfloat16")
    assert seen["softmax_lse"] == described(args["softmax_lse"], "float32")
    assert seen["sinks"] == described(args["sinks"], "float16")


@BOTH
def test_values_arrive_unchanged(recorder, tensor):
    values = {
        "softmax_scale": 0.37,
        "causal": True,
        "window_left": 17,
        "window_right": 3,
        "attention_chunk": 40,
        "softcap": 12.5,
        "num_splits": 3,
        "sm_margin": 2,
        "batch_invariant": True,
    }
    recorder.forward(**call(tensor), **values)
    seen = recorder.last_launch()
    assert {name: seen[name] for name in values} == values
    recorder.forward(**call(tensor))
    seen = recorder.last_launch()
    assert seen["softmax_scale"] is None and seen["softmax_lse"] is None and seen["sinks"] is None


def test_stream(recorder):
    recorder.forward(**call(FastTensor))
    assert recorder.last_launch()["stream"] == fake_cuda.STREAM
    recorder.forward(**call(SlowTensor))
    assert recorder.last_launch()["stream"] == 0, "the default stream, where nobody says another"
    recorder.forward(**call(FastTensor), stream=0xABC0)
    assert recorder.last_launch()["stream"] == 0xABC0, "a given stream wins"


def test_stream_is_that_of_the_device(recorder):
    on_second = {name: FastTensor(x.shape, device=(CUDA, 1)) for name, x in call(FastTensor).items()}
    recorder.forward(**on_second)
    assert recorder.last_launch()["stream"] == fake_cuda.STREAM + 1
    assert recorder.last_launch()["q"]["device"] == 1


@BOTH
def test_byte_offset_is_added(recorder, tensor):
    q = tensor((2, 64, 4, 64), byte_offset=1 << 33)
    recorder.forward(**call(tensor, q=q))
    assert recorder.last_launch()["q"]["data"] == q.data + (1 << 33)


def test_no_strides_are_contiguous(recorder):
    q = FastTensor((2, 64, 4, 64), no_strides=True)
    recorder.forward(**call(FastTensor, q=q))
    assert recorder.last_launch()["q"]["stride"] == q.strides


def test_the_two_ways_can_be_mixed(recorder):
    recorder.forward(**{**call(FastTensor), "k": SlowTensor((2, 128, 2, 64))})
    assert recorder.launches() == 1


def test_a_newer_table_leads_to_the_one_that_is_understood(recorder):
    newer = fake_cuda.ExchangeApi(2, 0, fake_cuda.ctypes.pointer(fake_cuda.API), None, None, None)
    kind = type("Newer", (FastTensor,), {"__dlpack_c_exchange_api__": fake_cuda.exchange_capsule(newer)})
    assert _core.has_exchange_api(kind)
    recorder.forward(**call(kind))
    assert recorder.launches() == 1


def test_a_table_of_another_major_version_is_not_read(recorder):
    other = fake_cuda.ExchangeApi(2, 0, None, None, None, None)
    kind = type("Other", (SlowTensor,), {"__dlpack_c_exchange_api__": fake_cuda.exchange_capsule(other)})
    assert not _core.has_exchange_api(kind)
    recorder.forward(**call(kind))
    assert recorder.launches() == 1


def test_a_table_without_borrowing_falls_back_but_tells_the_stream(recorder):
    api = fake_cuda.ExchangeApi(1, 2, None, None, None, None, fake_cuda.FROM_OBJECT(), fake_cuda.API.current_stream)
    kind = type("NoBorrow", (SlowTensor,), {"__dlpack_c_exchange_api__": fake_cuda.exchange_capsule(api)})
    recorder.forward(**call(kind))
    assert recorder.last_launch()["stream"] == fake_cuda.STREAM


def test_many_tensor_types(recorder):
    for index in range(20):
        kind = type(f"Tensor{index}", (FastTensor,), {})
        recorder.forward(**call(kind))
        assert recorder.last_launch()["stream"] == fake_cuda.STREAM
    assert not _core.has_exchange_api(int)


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "softmax_lse", "sinks"])
@pytest.mark.parametrize("value", [3, "text", [1.0], object()], ids=["int", "str", "list", "object"])
def test_an_object_that_is_no_tensor(recorder, name, value):
    shown = "s_aux" if name == "sinks" else name
    with pytest.raises(TypeError, match=f"^{shown}: a tensor is needed, found {type(value).__name__}"):
        recorder.forward(**call(FastTensor, **{name: value}))
    assert recorder.launches() == 0


@BOTH
def test_too_many_dims(recorder, tensor):
    with pytest.raises(ValueError, match="^q: at most 5 dims are possible, found 6"):
        recorder.forward(**call(tensor, q=tensor((1, 1, 1, 1, 1, 8))))


def test_memory_of_another_kind_of_device(recorder):
    with pytest.raises(ValueError, match="^k: must be in the memory of a CUDA device, found DLPack device type 4"):
        recorder.forward(**call(FastTensor, k=FastTensor((2, 128, 2, 64), device=(fake_cuda.OPENCL, 0))))


def test_host_memory(recorder):
    with pytest.raises(ValueError, match="^q: .*(CUDA|cuda|GPU)"):
        recorder.forward(**{name: FastTensor(x.shape, device=(CPU, 0)) for name, x in call(FastTensor).items()})
    with pytest.raises(ValueError, match="^v: .*CPU; move it there"):
        half = {name: FastTensor(x.shape, "fp16") for name, x in call(FastTensor).items()}
        recorder.forward(**{**half, "v": np.zeros((2, 128, 2, 64), np.float16)})


def test_torch_tensors_come_in_through_the_exchange_api(recorder):
    torch = pytest.importorskip("torch", minversion="2.10")
    assert _core.has_exchange_api(torch.Tensor) and _core.has_exchange_api(torch.nn.Parameter)
    with pytest.raises(ValueError, match="^k: must be on the device of q"):
        recorder.forward(**call(FastTensor, k=torch.zeros(2, 128, 2, 64, dtype=torch.bfloat16)))


def test_a_torch_tensor_without_memory(recorder):
    torch = pytest.importorskip("torch", minversion="2.10")
    with pytest.raises(TypeError, match="^q: this Tensor has no memory that a kernel could read") as caught:
        recorder.forward(**call(FastTensor, q=torch.empty(2, 64, 4, 64, device="meta")))
    assert "meta" in str(caught.value.__cause__)
    recorder.forward(**call(FastTensor))
    assert recorder.launches() == 1, "the error leaves nothing behind"


@pytest.mark.parametrize("name", ["softmax_scale", "causal", "window_left", "softcap", "num_splits", "stream"])
def test_a_value_of_the_wrong_type(recorder, name):
    with pytest.raises(TypeError):
        recorder.forward(**call(FastTensor), **{name: "text"})


def test_references_are_returned(recorder):
    import sys

    args = {**call(FastTensor), "k": SlowTensor((2, 128, 2, 64))}
    before = {name: sys.getrefcount(x) for name, x in args.items()}
    for _ in range(10):
        recorder.forward(**args)
    assert {name: sys.getrefcount(x) for name, x in args.items()} == before


def test_many_threads(recorder):
    from concurrent.futures import ThreadPoolExecutor

    def some_calls(thread):
        args = call(FastTensor, q=FastTensor((2, 64 + thread, 4, 64)), out=FastTensor((2, 64 + thread, 4, 64)))
        for _ in range(100):
            recorder.forward(**args)
            with pytest.raises(ValueError, match="^num_splits"):
                recorder.forward(**args, num_splits=-1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(some_calls, range(8)))
    assert recorder.launches() == 800
    assert recorder.cached_plans() == 8
