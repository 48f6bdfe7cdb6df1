"""Attention on raw device pointers and a `cuda.core` stream, without torch.

pip install cuda-core cuda-bindings numpy
python examples/attention_cuda_python.py
"""

from __future__ import annotations

import ctypes
import math

import numpy as np

from hopper_attention import _core, flash_attn_func

KDLCUDA, KDLFLOAT = 2, 2  # DLPack's codes


class DLTensor(ctypes.Structure):
    """DLPack's description of a tensor. Shape and strides count elements."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class RawTensor:
    """A contiguous tensor of floats at a device address, as an object that hopper_attention accepts.

    Owns nothing: the memory must outlive the work that reads it. Keep the object alive during the call.
    """

    def __init__(self, address: int, shape: tuple[int, ...], bits: int, device: int = 0):
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        self.c_shape = (ctypes.c_int64 * len(shape))(*shape)
        self.c_strides = (ctypes.c_int64 * len(shape))(*strides)
        tensor = DLTensor(
            address, KDLCUDA, device, len(shape), KDLFLOAT, bits, 1, self.c_shape, self.c_strides, byte_offset=0
        )
        self.managed = DLManagedTensor(tensor)

    def __dlpack_device__(self):
        return KDLCUDA, self.managed.tensor.device_id

    def __dlpack__(self, **_):
        return new_capsule(ctypes.addressof(self.managed), b"dltensor", None)


def attention(q, k, v, out, lse, stream: int):
    """Causal attention, queued on the CUstream_st* `stream`. `flash_attn_func` knows only streams that come with tensors."""
    _core.forward(q, k, v, out, lse, causal=True, stream=stream)


def run_on_gpu(device) -> None:
    """Random inputs to the device, one call, the result back and beside the CPU reference; all on one stream."""
    from cuda.bindings import driver

    def check(result):
        if result[0] != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the CUDA driver says {result[0].name}")

    device.set_current()
    stream = device.create_stream()
    queries, keys, heads_q, heads_k, head_dim = 500, 700, 8, 2, 128
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, queries, heads_q, head_dim), dtype=np.float32).astype(np.float16)
    k, v = rng.standard_normal((2, 1, keys, heads_k, head_dim), dtype=np.float32).astype(np.float16)
    out, lse = np.empty_like(q), np.empty((1, heads_q, queries), np.float32)

    buffers = [device.allocate(x.nbytes, stream=stream) for x in (q, k, v, out, lse)]
    tensors = [
        RawTensor(int(buffer.handle), x.shape, 8 * x.itemsize, device.device_id)
        for buffer, x in zip(buffers, (q, k, v, out, lse), strict=True)
    ]
    for buffer, x in zip(buffers, (q, k, v), strict=False):
        check(driver.cuMemcpyHtoDAsync(int(buffer.handle), x.ctypes.data, x.nbytes, stream.handle))
    attention(*tensors, stream=int(stream.handle))
    for buffer, x in zip(buffers[3:], (out, lse), strict=True):
        check(driver.cuMemcpyDtoHAsync(x.ctypes.data, int(buffer.handle), x.nbytes, stream.handle))
    stream.sync()
    for buffer in buffers:
        buffer.close()

    exact, exact_lse = flash_attn_func(
        *(x.astype(np.float64) for x in (q, k, v)), causal=True, return_attn_probs=True
    )  # numpy arrays run the reference
    print("out against the reference in float64:", np.abs(out - exact).max())
    print("log-sum-exp against the reference:", np.abs(lse - exact_lse).max())


def why_not() -> str:
    """What keeps this example from running on a GPU, in a sentence; "" if nothing does."""
    if not _core.built_kernels():
        return "this build of hopper_attention has no kernels"
    try:
        _core.require_supported_device(0)
    except RuntimeError as error:
        return str(error)
    try:
        import cuda.bindings.driver
        import cuda.core  # noqa: F401
    except ImportError as error:
        return f"{error}: pip install cuda-core cuda-bindings"
    return ""


def main() -> None:
    reason = why_not()
    if reason:
        print(f"nothing was run on a GPU: {reason}")
        return
    from cuda.core import Device

    run_on_gpu(Device(0))


if __name__ == "__main__":
    main()
