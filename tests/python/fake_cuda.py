"""Tensors that claim to be on a GPU: shape, strides and an address, no memory. For everything that happens before a
launch.
"""

from __future__ import annotations

import ctypes
import itertools

BFLOAT, FLOAT, INT, UINT = 4, 2, 0, 1
DTYPES = {
    "bf16": (BFLOAT, 16),
    "fp16": (FLOAT, 16),
    "fp32": (FLOAT, 32),
    "fp64": (FLOAT, 64),
    "int32": (INT, 32),
    "int64": (INT, 64),
    "uint8": (UINT, 8),
    "fp8": (10, 8),
}
CPU, CUDA, OPENCL = 1, 2, 4
STREAM = 0x5EED00

_addresses = itertools.count(0x7F00_0000_0000, 1 << 36)  # every tensor has 64 GiB to itself


class DLTensor(ctypes.Structure):
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


def contiguous(shape):
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return tuple(strides)


class FakeTensor:
    """What both kinds have in common: the description as a DLTensor."""

    def __init__(
        self, shape, dtype="bf16", *, strides=None, data=None, device=(CUDA, 0), byte_offset=0, no_strides=False
    ):
        self.shape = tuple(shape)
        self.strides = contiguous(shape) if strides is None else tuple(strides)
        self.data = next(_addresses) if data is None else data
        self.device = device
        code, bits = DTYPES[dtype]
        n = len(self.shape)
        self.c_shape = (ctypes.c_int64 * n)(*self.shape)
        self.c_strides = (ctypes.c_int64 * n)(*self.strides)
        self.managed = DLManagedTensor(
            DLTensor(
                self.data, *device, n, code, bits, 1, self.c_shape, None if no_strides else self.c_strides, byte_offset
            )
        )

    def __dlpack_device__(self):
        return self.device


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class SlowTensor(FakeTensor):
    """Comes in through __dlpack__, as tensors of torch < 2.10 do."""

    def __dlpack__(self, **kwargs):
        return _new_capsule(ctypes.addressof(self.managed), b"dltensor", None)


FROM_OBJECT = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))
CURRENT_STREAM = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class ExchangeApi(ctypes.Structure):
    pass


ExchangeApi._fields_ = [
    ("major", ctypes.c_uint32),
    ("minor", ctypes.c_uint32),
    ("prev_api", ctypes.POINTER(ExchangeApi)),
    ("allocator", ctypes.c_void_p),
    ("managed_from_object", ctypes.c_void_p),
    ("managed_to_object", ctypes.c_void_p),
    ("tensor_from_object", FROM_OBJECT),
    ("current_stream", CURRENT_STREAM),
]


@FROM_OBJECT
def _from_object(x, out):
    ctypes.memmove(out, ctypes.addressof(x.managed.tensor), ctypes.sizeof(DLTensor))
    return 0


@CURRENT_STREAM
def _current_stream(device_type, device_id, out):
    out[0] = STREAM + device_id
    return 0


def exchange_capsule(api):
    return _new_capsule(ctypes.addressof(api), b"dlpack_exchange_api", None)


API = ExchangeApi(1, 3, None, None, None, None, _from_object, _current_stream)


class FastTensor(FakeTensor):
    """Comes in through the DLPack C exchange API, as tensors of torch >= 2.10 do."""

    __dlpack_c_exchange_api__ = exchange_capsule(API)
