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

import hopper_attention
from hopper_attention.integrations.transformers_masks import NAME, Mask, is_exporting, mask

CONTINUOUS_BATCHING_NAME = "hopper_flash_attention_3"

# What models hand to their attention function that changes the result and is not available here.
_REFUSED = ("position_bias", "attention_bias", "alibi", "indices", "block_indices", "sinks", "head_mask")


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
    _wait_for_buffers()
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


def _wait_for_buffers() -> None:
    """Has continuous batching begin when its buffers and the model are ready.

    With `use_async_batching`, the default with CUDA graphs, transformers clears the buffers of a step on the stream of the
    thread and copies inputs into them on another one, which waits for nothing (5.23; every attention implementation). On
    a GPU that is shared the clearing came last: prompts were zeros, page ids garbage. Waits for the device, which a
    thread must not do while another one captures a CUDA graph in its global mode.
    """
    try:
        from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager as Manager
    except ImportError:
        return
    original = getattr(Manager, "_create_batch_processor", None)
    if original is None or getattr(original, "knows_hopper_attention", False):
        return

    @wraps(original)
    def create(self, *args, **kwargs):
        made = original(self, *args, **kwargs)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return made

    create.knows_hopper_attention = True
    Manager._create_batch_processor = create


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
        starts = attention_mask.packed_starts()
        if starts is not None:
            return _packed(q, k, v, starts, starts, options), None
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


def _masked(q, k, v, made: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """With what `mask` made, but for packed sequences."""
    if made.dtype == torch.bool:
        return _without_padding(q, k, v, made[:, 0, 0], options)
    if made.shape[0] == 0:
        return hopper_attention.flash_attn_func(q, k, v, **options)
    first, end = made[:, :, 0, 0]
    return hopper_attention.flash_attn_with_kvcache(q, k, v, cache_seqlens=end, cache_leftpad=first, **options)


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
