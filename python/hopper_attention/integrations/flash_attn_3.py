"""FlashAttention-3's own names, running this library: `install()` before the first import of what uses them.

    from hopper_attention.integrations import flash_attn_3
    flash_attn_3.install()
    torch.nn.attention.activate_flash_attention_impl("FA3")   # scaled_dot_product_attention and varlen_attn run on us

Modules flash_attn_interface, flash_attn_3, flash_attn_3._C and flash_attn_3.flash_attn_interface, a distribution
flash-attn-3, and the operators torch.ops.flash_attn_3.fwd, bwd, fwd_combine and get_scheduler_metadata with their
schemas. Forward only: bwd raises. Names, arguments and results are those of hopper/flash_attn_interface.py in
https://github.com/Dao-AILab/flash-attention.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch

import hopper_attention
from hopper_attention.torch_ops import fake

VERSION = "3.0.0"
MODULES = ("flash_attn_interface", "flash_attn_3", "flash_attn_3._C", "flash_attn_3.flash_attn_interface")

_TENSORS_OF_LENGTHS = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
)
_MASK = "bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
SCHEMAS = {
    "fwd": (
        "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
        f"Tensor(out!)? out=None, {_TENSORS_OF_LENGTHS}Tensor? seqused_k=None, int? max_seqlen_q=None, "
        "int? max_seqlen_k=None, Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, "
        "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, "
        f"Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None, {_MASK}int attention_chunk=0, "
        "float softcap=0., bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, "
        "bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
    ),
    "bwd": (
        "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
        "Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
        "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
        f"float? softmax_scale=None, {_MASK}float softcap=0., bool deterministic=False, int sm_margin=0) -> "
        "(Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "fwd_combine": (
        "fwd_combine(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, ScalarType? out_dtype=None) -> "
        "(Tensor(out!), Tensor)"
    ),
    "get_scheduler_metadata": (
        "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
        f"int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, {_TENSORS_OF_LENGTHS}"
        "Tensor? leftpad_k=None, int? page_size=None, int max_seqlen_k_new=0, "
        f"{_MASK}int attention_chunk=0, bool has_softcap=False, int num_splits=0, bool? pack_gqa=None, int sm_margin=0)"
        " -> Tensor"
    ),
}


def install() -> None:
    """Makes the modules, the distribution and the operators. A second call changes nothing.

    Raises RuntimeError if a real FlashAttention-3 is installed or loaded: the two cannot share names.
    """
    if _FINDER in sys.meta_path:
        return
    for name in MODULES[:2]:
        if name in sys.modules or importlib.util.find_spec(name) is not None:
            raise RuntimeError(f"{name} is installed: uninstall flash-attn-3 to run its callers on hopper-attention")
    if not _LIBRARIES:
        if torch._C._dispatch_has_kernel("flash_attn_3::fwd") or hasattr(torch.ops.flash_attn_3, "fwd"):
            raise RuntimeError("torch.ops.flash_attn_3.fwd is loaded already, by another library")
        _LIBRARIES.append(_define_operators())
    sys.meta_path.append(_FINDER)
    importlib.invalidate_caches()
    for name in MODULES:
        importlib.import_module(name)


def uninstall() -> None:
    """Takes the modules and the distribution away; what was imported from them, and the operators, stay."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
        for name in MODULES:
            sys.modules.pop(name, None)


def _flash_attn_forward(
    q,
    k,
    v,
    k_new=None,
    v_new=None,
    qv=None,
    out_=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    cu_seqlens_k_new=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    page_table=None,
    kv_batch_idx=None,
    leftpad_k=None,
    rotary_cos=None,
    rotary_sin=None,
    seqlens_rotary=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size_left=-1,
    window_size_right=-1,
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=1,
    pack_gqa=None,
    sm_margin=0,
):
    """Every attention call of FlashAttention-3, in one function. Returns (out, softmax_lse, empty, empty): where FA3
    hands out the parts of a split, there is nothing.

    The public function is chosen by what is given: `flash_attn_with_kvcache` for new keys, left padding, a batch index,
    lengths of dense keys or packed queries on dense keys, `flash_attn_varlen_func` for other packed queries, else `flash_attn_func`; each says what it
    raises. Tensors whose last stride is not 1 are copied, as FA3 does.
    """
    q, k, v, k_new, v_new, qv = (
        x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, k_new, v_new, qv)
    )
    options = {
        "qv": qv,
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": (window_size_left, window_size_right),
        "attention_chunk": attention_chunk,
        "softcap": softcap,
        "num_splits": num_splits,
        "pack_gqa": pack_gqa,
        "sm_margin": sm_margin,
        "out": out_,
    }
    dense_q = cu_seqlens_q is None
    of_a_cache = (k_new, v_new, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary)
    dense_k = k.dim() == 4 and page_table is None
    if any(x is not None for x in of_a_cache) or (
        dense_k if not dense_q else page_table is not None or seqused_k is not None
    ):
        if seqused_q is not None or cu_seqlens_k is not None:
            raise NotImplementedError("seqused_q and cu_seqlens_k: not available with a cache or with dense queries")
        result = hopper_attention.flash_attn_with_kvcache(
            q,
            k,
            v,
            k_new,
            v_new,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            cache_seqlens=seqused_k,
            cache_batch_idx=kv_batch_idx,
            cache_leftpad=leftpad_k,
            page_table=page_table,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k_new=cu_seqlens_k_new,
            max_seqlen_q=max_seqlen_q,
            rotary_seqlens=seqlens_rotary,
            rotary_interleaved=rotary_interleaved,
            scheduler_metadata=scheduler_metadata,
            return_softmax_lse=True,
            **options,
        )
    elif not dense_q:
        result = hopper_attention.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            seqused_q,
            seqused_k,
            page_table=page_table,
            scheduler_metadata=scheduler_metadata,
            return_attn_probs=True,
            **options,
        )
    else:
        if seqused_q is not None or cu_seqlens_k is not None:
            raise NotImplementedError("seqused_q and cu_seqlens_k: not available with dense queries; pass cu_seqlens_q")
        result = hopper_attention.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    out, lse = result
    nothing = fake.no_lse(lse)
    return out, lse, nothing, nothing.clone()


def _flash_attn_backward(*args, **kwargs):
    """Raises NotImplementedError."""
    raise NotImplementedError("flash_attn_3 backward: hopper-attention is forward only; train with the real package")


def flash_attn_qkvpacked_func(
    qkv,
    softmax_scale=None,
    causal=False,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    deterministic=False,
    num_heads_q=None,
    sm_margin=0,
    return_attn_probs=False,
):
    """`flash_attn_func` of one tensor: (B, S, 3, H, D), or (B, S, Hq + 2 Hk, D) with num_heads_q."""
    if qkv.dim() == 5:
        q, k, v = qkv.unbind(2)
    elif qkv.dim() == 4 and num_heads_q is not None:
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, heads_k, heads_k], dim=2)
    else:
        raise ValueError(f"qkv: 5 dims, or 4 with num_heads_q, are needed, found {qkv.dim()} dims")
    return hopper_attention.flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        None,
        q_descale,
        k_descale,
        v_descale,
        window_size,
        attention_chunk,
        softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_with_kvcache(*args, **kwargs):
    """`hopper_attention.flash_attn_with_kvcache`; with return_softmax_lse four results, the last two empty, as FA3."""
    result = hopper_attention.flash_attn_with_kvcache(*args, **kwargs)
    if not isinstance(result, tuple):
        return result
    nothing = fake.no_lse(result[1])
    return (*result, nothing, nothing.clone())


flash_attn_with_kvcache.__wrapped__ = hopper_attention.flash_attn_with_kvcache  # callers read the signature

_INTERFACE = {
    "_flash_attn_backward": _flash_attn_backward,
    "_flash_attn_forward": _flash_attn_forward,
    "flash_attn_combine": hopper_attention.flash_attn_combine,
    "flash_attn_func": hopper_attention.flash_attn_func,
    "flash_attn_qkvpacked_func": flash_attn_qkvpacked_func,
    "flash_attn_varlen_func": hopper_attention.flash_attn_varlen_func,
    "flash_attn_with_kvcache": flash_attn_with_kvcache,
    "get_scheduler_metadata": hopper_attention.get_scheduler_metadata,
}


def _define_operators() -> torch.library.Library:
    """torch.ops.flash_attn_3.*. Kernels and fake kernels are the same Python: the public functions take fake tensors."""
    library = torch.library.Library("flash_attn_3", "DEF")
    kernels = {
        "fwd": _forward,
        "bwd": _flash_attn_backward,
        "fwd_combine": hopper_attention.flash_attn_combine,
        "get_scheduler_metadata": _scheduler_metadata,
    }
    for name, kernel in kernels.items():
        library.define(SCHEMAS[name])
        for device in ("CPU", "CUDA"):
            library.impl(name, kernel, device)
        torch.library.register_fake(f"flash_attn_3::{name}", kernel, lib=library)
    return library


def _forward(*args):
    """Operators differ from `_flash_attn_forward` in two defaults, and leave trailing ones out."""
    defaults = {"rotary_interleaved": False, "num_splits": 0}
    later = _flash_attn_forward.__code__.co_varnames[len(args) : _flash_attn_forward.__code__.co_argcount]
    return _flash_attn_forward(*args, **{name: value for name, value in defaults.items() if name in later})


def _scheduler_metadata(
    batch_size,
    max_seqlen_q,
    max_seqlen_k,
    num_heads,
    num_heads_k,
    headdim,
    headdim_v,
    qkv_dtype,
    seqused_k,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    cu_seqlens_k_new=None,
    seqused_q=None,
    leftpad_k=None,
    page_size=None,
    max_seqlen_k_new=0,
    is_causal=False,
    window_size_left=-1,
    window_size_right=-1,
    attention_chunk=0,
    has_softcap=False,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
):
    if seqused_q is not None:
        raise NotImplementedError("seqused_q: not available in get_scheduler_metadata; leave the metadata out")
    return hopper_attention.get_scheduler_metadata(
        batch_size,
        max_seqlen_q,
        max_seqlen_k,
        num_heads,
        num_heads_k,
        headdim,
        seqused_k,
        qkv_dtype,
        headdim_v,
        cu_seqlens_q,
        cu_seqlens_k_new,
        leftpad_k,
        page_size,
        max_seqlen_k_new,
        is_causal,
        (window_size_left, window_size_right),
        attention_chunk,
        has_softcap,
        num_splits,
        pack_gqa,
        sm_margin,
    )


class _Distribution(importlib.metadata.Distribution):
    """What packages look at to learn whether FlashAttention-3 is there."""

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            return f"Metadata-Version: 2.1\nName: flash-attn-3\nVersion: {VERSION}\n"
        return "flash_attn_3\nflash_attn_interface\n" if filename == "top_level.txt" else None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: flash-attn-3 is made by hopper-attention and has no files")


class _Finder(importlib.metadata.DistributionFinder, importlib.abc.Loader):
    """Finds and fills the modules, and the distribution."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in MODULES:
            return None
        return importlib.machinery.ModuleSpec(name, self, origin=__file__, is_package=name == "flash_attn_3")

    def exec_module(self, module: ModuleType) -> None:
        module.__version__ = VERSION
        if module.__name__.endswith("flash_attn_interface"):
            vars(module).update(_INTERFACE)

    def find_distributions(self, context: Any = None):
        name = getattr(context, "name", None)
        if name is None or name.lower().replace("_", "-") == "flash-attn-3":
            yield _Distribution()


_FINDER = _Finder()
_LIBRARIES: list[torch.library.Library] = []  # kept: operators go with their library
