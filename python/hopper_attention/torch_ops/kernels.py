"""What the attention operators do on tensors with memory: the quick call of `_core`, where that takes it, else the public
function.

The signatures are the schemas. An argument costs a call of its operator 0.1 us where it is left to its default, 0.2 where
it is not, and a list 1 us: hence flags in one number, what is rarely used in `options`, and at the end what hardly ever
is. `_out` forms write into what they are given; without `out`, which their schema asks for, they return new tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from hopper_attention import _core, interface
from hopper_attention.torch_ops import fake

# Bits of `flags`. The arguments that they stand for are True where the bit is set, but rotary_interleaved.
FLAGS = {"causal": 1, "batch_invariant": 2, "return_lse": 4, "rotary_interleaved": 8}
CAUSAL, INVARIANT, LSE, HALVES = FLAGS.values()

# The items of `options`, where it is given.
OPTIONS = {
    "window_left": -1,
    "window_right": -1,
    "attention_chunk": 0,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}
DEFAULTS = tuple(OPTIONS.values())

# What besides dispatch modes, transforms and torch.jit.trace, which `_core` asks for, has to see the calls of an operator.
_function_modes = torch._C._len_torch_function_stack
_profiled, _profiler = torch._C._autograd._profiler_enabled, torch.autograd.profiler
_included, _PRE_DISPATCH = torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PreDispatch

NOTHING_NEW = (None,) * 6  # `new` of kvcache_out
NOT_IN_SCHEMAS = ("new", "only_quick")
NOT_TAKEN = object()  # what a kernel that may only take the quick call returns for all other calls


def fwd_out(
    q, k, v, out, softmax_lse=None, workspace=None, s_aux=None, num_splits=1, flags=0, softmax_scale=None, softcap=0.0,
    options=None, qv=None, q_descale=None, k_descale=None, v_descale=None, *, only_quick=False,
):  # fmt: skip
    left, right, chunk, margin, _, _ = DEFAULTS if options is None else options
    done = None
    if qv is None:
        done = _core.attend_dense(
            q, k, v, softmax_scale, flags & CAUSAL != 0, (left, right), chunk, softcap, num_splits, margin,
            flags & LSE != 0, s_aux, out, softmax_lse, flags & INVARIANT != 0, workspace,
        )  # fmt: skip
    if done is None:
        if only_quick:
            return NOT_TAKEN
        done = interface.flash_attn_func(
            q, k, v, softmax_scale, flags & CAUSAL != 0, qv, q_descale, k_descale, v_descale, (left, right), chunk,
            softcap, num_splits, None, False, margin, flags & LSE != 0, s_aux=s_aux, out=out, softmax_lse=softmax_lse,
            batch_invariant=flags & INVARIANT != 0, workspace=workspace,
        )  # fmt: skip
    return new_results(done) if out is None else None


def varlen_fwd_out(
    q, k, v, cu_seqlens_q, out, softmax_lse=None, workspace=None, cu_seqlens_k=None, seqused_k=None, page_table=None,
    scheduler_metadata=None, s_aux=None, num_splits=1, flags=0, max_seqlen_q=-1, max_seqlen_k=-1, softmax_scale=None,
    softcap=0.0, options=None, seqused_q=None, qv=None, q_descale=None, k_descale=None, v_descale=None,
    cp_tot_seqused_k=None, *, only_quick=False,
):  # fmt: skip
    left, right, chunk, margin, world, rank = DEFAULTS if options is None else options
    if max_seqlen_q < 0:
        max_seqlen_q = None
    if max_seqlen_k < 0:
        max_seqlen_k = None
    done = None
    if qv is None:
        done = _core.attend_packed(
            q, k, v, softmax_scale, flags & CAUSAL != 0, (left, right), chunk, softcap, num_splits, margin,
            flags & LSE != 0, s_aux, out, softmax_lse, flags & INVARIANT != 0, workspace, cu_seqlens_q, seqused_k,
            page_table, max_seqlen_q, world, rank, cp_tot_seqused_k, scheduler_metadata, cu_seqlens_k, seqused_q,
            max_seqlen_k,
        )  # fmt: skip
    if done is None:
        if only_quick:
            return NOT_TAKEN
        done = interface.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, softmax_scale,
            flags & CAUSAL != 0, qv, q_descale, k_descale, v_descale, (left, right), chunk, softcap, num_splits, None,
            False, margin, flags & LSE != 0, page_table=page_table, scheduler_metadata=scheduler_metadata, s_aux=s_aux,
            out=out, softmax_lse=softmax_lse, cp_world_size=world, cp_rank=rank, cp_tot_seqused_k=cp_tot_seqused_k,
            batch_invariant=flags & INVARIANT != 0, workspace=workspace,
        )  # fmt: skip
    return new_results(done) if out is None else None


def kvcache_out(
    q, k_cache, v_cache, out, softmax_lse=None, workspace=None, cache_seqlens=None, page_table=None, cu_seqlens_q=None,
    scheduler_metadata=None, s_aux=None, num_splits=0, flags=0, max_seqlen_q=-1, softmax_scale=None, softcap=0.0,
    options=None, cache_batch_idx=None, cache_leftpad=None, qv=None, q_descale=None, k_descale=None, v_descale=None,
    cp_tot_seqused_k=None, *, new=NOTHING_NEW, only_quick=False,
):  # fmt: skip
    """new: k, v, rotary_cos, rotary_sin, cu_seqlens_k_new, rotary_seqlens; not in the schema."""
    left, right, chunk, margin, world, rank = DEFAULTS if options is None else options
    if max_seqlen_q < 0:
        max_seqlen_q = None
    k, v, rotary_cos, rotary_sin, cu_seqlens_k_new, rotary_seqlens = new
    done = None
    if qv is None:
        rotary = None
        if new is not NOTHING_NEW:
            rotary = (rotary_cos, rotary_sin, rotary_seqlens, flags & HALVES == 0)
        done = _core.attend_cache(
            q, k_cache, v_cache, softmax_scale, flags & CAUSAL != 0, (left, right), chunk, softcap, num_splits, margin,
            flags & LSE != 0, s_aux, out, softmax_lse, flags & INVARIANT != 0, workspace, cu_seqlens_q, cache_seqlens,
            page_table, max_seqlen_q, world, rank, cp_tot_seqused_k, scheduler_metadata, cache_batch_idx,
            cache_leftpad, k, v, cu_seqlens_k_new, rotary,
        )  # fmt: skip
    if done is None:
        if only_quick:
            return NOT_TAKEN
        done = interface.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, qv, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
            page_table, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q, rotary_seqlens, q_descale, k_descale, v_descale,
            softmax_scale, flags & CAUSAL != 0, (left, right), chunk, softcap, flags & HALVES == 0, scheduler_metadata,
            num_splits, None, margin, flags & LSE != 0, s_aux=s_aux, out=out, softmax_lse=softmax_lse,
            cp_world_size=world, cp_rank=rank, cp_tot_seqused_k=cp_tot_seqused_k,
            batch_invariant=flags & INVARIANT != 0, workspace=workspace,
        )  # fmt: skip
    return new_results(done) if out is None else None


def kvcache_append_out(
    q, k_cache, v_cache, out, softmax_lse=None, workspace=None, k=None, v=None, rotary_cos=None, rotary_sin=None,
    rotary_seqlens=None, cu_seqlens_k_new=None, cache_seqlens=None, page_table=None, cu_seqlens_q=None,
    scheduler_metadata=None, s_aux=None, num_splits=0, flags=0, max_seqlen_q=-1, softmax_scale=None, softcap=0.0,
    options=None, cache_batch_idx=None, cache_leftpad=None, qv=None, q_descale=None, k_descale=None, v_descale=None,
    cp_tot_seqused_k=None, *, only_quick=False,
):  # fmt: skip
    return kvcache_out(
        q, k_cache, v_cache, out, softmax_lse, workspace, cache_seqlens, page_table, cu_seqlens_q, scheduler_metadata,
        s_aux, num_splits, flags, max_seqlen_q, softmax_scale, softcap, options, cache_batch_idx, cache_leftpad, qv,
        q_descale, k_descale, v_descale, cp_tot_seqused_k,
        new=(k, v, rotary_cos, rotary_sin, cu_seqlens_k_new, rotary_seqlens), only_quick=only_quick,
    )  # fmt: skip


def new_results(result: Any) -> tuple[Any, Any]:
    """The two results of the operators that allocate."""
    return result if isinstance(result, tuple) else (result, fake.no_lse(result))


def allocating(kernel: Callable) -> Callable:
    """The kernel of the operator without out, softmax_lse and workspace."""
    place = list(inspect.signature(kernel).parameters).index("out")

    def kernel_without_results(*args, **options):
        return kernel(*args[:place], None, None, None, *args[place:], **options)

    return kernel_without_results


# What `_core.fits` asks of an argument of a type of the schema; what kernels on the GPU refuse goes by the dispatcher.
_KINDS = {"Tensor": "t", "Optional[Tensor]": "T", "int": "i", "float": "f", "Optional[float]": "F"}
_KINDS["Optional[List[int]]"] = "l"
_NEVER = ("qv", "q_descale", "k_descale", "v_descale")


class CalledDirectly:
    """An attention operator as Python calls it. Where nothing has to see the call, arguments by position that are exactly
    what the schema says go straight to `kernel`; torch's dispatcher, which turns every argument into a C++ value and
    back, takes all others. Kernels and observers that others register with the dispatcher do not see direct calls.
    """

    def __init__(self, operator: Any, kernel: Callable):
        arguments = operator._schema.arguments
        self.dispatched, self.kernel = operator._op, kernel
        self.least = sum(not x.has_default_value() for x in arguments)
        self.kinds = "".join("n" if x.name in _NEVER else _KINDS[str(x.type)] for x in arguments).encode()

    def __call__(self, *args, **kwargs):
        seen = kwargs or _function_modes() or _profiled() or _profiler._is_profiler_enabled or _included(_PRE_DISPATCH)
        if not seen and len(args) >= self.least and _core.fits(args, self.kinds):
            done = self.kernel(*args, only_quick=True)
            if done is not NOT_TAKEN:
                return done
        return self.dispatched(*args, **kwargs)
