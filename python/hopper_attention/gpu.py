"""CUDA tensors -> kernels, for calls that `_core.attend_*` leave aside: converts values, allocates what the caller did not
give, and calls `_core`.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

from hopper_attention import _core, watching
from hopper_attention.arguments import (
    bound,
    check_torch_inputs,
    flag,
    integer,
    is_torch,
    naming_dtype,
    number,
    window,
)


@lru_cache(maxsize=1)
def use_torch() -> None:
    """From now on `_core.attend_*` take the calls that are plain."""
    torch = sys.modules["torch"]
    _core.use_torch(
        tensor=torch.Tensor,
        parameter=torch.nn.Parameter,
        is_grad_enabled=torch.is_grad_enabled,
        dispatch_modes=torch._C._len_torch_dispatch_stack,
        transform=torch._C._functorch.peek_interpreter_stack,
        is_tracing=torch._C._is_tracing,
        empty_like=torch.empty_like,
        empty_output=empty_output,
        empty_lse=empty_lse,
        empty_workspace=empty_workspace,
    )
    watching.is_traced = torch.compiler.is_dynamo_compiling


@lru_cache(maxsize=1)
def stream_comes_with_tensors() -> bool:
    """Whether torch tells its current stream through the DLPack C exchange API (torch >= 2.10)."""
    return _core.has_exchange_api(sys.modules["torch"].Tensor)


def current_stream(x: Any) -> int | None:
    """The stream of the device of `x` to launch on, where `_core` cannot find it out by itself; None otherwise.

    Arrays of other libraries run on the legacy default stream, which waits for all blocking streams.
    """
    if not is_torch(x) or stream_comes_with_tensors():
        return None
    return sys.modules["torch"].cuda.current_stream(x.device).cuda_stream


def forward(args: tuple, return_lse: bool) -> Any:
    """Attention on the device of q with what `arguments` returned -> out, or (out, softmax_lse)."""
    try:
        _core.forward(*args)
    except TypeError as error:
        raise explained(error, args) from None
    return (args[3], args[4]) if return_lse else args[3]


def check(args: tuple) -> None:
    """Raises as `forward`, and launches nothing."""
    try:
        _core.check(*args)
    except TypeError as error:
        raise explained(error, args) from None


def explained(error: TypeError, args: tuple) -> TypeError:
    """What to raise for a TypeError of `_core` on what `arguments` returned. Raises what says more than a TypeError."""
    refuse_fp8(q=args[0], k=args[1], v=args[2])
    refuse_long_integers(args)
    return naming_dtype(error, {name: args[place] for name, place in _TENSORS.items()})


def arguments(
    q: Any,
    k: Any,
    v: Any,
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
    cu_seqlens_q: Any = None,
    seqused_k: Any = None,
    page_table: Any = None,
    max_seqlen_q: Any = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Any = None,
    scheduler_metadata: Any = None,
    cu_seqlens_k: Any = None,
    seqused_q: Any = None,
    max_seqlen_k: Any = None,
    of_cache: tuple = (-1, None, None, None, 0),
) -> tuple:
    """The arguments of `_core.forward`, by position, with out, and softmax_lse if it is returned, allocated.

    of_cache: seqused_k_all, cache_batch_idx, cache_leftpad, cu_seqlens_k_new, seqlen_k_new. Raises for values that
    cannot be translated; all that is about tensors is left to `_core`.

    Calls that `_core.attend_*` leave aside pass here, all of them with torch < 2.10: arguments come by position, and
    values of the right type are seen without a call, since a keyword costs 25 ns and a call 60. Beyond 30 values Python
    makes a call or a tuple by way of a list, which costs 300 ns: hence `of_cache`, and two halves of the result.
    """
    left, right = (-1, -1) if window_size is None else window(window_size)
    if softmax_scale is not None and type(softmax_scale) is not float:
        softmax_scale = number("softmax_scale", softmax_scale)
    if causal is not True and causal is not False:
        causal = flag("causal", causal)
    if type(attention_chunk) is not int:
        attention_chunk = 0 if attention_chunk is None else integer("attention_chunk", attention_chunk)
    if type(softcap) is not float:
        softcap = number("softcap", softcap)
    if type(num_splits) is not int:
        num_splits = integer("num_splits", num_splits)
    if type(sm_margin) is not int:
        sm_margin = integer("sm_margin", sm_margin)
    if batch_invariant is not True and batch_invariant is not False:
        batch_invariant = flag("batch_invariant", batch_invariant)
    max_seqlen_q = -1 if max_seqlen_q is None else bound("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = -1 if max_seqlen_k is None else bound("max_seqlen_k", max_seqlen_k)
    if type(cp_world_size) is not int:
        cp_world_size = integer("cp_world_size", cp_world_size)
    if type(cp_rank) is not int:
        cp_rank = integer("cp_rank", cp_rank)
    seqused_k_all, cache_batch_idx, cache_leftpad, cu_seqlens_k_new, seqlen_k_new = of_cache
    stream = None
    torch = sys.modules.get("torch")
    if torch is not None:
        use_torch()
        # Plain tensors without grad mode, as engines pass them, have nothing to be refused.
        if torch.is_grad_enabled() or not type(q) is type(k) is type(v) is torch.Tensor:
            check_torch_inputs(q=q, k=k, v=v, s_aux=s_aux, out=out, softmax_lse=softmax_lse)
        if not stream_comes_with_tensors():
            stream = current_stream(q)
            q, k, v, s_aux = detached(q, k, v, s_aux)
    if out is None:
        out = empty_output(q, v)
    if softmax_lse is None and return_lse:
        softmax_lse = empty_lse(q)
    return (
        q,
        k,
        v,
        out,
        softmax_lse,
        s_aux,
        softmax_scale,
        causal,
        left,
        right,
        attention_chunk,
        softcap,
        num_splits,
        sm_margin,
        batch_invariant,
        stream,
        workspace,
        empty_workspace,
    ) + (
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        page_table,
        cache_batch_idx,
        cache_leftpad,
        cu_seqlens_k_new,
        None if cp_world_size == 1 else cp_tot_seqused_k,  # one rank has all keys
        scheduler_metadata,
        seqlen_k_new,
        seqused_k_all,
        max_seqlen_q,
        max_seqlen_k,
        cp_world_size,
        cp_rank,
    )


# Where tensors are in what `arguments` returns, by their names in `_core`.
_TENSORS = {
    **{"q": 0, "k": 1, "v": 2, "out": 3, "softmax_lse": 4, "sinks (s_aux)": 5, "workspace": 16, "cu_seqlens_q": 18},
    **{"cu_seqlens_k": 19, "seqused_q": 20, "seqused_k": 21, "page_table": 22, "cache_batch_idx": 23},
    **{"cache_leftpad": 24, "cu_seqlens_k_new": 25, "cp_tot_seqused_k": 26, "scheduler_metadata": 27},
}
# Where `arguments` leaves integers of any length for `_core` to refuse.
_INTEGERS = {10: "attention_chunk", 12: "num_splits", 13: "sm_margin", 32: "cp_world_size", 33: "cp_rank"}


def refuse_long_integers(args: tuple) -> None:
    """ValueError for the first integer of `arguments` that does not fit into 64 bits."""
    for place, name in _INTEGERS.items():
        integer(name, args[place])


def refuse_fp8(**tensors: Any) -> None:
    """NotImplementedError for the first of `tensors` that is fp8."""
    for name, x in tensors.items():
        if "float8" in str(getattr(x, "dtype", "")):
            raise NotImplementedError(
                f"{name}: fp8 is not available on the GPU yet, found {x.dtype}; pass bf16 or fp16"
            )


def detached(*tensors: Any) -> tuple:
    """Torch tensors without their grad, since __dlpack__ refuses requires_grad."""
    return tuple(x.detach() if is_torch(x) else x for x in tensors)


def empty_output(q: Any, v: Any) -> Any:
    """(..., Hq, Dv), dtype and device of q."""
    if not is_torch(q) or not is_torch(v):
        raise TypeError("out: is needed unless q and v are torch tensors, which allocate it")
    torch = sys.modules["torch"]
    if q.shape[-1:] == v.shape[-1:]:
        return torch.empty_like(q, memory_format=torch.contiguous_format)  # less than half the time of torch.empty
    return torch.empty((*q.shape[:-1], *v.shape[-1:]), dtype=q.dtype, device=q.device)


def empty_lse(q: Any) -> Any:
    """(B, Hq, Sq) or, for packed q, (Hq, Tq) float32 on the device of q; None if q has no such shape, which its checks
    will report.
    """
    if not is_torch(q):
        raise TypeError("softmax_lse: is needed unless q is a torch tensor, which allocates it")
    torch = sys.modules["torch"]
    if q.dim() == 4:
        return torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    if q.dim() == 3:
        return torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    return None


def empty_workspace(size: int, q: Any) -> Any:
    """`size` bytes on the device of q. `_core` asks for them, if the plan needs any."""
    if not is_torch(q):
        raise TypeError(f"workspace: {size} bytes are needed, which only torch tensors allocate; pass a uint8 tensor")
    torch = sys.modules["torch"]
    return torch.empty(size, dtype=torch.uint8, device=q.device)
