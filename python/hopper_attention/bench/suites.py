"""The cases, as data. A suite is a list of `Case`. What is wanted and what is reached: docs/performance-notes.md, and
`data` beside this file for the best speeds known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hopper_attention.bench.case import Case, Within
from hopper_attention.bench.lengths import ragged_lengths, skewed_lengths, squared_lengths

GRID_TOKENS = 16384
GRID_HIDDEN = 2048
GRID_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


AS_DENSE = (Within("ours", "ours, dense", 1.02), Within("ours, no metadata", "ours, dense", 1.02, 4.0))
AS_BF16 = Within("ours", "ours, bf16", 1.02)
AS_WITHOUT_SINKS = Within("ours", "ours, no sinks", 1.01)
AS_ONE_QUERY = Within("ours", "ours, one query", 1.05)
INVARIANT = Within("ours, batch_invariant", "ours", 1.15)  # of batches of 32 and more


def count(n: int) -> str:
    """16384 -> "16k"."""
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)


def grid_case(suite: str, head_dim: int, causal: bool, seqlen: int, **given: Any) -> Case:
    """One case of the FlashAttention papers' grid: 16k tokens, hidden size 2048."""
    heads = GRID_HIDDEN // head_dim
    name = f"d{head_dim} {'causal' if causal else 'full'} {count(seqlen)}"
    return Case(suite, name, GRID_TOKENS // seqlen, seqlen, seqlen, heads, heads, head_dim, causal=causal, **given)


def prefill() -> list[Case]:
    """The papers' grid: the 36 cases of data/prefill_best.json."""
    return [
        grid_case("prefill", head_dim, causal, seqlen, goal_best=0.95)
        for head_dim in (64, 128, 256)
        for causal in (False, True)
        for seqlen in GRID_LENGTHS
    ]


def varlen() -> list[Case]:
    """The same through flash_attn_varlen_func, beside the dense call: packing must cost nothing. Then what engines pack."""
    beside = {"suite": "varlen", "peers": ("fa3",), "seconds": 0.2}
    changes = {"call": "varlen", "goal_best": 0.0, "within": AS_DENSE}
    found = [dataclasses.replace(case, **beside, **changes) for case in prefill()]
    packed = [case for case in engine() if case.call == "varlen" and not case.page_size]
    return found + [dataclasses.replace(case, **beside) for case in packed]


def mixed() -> list[Case]:
    """A step of an engine: chunks of prompts, and prompts beside single queries, over a paged cache."""
    suite = "mixed"
    prompts, singles = 2, 62
    lengths = (1024,) * prompts + (4096,) * singles
    shape = (prompts + singles, 1024, 4096, 32, 8, 128)
    step = {"call": "varlen", "lengths": lengths, "queries": (1024,) * prompts + (1,) * singles, "goal": 1.15}
    step["within"] = (INVARIANT,)
    return [
        *(
            Case(*(suite, f"512 on 16k, page {page}, 32/8, d128", 4, 512, 16384, 32, 8, 128), call="varlen",
                 page_size=page, goal=1.08)
            for page in (16, 128)
        ),
        *(
            Case(*(suite, f"2 prompts of 1k with 62 queries at 4k, page {page}", *shape), page_size=page, **step)
            for page in (16, 128)
        ),
    ]  # fmt: skip


# Name: (queries, keys) of the sequences of a call that leaves most of the card idle.
FEW_SEQUENCES = {
    "4 prompts of 90 to 1,200": ((300, 300), (700, 700), (1200, 1200), (90, 90)),
    "6 prompts of 100 to 600": tuple((n, n) for n in range(100, 700, 100)),
    "prompts of 2k, 64 and 300": ((2048, 2048), (64, 64), (300, 300)),
    "4 chunks of 128 on 2k": ((128, 2048),) * 4,
    "512 and 16 x 1 on 1.5k": ((512, 512), *(((1, 1500),) * 16)),
    "512 on 8k and on 2k": ((512, 8192), (512, 2048)),
}


def short() -> list[Case]:
    """A prompt, a chunk of one behind keys that are there already, or a few of these, that leave most of the card idle.
    Then many short texts without a cache, as rerankers and models of embeddings have them.
    """
    suite = "short"
    texts = (((64, 10, 250), (12, 12, 64), False), ((32, 60, 120), (16, 16, 128), False),
             ((100, 8, 64), (8, 8, 128), True), ((32, 20, 150), (32, 8, 128), True))  # fmt: skip
    return [
        Case(*(suite, f"{count(queries)} on {count(keys)}, {heads_q}/{heads_k}, d{head_dim}", 1, queries, keys),
             heads_q, heads_k, head_dim, call="varlen", page_size=16, goal=1.00)
        for heads_q, heads_k, head_dim in ((8, 1, 128), (32, 8, 128), (8, 1, 64), (64, 8, 64))
        for queries, keys in ((512, 512), (1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192),
                              (128, 8192), (512, 8192), (2048, 8192), (100, 3000), (300, 4096))
    ] + [
        Case(suite, f"{name}, {heads_q}/{heads_k}, d{head_dim}", len(sequences), max(q for q, _ in sequences),
             max(k for _, k in sequences), heads_q, heads_k, head_dim, call="varlen", page_size=16, goal=1.00,
             queries=tuple(q for q, _ in sequences), lengths=tuple(k for _, k in sequences))
        for heads_q, heads_k, head_dim in ((8, 1, 128), (32, 8, 128), (8, 1, 64))
        for name, sequences in FEW_SEQUENCES.items()
    ] + [
        Case(suite, f"{number} of {least} to {most}, {heads_q}/{heads_k}, d{head_dim}{'' if causal else ', full'}",
             number, most, most, heads_q, heads_k, head_dim, call="varlen", causal=causal, goal=1.00,
             lengths=ragged_lengths(number, least, most, 0))
        for (number, least, most), (heads_q, heads_k, head_dim), causal in texts
    ]  # fmt: skip


def singles(number: int, keys: int, queries: int = 1) -> tuple[tuple[int, int], ...]:
    return ((queries, keys),) * number


def steps() -> list[Case]:
    """Steps of an engine: chunks of prompts of all kinds, most of them beside sequences with one query or four."""
    suite = "steps"
    sequences = {
        "512 on 4k, 16 x 1 on 2k": ((512, 4096), *singles(16, 2048)),
        "512 on 4k, 64 x 1 on 2k": ((512, 4096), *singles(64, 2048)),
        "512 on 16k, 64 x 1 on 8k": ((512, 16384), *singles(64, 8192)),
        "100 on 100, 40 x 1 on 4k": ((100, 100), *singles(40, 4096)),
        "17 on 8k, 40 x 1 on 1k": ((17, 8192), *singles(40, 1024)),
        "256 on 256, 128 x 1 on 1k": ((256, 256), *singles(128, 1024)),
        "512 on 512, 32 x 4 on 4k": ((512, 512), *singles(32, 4096, queries=4)),
        "512 on 4k, 64 x 4 on 2k": ((512, 4096), *singles(64, 2048, queries=4)),
        "4 x 300 on 300, 60 x 1 on 4k": (*((300, 300),) * 4, *singles(60, 4096)),
        "1k on 1k, 768 on 4k, 64 x 1 on 1k to 8k": (
            *((1024, 1024), (768, 4096)),
            *((1, keys) for keys in ragged_lengths(64, 1024, 8192, 1)),
        ),
        "2k on 2k, 8 x 1 on 16k": ((2048, 2048), *singles(8, 16384)),
        "2k on 2k, 64 x 1 on 4k": ((2048, 2048), *singles(64, 4096)),
        "2k on 8k, 64 x 1 on 2k": ((2048, 8192), *singles(64, 2048)),
        "8k on 8k, 64 x 1 on 4k": ((8192, 8192), *singles(64, 4096)),
        "512 on 2k, 8k and 16k": ((512, 2048), (512, 8192), (512, 16384)),
    }
    # Of models with large heads, and of one with 128, behind a bound on keys that says nothing.
    of_large = {
        "8 prompts of 37 to 900": tuple((n, n) for n in (37, 90, 150, 220, 310, 480, 640, 900)),
        "3 prompts of 200 to 800, 1 on 6k": ((200, 200), (450, 450), (800, 800), (1, 6144)),
        "100 on 100, 16 x 1 on 1k": ((100, 100), *singles(16, 1024)),
        "512 on 4k, 64 x 1 on 2k": ((512, 4096), *singles(64, 2048)),
    }
    groups = [(heads, sequences, 0) for heads in ((8, 1, 128), (32, 8, 128), (8, 1, 64))]
    groups += [(heads, of_large, ROOM) for heads in ((8, 1, 256), (16, 8, 256), (16, 16, 192), (32, 8, 128))]
    return [
        Case(suite, f"{name}, {heads_q}/{heads_k}, d{head_dim}" + (f", room {count(room)}" if room else ""),
             len(lengths), max(q for q, _ in lengths), max(k for _, k in lengths), heads_q, heads_k, head_dim,
             call="varlen", page_size=16, room=room, goal=1.00, seconds=0.2,
             queries=tuple(q for q, _ in lengths), lengths=tuple(k for _, k in lengths))
        for (heads_q, heads_k, head_dim), of_heads, room in groups
        for name, lengths in of_heads.items()
    ]  # fmt: skip


def varlen_case(suite: str, name: str, lengths: tuple[int, ...], heads_q: int, heads_k: int, **given: Any) -> Case:
    longest = max(lengths)
    shape = (len(lengths), longest, longest, heads_q, heads_k, 128)
    given.setdefault("within", AS_DENSE if len(set(lengths)) == 1 else ())
    return Case(suite, name, *shape, call="varlen", lengths=lengths, **given)


def engine() -> list[Case]:
    """Prefill as engines run it; all causal."""
    suite = "engine"
    return [
        Case(suite, "GQA 32/8, d128, b1 8k", 1, 8192, 8192, 32, 8, 128, goal=1.06),
        Case(suite, "GQA 32/8, d128, b1 8k, fp16", 1, 8192, 8192, 32, 8, 128, dtype="fp16", within=(AS_BF16,)),
        Case(suite, "GQA 32/8, d128, b1 8k, sinks", 1, 8192, 8192, 32, 8, 128, sinks=True, within=(AS_WITHOUT_SINKS,)),
        Case(suite, "GQA 8/1, d128, b1 2k", 1, 2048, 2048, 8, 1, 128, goal=1.18),
        Case(suite, "GQA 8/1, d128, b1 32k", 1, 32768, 32768, 8, 1, 128, goal=1.02),
        Case(suite, "16 heads, d192/128, b2 8k", 2, 8192, 8192, 16, 16, 192, 128, goal=1.03),
        Case(suite, "24 heads, d96, b4 4k", 4, 4096, 4096, 24, 24, 96, goal=1.07),
        Case(suite, "16 heads, d192, b2 8k", 2, 8192, 8192, 16, 16, 192, goal=1.0),
        varlen_case(suite, "32 sequences of 512, 32/8, d128", (512,) * 32, 32, 8, goal=1.4),
        varlen_case(suite, "16 skewed sequences 1-8k, 32/8, d128", skewed_lengths(16, 1, 8192, 0), 32, 8, goal=1.05),
        varlen_case(suite, "16 skewed sequences 1-8k, 16/16, d128", skewed_lengths(16, 1, 8192, 0), 16, 16, goal=1.0),
        varlen_case(suite, "24 of 512 and 2 of 6k, 16/16, d128", (512,) * 24 + (6144,) * 2, 16, 16, goal=1.0),
        Case(suite, "window (4095, 0), 32/8, d128, b2 16k", 2, 16384, 16384, 32, 8, 128, window=(4095, 0), goal=1.17),
        Case(
            *(suite, "window (127, 0) + sinks, 64/8, d64, b2 8k", 2, 8192, 8192, 64, 8, 64),
            window=(127, 0),
            sinks=True,
            goal=1.5,
        ),
        *(
            Case(
                *(suite, f"window (127, 0) + sinks, 64/8, d64, 2 x 8k, {keys}", 2, 8192, 8192, 64, 8, 64),
                window=(127, 0),
                sinks=True,
                call="varlen",
                page_size=page,
                goal=1.5,
                within=within,
            )
            for keys, page, within in (("packed", 0, AS_DENSE), ("page 16", 16, ()))
        ),
        Case(
            *(suite, "window (127, 0) + sinks, 64/8, d64, 2k on 2k, 64 x 1 on 4k", 65, 2048, 4096, 64, 8, 64),
            window=(127, 0),
            sinks=True,
            call="varlen",
            page_size=16,
            queries=(2048, *(1,) * 64),
            lengths=(2048, *(4096,) * 64),
            goal=1.0,
        ),
        Case(suite, "softcap 50, 32/16, d128, b2 8k", 2, 8192, 8192, 32, 16, 128, softcap=50.0, goal=1.15),
        Case(
            *(suite, "softcap 50, large scores, 32/16, d128, b2 8k", 2, 8192, 8192, 32, 16, 128),
            softcap=50.0,
            size_q=8.0,
            goal=1.0,
        ),
        *(
            Case(
                suite,
                f"softcap 50, {name}16/8, d256, b2 8k",
                2,
                8192,
                8192,
                16,
                8,
                256,
                softcap=50.0,
                window=window,
                goal=1.0,
            )
            for name, window in (("", (-1, -1)), ("window (4095, 0), ", (4095, 0)))
        ),
        *(
            Case(
                suite, f"512 on 16k, page {page}, 32/8, d128", 4, 512, 16384, 32, 8, 128, call="varlen", page_size=page
            )
            for page in (16, 128)
        ),
    ]


def scaling() -> list[Case]:
    """Time must grow as the work: d128, 16 heads, causal, all over equal wall time. 4k alone and with as many tokens as
    16k.
    """
    shapes = [(1, 4096), (4, 4096), (1, 16384), (1, 65536), (1, 262144)]
    return [
        Case(
            *("scaling", f"b{b} {count(n)}, 16 heads, d128", b, n, n, 16, 16, 128),
            seconds=2.6,  # three rounds of 256k, ours and FA3
            fill=True,
            peers=("fa3",),
        )
        for b, n in shapes
    ]


def decode_case(batch: int, keys: int, heads_q: int, heads_k: int, head_dim: int = 128, **given: Any) -> Case:
    """One query (or seqlen_q of them) for each sequence, over a cache in pages of 16."""
    page = given.setdefault("page_size", 16)
    queries = given.pop("seqlen_q", 1)
    lengths = given.get("lengths", ())
    spread = f"{count(min(lengths))}-{count(max(lengths))}" if lengths else count(keys)
    name = f"b{batch} {spread}, {heads_q}/{heads_k}, d{head_dim}"
    name += f", {queries} queries" if queries > 1 else ""
    name += f", window {given['window'][0]}" if "window" in given else ""
    name += f", room {count(given['room'])}" if "room" in given else ""
    name += "" if page == 16 else (f", page {page}" if page else ", contiguous")
    return Case("decode", name, batch, queries, keys, heads_q, heads_k, head_dim, call="cache", **given)


def memory_goals(case: Case) -> dict[str, float]:
    """What one query a sequence may take for the K and V that it reads: from 1 GB on a part of the read rate where all
    lengths are equal, from 100 MB on so many us more than at that rate. The part is less where keys are gathered.
    """
    if case.seqlen_q != 1 or case.window != (-1, -1):
        return {}
    if case.kv_bytes() >= 1e9:
        gathered = case.page_size % 8 != 0
        part = 0.94 if case.head_dim <= 64 else (0.96 if gathered else 0.98)
        return {"goal_read": part} if case.equal_lengths else {}
    return {"goal_over_us": 8.0 if case.head_dim <= 64 else 5.0} if case.kv_bytes() >= 100e6 else {}


def decode() -> list[Case]:
    """The cases of data/decode_best.json, streams of 1 GB with other pages and head dims, several queries, windows."""
    large = [(1, 8192, 32, 8), (1, 8192, 64, 8), (64, 4096, 32, 8), (256, 1024, 32, 8), (1, 8192, 8, 1)]
    large += [(16, 8192, 8, 1), (64, 4096, 8, 1), (1, 131072, 8, 1)]
    goals = {(1, 8192, 32, 8): 1.25, (1, 8192, 64, 8): 1.25, (256, 1024, 32, 8): 1.03}
    cases = [decode_case(*shape, goal_best=goals.get(shape, 0.0)) for shape in large]
    cases += [
        decode_case(b, keys, 64, 8, 64, goal_best=goal)
        for b, keys, goal in ((1, 8192, 1.25), (16, 8192, 0.0), (256, 1024, 1.03))
    ]
    cases.append(decode_case(32, 8192, 32, 8, lengths=ragged_lengths(32, 512, 8192, 0), goal_best=1.15))
    few = [(hq, hk, keys, b) for hq, hk, lengths in FEW for keys in lengths for b in (1, 16, 64)]
    limits = {(8, 1, 8192, 1): 8.0}
    cases = [case for case in cases if (case.heads_q, case.heads_k, case.seqlen_k, case.batch) not in few]
    cases += [
        decode_case(b, keys, hq, hk, goal_best=1.0, goal_us=limits.get((hq, hk, keys, b), 0.0))
        for hq, hk, keys, b in few
    ]
    cases += [decode_case(b, 8192, 32, 8, d, page_size=page) for b, d, page in STREAMS]
    cases += [decode_case(64, 4096, 32, 8, seqlen_q=queries, within=(AS_ONE_QUERY,)) for queries in (4, 8)]
    cases += [decode_case(32, keys, 64, 8, 64, window=(127, 0), goal_us=12.0) for keys in (2048, 32768)]
    invariant = [dataclasses.replace(c, within=(*c.within, INVARIANT)) if c.batch >= 32 else c for c in cases]
    return [dataclasses.replace(case, **memory_goals(case)) for case in {c.name: c for c in invariant}.values()]


def tables() -> list[Case]:
    """Decode steps whose page tables are as wide as a model's longest context, as those of captured graphs are: alike
    sequences, and one much longer than the others.
    """
    shapes = [(1, 1024, 8, 1), (1, 8192, 32, 8), (16, 1024, 8, 1), (16, 8192, 8, 1), (64, 1024, 8, 1), (64, 8192, 8, 1)]
    shapes += [(64, 512, 32, 8), (64, 4096, 32, 8), (256, 1024, 32, 8)]
    skewed = [(16, (16384, *[1024] * 15), 8, 1), (64, (65536, *[1024] * 63), 32, 8)]
    skewed += [(32, ragged_lengths(32, 512, 8192, 0), 8, 1), (32, ragged_lengths(32, 512, 8192, 0), 32, 8)]
    cases = [decode_case(*shape, room=ROOM, goal=1.0) for shape in shapes]
    cases.append(decode_case(16, 8192, 64, 8, 64, room=ROOM, goal=1.0))
    cases += [
        decode_case(b, max(lengths), hq, hk, lengths=lengths, room=ROOM, goal=1.0) for b, lengths, hq, hk in skewed
    ]
    return [dataclasses.replace(case, suite="tables") for case in cases]


def batches() -> list[Case]:
    """Decode steps of batches whose tiles fill no round of all SMs, of a few sequences, of sequences of all lengths, and
    of sequences with several queries, with exact bounds and with the page tables of captured graphs.
    """
    alike = [(12, 8192, 32, 8), (17, 8192, 32, 8), (20, 32768, 32, 8), (72, 8192, 8, 1), (96, 32768, 8, 1)]
    few = [(8, 8192, 32, 8, 64), (4, 8192, 32, 8, 64), (16, 32768, 8, 1, 64)]
    few += [(2, 65536, 8, 1), (4, 4096, 8, 1), (4, 65536, 8, 1)]
    few += [(1, 65536, 32, 4), (1, 65536, 80, 10), (3, 65536, 32, 8)]
    ragged = [(24, 32768, 8, 1, 128), (16, 32768, 8, 1, 128), (24, 8192, 16, 2, 128), (32, 8192, 64, 8, 128)]
    ragged += [(16, 32768, 64, 8, 128), (128, 8192, 8, 1, 128), (48, 8192, 16, 2, 64), (4, 32768, 64, 8, 64)]
    cases = [
        decode_case(*shape, **given)
        for shape in (*alike, *few)
        for given in ({"goal": 1.0}, {"goal": 1.0, "room": ROOM})
    ]
    for seed, (batch, longest, heads_q, heads_k, head_dim) in enumerate(ragged):
        lengths = squared_lengths(batch, longest, seed)
        for given in ({}, {"room": ROOM}):
            cases.append(
                decode_case(batch, max(lengths), heads_q, heads_k, head_dim, lengths=lengths, goal=1.0, **given)
            )
    several = [
        (64, 512, 16, 4, 128, 5),
        (16, 4096, 32, 8, 128, 5),
        (32, 8192, 32, 8, 128, 8),
        (64, 2048, 28, 4, 128, 3),
    ]
    several += [(8, 8192, 8, 1, 128, 4), (1, 8192, 32, 8, 128, 8), (16, 4096, 64, 8, 64, 4), (64, 1024, 8, 1, 256, 3)]
    for batch, keys, heads_q, heads_k, head_dim, queries in several:
        for given in ({}, {"room": ROOM}):
            shape = (batch, keys, heads_q, heads_k, head_dim)
            cases.append(decode_case(*shape, seqlen_q=queries, goal=1.0, **given))
    return [dataclasses.replace(case, suite="batches") for case in cases]


ROOM = 131072
FEW = ((32, 8, (128, 512)), (8, 1, (128, 512, 1024, 8192, 32768)))
STREAMS = [
    *((32, 128, page) for page in (1, 4, 16, 64, 256, 0)),
    *((64, 64, page) for page in (16, 0)),
]

SUITES: dict[str, Callable[[], list[Case]]] = {
    "prefill": prefill,
    "varlen": varlen,
    "engine": engine,
    "mixed": mixed,
    "short": short,
    "steps": steps,
    "scaling": scaling,
    "decode": decode,
    "tables": tables,
    "batches": batches,
}


def select(suite: str, expression: str | None) -> list[Case]:
    """Cases of a suite ("all": of every suite) for which a Python expression over the fields of `Case` is true.

    Raises ValueError if the expression cannot be evaluated.
    """
    names = SUITES if suite == "all" else [suite]
    cases = [case for name in names for case in SUITES[name]()]
    if expression is None:
        return cases
    try:
        code = compile(expression, "--filter", "eval")
        return [case for case in cases if eval(code, {"__builtins__": {}}, case.as_dict())]
    except Exception as error:
        fields = ", ".join(field.name for field in dataclasses.fields(Case))
        raise ValueError(f"--filter {expression!r}: {error}; fields: {fields}") from error
