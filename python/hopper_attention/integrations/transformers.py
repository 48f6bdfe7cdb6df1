"""Hugging Face transformers: `register()`, then `from_pretrained(..., attn_implementation="hopper_attention")`.

Causal and bidirectional attention, sliding windows, softcap, sinks, padding on any side, packed sequences, every kind
of cache, and paged continuous batching. Masks of other shapes (chunks, images that see each other, user functions),
position biases and selected keys are refused, never ignored; so are models that compute with the mask themselves.

Two names are registered. NAME is for everything but continuous batching, which takes only implementations with "flash" in
their name; for those transformers loads functions by name from its hub, unless `register()` has told it ours. So
CONTINUOUS_BATCHING_NAME is the name to use there; its 3 lets transformers take its fast path for decoding.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

import hopper_attention

NAME = "hopper_attention"
CONTINUOUS_BATCHING_NAME = "hopper_flash_attention_3"

_PLAIN_MASKS = ("causal_mask_function", "bidirectional_mask_function")
_WINDOWS = ("sliding_window_overlay", "sliding_window_bidirectional_overlay")
_PACKED = "packed_sequence_mask_function"
_POSITIONS = "remap_positions_for_packed_sequence"
# What models hand to their attention function that changes the result and is not available here.
_REFUSED = ("position_bias", "attention_bias", "alibi", "indices", "block_indices", "sinks", "head_mask")

_MOVING = tuple(getattr(torch.Tensor, name) for name in ("to", "cpu", "cuda", "clone", "contiguous", "detach"))
_LOOKING = frozenset(
    [
        "__repr__",
        "__format__",
        "__len__",
        "dim",
        "size",
        "stride",
        "numel",
        "element_size",
        "storage_offset",
        "untyped_storage",
        "data_ptr",
        "get_device",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_conj",
        "is_neg",
        "is_inference",
        "_is_view",
    ]
)
# What compiled code and CUDA graphs do with their inputs; a model calls no operator by its overload.
_COMPILED = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_COPYING = (torch._foreach_copy_, torch.as_strided)
_BASE = torch.Tensor._base.__get__
_USED = (
    f"attention_mask: this model computes with the mask itself ({{}}), but {NAME} prepares none that has a value for each "
    "query and key; use attn_implementation 'sdpa' or 'eager' for this model"
)


class Mask(torch.Tensor):
    """What `mask` makes. It says where keys begin and end, and is no mask to anyone but `attention`: it can be looked at,
    moved to another device and be an input of compiled code; every other operation of Python, such as adding it to
    scores, raises NotImplementedError.
    """

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if isinstance(function, _COMPILED) or function in _COPYING:
            with torch.utils._python_dispatch._disable_current_modes():  # which may not know this type
                args, kwargs = tree_map_only(Mask, Mask.plain, (args, kwargs or {}))
            return function(*args, **kwargs)
        name = getattr(function, "__name__", str(function))
        if function not in _MOVING and name != "__get__" and name not in _LOOKING:
            raise NotImplementedError(_USED.format(name))
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        if not isinstance(result, torch.Tensor) or function == _BASE:
            return result
        if function not in _MOVING or result.dtype != args[0].dtype:
            raise NotImplementedError(_USED.format(name))
        return result.as_subclass(Mask)

    def plain(self) -> torch.Tensor:
        """Its numbers, for `attention`."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach()


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
    _accept_name()
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


def _accept_name() -> None:
    """Lets models have CONTINUOUS_BATCHING_NAME that list the flash implementations they accept, because they need sinks,
    and replace any other by a download.
    """
    import transformers
    from transformers import PreTrainedModel
    from transformers import modeling_flash_attention_utils as utils

    original = getattr(PreTrainedModel, "_check_and_adjust_attn_implementation", None)
    if original is None or getattr(original, "knows_hopper_attention", False):
        return

    @wraps(original)
    def check(self, attn_implementation, *args, **kwargs):
        if attn_implementation == f"paged|{CONTINUOUS_BATCHING_NAME}":  # how older versions ask for it
            raise NotImplementedError(
                f"continuous batching: transformers 5.23 or newer is needed, found {transformers.__version__}"
            )
        if attn_implementation != CONTINUOUS_BATCHING_NAME:
            return original(self, attn_implementation, *args, **kwargs)
        utils.lazy_import_flash_attention(CONTINUOUS_BATCHING_NAME)  # as the original: before a model is compiled
        return attn_implementation

    check.knows_hopper_attention = True
    PreTrainedModel._check_and_adjust_attn_implementation = check


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

    attention_mask: what `mask` made, or (B, 1, 1, keys) bool, which keys count, where all queries see the same ones; of a
    single query in a window the last key is its own.
    cache: the paged cache of continuous batching; new keys are then appended to it.
    Returns (out (B, Sq, Hq, Dv), None): no attention weights.

    Raises NotImplementedError for dropout, position biases, selected keys and masks that `mask` has not made.
    """
    if dropout:
        raise NotImplementedError(f"dropout: forward for inference only, found {dropout}; call model.eval()")
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{name}: not available in {NAME}; use attn_implementation 'sdpa' or 'eager' for this model"
            )
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
    if isinstance(attention_mask, Mask):
        return _masked(q, k, v, attention_mask.plain(), options), None
    one_query, windowed = q.shape[1] == 1, "window_size" in options
    if attention_mask.dtype == torch.bool and attention_mask.dim() == 4 and attention_mask.shape[1:3] == (1, 1):
        if one_query and not windowed:  # it sees all keys that count, wherever its own is
            options["causal"] = False
        if one_query or not (causal or windowed) or is_exporting():
            return _masked(q, k, v, attention_mask, options), None
    elif attention_mask.dtype == torch.int32 and attention_mask.dim() == 4:
        of_one_query = one_query and attention_mask.shape == (2, q.shape[0], 1, 1)
        if of_one_query or is_exporting():
            return _masked(q, k, v, attention_mask, options), None
    raise NotImplementedError(
        f"attention_mask: a mask prepared for {NAME} is needed, found {attention_mask.dtype} of shape "
        f"{tuple(attention_mask.shape)}; masks of your own need attn_implementation 'sdpa' or 'eager'"
    )


def is_exporting() -> bool:
    """Whether torch.export traces without Dynamo, whose tensors cannot be a Mask."""
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


def _masked(q, k, v, made: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """With what `mask` made."""
    if made.dtype == torch.bool:
        return _without_padding(q, k, v, made[:, 0, 0], options)
    if made.shape[0] == 0:
        return hopper_attention.flash_attn_func(q, k, v, **options)
    if made.shape[0] == 1:
        starts = made.flatten()
        return _packed(q, k, v, starts, starts, options)
    first, end = made[:, :, 0, 0]
    return hopper_attention.flash_attn_with_kvcache(q, k, v, cache_seqlens=end, cache_leftpad=first, **options)


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
    """What `attention` needs to know of the mask, made once for all layers of a step: a Mask, or None.

    None: every query sees every key. (0, 1, 1, 1) int32: every key counts. (2, B, 1, 1) int32: first key and end of keys
    of each sequence, the last query at the last of them. (1, n + 1, 1, 1) int32: where packed sequences start. (B, 1, 1,
    keys) bool: which keys count, for padding in other places. Four axes, because transformers takes a mask of four for
    one that is ready.

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
        return packed_starts(parts[_PACKED]).as_subclass(Mask)
    bidirectional = "bidirectional_mask_function" in parts and "causal_mask_function" not in parts

    # The decoding step that transformers compiles gets the mask from outside, as a plain tensor: copies of inputs and
    # graphs know no other. A model that computes with the mask itself has raised in the step before.
    compiled = q_length == 1 and not (tracing or bidirectional or kwargs.get("allow_is_causal_skip", True))

    def made(x: torch.Tensor) -> torch.Tensor:
        return x if compiled or is_exporting() else x.as_subclass(Mask)

    def whole() -> torch.Tensor | None:  # to a model that computes with the mask itself, None is no mask
        if compiled or set(parts) == {"bidirectional_mask_function"}:
            return None
        return made(torch.empty(0, 1, 1, 1, dtype=torch.int32, device=device))

    end = kv_length if bidirectional else q_offset + q_length - kv_offset
    if not tracing:
        end = min(int(end), kv_length)
    if attention_mask is None:
        if not tracing and end == kv_length:
            return whole()
        valid = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    else:
        valid = window_of(attention_mask.bool(), kv_length, kv_offset)
    valid = valid & (torch.arange(kv_length, device=valid.device) < end)
    first = valid.to(torch.int32).argmax(dim=1)
    if tracing:
        return made(torch.stack([first, torch.zeros_like(first) + end]).to(torch.int32)[:, :, None, None])
    all_count, without_holes = torch.stack([valid.all(), (valid.sum(dim=1) == end - first).all()]).tolist()
    if all_count:
        return whole()
    if without_holes:
        return made(torch.stack([first, torch.full_like(first, end)]).to(torch.int32)[:, :, None, None])
    return made(valid[:, None, None, :end])


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
