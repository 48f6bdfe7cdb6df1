"""Every pair of values of all features (hopper_attention.features) in some call, judged against float64.

The calls are few and covering; lengths, pages, masks and numbers within a value are random. Also run on the CPU reference
(tests/python/test_features.py), so that the calls are known to be right ones, and many times by tools/reliability pairs.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
from gpu import appended, batches, support  # noqa: E402
from gpu.batches import Batch, Made  # noqa: E402
from hopper_attention.features import covering_rows  # noqa: E402

pytestmark = pytest.mark.gpu

ROWS = covering_rows()
HEAD_DIMS = {"64": (64, 64), "96": (96, 96), "128": (128, 128), "192": (192, 192), "256": (256, 256),
             "192, v 128": (192, 128)}  # fmt: skip
BETWEEN = [(8, 8), (40, 40), (72, 72), (104, 104), (160, 160), (232, 232), (64, 32), (32, 64)]
PAGES = {"pages of 16 or 24": (16, 24), "pages of 128": (128,), "pages of 1": (1,)}
SPLITS = {"1": 1, "chosen": 0, "up to 7": 7}
ROTARY = {"none": "", "new keys": "", "rotated": ("interleaved", "halves")}


@dataclasses.dataclass
class Call:
    """A row as a call. function: "dense" is flash_attn_func; other functions are those of the batch."""

    row: dict[str, str]
    batch: Batch
    function: str
    rotary: str
    seed: int


def mask_of(mask: str, r: random.Random) -> dict[str, Any]:
    return {
        "full": {},
        "causal": {"causal": True},
        "window": {"window": (r.randint(0, 200), r.randint(0, 60))},
        "causal window": {"causal": True, "window": (r.randint(0, 200), 0)},
        "chunk": {"chunk": r.choice((1, 64, 96, 128)), "causal": r.random() < 0.5},
    }[mask]


def lengths_of(dense_q: bool, equal_keys: bool, r: random.Random) -> dict[str, tuple[int, ...]]:
    size = r.choice((1, 2, 5))
    if not dense_q:
        queries, keys = [1, 70, 0, 17, 130], [300, 70, 40, 700, 129]
        r.shuffle(keys)
        return {"q_lengths": tuple(queries[-size:]), "k_lengths": tuple(keys[:size])}
    longest = r.choice((1, 3, 66))
    keys = tuple(r.choice((longest, 0, 64, 129, r.randint(1, 700))) for _ in range(size))
    return {"q_lengths": (longest,) * size, "k_lengths": (keys[0],) * size if equal_keys else keys}


def call_of(row: dict[str, str], seed: int) -> Call:
    """The same for the same row and seed, if the build has the same kernels."""
    r = random.Random(seed)
    dense_q, keys, appends = row["queries"] == "dense", row["keys"], row["append"] != "none"
    paged = keys in PAGES
    may_be_dense = dense_q and keys == "dense" and not appends and row["ranks"] == "1" and row["metadata"] == "none"
    function = "dense" if may_be_dense and r.random() < 0.5 else ""
    if keys == "packed":
        call = "varlen"
    elif dense_q or keys == "dense" or appends:
        call = "cache"
    else:
        call = r.choice(("varlen", "cache"))
    head_dim, head_dim_v = HEAD_DIMS.get(row["head dim"]) or r.choice(BETWEEN)
    heads_k = r.choice((1, 2))
    batch = Batch(
        f"pairs, {', '.join(row.values())}",
        **lengths_of(dense_q, function == "dense", r),
        heads_q=heads_k * int(row["heads of q for one of k"]),
        heads_k=heads_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=row["dtype"],
        call=call,
        keys="paged" if paged else keys,
        page_size=r.choice(PAGES[keys]) if paged else 16,
        dense_q=dense_q,
        cp_world=int(row["ranks"]),
        cp_rank=r.randrange(int(row["ranks"])),
        **mask_of(row["mask"], r),
        softcap=15.0 if row["softcap"] == "on" else 0.0,
        sinks={"none": "", "fp32": "fp32", "16 bits": r.choice(("bf16", "fp16"))}[row["sinks"]],
        num_splits=SPLITS[row["splits"]],
        metadata=row["metadata"] == "given",
        batch_invariant=row["batch_invariant"] == "on",
        seed=seed,
    )
    rotary = ROTARY[row["append"]]
    return Call(row, batch, function, r.choice(rotary) if rotary else "", seed)


def dense(made: Made, results: tuple[torch.Tensor, torch.Tensor], with_lse: bool) -> Any:
    """flash_attn_func on a batch whose sequences are alike."""
    batch, (out, lse) = made.batch, results
    keys = batch.k_lengths[0]
    return hopper_attention.flash_attn_func(
        made.q, made.k[:, :keys], made.v[:, :keys], **batch.options, s_aux=made.s_aux, num_splits=batch.num_splits,
        batch_invariant=batch.batch_invariant, out=out, softmax_lse=lse if with_lse else None,
        return_attn_probs=with_lse,
    )  # fmt: skip


def launched(call: Call, function: Callable[[], Any], results: tuple[torch.Tensor, torch.Tensor]) -> str:
    """Runs it, in a graph if the row says so -> "" or what went wrong."""
    if call.row["launch"] == "eager" or support.DEVICE != "cuda":
        function()
        return ""
    before = [x.clone() for x in results]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    ran = not all(support.same_bits(a, b) for a, b in zip(results, before, strict=True))
    graph.replay()
    torch.cuda.synchronize()
    return "the call ran while it was captured" if ran else ""


def judge(call: Call, pool: batches.Pool) -> tuple[batches.Judged, str]:
    """The gates of a call, and "" or what is wrong beside them."""
    cache = new = None
    if call.row["append"] != "none":
        packed = not call.batch.dense_q or call.seed % 2 == 0
        new = appended.append(call.batch, call.seed, call.rotary, packed)
        made, given, cache = new.made, new.given, new.cache
    else:
        made, given = batches.make(call.batch), {}
    before = made.q.clone()
    results = batches.new_results(made)
    with_lse = call.row["LSE"] == "returned"

    def run(results: tuple[torch.Tensor, torch.Tensor], with_lse: bool) -> Any:
        if call.function == "dense":
            return dense(made, results, with_lse)
        return batches.attend(made, results, with_lse, **given)

    problem = launched(call, lambda: run(results, with_lse), results)
    out, lse = results
    if not with_lse:
        again = batches.new_results(made)
        run(again, True)  # the gates want one; it is a call of its own
        if float(lse.min()) != batches.LSE_POISON or float(lse.max()) != batches.LSE_POISON:
            problem = problem or "an LSE was written that the call was not given"
        lse = again[1]
    if not support.same_bits(made.q, before):
        problem = problem or "q was changed"
    if cache is not None:
        for name, found, wanted in zip(("k_cache", "v_cache"), (made.k, made.v), cache, strict=True):
            if not support.same_bits(found, wanted):
                problem = problem or f"{name} is not as the append leaves it"
        made.q = new.judged_q
    judged = batches.verdict(made, out, lse)
    pool.add(judged)
    if not judged.result:
        problem = problem or judged.result.message
    return judged, problem


def can_run(batch: Batch) -> bool:
    """Whether this build has the kernel; the reference runs all."""
    return support.DEVICE != "cuda" or batches.supported(batch)


def problem_of(number: int, row: dict[str, str], seed: int, pool: batches.Pool) -> str:
    """For a call that can run: "" or what is wrong."""
    call = call_of(row, seed)
    try:
        judged, problem = judge(call, pool)
    except Exception as error:
        problem = f"raised {type(error).__name__}: {error}"
    else:
        support.WORST.add(judged.result, call.batch)
    return f"row {number}, seed {seed}: {row}\n{call.batch}\n{problem}" if problem else ""


POOL = batches.Pool()


@pytest.mark.parametrize("number", range(len(ROWS)), ids=lambda n: "; ".join(ROWS[n].values()))
def test_every_pair_of_features(number):
    seeds = [seed for seed in (number, 1000 + number) if can_run(call_of(ROWS[number], seed).batch)]
    if not seeds:
        pytest.skip("this build has no kernel for the dtype and head dim of these calls")
    problems = [problem_of(number, ROWS[number], seed, POOL) for seed in seeds]
    if any(problems):
        pytest.fail("\n".join(filter(None, problems)), pytrace=False)


def test_the_calls_together():
    """Those before that are too small for an RMS error of their own."""
    assert not POOL.problem()
