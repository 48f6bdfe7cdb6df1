"""What goes together: one table of features, their values and the pairs that do not work.

`is_supported` answers from it, docs/features.md is written from it (tools/reliability --page), and
tests/python/gpu/test_pairs.py runs calls in which every pair of values occurs (`covering_rows`). Imports nothing heavy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

Value = tuple[str, str]  # (feature, value)

DTYPES = ("bfloat16", "float16")
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8

FEATURES: dict[str, dict[str, str]] = {
    "dtype": {"bf16": "q, k, v, out in bfloat16", "fp16": "q, k, v, out in float16"},
    "head dim": {
        "64": "", "96": "", "128": "", "192": "", "256": "",
        "192, v 128": "q and k of 192 columns, v and out of 128",
        "between": "any other multiple of 8 up to 256 runs in the next larger kernel",
    },
    "mask": {
        "full": "", "causal": "causal=True", "window": "window_size=(left, right)",
        "causal window": "causal=True, window_size=(left, 0)", "chunk": "attention_chunk",
    },
    "softcap": {"off": "", "on": "softcap > 0"},
    "sinks": {"none": "", "fp32": "s_aux in float32", "16 bits": "s_aux in bfloat16 or float16"},
    "queries": {"dense": "q (B, Sq, Hq, D)", "packed": "q (Tq, Hq, D) with cu_seqlens_q"},
    "keys": {
        "dense": "k (B, Sk, Hk, D) or a cache", "packed": "k (Tk, Hk, D) with cu_seqlens_k",
        "pages of 16 or 24": "page_table; other multiples of 8 likewise", "pages of 128": "page_table",
        "pages of 1": "page_table; other sizes likewise",
    },
    "append": {"none": "", "new keys": "k and v of flash_attn_with_kvcache", "rotated": "and rotary_cos, rotary_sin"},
    "splits": {"1": "num_splits=1", "chosen": "num_splits=0", "up to 7": "num_splits=7"},
    "heads of q for one of k": {"1": "", "4": "", "5": "", "16": ""},
    "ranks": {"1": "", "3": "cp_world_size=3, cp_rank, cp_tot_seqused_k"},
    "batch_invariant": {"off": "", "on": "batch_invariant=True"},
    "launch": {"eager": "", "graph": "captured in a CUDA graph and replayed"},
    "LSE": {"not returned": "", "returned": "return_attn_probs or return_softmax_lse"},
    "metadata": {"none": "", "given": "scheduler_metadata of get_scheduler_metadata"},
}  # fmt: skip


def _pair(a: str, x: str, b: str, y: str) -> frozenset[Value]:
    return frozenset(((a, x), (b, y)))


NOT_TOGETHER: dict[frozenset[Value], str] = {
    _pair("queries", "dense", "keys", "packed"): "cu_seqlens_k: belongs to flash_attn_varlen_func, whose q is packed",
    _pair("keys", "packed", "append", "new keys"): "cu_seqlens_k: packed keys have no room; append to a cache or pages",
    _pair("keys", "packed", "append", "rotated"): "cu_seqlens_k: packed keys have no room; append to a cache or pages",
}  # fmt: skip


def pairs_of(chosen: Mapping[str, str]) -> Iterator[frozenset[Value]]:
    """Every pair of values of a call."""
    return map(frozenset, itertools.combinations(chosen.items(), 2))


def why_not(chosen: Mapping[str, str]) -> str:
    """The reason of the first pair that does not work; "" if all do. `chosen` may leave features out."""
    return next((NOT_TOGETHER[pair] for pair in pairs_of(chosen) if pair in NOT_TOGETHER), "")


def all_pairs() -> list[frozenset[Value]]:
    """Every pair of values of two features, those that do not work included."""
    return [
        _pair(a, x, b, y)
        for a, b in itertools.combinations(FEATURES, 2)
        for x, y in itertools.product(FEATURES[a], FEATURES[b])
    ]


def chosen_by(
    *,
    causal: bool,
    window: tuple[int, int],
    attention_chunk: int,
    softcap: float,
    sinks: bool,
    packed_q: bool,
    packed_k: bool,
    page_size: int,
    append: bool,
    rotary: bool,
    cp_world_size: int,
    batch_invariant: bool,
    metadata: bool,
) -> dict[str, str]:
    """The values that the arguments of `is_supported` mean; all that NOT_TOGETHER names must be among them."""
    mask = "chunk" if attention_chunk else "full" if window == (-1, -1) else "window"
    if causal and mask != "chunk":
        mask = "causal" if mask == "full" else "causal window"
    return {
        "mask": mask,
        "softcap": "on" if softcap else "off",
        "sinks": "fp32" if sinks else "none",
        "queries": "packed" if packed_q else "dense",
        "keys": _pages(page_size) if page_size else "packed" if packed_k else "dense",
        "append": "rotated" if rotary else "new keys" if append else "none",
        "ranks": "1" if cp_world_size == 1 else "3",
        "batch_invariant": "on" if batch_invariant else "off",
        "metadata": "given" if metadata else "none",
    }


def _pages(size: int) -> str:
    return "pages of 1" if size % 8 else "pages of 16 or 24" if size % 128 else "pages of 128"


def covering_rows(seed: int = 0) -> list[dict[str, str]]:
    """Calls, few of them, in which every pair of values that works occurs: the same for the same seed.

    Greedy: each row begins with a pair that is missing, and takes for one feature after another the value with the most
    missing pairs among those that go with the values taken.
    """
    import random

    r = random.Random(seed)
    missing = {pair for pair in all_pairs() if pair not in NOT_TOGETHER}
    order = sorted(missing, key=sorted)
    r.shuffle(order)
    rows: list[dict[str, str]] = []
    for first in order:
        if first not in missing:
            continue
        row = dict(first)
        names = [name for name in FEATURES if name not in row]
        r.shuffle(names)
        for name in names:
            values = [value for value in FEATURES[name] if not why_not({**row, name: value})]
            r.shuffle(values)
            row[name] = max(values, key=lambda value: len(missing & new_pairs(row, name, value)))
        missing -= set(pairs_of(row))
        rows.append({name: row[name] for name in FEATURES})
    return rows


def new_pairs(row: Mapping[str, str], name: str, value: str) -> set[frozenset[Value]]:
    """The pairs that a value adds to a row."""
    return {frozenset(((name, value), other)) for other in row.items()}


def page() -> str:
    """The text of docs/features.md."""
    lines = [
        "<!-- Written by tools/reliability --page from python/hopper_attention/features.py. -->\n",
        "# Features\n",
        "Every feature works with every other. Of any two values below a test on a GPU runs a call that has both, judged",
        "against float64 ([pairs](reliability.md#pairs)); `is_supported` answers from the same table, and names the few",
        "pairs that contradict each other.\n",
        "| feature | values |",
        "| --- | --- |",
    ]
    for name, values in FEATURES.items():
        said = [
            value + (f" (`{text}`)" if "=" in text else f" ({text})" if text else "") for value, text in values.items()
        ]
        lines.append(f"| {name} | {'; '.join(said)} |")
    names = list(FEATURES)
    lines += ["\n## Pairs\n", "A number is the number of pairs of values that work; one below the line says which do not.\n",
              "| | " + " | ".join(names[1:]) + " |", "| --- |" + " --- |" * (len(names) - 1)]  # fmt: skip
    for a in names[:-1]:
        cells = [cell(a, b) if names.index(b) > names.index(a) else "" for b in names[1:]]
        lines.append(f"| {a} | " + " | ".join(cells) + " |")
    lines += ["\n| not together | why |", "| --- | --- |"]
    for pair, reason in NOT_TOGETHER.items():
        both = sorted(pair, key=lambda value: names.index(value[0]))
        lines.append("| " + ", ".join(f"{name} {value}" for name, value in both) + f" | {reason} |")
    works = len(all_pairs()) - len(NOT_TOGETHER)
    lines.append(f"\n{works:,} of {len(all_pairs()):,} pairs work; {len(covering_rows())} calls have them all.")
    return "\n".join(lines) + "\n"


def cell(a: str, b: str) -> str:
    """How many pairs of values of two features work."""
    pairs = [_pair(a, x, b, y) for x in FEATURES[a] for y in FEATURES[b]]
    works = sum(pair not in NOT_TOGETHER for pair in pairs)
    return f"{works}" if works == len(pairs) else f"**{works} of {len(pairs)}**"
