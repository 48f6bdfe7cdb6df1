"""Attention over a K/V cache on the GPU, after appending to it: two launches of `_core`."""

from __future__ import annotations

import sys
from typing import Any

from hopper_attention import _core, gpu
from hopper_attention.arguments import check_torch_inputs, flag, is_torch, lengths, naming_dtype, on_cuda, window

# What flash_attn_with_kvcache calls the arguments of attention.
_NAMES = {"k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens"}
_WORKSPACE = 16  # its place in what `gpu.arguments` returns
_ROTATED_ALIGNMENT = 256  # of a rotated q, from the start of the workspace; as in the bindings


def attend(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    new: tuple,
    cache_seqlens: Any,
    cache_batch_idx: Any,
    cache_leftpad: Any,
    page_table: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: Any,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    attention_chunk: int | None,
    softcap: float,
    scheduler_metadata: Any,
    num_splits: int,
    sm_margin: int,
    return_lse: bool,
    s_aux: Any,
    out: Any,
    softmax_lse: Any,
    cp_world_size: int,
    cp_rank: int,
    cp_tot_seqused_k: Any,
    batch_invariant: bool,
    workspace: Any,
) -> Any:
    """Arguments, results and errors as in `flash_attn_with_kvcache`. new: k, v, rotary_cos, rotary_sin,
    cu_seqlens_k_new, rotary_seqlens, rotary_interleaved (in one tuple, because of what `gpu.arguments` says).
    """
    k, v, rotary_cos, rotary_sin, cu_seqlens_k_new, rotary_seqlens, rotary_interleaved = new
    seqused_k, seqused_k_all = lengths("cache_seqlens", cache_seqlens)
    seqlen_k_new = 0
    appends = k is not None or v is not None
    if not appends:
        cu_seqlens_k_new = None
        if rotary_cos is not None or rotary_sin is not None:
            name = "rotary_cos" if rotary_cos is not None else "rotary_sin"
            raise ValueError(f"{name}: rotary embedding needs k and v, which were not given")
    else:
        check_new_keys(k, v, cache_seqlens)
        if cu_seqlens_k_new is None:
            seqlen_k_new = new_keys(k)
    try:
        args = gpu.arguments(
            q,
            k_cache,
            v_cache,
            softmax_scale,
            causal,
            window_size,
            attention_chunk,
            softcap,
            num_splits,
            sm_margin,
            return_lse,
            s_aux,
            out,
            softmax_lse,
            batch_invariant,
            workspace,
            cu_seqlens_q,
            seqused_k,
            page_table,
            max_seqlen_q,
            cp_world_size,
            cp_rank,
            cp_tot_seqused_k,
            scheduler_metadata,
            None,  # cu_seqlens_k
            None,  # seqused_q
            None,  # max_seqlen_k
            (seqused_k_all, cache_batch_idx, cache_leftpad, cu_seqlens_k_new, seqlen_k_new),
        )
        if not appends:
            return gpu.forward(args, return_lse)
        gpu.check(args)  # before anything is written
    except (ValueError, TypeError, NotImplementedError) as error:
        raise renamed(error) from None
    rotated = None
    if workspace is not None and (rotary_cos is not None or rotary_sin is not None):
        args, rotated = with_room(args)
    rotated = append(
        args[0],
        k,
        v,
        args[1],
        args[2],
        rotated=rotated,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        seqused_k=seqused_k,
        seqused_k_all=seqused_k_all,
        cache_batch_idx=cache_batch_idx,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        rotary_seqlens=rotary_seqlens,
        rotary_interleaved=flag("rotary_interleaved", rotary_interleaved),
        per_position=args[7] or attention_chunk not in (None, 0) or window(window_size) != (-1, -1),
    )
    return gpu.forward((rotated, *args[1:]), return_lse)


def with_room(args: tuple) -> tuple[tuple, Any]:
    """The arguments of attention, which passed its checks, with a workspace that ends before room for a rotated q, and a
    tensor there; as they are, and None, if the workspace is too small for both.
    """
    q, workspace = args[0], args[_WORKSPACE]
    if not is_torch(q) or not is_torch(workspace):
        return args, None
    size = q.numel() * q.element_size()
    before = (workspace.numel() - size) // _ROTATED_ALIGNMENT * _ROTATED_ALIGNMENT
    if before < 0:
        return args, None
    shorter = (*args[:_WORKSPACE], workspace[:before], *args[_WORKSPACE + 1 :])
    try:
        _core.check(*shorter)
    except ValueError:
        return args, None
    return shorter, workspace[before : before + size].view(q.dtype).view(q.shape)


def append(
    q: Any,
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    rotated: Any,
    rotary_cos: Any,
    rotary_sin: Any,
    seqused_k: Any,
    seqused_k_all: int,
    cache_batch_idx: Any,
    page_table: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k_new: Any,
    rotary_seqlens: Any,
    rotary_interleaved: bool,
    per_position: bool,
) -> Any:
    """Writes k and v to the cache, rotated if rotary_cos and rotary_sin are given -> q, or a rotated copy of it, which
    goes to `rotated` if that is given.
    """
    rotates = rotary_cos is not None or rotary_sin is not None
    if "torch" in sys.modules:
        check_torch_inputs(k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
        if not gpu.stream_comes_with_tensors():
            k, v, rotary_cos, rotary_sin = gpu.detached(k, v, rotary_cos, rotary_sin)
    if rotates and rotated is None:
        if not is_torch(q):
            raise TypeError("q: must be a torch tensor with rotary embedding, which allocates the rotated q")
        rotated = gpu.empty_output(q, q)
    try:
        _core.append(
            k,
            v,
            k_cache,
            v_cache,
            seqused_k=seqused_k,
            seqused_k_all=seqused_k_all,
            cu_seqlens_k_new=cu_seqlens_k_new,
            page_table=page_table,
            cache_batch_idx=cache_batch_idx,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            q=q,
            q_rotated=rotated,
            cu_seqlens_q=cu_seqlens_q,
            rotary_seqlens=rotary_seqlens if rotates else None,
            rotary_interleaved=rotary_interleaved,
            rotate_q_per_position=per_position,
            stream=gpu.current_stream(q),
        )
    except TypeError as error:
        tables = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "rotary_seqlens": rotary_seqlens}
        raise naming_dtype(error, {"k": k, "v": v, "cu_seqlens_k_new": cu_seqlens_k_new, **tables}) from None
    return rotated if rotates else q


def check_new_keys(k: Any, v: Any, cache_seqlens: Any) -> None:
    """What must come together."""
    for name, x, other in (("k", k, "v"), ("v", v, "k")):
        if x is None:
            raise ValueError(f"{name}: is needed with {other}, the new keys and values")
        on_cuda(name, x)  # raises for what is no tensor
    if cache_seqlens is None:
        raise ValueError("cache_seqlens: is needed with k and v, which are appended behind so many keys")


def new_keys(k: Any) -> int:
    """How many keys every sequence gets."""
    if len(k.shape) != 4:
        raise ValueError(
            f"k: must have shape (batch, new keys, heads_k, head_dim) without cu_seqlens_k_new, found {tuple(k.shape)}"
        )
    return int(k.shape[1])


def renamed(error: Exception) -> Exception:
    """The error of an attention call with the argument's name as it is here."""
    name, colon, rest = str(error).partition(":")
    return type(error)(_NAMES.get(name, name) + colon + rest)
