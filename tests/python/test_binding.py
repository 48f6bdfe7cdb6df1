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


def int32(*shape, **options):
    return FastTensor(shape, "int32", **options)


def paged_call(tensor=FastTensor, **changes):
    """64 packed sequences of one query on pages of 16 keys: a call that is split."""
    given = {"q": tensor((64, 32, 128)), "out": tensor((64, 32, 128)), "cu_seqlens_q": int32(65)}
    given |= {"k": tensor((900, 16, 8, 128)), "v": tensor((900, 16, 8, 128)), "page_table": int32(64, 512)}
    return {**given, "seqused_k": int32(64), "num_splits": 0, **changes}


NUMBERS = ("seqlen_k_new", "seqused_k_all", "max_seqlen_q", "max_seqlen_k", "cp_world_size", "cp_rank")
LENGTHS = ("cu_seqlens_q", "seqused_q", "seqused_k", "page_table", "cache_leftpad", "cu_seqlens_k_new")
LENGTHS = (*LENGTHS, "cp_tot_seqused_k", "scheduler_metadata")


@BOTH
def test_lengths_and_numbers_arrive_unchanged(recorder, tensor):
    def int32(*shape):
        return tensor(shape, "int32")

    args = paged_call(
        tensor,
        page_table=tensor((64, 512), "int32", strides=(1024, 1)),
        seqused_q=int32(64),
        cache_leftpad=int32(64),
        cu_seqlens_k_new=int32(65),
        cp_tot_seqused_k=int32(64),
        scheduler_metadata=int32(300),
        workspace=tensor((1 << 30,), "uint8"),
        max_seqlen_q=5,
        max_seqlen_k=4000,
        cp_world_size=4,
        cp_rank=3,
    )
    recorder.forward(**args)
    seen = recorder.last_launch()
    for name in LENGTHS:
        assert seen[name] == described(args[name], "int32")
    assert seen["workspace"] == described(args["workspace"], "uint8")
    expected = {"seqlen_k_new": 0, "seqused_k_all": -1, "max_seqlen_q": 5, "max_seqlen_k": 4000}
    assert {name: seen[name] for name in NUMBERS} == {**expected, "cp_world_size": 4, "cp_rank": 3}


def test_what_is_not_given_stays_away(recorder):
    recorder.forward(**call(FastTensor))
    seen = recorder.last_launch()
    assert all(seen[name] is None for name in (*LENGTHS, "cu_seqlens_k", "cache_batch_idx", "workspace"))
    assert [seen[name] for name in NUMBERS] == [0, -1, -1, -1, 1, 0]


def test_the_workspace_is_asked_for_once_and_given_to_the_launch(recorder):
    asked = []

    def allocate(size, q):
        asked.append((size, q))
        return FastTensor((size,), "uint8", data=0x7000_0000_0000)

    args = paged_call()
    recorder.forward(**args, allocate=allocate)
    seen = recorder.last_launch()
    assert seen["plan"].workspace_bytes > 0, "else this case shows nothing"
    assert asked == [(seen["plan"].workspace_bytes, args["q"])]
    assert seen["workspace"]["data"] == 0x7000_0000_0000
    recorder.forward(**args, allocate=allocate, workspace=FastTensor((1 << 30,), "uint8"))
    recorder.forward(**call(FastTensor), allocate=allocate)
    assert len(asked) == 1, "not where one is given, or none is needed"


def test_the_workspace_is_let_go_after_the_launch(recorder):
    import gc
    import weakref

    made = []

    def allocate(size, q):
        tensor = FastTensor((size,), "uint8")
        made.append(weakref.ref(tensor))
        return tensor

    recorder.forward(**paged_call(), allocate=allocate)
    gc.collect()
    assert len(made) == 1 and made[0]() is None


@pytest.mark.parametrize(("result", "error"), [(3, TypeError), (MemoryError("no room"), MemoryError)], ids=str)
def test_an_allocator_that_fails(recorder, result, error):
    def allocate(size, q):
        if isinstance(result, Exception):
            raise result
        return result

    with pytest.raises(error):
        recorder.forward(**paged_call(), allocate=allocate)
    assert recorder.launches() == 0
    recorder.forward(**call(FastTensor))
    assert recorder.launches() == 1


def test_check_launches_nothing_and_raises_the_same(recorder):
    recorder.check(**paged_call())
    with pytest.raises(ValueError, match="^num_splits: "):
        recorder.check(**{**paged_call(), "num_splits": 257})
    assert recorder.launches() == 0


@pytest.mark.parametrize(("batch", "size"), [(0, 1), (1, 17), (4, 17), (5, 33), (8, 33), (256, 1025), (4096, 16385)])
def test_schedule_size(batch, size):
    assert _core.schedule_size(batch) == size
