"""What can run, what would run and why: questions that need neither tensors nor, with a named device, a GPU."""

from __future__ import annotations

import sys
from typing import Any

from hopper_attention import _core, features
from hopper_attention.arguments import bound, dtype_name, flag, integer, number, size_of_pages, window

_DTYPES = features.DTYPES
_HEAD_DIMS = [
    *((d, d) for d in range(features.HEAD_DIM_STEP, features.MAX_HEAD_DIM + 1, features.HEAD_DIM_STEP)),
    (192, 128),
]
_NAME_FOR_PLANS = "H100"


def plan(
    *,
    dtype: Any,
    kv_dtype: Any = None,
    head_dim: int,
    head_dim_v: int | None = None,
    page_size: int | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    sinks: bool = False,
    device: Any = None,
    batch: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_q: int,
    heads_kv: int,
    num_splits: int = 0,
    attention_chunk: int | None = 0,
    batch_invariant: bool = False,
    lengths_on_device: bool = False,
    total_q: int | None = None,
    total_k: int | None = None,
    scheduler_metadata: bool = False,
    rotary: bool = False,
) -> _core.Plan:
    """The plan of a call: kernels, tiles, splits, grid, workspace, and the reason for each. print(plan) explains it.

    dtype: torch or numpy dtype, or its name. page_size: of a paged K and V, None for others. device: None, "cuda:1", a
    torch.device: that GPU; "H100", "H200" or a number of SMs: no GPU is needed. The kernel may be missing from this
    build, see `is_supported`.

    Without more, a dense call, or one whose sequences all have max_seqlen_*. lengths_on_device: tensors say how long
    each sequence is (cache_seqlens, seqused_*), and max_seqlen_* are bounds, those that the call is given or that its
    shapes allow. total_q: rows of a packed q (`flash_attn_varlen_func`, cu_seqlens_q), whose lengths are on the device,
    too; total_k: of its k without pages; lengths need no schedule where both have as many rows as the bounds allow.
    scheduler_metadata: whether the call is given some that it uses (see `get_scheduler_metadata`). rotary: new keys and
    queries are rotated; workspace_bytes then have room for the rotated q, which is allocated in a workspace without. The
    plan follows from these alone, never from lengths.

    Raises ValueError or TypeError for values that no call takes, NotImplementedError if there is no kernel for them,
    RuntimeError if `device` is a GPU that cannot be asked.
    """
    name = dtype_name(dtype)
    rows = None if total_q is None else bound("total_q", total_q)
    queries = integer("max_seqlen_q", max_seqlen_q)
    if name not in _DTYPES:
        raise NotImplementedError(f"dtype: {name} is not available; available: {', '.join(_DTYPES)}")
    if kv_dtype is not None and dtype_name(kv_dtype) != name:
        raise NotImplementedError(f"kv_dtype: must be dtype, {name}, found {dtype_name(kv_dtype)}")
    left, right = window(window_size)
    dim = integer("head_dim", head_dim)
    return _core.plan(
        device_info(device),
        dtype=name,
        batch=integer("batch", batch),
        seqlen_q=queries if rows is None else min(queries, rows),
        seqlen_k=integer("max_seqlen_k", max_seqlen_k),
        heads_q=integer("heads_q", heads_q),
        heads_k=integer("heads_kv", heads_kv),
        head_dim=dim,
        head_dim_v=dim if head_dim_v is None else integer("head_dim_v", head_dim_v),
        has_sinks=flag("sinks", sinks),
        causal=flag("causal", causal),
        window_left=left,
        window_right=right,
        attention_chunk=0 if attention_chunk is None else integer("attention_chunk", attention_chunk),
        softcap=number("softcap", softcap),
        num_splits=integer("num_splits", num_splits),
        batch_invariant=flag("batch_invariant", batch_invariant),
        page_size=size_of_pages(page_size),
        ragged=flag("lengths_on_device", lengths_on_device),
        total_q=rows,
        total_k=None if total_k is None else bound("total_k", total_k),
        has_metadata=flag("scheduler_metadata", scheduler_metadata),
        rotary=flag("rotary", rotary),
    )


def is_supported(
    *,
    dtype: Any,
    kv_dtype: Any = None,
    head_dim: int,
    head_dim_v: int | None = None,
    page_size: int | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    sinks: bool = False,
    device: Any = None,
    attention_chunk: int | None = 0,
    packed_q: bool = False,
    packed_k: bool = False,
    append: bool = False,
    rotary: bool = False,
    num_splits: int = 0,
    heads_q: int = 1,
    heads_kv: int = 1,
    cp_world_size: int = 1,
    batch_invariant: bool = False,
    scheduler_metadata: bool = False,
) -> tuple[bool, str]:
    """Whether a GPU call with these arguments would run, and why not: (True, "") or (False, reason). Never raises for
    values.

    device as in `plan`; with None the GPU of this machine must be able to run the kernels. The kernel must be in this
    build. packed_q, packed_k: with cu_seqlens_q, cu_seqlens_k. append: k and v are new keys; rotary: and rotated.
    scheduler_metadata: is given. What goes together: hopper_attention.features.
    """
    try:
        if integer("cp_world_size", cp_world_size) < 1:
            raise ValueError(f"cp_world_size: must be at least 1, found {cp_world_size}")
        reason = features.why_not(
            features.chosen_by(
                causal=flag("causal", causal),
                window=window(window_size),
                attention_chunk=0 if attention_chunk is None else integer("attention_chunk", attention_chunk),
                softcap=number("softcap", softcap),
                sinks=flag("sinks", sinks),
                packed_q=flag("packed_q", packed_q),
                packed_k=flag("packed_k", packed_k),
                page_size=size_of_pages(page_size),
                append=flag("append", append),
                rotary=flag("rotary", rotary),
                cp_world_size=cp_world_size,
                batch_invariant=flag("batch_invariant", batch_invariant),
                metadata=flag("scheduler_metadata", scheduler_metadata),
            )
        )
        if reason:
            return False, reason
        ordinal = device_ordinal(device)
        if ordinal is not None:
            _core.require_supported_device(ordinal)
        found = plan(
            dtype=dtype,
            kv_dtype=kv_dtype,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            page_size=page_size,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            sinks=sinks,
            device=device,
            batch=1,
            max_seqlen_q=1024,
            max_seqlen_k=1024,
            heads_q=heads_q,
            heads_kv=heads_kv,
            num_splits=num_splits,
            attention_chunk=attention_chunk,
            batch_invariant=batch_invariant,
        )
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        return False, str(error)
    return (True, "") if is_built(found) else (False, missing_kernel(found))


def support_matrix() -> list[dict[str, Any]]:
    """The head dims that have kernels. A dict for each (dtype, mask class, tile): dtype, masked, head_dims, head_dims_v,
    tile, built.

    head_dims are those for which this tile is chosen at 1,024 queries and keys of a dense call, each with the
    head_dims_v at the same place: equal ones, and (192, 128); other lengths and layouts may get another tile of the
    same head dims. Smaller dims of v run, too. Layout, lengths, pages, batch, head ratio, causal, window, chunk, softcap
    and sinks are free for each. Needs no GPU.
    """
    rows: list[dict[str, Any]] = []
    for dtype in _DTYPES:
        for masked in (False, True):
            for dim, dim_v in _HEAD_DIMS:
                try:
                    found = plan(
                        dtype=dtype,
                        head_dim=dim,
                        head_dim_v=dim_v,
                        causal=masked,
                        device=_NAME_FOR_PLANS,
                        batch=1,
                        max_seqlen_q=1024,
                        max_seqlen_k=1024,
                        heads_q=1,
                        heads_kv=1,
                    )
                except NotImplementedError:
                    continue
                row = {"dtype": dtype, "masked": masked, "tile": found.tile}
                if not rows or any(rows[-1][key] != value for key, value in row.items()):
                    rows.append({**row, "head_dims": [], "head_dims_v": [], "built": is_built(found)})
                rows[-1]["head_dims"].append(dim)
                rows[-1]["head_dims_v"].append(dim_v)
    return rows


def built_kernels() -> list[_core.KernelInfo]:
    """The kernels that this build contains: family, dtype, tile. Empty in a host-only build. Needs no GPU."""
    return _core.built_kernels()


def warmup(device: Any = None) -> None:
    """Loads every kernel on a GPU (None: the current one), so that no first call pays for it. Raises RuntimeError as a
    call would.

    device: None, "cuda:1", a torch.device.
    """
    ordinal = device_ordinal(device)
    if ordinal is None:
        raise ValueError(f'device: a CUDA device is needed, "cuda:0" or a torch.device, found {device!r}')
    _core.require_supported_device(ordinal)
    _core.warmup(ordinal)


def is_built(found: _core.Plan) -> bool:
    """Whether this build contains the kernel of a plan."""
    kernels = _core.built_kernels()
    return any((k.family, k.dtype, k.tile) == (found.kernel, found.dtype, found.tile) for k in kernels)


def missing_kernel(found: _core.Plan) -> str:
    """Why the kernel of a plan cannot run, and how to get it."""
    built = sorted({(k.dtype, k.tile.head_dim) for k in _core.built_kernels()})
    have = ", ".join(f"{dtype} {head_dim}" for dtype, head_dim in built) or "none"
    return (
        f"the {found.kernel} kernel for {found.dtype}, head dim {found.tile.head_dim} is not in this build "
        f"(built: {have}); reinstall with HOPPER_ATTENTION_HEAD_DIMS and HOPPER_ATTENTION_DTYPES unset or including "
        "it, and without HOPPER_ATTENTION_HOST_ONLY"
    )


def device_ordinal(device: Any) -> int | None:
    """The CUDA ordinal that `device` means; None if it means a card by name, SM count or facts."""
    torch = sys.modules.get("torch")
    if device is None:
        return torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else 0
    if torch is not None and isinstance(device, torch.device):
        device = str(device)
    if isinstance(device, str) and device.startswith("cuda"):
        index = device.removeprefix("cuda").removeprefix(":")
        if not index:
            return device_ordinal(None)
        if index.isdecimal():
            return int(index)
    return None


def device_info(device: Any) -> _core.DeviceInfo:
    """The facts of a GPU of this machine or of a named card; see `plan`."""
    if isinstance(device, _core.DeviceInfo):
        return device
    ordinal = device_ordinal(device)
    if ordinal is not None:
        try:
            return _core.device_info(ordinal)
        except RuntimeError as error:
            raise RuntimeError(f'{error}; pass device="H100" to plan without a GPU') from None
    torch = sys.modules.get("torch")
    if isinstance(device, str) or (torch is not None and isinstance(device, torch.device)):
        return _core.device_info(str(device))
    sms = integer("device", device)
    if sms < 1:
        raise ValueError(f"device: the number of SMs must be at least 1, found {sms}")
    return _core.DeviceInfo(f"card with {sms} SMs", sms)
