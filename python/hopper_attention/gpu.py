"""CUDA tensors -> kernels: allocates what the caller did not give, and calls `_core`."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

from hopper_attention import _core
from hopper_attention.arguments import check_torch_inputs, flag, integer, is_torch, number, on_cuda, window

WHAT_WORKS = "flash_attn_func works (dense, bf16 and fp16); CPU tensors and numpy arrays run the reference"


def not_available(function: str) -> NotImplementedError:
    """The error for a public function that has no kernel yet."""
    return NotImplementedError(f"{function}: not available on the GPU yet; {WHAT_WORKS}")


@lru_cache(maxsize=1)
def stream_comes_with_tensors() -> bool:
    """Whether torch tells its current stream through the DLPack C exchange API (torch >= 2.10)."""
    return _core.has_exchange_api(sys.modules["torch"].Tensor)


def current_stream(q: Any) -> int | None:
    """The stream to launch on, where `_core` cannot find it out by itself; None otherwise.

    Arrays of other libraries run on the legacy default stream, which waits for all blocking streams.
    """
    if not is_torch(q) or stream_comes_with_tensors():
        return None
    return sys.modules["torch"].cuda.current_stream(q.device).cuda_stream


def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    attention_chunk: int | None,
    softcap: float,
    num_splits: int,
    sm_margin: int,
    return_lse: bool,
    s_aux: Any,
    out: Any,
    softmax_lse: Any,
    batch_invariant: bool,
    workspace: Any,
) -> Any:
    """Dense attention on the device of q. Arguments, results and errors as in `flash_attn_func`."""
    left, right = window(window_size)
    if "torch" in sys.modules:
        check_torch_inputs(q=q, k=k, v=v, s_aux=s_aux, out=out, softmax_lse=softmax_lse)
        if not stream_comes_with_tensors():
            q, k, v, s_aux = (
                x.detach() if is_torch(x) else x for x in (q, k, v, s_aux)
            )  # __dlpack__ refuses requires_grad
    if workspace is not None:
        check_workspace(workspace)
    if out is None:
        out = empty_output(q, v)
    if softmax_lse is None and return_lse:
        softmax_lse = empty_lse(q)
    _core.forward(
        q,
        k,
        v,
        out,
        softmax_lse,
        s_aux,
        None if softmax_scale is None else number("softmax_scale", softmax_scale),
        flag("causal", causal),
        left,
        right,
        0 if attention_chunk is None else integer("attention_chunk", attention_chunk),
        number("softcap", softcap),
        integer("num_splits", num_splits),
        integer("sm_margin", sm_margin),
        flag("batch_invariant", batch_invariant),
        current_stream(q),
    )
    return (out, softmax_lse) if return_lse else out


def empty_output(q: Any, v: Any) -> Any:
    """(B, Sq, Hq, Dv), dtype and device of q."""
    if not is_torch(q) or not is_torch(v):
        raise TypeError("out: is needed unless q and v are torch tensors, which allocate it")
    torch = sys.modules["torch"]
    if q.shape[-1:] == v.shape[-1:]:
        return torch.empty_like(q, memory_format=torch.contiguous_format)  # less than half the time of torch.empty
    return torch.empty((*q.shape[:-1], *v.shape[-1:]), dtype=q.dtype, device=q.device)


def empty_lse(q: Any) -> Any:
    """(B, Hq, Sq) float32 on the device of q; None if q has no such shape, which its checks will report."""
    if not is_torch(q):
        raise TypeError("softmax_lse: is needed unless q is a torch tensor, which allocates it")
    if q.dim() != 4:
        return None
    torch = sys.modules["torch"]
    return torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)


def check_workspace(workspace: Any) -> None:
    """uint8 on a CUDA device. Dense attention needs none of it."""
    if not on_cuda("workspace", workspace):
        raise ValueError("workspace: must be on the device of q, but is on the CPU")
    dtype = str(getattr(workspace, "dtype", None)).removeprefix("torch.")
    if dtype != "uint8":
        raise TypeError(f"workspace: dtype must be uint8, found {dtype}")
