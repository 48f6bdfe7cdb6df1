"""Wrong calls of all public functions: one list, run on the CPU reference, with launches stubbed out, and on a GPU.

A call is a right one with some arguments replaced. It must raise an exception of its type that names the argument, before
anything is launched or written; the process goes on, and the next right call gives what it gave before.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import hopper_attention
from fake_cuda import CUDA, FastTensor, contiguous

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "int32": 4, "int64": 8, "uint8": 1, "fp8": 1}
V, TY, N = ValueError, TypeError, NotImplementedError
EVERYWHERE, GPU, STUB, TORCH = "everywhere", "gpu", "stub", "torch"


@dataclass(frozen=True)
class T:
    """A tensor to be made. offset in elements; of: the argument whose memory it is in; where: "", "cpu", "other GPU"."""

    shape: tuple[int, ...]
    dtype: str = "bf16"
    strides: tuple[int, ...] | None = None
    offset: int = 0
    values: Any = None
    of: str = ""
    where: str = ""
    grad: bool = False


@dataclass(frozen=True)
class Wrong:
    """on: EVERYWHERE; GPU where the reference takes it (strides, alignment, head dims, devices); TORCH for torch tensors
    on any device; STUB for what only made-up tensors can be.
    """

    function: str
    why: str
    error: type[Exception] | tuple[type[Exception], ...]
    named: str  # the argument that the message must name; or several, of which one is enough, with |
    changes: dict[str, Any] = field(default_factory=dict)
    on: str = EVERYWHERE


Q, K, LSE = (2, 64, 4, 64), (2, 128, 2, 64), (2, 4, 64)
PACKED_Q, PACKED_K, PAGES, CACHE = (20, 4, 64), (30, 2, 64), (12, 16, 2, 64), (8, 100, 2, 64)
STARTS_Q, STARTS_K, USED = [0, 5, 5, 17], [0, 10, 20, 30], [10, 70, 0]
TABLE = [[3, 1, 2, 0, 4], [5, 6, 7, 8, 9], [11, 10, 0, 0, 0]]
WORKSPACE = T((1 << 26,), "uint8")


def ints(*values: int, dtype: str = "int32") -> T:
    return T((len(values),), dtype, values=list(values))


def tensor_like(t: T, **changes: Any) -> T:
    return T(**{**{name: getattr(t, name) for name in T.__dataclass_fields__}, **changes})


RIGHT: dict[str, dict[str, Any]] = {
    "flash_attn_func": {
        "q": T(Q), "k": T(K), "v": T(K), "s_aux": T((4,), "fp32"), "out": T(Q), "softmax_lse": T(LSE, "fp32"),
        "workspace": WORKSPACE,
    },
    "flash_attn_varlen_func": {
        "q": T(PACKED_Q), "k": T(PACKED_K), "v": T(PACKED_K), "cu_seqlens_q": ints(*STARTS_Q),
        "cu_seqlens_k": ints(*STARTS_K), "max_seqlen_q": 20, "max_seqlen_k": 30, "seqused_q": ints(5, 0, 12),
        "seqused_k": ints(10, 9, 10), "out": T(PACKED_Q), "softmax_lse": T((4, 20), "fp32"), "workspace": WORKSPACE,
    },
    "paged": {
        "q": T(PACKED_Q), "k": T(PAGES), "v": T(PAGES), "cu_seqlens_q": ints(*STARTS_Q), "seqused_k": ints(*USED),
        "page_table": T((3, 5), "int32", values=TABLE), "out": T(PACKED_Q), "softmax_lse": T((4, 20), "fp32"),
        "workspace": WORKSPACE,
    },
    "flash_attn_with_kvcache": {
        "q": T((3, 1, 4, 64)), "k_cache": T(CACHE), "v_cache": T(CACHE), "cache_seqlens": ints(*USED),
        "cache_batch_idx": ints(7, 0, 2), "cache_leftpad": ints(0, 3, 0), "out": T((3, 1, 4, 64)),
        "softmax_lse": T((3, 4, 1), "fp32"), "workspace": WORKSPACE,
    },
    "append": {
        "q": T((3, 2, 4, 64)), "k_cache": T(CACHE), "v_cache": T(CACHE), "k": T((3, 2, 2, 64)), "v": T((3, 2, 2, 64)),
        "rotary_cos": T((128, 32)), "rotary_sin": T((128, 32)), "rotary_seqlens": ints(1, 2, 3),
        "cache_seqlens": ints(*USED), "cache_batch_idx": ints(7, 0, 2), "out": T((3, 2, 4, 64)), "workspace": WORKSPACE,
    },
    "flash_attn_combine": {
        "out_partial": T((3, 2, 5, 4, 64), "fp32"), "lse_partial": T((3, 2, 5, 4), "fp32"), "out": T((2, 5, 4, 64)),
    },
    "merge_states": {
        "out_a": T((2, 5, 4, 64)), "lse_a": T((2, 4, 5), "fp32"), "out_b": T((2, 5, 4, 64)),
        "lse_b": T((2, 4, 5), "fp32"), "out": T((2, 5, 4, 64)), "lse": T((2, 4, 5), "fp32"),
    },
    "get_scheduler_metadata": {
        "batch_size": 3, "max_seqlen_q": 20, "max_seqlen_k": 80, "num_heads_q": 4, "num_heads_kv": 2, "headdim": 64,
        "cache_seqlens": ints(*USED), "cu_seqlens_q": ints(*STARTS_Q), "page_size": 16, "out": T((17,), "int32"),
    },
    "check_metadata": {
        "q": T(PACKED_Q), "k": T(PAGES), "cu_seqlens_q": ints(*STARTS_Q), "seqused_k": ints(*USED),
        "page_table": T((3, 5), "int32", values=TABLE),
    },
    "plan": {
        "dtype": "bf16", "head_dim": 128, "device": "H100", "batch": 2, "max_seqlen_q": 100, "max_seqlen_k": 300,
        "heads_q": 8, "heads_kv": 2,
    },
}  # fmt: skip
FUNCTIONS: dict[str, Callable] = {
    "paged": hopper_attention.flash_attn_varlen_func,
    "append": hopper_attention.flash_attn_with_kvcache,
    **{name: getattr(hopper_attention, name) for name in RIGHT if hasattr(hopper_attention, name)},
}
ATTENTION = ("flash_attn_func", "flash_attn_varlen_func", "paged", "flash_attn_with_kvcache", "append")
STUBBED = (*ATTENTION, "merge_states", "get_scheduler_metadata", "plan")  # what runs on made-up tensors
LAUNCHED = ("flash_attn_func", "flash_attn_varlen_func", "paged", "flash_attn_with_kvcache")  # what the stub records
WRITTEN = ("out", "softmax_lse", "lse")


def keys_of(function: str) -> tuple[str, str]:
    return ("k_cache", "v_cache") if "k_cache" in RIGHT[function] else ("k", "v")


def values() -> Iterator[Wrong]:
    """Numbers and options that no call takes, for each function that has them."""
    wrong: list[tuple[str, str, Any, Any, str]] = [
        ("softmax_scale", "NaN scale", V, math.nan, EVERYWHERE),
        ("softmax_scale", "infinite scale", V, math.inf, EVERYWHERE),
        ("softmax_scale", "scale beyond float32", V, 1e300, GPU),
        ("softmax_scale", "negative scale", V, -0.5, GPU),
        ("softmax_scale", "scale that is text", TY, "0.1", EVERYWHERE),
        ("softmax_scale", "complex scale", TY, 1j, EVERYWHERE),
        ("softcap", "NaN softcap", V, math.nan, EVERYWHERE),
        ("softcap", "infinite softcap", V, math.inf, EVERYWHERE),
        ("softcap", "negative softcap", V, -1.0, EVERYWHERE),
        ("softcap", "softcap too small for float32", V, 1e-42, GPU),
        ("softcap", "softcap None", TY, None, EVERYWHERE),
        ("softcap", "softcap that is text", TY, "30", EVERYWHERE),
        ("num_splits", "negative splits", V, -5, EVERYWHERE),
        ("num_splits", "one split too many", V, 257, EVERYWHERE),
        ("num_splits", "splits beyond 64 bits", V, 1 << 80, EVERYWHERE),
        ("num_splits", "fractional splits", TY, 1.5, EVERYWHERE),
        ("num_splits", "splits None", TY, None, EVERYWHERE),
        ("sm_margin", "negative margin", V, -1, EVERYWHERE),
        ("sm_margin", "fractional margin", TY, 0.5, EVERYWHERE),
        ("window_size", "left window below -1", V, (-2, 0), EVERYWHERE),
        ("window_size", "right window below -1", V, (0, -7), EVERYWHERE),
        ("window_size", "window of three", V, (1, 2, 3), EVERYWHERE),
        ("window_size", "window that is a number", V, 128, EVERYWHERE),
        ("window_size", "fractional window", TY, (1.5, 0), EVERYWHERE),
        ("window_size", "half a window", TY, (None, 3), EVERYWHERE),
        ("attention_chunk", "negative chunk", V, -3, EVERYWHERE),
        ("attention_chunk", "fractional chunk", TY, 1.5, EVERYWHERE),
        ("causal", "causal that is text", TY, "yes", EVERYWHERE),
        ("batch_invariant", "batch_invariant None", TY, None, EVERYWHERE),
    ]
    for name, why, error, value, on in wrong:
        yield Wrong("flash_attn_func", why, error, name, {name: value}, on)
    every_second = itertools.cycle(("flash_attn_varlen_func", "paged", "flash_attn_with_kvcache", "append"))
    for function, (name, why, error, value, on) in zip(every_second, wrong, strict=False):
        yield Wrong(function, why, error, name, {name: value}, on)
    for name, value, error, why in (
        ("max_seqlen_q", -1, V, "negative bound"), ("max_seqlen_q", 1.5, TY, "fractional bound"),
        ("max_seqlen_q", "20", TY, "bound that is text"), ("max_seqlen_k", -4, V, "negative bound"),
        ("max_seqlen_k", [30], TY, "bound that is a list"),
    ):  # fmt: skip
        yield Wrong("flash_attn_varlen_func", f"{why} {name}", error, name, {name: value})
    totals = ints(20, 20, 30)
    for why, error, named, changes in (
        ("rank out of the world", V, "cp_rank", {"cp_world_size": 2, "cp_rank": 2, "cp_tot_seqused_k": totals}),
        ("negative rank", V, "cp_rank", {"cp_world_size": 2, "cp_rank": -1, "cp_tot_seqused_k": totals}),
        ("no ranks", V, "cp_world_size", {"cp_world_size": 0, "cp_tot_seqused_k": totals}),
        ("fractional ranks", TY, "cp_world_size", {"cp_world_size": 2.0, "cp_tot_seqused_k": totals}),
        ("ranks without totals", V, "cp_tot_seqused_k", {"cp_world_size": 2}),
        ("totals of another batch", V, "cp_tot_seqused_k", {"cp_world_size": 2, "cp_tot_seqused_k": ints(20, 20)}),
        ("int64 totals", TY, "cp_tot_seqused_k",
         {"cp_world_size": 2, "cp_tot_seqused_k": ints(20, 20, 30, dtype="int64")}),
    ):  # fmt: skip
        yield Wrong("flash_attn_varlen_func", why, error, named, changes)
        yield Wrong("paged", why, error, named, changes)


def tensors() -> Iterator[Wrong]:
    """dtypes, devices, ranks, shapes, strides, alignment of q, k, v in all attention functions."""
    for function in ATTENTION:
        right = RIGHT[function]
        k_name, v_name = keys_of(function)
        q, k, v = right["q"], right[k_name], right[v_name]
        rest = {"q": q, k_name: k, v_name: v}

        def make(why, error, named, changes, on=EVERYWHERE, function=function) -> Wrong:
            return Wrong(function, why, error, named, changes, on)

        yield make("q in float32", TY, "q", {"q": tensor_like(q, dtype="fp32")})
        yield make("q in int32", TY, "q", {"q": tensor_like(q, dtype="int32")})
        yield make("q in fp8", (TY, N), "q", {"q": tensor_like(q, dtype="fp8")})
        yield make("k in another dtype", TY, k_name, {k_name: tensor_like(k, dtype="fp16")})
        yield make("v in another dtype", TY, v_name, {v_name: tensor_like(v, dtype="fp16")})
        yield make("v in uint8", TY, v_name, {v_name: tensor_like(v, dtype="uint8")})
        yield make("k on the CPU", V, k_name, {k_name: tensor_like(k, where="cpu")}, GPU)
        yield make("v on the CPU", V, v_name, {v_name: tensor_like(v, where="cpu")}, GPU)
        yield make("k on another GPU", V, k_name, {k_name: tensor_like(k, where="other GPU")}, STUB)
        yield make("v on another GPU", V, v_name, {v_name: tensor_like(v, where="other GPU")}, STUB)
        yield make("q without a dim", V, "q", {"q": T(q.shape[1:])})
        yield make("q with a dim more", V, "q", {"q": T((1, *q.shape))})
        yield make("k without a dim", V, k_name, {k_name: T(k.shape[1:])})
        yield make("v with a dim more", V, v_name, {v_name: T((1, *v.shape))})
        yield make("q without dims", V, "q", {"q": T(())})
        yield make("heads that do not divide", V, "q",
                   {k_name: T((*k.shape[:-2], 3, 64)), v_name: T((*v.shape[:-2], 3, 64))})  # fmt: skip
        yield make("no kv heads", V, k_name,
                   {k_name: T((*k.shape[:-2], 0, 64)), v_name: T((*v.shape[:-2], 0, 64))})  # fmt: skip
        yield make("head dims of q and k differ", V, k_name, {k_name: T((*k.shape[:-1], 128))})
        yield make("heads of k and v differ", V, v_name, {v_name: T((*v.shape[:-2], 4, 64))})
        yield make("rows of k and v differ", V, v_name, {v_name: T((*v.shape[:-3], v.shape[-3] - 1, *v.shape[-2:]))})
        yield make(
            "head dim 60",
            V,
            "q",
            {n: T((*t.shape[:-1], 60)) for n, t in rest.items()} | out_of(function, 60),
            GPU,
        )
        yield make("head dim 320", (N, V), "q",
                   {n: T((*t.shape[:-1], 320)) for n, t in rest.items()} | out_of(function, 320), GPU)  # fmt: skip
        yield make("q with columns two apart", V, "q", {"q": tensor_like(q, strides=doubled(q.shape))}, GPU)
        for name, t in rest.items():
            yield make(f"{name} at an odd address", V, name, {name: tensor_like(t, offset=1)}, GPU)
            yield make(f"{name} with odd rows", V, name, {name: tensor_like(t, strides=odd_rows(t.shape))}, GPU)
        yield make(
            "k expanded over its rows", V, k_name, {k_name: tensor_like(k, strides=(0, *contiguous(k.shape)[1:]))}, GPU
        )
        for name, t in rest.items():
            yield make(f"{name} None", (V, TY), name, {name: None})
            yield make(f"{name} a list", TY, name, {name: [1.0, 2.0]})
            yield make(f"{name} requires grad", N, name, {name: tensor_like(t, grad=True)}, TORCH)
        yield make("a null address", V, "q", {"q": tensor_like(q, offset=-1)}, STUB)
        yield make("negative strides", V, "q",
                   {"q": tensor_like(q, strides=(-contiguous(q.shape)[0], *contiguous(q.shape)[1:]))}, STUB)  # fmt: skip
        yield make("qv", N, "qv", {"qv": q}, GPU)


def out_of(function: str, columns: int) -> dict[str, T]:
    return {"out": T((*RIGHT[function]["out"].shape[:-1], columns))}


def doubled(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(2 * s for s in contiguous(shape))


def odd_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Rows of all heads one element further apart."""
    heads, dim = shape[-2:]
    row = heads * dim + 1
    return (*(s * row for s in contiguous(shape[:-2])), dim, 1)


def results() -> Iterator[Wrong]:
    """out, softmax_lse, workspace, sinks."""
    for function in ATTENTION:
        right = RIGHT[function]
        out, shape = right["out"], right["out"].shape

        def make(why, error, named, changes, on=EVERYWHERE, function=function) -> Wrong:
            return Wrong(function, why, error, named, changes, on)

        yield make("out of another shape", V, "out", {"out": T((*shape[:-3], shape[-3] + 1, *shape[-2:]))})
        yield make("out of other heads", V, "out", {"out": T((*shape[:-2], 3, 64))})
        yield make("out of other columns", V, "out", {"out": T((*shape[:-1], 128))})
        yield make("out without a dim", V, "out", {"out": T(shape[1:])})
        yield make("out of another dtype", TY, "out", {"out": T(shape, "fp16")})
        yield make("out in float32", TY, "out", {"out": T(shape, "fp32")})
        yield make("out on the CPU", V, "out", {"out": T(shape, where="cpu")}, GPU)
        yield make("out on another GPU", V, "out", {"out": T(shape, where="other GPU")}, STUB)
        yield make("out with equal addresses", V, "out", {"out": T(shape, strides=(*contiguous(shape)[:-2], 0, 1))})
        yield make("out with columns two apart", V, "out", {"out": T(shape, strides=doubled(shape))}, GPU)
        yield make("out is q", V, "out", {"out": tensor_like(out, of="q")})
        yield make("out is a list", TY, "out", {"out": [0.0]})
        if "softmax_lse" in right:
            lse = right["softmax_lse"].shape
            yield make("lse in bf16", TY, "softmax_lse", {"softmax_lse": T(lse)})
            yield make("lse of another shape", V, "softmax_lse", {"softmax_lse": T((*lse[:-1], lse[-1] + 1), "fp32")})
            yield make("lse with a dim more", V, "softmax_lse", {"softmax_lse": T((1, *lse), "fp32")})
            yield make("lse with gaps", V, "softmax_lse", {"softmax_lse": T(lse, "fp32", strides=doubled(lse))}, GPU)
            yield make("lse on the CPU", V, "softmax_lse", {"softmax_lse": T(lse, "fp32", where="cpu")}, GPU)
            yield make("lse inside q", V, "softmax_lse", {"softmax_lse": T(lse, "fp32", of="q")}, EVERYWHERE)
            yield make("lse inside out", V, "softmax_lse", {"softmax_lse": T(lse, "fp32", of="out")}, EVERYWHERE)
        yield make("workspace in float32", TY, "workspace", {"workspace": T((1 << 20,), "fp32")}, GPU)
        yield make("workspace of two dims", V, "workspace", {"workspace": T((1 << 12, 1 << 10), "uint8")}, GPU)
        yield make("workspace at 8 bytes", V, "workspace", {"workspace": T((1 << 20,), "uint8", offset=8)}, GPU)
        yield make("workspace on the CPU", V, "workspace", {"workspace": T((1 << 20,), "uint8", where="cpu")}, GPU)
        yield make("sinks of fewer heads", V, "s_aux", {"s_aux": T((3,), "fp32")})
        yield make("sinks of two dims", V, "s_aux", {"s_aux": T((1, 4), "fp32")})
        yield make("sinks in int64", TY, "s_aux", {"s_aux": T((4,), "int64")})
        yield make("sinks on the CPU", V, "s_aux", {"s_aux": T((4,), "fp32", where="cpu")}, GPU)
        yield make("sinks two apart", V, "s_aux", {"s_aux": T((4,), "fp32", strides=(2,))}, GPU)
        yield make("sinks that are a number", TY, "s_aux", {"s_aux": 1.0})
    yield Wrong("flash_attn_func", "out inside v", V, "out", {"out": T((2, 64, 4, 64), of="v")})
    yield Wrong("flash_attn_func", "out inside the workspace", V, "out", {"out": T(Q, of="workspace")}, GPU)
    yield Wrong("paged", "out inside the pages", V, "out", {"out": T(PACKED_Q, of="k")})
    yield Wrong("flash_attn_with_kvcache", "out inside the cache", V, "out", {"out": T((3, 1, 4, 64), of="v_cache")})


def lengths() -> Iterator[Wrong]:
    """Tensors of lengths and pages, and what must or must not come together."""
    for function, names in (
        ("flash_attn_varlen_func", ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")),
        ("paged", ("cu_seqlens_q", "seqused_k")),
        ("flash_attn_with_kvcache", ("cache_seqlens", "cache_batch_idx", "cache_leftpad")),
        ("append", ("cache_seqlens", "rotary_seqlens")),
    ):
        for name in names:
            t = RIGHT[function][name]
            n = t.shape[0]
            yield Wrong(function, f"{name} in int64", TY, name, {name: tensor_like(t, dtype="int64")})
            yield Wrong(function, f"{name} in float32", TY, name, {name: tensor_like(t, dtype="fp32")})
            yield Wrong(function, f"{name} of two dims", V, name, {name: T((1, n), "int32")})
            if name != "cu_seqlens_q":  # says how many sequences there are
                yield Wrong(function, f"{name} of another batch", V, name, {name: T((n + 1,), "int32")})
            else:
                yield Wrong(function, f"{name} of another batch", V, "cu_seqlens_k|seqused_k|page_table|seqused_q",
                            {name: T((n + 1,), "int32")})  # fmt: skip
            yield Wrong(function, f"{name} with gaps", V, name, {name: tensor_like(t, strides=(2,))}, GPU)
            yield Wrong(function, f"{name} on the CPU", V, name, {name: tensor_like(t, where="cpu")}, GPU)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        yield Wrong("flash_attn_varlen_func", f"no {name}", (V, TY), name, {name: None})
        yield Wrong("flash_attn_varlen_func", f"{name} a list", TY, name, {name: [0, 5, 5, 17]})
    yield Wrong(
        "flash_attn_varlen_func", "no offsets in cu_seqlens_q", V, "cu_seqlens_q", {"cu_seqlens_q": T((0,), "int32")}
    )
    yield Wrong("flash_attn_varlen_func", "dense q", V, "q", {"q": T(Q)})
    yield Wrong("flash_attn_varlen_func", "dense LSE", V, "softmax_lse", {"softmax_lse": T((1, 4, 20), "fp32")})
    yield Wrong("paged", "both kinds of keys", V, "cu_seqlens_k", {"cu_seqlens_k": ints(*STARTS_K)})
    yield Wrong("paged", "no lengths", V, "seqused_k", {"seqused_k": None})
    table = RIGHT["paged"]["page_table"]
    for why, error, t, on in (
        ("int64 table", TY, tensor_like(table, dtype="int64"), EVERYWHERE),
        ("float table", TY, tensor_like(table, dtype="fp32"), EVERYWHERE),
        ("table of another batch", V, T((4, 5), "int32"), EVERYWHERE),
        ("flat table", V, T((15,), "int32"), EVERYWHERE),
        ("table of three dims", V, T((1, 3, 5), "int32"), EVERYWHERE),
        ("transposed table", V, T((3, 5), "int32", strides=(1, 3)), GPU),
        ("table on the CPU", V, tensor_like(table, where="cpu"), GPU),
        ("table a list", TY, TABLE, EVERYWHERE),
    ):
        yield Wrong("paged", why, error, "page_table", {"page_table": t}, on)
        yield Wrong("flash_attn_with_kvcache", why, error, "page_table", {"page_table": t, "cache_batch_idx": None}, on)
    yield Wrong("paged", "pages of no keys", V, "k", {"k": T((12, 0, 2, 64)), "v": T((12, 0, 2, 64))}, GPU)
    yield Wrong("paged", "other pages of v", V, "v", {"v": T((11, 16, 2, 64))})
    yield Wrong("flash_attn_with_kvcache", "cache of another batch", V, "k_cache", {"cache_batch_idx": None})
    yield Wrong("flash_attn_with_kvcache", "pages with indices", V, "cache_batch_idx", {"page_table": table})
    yield Wrong("flash_attn_with_kvcache", "pages without lengths", V, "cache_seqlens",
                {"page_table": table, "cache_batch_idx": None, "cache_seqlens": None}, EVERYWHERE)  # fmt: skip
    yield Wrong("flash_attn_with_kvcache", "packed q without offsets", V, "q", {"q": T((3, 4, 64))})
    yield Wrong("flash_attn_with_kvcache", "dense q with offsets", V, "q", {"cu_seqlens_q": ints(0, 1, 2, 3)})
    yield Wrong("flash_attn_with_kvcache", "length that is text", TY, "cache_seqlens", {"cache_seqlens": "40"})
    yield Wrong("flash_attn_with_kvcache", "fractional length", TY, "cache_seqlens", {"cache_seqlens": 40.5})
    for why, error, t, on in (
        ("short metadata", V, T((16,), "int32"), GPU),
        ("int64 metadata", TY, T((17,), "int64"), GPU),
        ("metadata on the CPU", V, T((17,), "int32", where="cpu"), GPU),
        ("metadata of two dims", V, T((1, 17), "int32"), GPU),
        ("metadata with gaps", V, T((17,), "int32", strides=(2,)), GPU),
    ):
        yield Wrong("flash_attn_varlen_func", why, error, "scheduler_metadata", {"scheduler_metadata": t}, on)
        yield Wrong("flash_attn_with_kvcache", why, error, "scheduler_metadata", {"scheduler_metadata": t}, on)


def appends() -> Iterator[Wrong]:
    """New keys and rotary embedding."""
    new, cos = RIGHT["append"]["k"], RIGHT["append"]["rotary_cos"]
    no_rotary = {"rotary_cos": None, "rotary_sin": None, "rotary_seqlens": None}
    for why, error, named, changes, on in (
        ("k without v", V, "v", {"v": None}, EVERYWHERE),
        ("v without k", V, "k", {"k": None}, EVERYWHERE),
        ("rotation without new keys", V, "rotary_cos", {"k": None, "v": None}, TORCH),
        ("new keys without lengths", V, "cache_seqlens", {"cache_seqlens": None}, EVERYWHERE),
        ("cos without sin", V, "rotary_sin", {"rotary_sin": None}, EVERYWHERE),
        ("sin without cos", V, "rotary_cos", {"rotary_cos": None}, EVERYWHERE),
        ("cos of three dims", V, "rotary_cos", {"rotary_cos": T((1, 128, 32))}, EVERYWHERE),
        ("sin of other positions", V, "rotary_sin", {"rotary_sin": T((64, 32))}, EVERYWHERE),
        ("sin of other columns", V, "rotary_sin", {"rotary_sin": T((128, 16))}, EVERYWHERE),
        ("cos in int32", TY, "rotary_cos", {"rotary_cos": T((128, 32), "int32"), "rotary_sin": T((128, 32), "int32")},
         EVERYWHERE),
        ("cos in the other half dtype", TY, "rotary_cos",
         {"rotary_cos": T((128, 32), "fp16"), "rotary_sin": T((128, 32), "fp16")}, GPU),
        ("rotation of more columns than there are", V, "rotary_cos",
         {"rotary_cos": T((128, 40)), "rotary_sin": T((128, 40))}, EVERYWHERE),
        ("tables of no positions", V, "rotary_cos", {"rotary_cos": T((0, 32)), "rotary_sin": T((0, 32))}, EVERYWHERE),
        ("cos on the CPU", V, "rotary_cos", {"rotary_cos": tensor_like(cos, where="cpu")}, GPU),
        ("cos with columns two apart", V, "rotary_cos", {"rotary_cos": T((128, 32), strides=(64, 2))}, GPU),
        ("new keys in another dtype", TY, "k", {"k": tensor_like(new, dtype="fp16")}, EVERYWHERE),
        ("new values in another dtype", TY, "v", {"v": tensor_like(new, dtype="fp16")}, EVERYWHERE),
        ("new keys of other heads", V, "k", {"k": T((3, 2, 4, 64)), "v": T((3, 2, 4, 64))}, EVERYWHERE),
        ("new keys of another head dim", V, "k", {"k": T((3, 2, 2, 32))}, EVERYWHERE),
        ("new keys of another batch", V, "k", {"k": T((4, 2, 2, 64)), "v": T((4, 2, 2, 64))}, EVERYWHERE),
        ("more new values than keys", V, "v", {"v": T((3, 3, 2, 64))}, EVERYWHERE),
        ("packed new keys without offsets", V, "k", {"k": T((6, 2, 64)), "v": T((6, 2, 64))}, EVERYWHERE),
        ("dense new keys with offsets", V, "k", {"cu_seqlens_k_new": ints(0, 2, 4, 6)}, EVERYWHERE),
        ("offsets of another batch", V, "cu_seqlens_k_new",
         {"k": T((6, 2, 64)), "v": T((6, 2, 64)), "cu_seqlens_k_new": ints(0, 2, 6)}, EVERYWHERE),
        ("int64 offsets of new keys", TY, "cu_seqlens_k_new",
         {"k": T((6, 2, 64)), "v": T((6, 2, 64)), "cu_seqlens_k_new": ints(0, 2, 4, 6, dtype="int64")}, EVERYWHERE),
        ("new keys on the CPU", V, "k", {"k": tensor_like(new, where="cpu")}, GPU),
        ("new keys at an odd address", V, "k", {"k": tensor_like(new, offset=1)}, GPU),
        ("new keys with odd rows", V, "k", {"k": tensor_like(new, strides=odd_rows(new.shape))}, GPU),
        ("new values with columns two apart", V, "v", {"v": tensor_like(new, strides=doubled(new.shape))}, GPU),
        ("new keys inside the cache", V, "k", {"k": T(new.shape, of="k_cache"), **no_rotary}, EVERYWHERE),
        ("queries inside the cache", V, "q", {"q": T((3, 2, 4, 64), of="k_cache"), **no_rotary}, EVERYWHERE),
        ("queries inside the cache of V", V, "q", {"q": T((3, 2, 4, 64), of="v_cache")}, EVERYWHERE),
        ("new values inside the cache of K", V, "v", {"v": T(new.shape, of="k_cache")}, EVERYWHERE),
        ("one cache for K and V", V, "v_cache", {"v_cache": T(CACHE, of="k_cache")}, EVERYWHERE),
        ("half a page between K and V", V, "v_cache",
         {"v_cache": T((6, 16, 2, 64), of="k_cache", offset=1024), "k_cache": T((6, 16, 2, 64), of="k_cache"),
          "page_table": RIGHT["paged"]["page_table"], "cache_batch_idx": None}, EVERYWHERE),
        ("cosines inside the cache", V, "rotary_cos", {"rotary_cos": T((128, 32), of="v_cache")}, EVERYWHERE),
        ("new keys that require grad", N, "k", {"k": tensor_like(new, grad=True)}, TORCH),
        ("new keys a list", TY, "k", {"k": [1.0]}, EVERYWHERE),
        ("rotary_interleaved None", TY, "rotary_interleaved", {"rotary_interleaved": None}, EVERYWHERE),
        ("a cache whose rows are one", V, "k_cache", {"k_cache": T(CACHE, strides=(0, *contiguous(CACHE)[1:]))}, EVERYWHERE),
    ):  # fmt: skip
        yield Wrong("append", why, error, named, changes, on)


def merges() -> Iterator[Wrong]:
    """flash_attn_combine and merge_states."""
    parts, logs = (3, 2, 5, 4, 64), (3, 2, 5, 4)
    for why, error, named, changes, on in (
        ("parts in bf16", TY, "out_partial", {"out_partial": T(parts)}, EVERYWHERE),
        ("parts of four dims", V, "out_partial", {"out_partial": T(parts[1:], "fp32")}, EVERYWHERE),
        ("LSEs in bf16", TY, "lse_partial", {"lse_partial": T(logs)}, EVERYWHERE),
        ("LSEs of another shape", V, "lse_partial", {"lse_partial": T((3, 2, 4, 5), "fp32")}, EVERYWHERE),
        ("LSEs of another count", V, "lse_partial", {"lse_partial": T((2, 2, 5, 4), "fp32")}, EVERYWHERE),
        ("LSEs on the CPU", V, "lse_partial", {"lse_partial": T(logs, "fp32", where="cpu")}, GPU),
        ("LSEs None", (TY, V), "lse_partial", {"lse_partial": None}, EVERYWHERE),
        ("parts None", TY, "out_partial", {"out_partial": None}, EVERYWHERE),
        ("out of another shape", V, "out", {"out": T((2, 5, 4, 32))}, EVERYWHERE),
        ("out in int32", TY, "out", {"out": T((2, 5, 4, 64), "int32")}, EVERYWHERE),
        ("out not of out_dtype", TY, "out", {"out_dtype": "float16"}, EVERYWHERE),
        ("unknown out_dtype", TY, "out_dtype", {"out": None, "out_dtype": "int8"}, TORCH),
        ("out inside the parts", V, "out", {"out": T((2, 5, 4, 64), "fp32", of="out_partial")}, EVERYWHERE),
        ("head dim 60", V, "out_partial", {"out_partial": T((3, 2, 5, 4, 60), "fp32"), "out": T((2, 5, 4, 60))}, GPU),
        ("head dim 520", (N, V), "out_partial", {"out_partial": T((3, 2, 5, 4, 520), "fp32"), "out": T((2, 5, 4, 520))},
         GPU),
        ("parts at an odd address", V, "out_partial", {"out_partial": T(parts, "fp32", offset=1)}, GPU),
        ("parts with columns two apart", V, "out_partial", {"out_partial": T(parts, "fp32", strides=doubled(parts))}, GPU),
        ("out with equal addresses", V, "out", {"out": T((2, 5, 4, 64), strides=(0, 256, 64, 1))}, EVERYWHERE),
        ("parts that require grad", N, "out_partial", {"out_partial": T(parts, "fp32", grad=True)}, TORCH),
    ):  # fmt: skip
        yield Wrong("flash_attn_combine", why, error, named, changes, on)
    o, l = (2, 5, 4, 64), (2, 4, 5)
    for why, error, named, changes, on in (
        ("b in another dtype", TY, "out_b", {"out_b": T(o, "fp16")}, EVERYWHERE),
        ("a in int32", TY, "out_a", {"out_a": T(o, "int32")}, EVERYWHERE),
        ("a of five dims", V, "out_a", {"out_a": T((1, *o))}, EVERYWHERE),
        ("b of another shape", V, "out_b", {"out_b": T((2, 6, 4, 64))}, EVERYWHERE),
        ("LSE of a transposed", V, "lse_a", {"lse_a": T((2, 5, 4), "fp32")}, EVERYWHERE),
        ("LSE of a in bf16", TY, "lse_a", {"lse_a": T(l)}, EVERYWHERE),
        ("LSE of b in float64", TY, "lse_b", {"lse_b": T(l, "fp64")}, EVERYWHERE),
        ("LSE of b of three sequences", V, "lse_b", {"lse_b": T((3, 4, 5), "fp32")}, EVERYWHERE),
        ("LSE of b None", (TY, V), "lse_b", {"lse_b": None}, EVERYWHERE),
        ("b None", (TY, V), "out_b", {"out_b": None}, EVERYWHERE),
        ("b on the CPU", V, "out_b", {"out_b": T(o, where="cpu")}, GPU),
        ("LSE on another GPU", V, "lse_b", {"lse_b": T(l, "fp32", where="other GPU")}, STUB),
        ("out in another dtype", TY, "out", {"out": T(o, "fp16")}, EVERYWHERE),
        ("out of another shape", V, "out", {"out": T((2, 5, 4, 32))}, EVERYWHERE),
        ("out is b", V, "out", {"out": T(o, of="out_b")}, EVERYWHERE),
        ("out a row beside a", V, "out", {"out": T((2, 4, 4, 64), of="out_a", offset=256), "out_a": T((2, 4, 4, 64), of="out_a"),
         "out_b": T((2, 4, 4, 64)), "lse_a": T((2, 4, 4), "fp32"), "lse_b": T((2, 4, 4), "fp32"),
         "lse": T((2, 4, 4), "fp32")}, EVERYWHERE),
        ("out and lse are one", V, "out|lse", {"lse": T(l, "fp32", of="out")}, EVERYWHERE),
        ("lse a row beside that of a", V, "lse", {"lse": T((2, 3, 5), "fp32", strides=(20, 5, 1), of="lse_a", offset=5),
         "lse_a": T((2, 3, 5), "fp32", strides=(20, 5, 1), of="lse_a"), "lse_b": T((2, 3, 5), "fp32"),
         **{n: T((2, 5, 3, 64)) for n in ("out_a", "out_b", "out")}}, EVERYWHERE),
        ("lse with equal addresses", V, "lse", {"lse": T(l, "fp32", strides=(0, 5, 1))}, EVERYWHERE),
        ("lse is that of b", V, "lse", {"lse": T(l, "fp32", of="lse_b")}, EVERYWHERE),
        ("lse in bf16", TY, "lse", {"lse": T(l)}, EVERYWHERE),
        ("a at an odd address", V, "out_a", {"out_a": T(o, offset=1)}, GPU),
        ("a with columns two apart", V, "out_a", {"out_a": T(o, strides=doubled(o))}, GPU),
        ("head dim 60", V, "out_a", {"out_a": T((2, 5, 4, 60)), "out_b": T((2, 5, 4, 60)), "out": T((2, 5, 4, 60))}, GPU),
    ):  # fmt: skip
        yield Wrong("merge_states", why, error, named, changes, on)


def schedules() -> Iterator[Wrong]:
    """get_scheduler_metadata, check_metadata, plan."""
    for why, error, named, changes, on in (
        ("short out", V, "out", {"out": T((16,), "int32")}, EVERYWHERE),
        ("out in float32", TY, "out", {"out": T((17,), "fp32")}, EVERYWHERE),
        ("out on the CPU", V, "out", {"out": T((17,), "int32", where="cpu")}, GPU),
        ("lengths of another batch", V, "cache_seqlens", {"cache_seqlens": ints(1, 2)}, EVERYWHERE),
        ("int64 lengths", TY, "cache_seqlens", {"cache_seqlens": ints(*USED, dtype="int64")}, EVERYWHERE),
        ("offsets of another batch", V, "cu_seqlens_q", {"cu_seqlens_q": ints(0, 1, 2)}, EVERYWHERE),
        ("negative batch", V, "batch_size", {"batch_size": -1}, EVERYWHERE),
        ("fractional batch", TY, "batch_size", {"batch_size": 2.5}, EVERYWHERE),
        ("negative bound", V, "max_seqlen_q", {"max_seqlen_q": -1}, EVERYWHERE),
        ("bound beyond any tensor", V, "max_seqlen_k", {"max_seqlen_k": 1 << 40}, EVERYWHERE),
        ("heads that do not divide", V, "num_heads_q|heads", {"num_heads_q": 5}, EVERYWHERE),
        ("no kv heads", V, "num_heads_kv|heads", {"num_heads_kv": 0}, EVERYWHERE),
        ("no lengths", V, "cache_seqlens", {"cache_seqlens": None}, EVERYWHERE),
        ("a list of lengths", TY, "cache_seqlens", {"cache_seqlens": USED}, EVERYWHERE),
        ("fewer than no new keys", V, "max_seqlen_k_new", {"max_seqlen_k_new": -1}, EVERYWHERE),
        ("padding of another batch", V, "cache_leftpad", {"cache_leftpad": ints(1, 2)}, EVERYWHERE),
        ("offsets of new keys of another batch", V, "cu_seqlens_k_new", {"cu_seqlens_k_new": ints(1, 2)}, EVERYWHERE),
        ("head dim 512", N, "headdim|head_dim", {"headdim": 512}, EVERYWHERE),
        ("wider v", V, "headdim_v|head_dim", {"headdim_v": 12}, EVERYWHERE),
        ("causal that is text", TY, "causal", {"causal": "no"}, EVERYWHERE),
        ("head dim 60", V, "headdim|head_dim", {"headdim": 60}, EVERYWHERE),
        ("dtype without kernels", (TY, N), "qkv_dtype", {"qkv_dtype": "float64"}, EVERYWHERE),
        ("pages of no keys", V, "page_size", {"page_size": 0}, EVERYWHERE),
        ("too many splits", V, "num_splits", {"num_splits": 257}, EVERYWHERE),
        ("window below -1", V, "window_size", {"window_size": (-3, 0)}, EVERYWHERE),
        ("negative chunk", V, "attention_chunk", {"attention_chunk": -1}, EVERYWHERE),
        ("negative margin", V, "sm_margin", {"sm_margin": -2}, EVERYWHERE),
        ("out is the lengths", V, "out", {"out": T((17,), "int32", of="long"), "cache_seqlens": T((3,), "int32", of="long")}, EVERYWHERE),
    ):  # fmt: skip
        yield Wrong("get_scheduler_metadata", why, error, named, changes, on)
    for why, error, named, changes in (
        ("offsets that decrease", V, "cu_seqlens_q", {"cu_seqlens_q": ints(0, 9, 5, 17)}),
        ("offsets past the end", V, "cu_seqlens_q", {"cu_seqlens_q": ints(0, 5, 5, 21)}),
        ("offsets that begin late", V, "cu_seqlens_q", {"cu_seqlens_q": ints(1, 5, 5, 17)}),
        ("negative length", V, "seqused_k", {"seqused_k": ints(10, -1, 0)}),
        ("more keys than pages hold", V, "seqused_k", {"seqused_k": ints(81, 70, 0)}),
        ("a page that is not there", V, "page_table", {"page_table": T((3, 5), "int32", values=[[12] * 5] * 3)}),
        ("no lengths of pages", V, "seqused_k", {"seqused_k": None}),
        ("int64 lengths", TY, "seqused_k", {"seqused_k": ints(*USED, dtype="int64")}),
        ("table of another batch", V, "page_table", {"page_table": T((2, 5), "int32", values=TABLE[:2])}),
        ("bound that does not hold", V, "max_seqlen_q", {"max_seqlen_q": 3}),
        ("new keys that do not fit", V, "seqused_k", {"seqlen_k_new": 11}),
        ("q of two dims", V, "q", {"q": T((20, 64))}),
    ):
        yield Wrong("check_metadata", why, error, named, changes)
    for named, error, value in (
        ("head_dim", V, 60), ("head_dim", V, 0), ("head_dim", N, 512), ("head_dim", TY, 64.0), ("head_dim_v", V, 7),
        ("heads_kv", V, 3), ("heads_kv", V, 0), ("batch", V, -1), ("max_seqlen_q", TY, None), ("num_splits", V, 257),
        ("window_size", V, (-3, 0)), ("softcap", V, -1.0), ("attention_chunk", V, -1), ("dtype", N, "float32"),
        ("kv_dtype", N, "float8_e4m3fn"), ("page_size", V, 0), ("page_size", TY, 16.0), ("device", V, "A100"),
        ("device", V, 0), ("sinks", TY, "yes"), ("causal", TY, "no"), ("batch_invariant", TY, 0.5),
    ):  # fmt: skip
        name = {"heads_kv": "heads", "head_dim_v": "head_dim"}.get(named, named)
        yield Wrong("plan", f"{named} {value!r}", error, name, {named: value})


def every() -> list[Wrong]:
    """The list, without repetitions."""
    found: dict[tuple[str, str], Wrong] = {}
    for group in (values, tensors, results, lengths, appends, merges, schedules):
        for wrong in group():
            found.setdefault((wrong.function, wrong.why), wrong)
    return list(found.values())


class StubWorld:
    """Made-up CUDA tensors and a recorder of launches."""

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.rights: dict[str, dict[str, Any]] = {}

    def can(self, wrong: Wrong) -> bool:
        """Only torch allocates a rotated q."""
        rotates = wrong.function == "append" and any(name.startswith("rotary_") for name in wrong.changes)
        return wrong.function in STUBBED and wrong.on != TORCH and not rotates

    def tensor(self, t: T, right: dict[str, Any]) -> Any:
        device = {"": (CUDA, 0), "cpu": (1, 0), "other GPU": (CUDA, 1)}[t.where]
        base = right[t.of].data if t.of else FastTensor(t.shape).data
        data = 0 if t.offset < 0 else base + t.offset * BYTES[t.dtype]
        return FastTensor(t.shape, t.dtype, strides=t.strides, data=data, device=device)

    def right(self, function: str) -> dict[str, Any]:
        if function not in self.rights:
            given = {name: x for name, x in RIGHT[function].items() if not name.startswith("rotary_")}
            self.rights[function] = made(self, given, {})
        return self.rights[function]

    def before(self, function: str) -> Any:
        return self.recorder.launches()

    def touched(self, function: str, before: Any) -> str:
        return "it launched" if self.recorder.launches() != before else ""

    def right_call(self, function: str) -> str:
        if function not in LAUNCHED:
            return ""
        launches = self.recorder.launches()
        FUNCTIONS[function](**self.right(function))
        return "" if self.recorder.launches() > launches else "the next call launched nothing"


class TorchWorld:
    """Torch tensors on a device."""

    def __init__(self, device: str) -> None:
        import torch

        self.torch, self.device = torch, device
        self.dtypes = {
            "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64,
            "int32": torch.int32, "int64": torch.int64, "uint8": torch.uint8, "fp8": torch.float8_e4m3fn,
        }  # fmt: skip
        self.rights: dict[str, dict[str, Any]] = {}
        self.expected: dict[str, list[Any]] = {}
        self.inputs: dict[str, dict[str, Any]] = {}

    def can(self, wrong: Wrong) -> bool:
        if wrong.on == STUB:
            return wrong.changes and all(
                t.where == "other GPU" for t in wrong.changes.values() if isinstance(t, T)
            ) and self.device == "cuda" and self.torch.cuda.device_count() > 1  # fmt: skip
        return wrong.on in (EVERYWHERE, TORCH) or self.device == "cuda"

    def tensor(self, t: T, right: dict[str, Any]) -> Any:
        torch, dtype = self.torch, self.dtypes[t.dtype]
        strides = contiguous(t.shape) if t.strides is None else t.strides
        device = {"": self.device, "cpu": "cpu", "other GPU": "cuda:1"}[t.where]
        if t.of:
            whole = torch.empty(0, dtype=dtype, device=device)
            return whole.set_(right[t.of].untyped_storage(), t.offset, t.shape, strides)
        span = t.offset + 1 + sum((n - 1) * s for n, s in zip(t.shape, strides, strict=True) if n > 0)
        if dtype.is_floating_point:
            generator = torch.Generator().manual_seed(len(t.shape) + sum(t.shape))
            memory = torch.randn(span, generator=generator).to(dtype).to(device)
        else:
            memory = torch.zeros(span, dtype=dtype, device=device)
        found = memory.as_strided(t.shape, strides, t.offset)
        if t.values is not None:
            found.copy_(torch.tensor(t.values).view(t.shape))
        return found.requires_grad_() if t.grad else found

    def right(self, function: str) -> dict[str, Any]:
        if function not in self.rights:
            self.rights[function] = made(self, RIGHT[function], {})
            self.call(function)  # an append has been made once
            self.inputs[function] = {
                n: x.clone() for n, x in self.tensors(function).items() if n not in (*WRITTEN, "workspace")
            }
            self.before(function)  # rows of no sequence keep what is there
            self.expected[function] = self.call(function)
        return self.rights[function]

    def tensors(self, function: str) -> dict[str, Any]:
        return {n: x for n, x in self.rights[function].items() if isinstance(x, self.torch.Tensor)}

    def call(self, function: str) -> list[Any]:
        """Copies of the results of a right call."""
        found = FUNCTIONS[function](**self.rights[function])
        found = found if isinstance(found, (tuple, list)) else (found,)
        results = [*found, *(x for n, x in self.rights[function].items() if n in WRITTEN)]
        return [x.clone() for x in results if isinstance(x, self.torch.Tensor)]

    def same(self, a: Any, b: Any) -> bool:
        a, b = (x.contiguous().view(self.torch.uint8) for x in (a, b))
        return bool(self.torch.equal(a, b))

    def before(self, function: str) -> Any:
        """Results full of a value that no call gives."""
        kept = {n: x for n, x in self.tensors(function).items() if n in WRITTEN}
        for x in kept.values():
            x.fill_(77)
        return kept

    def touched(self, function: str, before: Any) -> str:
        for name, x in before.items():
            if not bool((x == 77).all()):
                return f"it wrote to {name}"
        for name, x in self.inputs[function].items():
            if not self.same(x, self.rights[function][name]):
                return f"it wrote to {name}"
        return ""

    def right_call(self, function: str) -> str:
        self.before(function)
        found = self.call(function)
        same = all(self.same(a, b) for a, b in zip(found, self.expected[function], strict=True))
        return "" if same else "the next call gives another result"


def made(world: Any, given: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """The arguments with their tensors."""
    if any(isinstance(x, T) and x.of == "long" for x in given.values()):
        right = {**right, "long": world.tensor(T((64,), "int32"), {})}
    return {name: world.tensor(x, right) if isinstance(x, T) else x for name, x in given.items()}


def problem_of(world: Any, wrong: Wrong) -> str:
    """Makes the wrong call: "" or what is wrong with what it does."""
    right = world.right(wrong.function)
    before = world.before(wrong.function)
    said = f"{wrong.function}, {wrong.why}"
    try:
        FUNCTIONS[wrong.function](**{**right, **made(world, wrong.changes, right)})
    except Exception as error:
        if not isinstance(error, wrong.error):
            return f"{said}: raised {type(error).__name__}: {error}"
        if not any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", str(error)) for name in wrong.named.split("|")):
            return f"{said}: the message does not name {wrong.named}: {error}"
    else:
        return f"{said}: raised nothing"
    touched = world.touched(wrong.function, before)
    if touched:
        return f"{said}: {touched}"
    problem = world.right_call(wrong.function)
    return f"{said}: {problem}" if problem else ""
