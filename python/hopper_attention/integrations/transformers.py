"""Hugging Face transformers: `register()`, then `from_pretrained(..., attn_implementation="hopper_attention")`.

Causal and bidirectional attention, sliding windows, softcap, sinks, padding on any side, packed sequences, every kind
of cache, and paged continuous batching. Masks of other shapes (chunks, images that see each other, user functions) are
refused, never ignored.

Two names are registered. NAME is for everything but continuous batching, which takes only implementations with "flash" in
their name; for those transformers loads functions by name from its hub, unless `register()` has told it ours. So
CONTINUOUS_BATCHING_NAME is the name to use there; its 3 lets transformers take its fast path for decoding.
"""

from __future__ import annotations

from typing import Any

import torch

import hopper_attention

NAME = "hopper_attention"
CONTINUOUS_BATCHING_NAME = "hopper_flash_attention_3"

_PLAIN_MASKS = ("causal_mask_function", "bidirectional_mask_function")
_WINDOWS = ("sliding_window_overlay", "sliding_window_bidirectional_overlay")
_PACKED = "packed_sequence_mask_function"
_POSITIONS = "remap_positions_for_packed_sequence"


def register() -> str:
    """Makes both names known to transformers, with the function that prepares their masks. Returns NAME.

    Without the mask function transformers would drop the padding mask, and batches padded on the left would be wrong
    without a word. Can be called more than once.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name in (NAME, CONTINUOUS_BATCHING_NAME):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, mask)
    _provide_functions()
    return NAME


def _provide_functions() -> None:
    """Has transformers find the functions of CONTINUOUS_BATCHING_NAME here instead of on its hub."""
    from transformers import modeling_flash_attention_utils as utils

    original = getattr(utils, "_lazy_imports", None)
    if original is None or getattr(original, "knows_hopper_attention", False):
        return

    def lazy_imports(implementation, *args, **kwargs):
        if implementation == CONTINUOUS_BATCHING_NAME:
            functions = (
                hopper_attention.flash_attn_func,
                hopper_attention.flash_attn_varlen_func,
                hopper_attention.flash_attn_with_kvcache,
            )
            return (*functions, utils._pad_input, utils._unpad_input)
        return original(implementation, *args, **kwargs)

    lazy_imports.knows_hopper_attention = True
    utils._lazy_imports = lazy_imports


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    cache: Any = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """The attention of one layer. query (B, Hq, Sq, D), key (B, Hk, Sk, D), value (B, Hk, Sk, Dv), any strides.

    attention_mask: what `mask` made. cache: the paged cache of continuous batching; new keys are then appended to it.
    Returns (out (B, Sq, Hq, Dv), None): no attention weights.

    Raises NotImplementedError for dropout and for masks that `mask` has not made.
    """
    if dropout:
        raise NotImplementedError(f"dropout: forward for inference only, found {dropout}; call model.eval()")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options = {"softmax_scale": scaling, "causal": causal, "softcap": softcap or 0.0, "s_aux": s_aux}
    if sliding_window is not None:  # counts the query's own position; symmetric where it is not causal
        options["window_size"] = (sliding_window - 1, sliding_window - 1)
    if cache is not None:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if kwargs.get("block_table") is not None:
        return _decode_from_pages(q, k, v, kwargs, options), None
    if kwargs.get("cu_seq_lens_q") is not None and kwargs.get("cu_seq_lens_k") is not None:
        starts = (kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"])
        return _packed(q, k, v, *starts, options, kwargs.get("max_length_q"), kwargs.get("max_length_k")), None
    if attention_mask is None:
        return hopper_attention.flash_attn_func(q, k, v, **options), None
    if attention_mask.dim() == 4:
        if attention_mask.dtype == torch.int32 and attention_mask.shape[0] == 1:
            starts = attention_mask.flatten()
            return _packed(q, k, v, starts, starts, options), None
        if attention_mask.dtype == torch.int32:
            first, end = attention_mask[:, :, 0, 0]
            ends = {"cache_seqlens": end, "cache_leftpad": first}
            return hopper_attention.flash_attn_with_kvcache(q, k, v, **ends, **options), None
        if attention_mask.dtype == torch.bool and attention_mask.shape[1:3] == (1, 1):
            return _without_padding(q, k, v, attention_mask[:, 0, 0], options), None
    raise NotImplementedError(
        f"attention_mask: a mask prepared for {NAME} is needed, found {attention_mask.dtype} of shape "
        f"{tuple(attention_mask.shape)}; masks of your own need attn_implementation 'sdpa' or 'eager'"
    )


def mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    device: Any = None,
    cache_position: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor | None:
    """What `attention` needs to know of the mask, made once for all layers of a step.

    None: every key counts. (2, B, 1, 1) int32: first key and end of keys of each sequence, the last query at the last
    of them. (1, n + 1, 1, 1) int32: where packed sequences start. (B, 1, 1, keys) bool: which keys count, for padding
    in other places. Four axes, because transformers takes a mask of four for one that is ready.

    q_length, kv_length, q_offset, kv_offset: queries and keys of this step and the positions of the first ones.
    attention_mask (B, tokens so far) bool or None. cache_position: how transformers before 5 gives the first two.
    Reads the device once, and once more for a static cache; not while torch traces, padding must be on the left then.

    Raises NotImplementedError for a mask_function other than causal, bidirectional, sliding window or packed.
    """
    if cache_position is not None:
        q_length, q_offset = cache_position.shape[0], cache_position[0]
    tracing = torch.compiler.is_compiling()
    parts = {} if tracing or mask_function is None else mask_parts(mask_function)
    if _PACKED in parts:
        return packed_starts(parts[_PACKED])
    bidirectional = "bidirectional_mask_function" in parts and "causal_mask_function" not in parts
    end = kv_length if bidirectional else q_offset + q_length - kv_offset
    if not tracing:
        end = min(int(end), kv_length)
    if attention_mask is None:
        if not tracing and end == kv_length:
            return None
        valid = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    else:
        valid = window_of(attention_mask.bool(), kv_length, kv_offset)
    valid = valid & (torch.arange(kv_length, device=valid.device) < end)
    first = valid.to(torch.int32).argmax(dim=1)
    if tracing:
        ends = torch.zeros_like(first) + end
        return torch.stack([first, ends]).to(torch.int32)[:, :, None, None]
    whole, without_holes = torch.stack([valid.all(), (valid.sum(dim=1) == end - first).all()]).tolist()
    if whole:
        return None
    if without_holes:
        return torch.stack([first, torch.full_like(first, end)]).to(torch.int32)[:, :, None, None]
    return valid[:, None, None, :end]


def window_of(attention_mask: torch.Tensor, kv_length: int, kv_offset: Any) -> torch.Tensor:
    """The columns [kv_offset, kv_offset + kv_length) of a mask; those it does not have are False."""
    if isinstance(kv_offset, torch.Tensor):
        columns = torch.arange(kv_length, device=attention_mask.device) + kv_offset.to(attention_mask.device)
        inside = columns < attention_mask.shape[1]
        return attention_mask[:, columns.clamp(max=attention_mask.shape[1] - 1)] & inside
    found = attention_mask[:, kv_offset : kv_offset + kv_length]
    return torch.nn.functional.pad(found, (0, kv_length - found.shape[1]))


def mask_parts(mask_function: Any) -> dict[str, Any]:
    """The functions that a transformers mask function is made of: {name: function}.

    Raises NotImplementedError for one that is not known here: ignoring it would give wrong results.
    """
    parts: dict[str, Any] = {}
    waiting = [mask_function]
    while waiting:
        function = waiting.pop()
        name = getattr(function, "__qualname__", str(function)).split(".")[0]
        held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        if name == "and_masks":
            waiting.extend(part for cell in held for part in (cell if isinstance(cell, (tuple, list)) else (cell,)))
        elif name == _POSITIONS:
            waiting.extend(part for part in held if callable(part))
        elif name in _PLAIN_MASKS or name in _WINDOWS or name == _PACKED:
            parts[name] = function
        else:
            raise NotImplementedError(
                f"mask_function: causal, bidirectional, sliding window and packed masks are available, found {name}; "
                "use attn_implementation 'sdpa' or 'eager' for this model"
            )
    return parts


def packed_starts(packed_mask_function: Any) -> torch.Tensor:
    """(1, n + 1, 1, 1) int32 from transformers' function that compares the sequence numbers, (B, T), of two tokens."""
    (numbers,) = (
        cell.cell_contents for cell in packed_mask_function.__closure__ if isinstance(cell.cell_contents, torch.Tensor)
    )
    new = torch.ones_like(numbers, dtype=torch.bool)
    new[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    starts = new.flatten().nonzero().squeeze(1).to(torch.int32)
    return torch.nn.functional.pad(starts, (0, 1), value=numbers.numel())[None, :, None, None]


def _packed(q, k, v, starts_q, starts_k, options, max_length_q=None, max_length_k=None) -> torch.Tensor:
    """q (B, Sq, Hq, D), k and v: all tokens of the batch one after the other are the sequences."""
    out = hopper_attention.flash_attn_varlen_func(
        *(x.reshape(-1, *x.shape[2:]) for x in (q, k, v)),
        starts_q.to(torch.int32),
        starts_k.to(torch.int32),
        max_length_q,
        max_length_k,
        **options,
    )
    return out.view(*q.shape[:2], *out.shape[1:])


def _decode_from_pages(q, k, v, kwargs: dict[str, Any], options: dict[str, Any]) -> torch.Tensor:
    """One new token for each sequence: appended to the pages of continuous batching, then attended to."""
    out_shape = (*q.shape[:2], q.shape[2], v.shape[3])
    q, k, v = (x.reshape(-1, 1, *x.shape[2:]) for x in (q, k, v))
    batch = q.shape[0]
    starts = kwargs["cu_seq_lens_k"].to(torch.int32)
    out = hopper_attention.flash_attn_with_kvcache(
        q,
        kwargs["k_cache"],
        kwargs["v_cache"],
        k,
        v,
        cache_seqlens=starts[1 : batch + 1] - starts[:batch] - 1,
        page_table=kwargs["block_table"],
        **options,
    )
    return out.view(out_shape)


def _without_padding(q, k, v, valid: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Padding anywhere. The tokens that count are moved together, so that positions are right again, and back after.

    valid (B, keys). Queries are the last keys if there is a diagonal. Copies q, k and v; does not synchronise. Rows of
    queries that are padding are 0.
    """
    batch, queries = q.shape[:2]
    keys = valid.shape[1]
    k, v = k[:, :keys], v[:, :keys]
    has_diagonal = options["causal"] or "window_size" in options
    valid_q = valid[:, keys - queries :] if has_diagonal else valid.new_ones(batch, queries)

    def together(x, order):
        return x.gather(1, order[:, :, None, None].expand(-1, -1, *x.shape[2:])).flatten(0, 1)

    order_q = (~valid_q).to(torch.int8).argsort(dim=1, stable=True)
    order_k = (~valid).to(torch.int8).argsort(dim=1, stable=True)
    row = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    out = hopper_attention.flash_attn_varlen_func(
        together(q, order_q),
        together(k, order_k),
        together(v, order_k),
        row * queries,
        row * keys,
        queries,
        keys,
        valid_q.sum(dim=1, dtype=torch.int32),
        valid.sum(dim=1, dtype=torch.int32),
        **options,
    ).view(batch, queries, q.shape[2], v.shape[3])
    back = order_q.argsort(dim=1)
    out = out.gather(1, back[:, :, None, None].expand_as(out))
    return out.masked_fill(~valid_q[:, :, None, None], 0)
