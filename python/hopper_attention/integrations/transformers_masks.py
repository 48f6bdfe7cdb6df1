"""What a transformers mask function says, for `transformers.attention`: where keys begin and end, not a value for each
query and key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

NAME = "hopper_attention"

_PLAIN_MASKS = ("causal_mask_function", "bidirectional_mask_function")
_WINDOWS = ("sliding_window_overlay", "sliding_window_bidirectional_overlay")
_PACKED = "packed_sequence_mask_function"
_POSITIONS = "remap_positions_for_packed_sequence"
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
        result = result.as_subclass(Mask)
        if hasattr(args[0], "_starts"):
            starts = args[0]._starts
            result._starts = None if starts is None else starts.to(result.device)
        return result

    def plain(self) -> torch.Tensor:
        """Its numbers, for `attention`."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach()

    def packed_starts(self) -> torch.Tensor | None:
        """Where packed sequences start, (n + 1,) int32; None if this is another kind of mask. Reads the device the first
        time: not while it is made, since continuous batching has its own starts and captures a graph around it.
        """
        if not hasattr(self, "_starts"):
            numbers = self.plain()
            self._starts = starts_of(numbers[:, 0, 0]) if numbers.dtype == torch.int64 else None
        return self._starts


def is_exporting() -> bool:
    """Whether torch.export traces without Dynamo, whose tensors cannot be a Mask."""
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


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
    of each sequence, the last query at the last of them. (B, 1, 1, tokens) int64: which packed sequence a token belongs
    to. (B, 1, 1, keys) bool: which keys count, for padding in other places. Four axes, because transformers takes a mask
    of four for one that is ready.

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
        return packed_numbers(parts[_PACKED])[:, None, None].as_subclass(Mask)
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


def packed_numbers(packed_mask_function: Any) -> torch.Tensor:
    """(B, tokens) int64: the sequence numbers of which transformers' function compares those of two tokens."""
    (numbers,) = (
        cell.cell_contents for cell in packed_mask_function.__closure__ if isinstance(cell.cell_contents, torch.Tensor)
    )
    return numbers.to(torch.int64)


def starts_of(numbers: torch.Tensor) -> torch.Tensor:
    """(n + 1,) int32: where sequences start in the rows of `numbers`, one row after the other, and where the last ends."""
    new = torch.ones_like(numbers, dtype=torch.bool)
    new[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    starts = new.flatten().nonzero().squeeze(1).to(torch.int32)
    return torch.nn.functional.pad(starts, (0, 1), value=numbers.numel())
