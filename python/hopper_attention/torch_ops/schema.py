"""Operator schemas, made from the signatures of the functions behind them, so that the two cannot drift apart."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection

_SCALARS = {
    "SymInt": """attention_chunk num_splits sm_margin cp_world_size cp_rank max_seqlen_q max_seqlen_k max_seqlen_k_new
        batch_size num_heads_q num_heads_kv headdim headdim_v page_size""",
    "float": "softmax_scale softcap",
    "bool": """causal pack_gqa deterministic batch_invariant return_attn_probs return_softmax_lse rotary_interleaved
        has_softcap""",
    "ScalarType": "qkv_dtype out_dtype",
    "SymInt[]": "window_size options",
    "int": "flags",
}
TYPES = {name: kind for kind, names in _SCALARS.items() for name in names.split()}  # every other parameter is a Tensor


def schema(
    operator: str,
    function: Callable,
    *,
    returns: str,
    without: Collection[str] = (),
    written: Collection[str] = (),
    required: Collection[str] = (),
) -> str:
    """The schema of `operator`: parameters of `function` in their order.

    without: parameters left out. written: tensors that the call writes to. required: without a default here.
    """
    parts: list[str] = []
    letters = iter("abcdefgh")
    keyword_only = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in without:
            continue
        must = parameter.default is parameter.empty or parameter.name in required
        if (parameter.kind is parameter.KEYWORD_ONLY or (must and any("=" in part for part in parts))) and not (
            keyword_only
        ):
            parts.append("*")
            keyword_only = True
        kind = TYPES.get(parameter.name, "Tensor")
        if parameter.name in written:
            kind = f"Tensor({next(letters)}!)"
        if parameter.default is None and not must:
            kind += "?"
        parts.append(f"{kind} {parameter.name}" + ("" if must else f"={_default(parameter.default)}"))
    return f"{operator}({', '.join(parts)}) -> {returns}"


def _default(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
