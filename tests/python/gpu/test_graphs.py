"""CUDA graphs of varlen and cache calls: captured with the largest bounds, replayed with the step's lengths and pages."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
from gpu import batches, support  # noqa: E402
from gpu.batches import Batch, attend, fail, main_dims, make, require_same  # noqa: E402
from gpu.processes import run_together  # noqa: E402
from gpu.support import Case  # noqa: E402

pytestmark = pytest.mark.gpu

SEQUENCES, TOKENS, PAGES, CAPACITY = 8, 300, 1500, 131072
HEADS_Q, HEADS_K = 8, 2

# Queries and keys of each sequence in a step; what is missing up to SEQUENCES is padding of length 0.
STEPS = {
    "decode": ((1,) * 8, (900, 1, 64, 65, 3000, 17, 128, 700)),
    "fewer sequences": ((1, 1, 1), (5000, 2, 16)),
    "mixed": ((1, 200, 1, 30, 1), (900, 200, 4000, 700, 1)),
    "one prompt": ((256,), (2000,)),
    "4 queries": ((4,) * 6, (900, 4, 70, 3000, 300, 1000)),
    "nothing": ((), ()),
}


class Step:
    """Buffers of an engine, whose addresses a graph remembers; `set` fills them for a step."""

    def __init__(self, page: int, head_dim: int, dtype: str) -> None:
        device = support.DEVICE
        generator = torch.Generator(device).manual_seed(3)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device).to(support.DTYPES[dtype])

        self.page = page
        self.pages = PAGES * 16 // page
        self.q = normal(TOKENS, HEADS_Q, head_dim)
        self.k, self.v = (normal(self.pages, page, HEADS_K, head_dim) for _ in range(2))
        self.cu = torch.zeros(SEQUENCES + 1, dtype=torch.int32, device=device)
        self.used = torch.zeros(SEQUENCES, dtype=torch.int32, device=device)
        self.table = torch.full((SEQUENCES, CAPACITY // page), 2147480000, dtype=torch.int32, device=device)
        self.metadata = torch.zeros(1 + 4 * SEQUENCES, dtype=torch.int32, device=device)
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(HEADS_Q, TOKENS, device=device)

    def set(self, queries: tuple[int, ...], keys: tuple[int, ...], seed: int) -> None:
        starts = batches.offsets(queries)
        starts += [starts[-1]] * (SEQUENCES + 1 - len(starts))
        self.cu.copy_(batches.int32(starts))
        self.used.copy_(batches.int32([*keys, *[0] * (SEQUENCES - len(keys))]))
        self.table.fill_(2147480000)
        generator = torch.Generator(support.DEVICE).manual_seed(seed)
        order = torch.randperm(self.pages, generator=generator, device=support.DEVICE).to(torch.int32)
        taken = 0
        for b, n in enumerate(keys):
            count = -(-n // self.page)
            self.table[b, :count] = order[taken : taken + count]
            taken += count
        self.out.fill_(float("nan"))
        self.lse.fill_(777.25)

    def make_metadata(self, max_q: int, max_k: int, **options) -> torch.Tensor:
        return hopper_attention.get_scheduler_metadata(
            *(SEQUENCES, max_q, max_k, HEADS_Q, HEADS_K, self.q.shape[-1], self.used),
            qkv_dtype=self.q.dtype,
            cu_seqlens_q=self.cu,
            page_size=self.page,
            causal=True,
            **options,
        )

    def attend(self, max_q: int, max_k: int, with_metadata: bool, **options):
        return hopper_attention.flash_attn_varlen_func(
            *(self.q, self.k, self.v, self.cu),
            max_seqlen_q=max_q,
            max_seqlen_k=max_k,
            seqused_k=self.used,
            page_table=self.table,
            causal=True,
            return_attn_probs=True,
            scheduler_metadata=self.metadata if with_metadata else None,
            out=self.out,
            softmax_lse=self.lse,
            **options,
        )

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.out.clone(), self.lse.clone()


@pytest.mark.parametrize("page", [16, 1, 64])
@pytest.mark.parametrize("splits", [0, 1, 32])
@pytest.mark.parametrize("invariant", [False, True], ids=["", "batch_invariant"])
@pytest.mark.parametrize("with_metadata", [True, False], ids=["metadata", "no metadata"])
def test_captured_with_maxima_replayed_with_the_step(with_metadata, invariant, splits, page):
    """Captured for 256 queries and 131,072 keys, replayed with metadata made for 1 and 900 and other steps: bitwise the
    eager call with the same arguments and metadata.
    """
    case = main_dims(Batch("graph", (1,), (1,)))
    step = Step(page, case.head_dim, case.dtype)
    options = {"num_splits": splits, "batch_invariant": invariant}
    step.set(*STEPS["mixed"], 0)
    if with_metadata:
        step.metadata.copy_(step.make_metadata(256, CAPACITY, **options))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.attend(256, CAPACITY, with_metadata, **options)
    if not bool(step.out.isnan().all()):
        fail(case, "the call ran while it was captured")
    for seed, (name, (queries, keys)) in enumerate(STEPS.items()):
        step.set(queries, keys, seed)
        if with_metadata:
            bounds = (1, 900) if name == "decode" else (max([1, *queries]), max([1, *keys]))
            step.metadata.copy_(step.make_metadata(*bounds, **options))
        graph.replay()
        replayed = step.results()
        step.set(queries, keys, seed)
        step.attend(256, CAPACITY, with_metadata, **options)
        require_same(case, f"replay of {name!r}, {splits} splits, pages of {page}", replayed, step.results())
        total = sum(queries)
        if not bool(replayed[0][total:].isnan().all()) or not bool((replayed[1][:, total:] == 777.25).all()):
            fail(case, f"{name}: rows of no sequence were written")
        if not bool(replayed[0][:total].isfinite().all()):
            fail(case, f"{name}: rows were not written")


@pytest.mark.parametrize("splits", [1, 0, 5])
@pytest.mark.parametrize("invariant", [False, True], ids=["", "batch_invariant"])
def test_packed_keys_whose_lengths_change(invariant, splits):
    """Captured with room for all rows of q and k, replayed with other offsets of both: bitwise the eager call."""
    rows = 6000
    case = main_dims(Batch("graph of packed keys", (1,), (1,)))
    step = Step(16, case.head_dim, case.dtype)
    k, v = (x.flatten(0, 1)[:rows] for x in (step.k, step.v))
    cu_k = torch.zeros(SEQUENCES + 1, dtype=torch.int32, device=support.DEVICE)

    def set_step(queries: tuple[int, ...], keys: tuple[int, ...]) -> None:
        step.set(queries, keys, 0)
        starts = batches.offsets(keys)
        cu_k.copy_(batches.int32(starts + [starts[-1]] * (SEQUENCES + 1 - len(starts))))

    def attend() -> None:
        hopper_attention.flash_attn_varlen_func(
            *(step.q, k, v, step.cu, cu_k, 256, rows),
            causal=True,
            num_splits=splits,
            batch_invariant=invariant,
            return_attn_probs=True,
            out=step.out,
            softmax_lse=step.lse,
        )

    set_step(*STEPS["mixed"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    for name, (queries, keys) in STEPS.items():
        set_step(queries, keys)
        graph.replay()
        replayed = step.results()
        set_step(queries, keys)
        attend()
        require_same(case, f"replay of {name!r}, {splits} splits", replayed, step.results())
        total = sum(queries)
        if not bool(replayed[0][total:].isnan().all()) or not bool(replayed[0][:total].isfinite().all()):
            fail(case, f"{name}: not the rows of the sequences were written")


def test_metadata_made_inside_the_graph():
    case = main_dims(Batch("graph with its metadata", (1,), (1,)))
    step = Step(16, case.head_dim, case.dtype)
    step.set(*STEPS["mixed"], 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.make_metadata(256, CAPACITY, num_splits=0, out=step.metadata)
        for _ in range(3):  # layers
            step.attend(256, CAPACITY, True, num_splits=0)
    for seed, (name, (queries, keys)) in enumerate(STEPS.items()):
        step.set(queries, keys, seed)
        graph.replay()
        replayed = step.results()
        step.set(queries, keys, seed)
        step.metadata.copy_(step.make_metadata(256, CAPACITY, num_splits=0))
        step.attend(256, CAPACITY, True, num_splits=0)
        require_same(case, f"replay of {name!r}", replayed, step.results())


# Steps of one captured call, the most queries of a sequence first, then queries and keys.
CHANGES = {
    # Tiles of few queries that are cut, taken by clusters, or both by turns.
    "other lengths": (1, ((1,) * 3, (20000, 900, 700)), ((1,) * 3, (700, 21000, 900))),
    "other sequences": (1, ((1,) * 8, (20000, 90, 1, 64, 65, 17, 128, 700)), ((1,) * 2, (16000, 8000))),
    "alike and not": (1, ((1,) * 8, (1000,) * 8), ((1,) * 8, (20000, *(100,) * 7))),
    "with and without": (1, ((1,), (20000,)), ((), ())),
    # Tiles of 64 rows.
    "speculative": (16, ((16, 9, 16), (20000, 900, 700)), ((16, 16), (64, 9000))),
    # Prompts and single queries, in one kernel and in two; whole tiles and some that are cut.
    "a prompt elsewhere": (256, ((1, 256, 1), (9000, 700, 20)), ((120, 1, 1, 1), (4000, 900, 64, 3000))),
    "the same queries": (64, ((64, 64), (20000, 300)), ((64, 64), (300, 19000))),
    "prompts or none": (256, ((150, 140), (150, 140)), ((1,) * 8, (20000, *(100,) * 7))),
    "nothing at first": (256, ((), ()), ((256, 1, 1), (2000, 10000, 7))),
}


@pytest.mark.parametrize("invariant", [False, True], ids=["", "batch_invariant"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_lengths_and_metadata_that_the_kernel_before_writes(change, invariant):
    """Attention kernels look for their first work while the kernel before still runs, in what may then be the metadata
    and lengths of the step before: here they always are. Two layers, of which the second guesses right.
    """
    case = main_dims(Batch("guess", (1,), (1,)))
    step, next_step = Step(16, case.head_dim, case.dtype), Step(16, case.head_dim, case.dtype)
    most_queries, *steps = change
    options = {"num_splits": 0, "batch_invariant": invariant}
    outs = [torch.empty_like(step.q) for _ in range(2)]

    def run() -> None:
        step.make_metadata(most_queries, CAPACITY, batch_invariant=invariant, out=step.metadata)
        for name in ("cu", "used", "table"):
            getattr(step, name).copy_(getattr(next_step, name))
        step.make_metadata(most_queries, CAPACITY, batch_invariant=invariant, out=step.metadata)
        for out in outs:
            step.out = out
            step.attend(most_queries, CAPACITY, True, **options)

    step.set(*steps[0], 0)
    next_step.set(*steps[0], 0)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for i in range(6):
        next_step.set(*steps[(i + 1) % 2], i)
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        found = [(out.clone(), step.lse.clone()) for out in outs]
        step.out = torch.full_like(step.q, float("nan"))
        step.attend(most_queries, CAPACITY, True, **options)
        torch.cuda.synchronize()
        for layer, results in enumerate(found):
            require_same(case, f"replay {i}, layer {layer}", results, (step.out, step.lse))


@pytest.mark.parametrize("page", [16, 1])
def test_a_decode_loop_with_append(page):
    """Ten steps of a captured cache call that appends its key; the cache and every result as in eager mode."""
    lengths = (5, 15, 16, 300, 1000)
    case = main_dims(Batch("decode loop", (1,) * 5, tuple(n + 10 for n in lengths), keys="paged", page_size=page,
                           call="cache", dense_q=True, causal=True, heads_q=8, num_splits=0))  # fmt: skip
    made = make(case.but(poison="zero"))
    start_k, start_v = made.k.clone(), made.v.clone()
    used = batches.int32(list(lengths))
    shape = (5, 1, case.heads_k, case.head_dim)
    new_k, new_v = (torch.zeros(shape, dtype=made.k.dtype, device=support.DEVICE) for _ in range(2))
    results = batches.new_results(made)

    def step():
        attend(made, results, cache_seqlens=used, k=new_k, v=new_v)

    def loop(call) -> list[tuple[torch.Tensor, ...]]:
        made.k.copy_(start_k)
        made.v.copy_(start_v)
        used.copy_(batches.int32(list(lengths)))
        generator = torch.Generator(support.DEVICE).manual_seed(5)
        found = []
        for _ in range(10):
            for x in (new_k, new_v, made.q):
                x.copy_(torch.randn(x.shape, generator=generator, device=support.DEVICE))
            call()
            found.append((results[0].clone(), results[1].clone(), made.k.clone(), made.v.clone()))
            used.add_(1)
        return found

    eager = loop(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for number, (found, expected) in enumerate(zip(loop(graph.replay), eager, strict=True)):
        require_same(case, f"step {number}", found[:2], expected[:2])
        require_same(case, f"cache of step {number}", found[2:], expected[2:])


@pytest.mark.parametrize("given", [True, False], ids=["out and lse given", "allocated"])
def test_merged_states(given):
    """Both results change between replays, and some rows have no keys; bitwise the eager call."""
    generator = torch.Generator(support.DEVICE).manual_seed(9)

    def fill(out: torch.Tensor, lse: torch.Tensor) -> None:
        out.copy_(torch.randn(out.shape, generator=generator, device=support.DEVICE))
        lse.copy_(torch.randn(lse.shape, generator=generator, device=support.DEVICE) * 3)
        lse.masked_fill_(torch.rand(lse.shape, generator=generator, device=support.DEVICE) < 0.2, -float("inf"))

    def state() -> tuple[torch.Tensor, torch.Tensor]:
        shape = (2, 70, 4, 128)
        return torch.zeros(shape, dtype=torch.bfloat16, device=support.DEVICE), torch.zeros(
            2, 4, 70, device=support.DEVICE
        )

    a, b, merged = state(), state(), state()
    options = {"out": merged[0], "lse": merged[1]} if given else {}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = hopper_attention.merge_states(*a, *b, **options)
    for _ in range(3):
        fill(*a)
        fill(*b)
        for x in results:
            x.fill_(777.25)
        graph.replay()
        for found, wanted in zip(results, hopper_attention.merge_states(*a, *b), strict=True):
            assert support.same_bits(found, wanted) and not bool((found == 777.25).any())


# `call` returns its results; `filled` are those given to it, `cache` what it changes beside them.
FRESH = """
import torch, hopper_attention
torch.manual_seed(0)
def randn(*shape):
    return torch.randn(*shape, device="cuda").to(torch.{dtype})
def int32(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")
cache = []
{setup}
def bits(x):
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)
def poison():
    for x in filled:
        x.fill_(float("nan"))
before = [x.clone() for x in cache]
poison()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    results = call()
assert all(bool(x.isnan().all()) for x in filled), "ran during capture"
assert all(torch.equal(x, kept) for x, kept in zip(cache, before)), "appended during capture"
graph.replay()
replayed = [x.clone() for x in (*results, *cache)]
poison()
for x, kept in zip(cache, before):
    x.copy_(kept)
eager = (*call(), *cache)
assert len(replayed) == len(eager) > len(cache)
assert all(torch.equal(bits(a), bits(b)) for a, b in zip(replayed, eager)), "differs from eager"
assert all(bool(x.isfinite().all()) for x in replayed)
assert not any(torch.equal(x, kept) for x, kept in zip(cache, before)), "appended nothing"
print("right")
"""

VARLEN = """
q, k, v = randn(40, 8, {d}), randn(100, 16, 2, {d}), randn(100, 16, 2, {d})
cu, used = int32(0, 1, 33, 33, 40), int32(700, 32, 9, 300)
table = torch.randperm(100, device="cuda").to(torch.int32).reshape(2, 50).repeat(2, 1)
filled = [torch.empty_like(q)]
def metadata():
    return hopper_attention.get_scheduler_metadata(4, 256, 800, 8, 2, {d}, used, qkv_dtype=q.dtype, cu_seqlens_q=cu,
                                                   page_size=16, causal=True)
def call():
    return [hopper_attention.flash_attn_varlen_func(q, k, v, cu, max_seqlen_q=256, max_seqlen_k=800, seqused_k=used,
        page_table=table, causal=True, out=filled[0], scheduler_metadata={metadata}, num_splits=0)]
"""

DENSE = """
q, k, v = randn(2, {queries}, 8, {d}), randn(2, 3000, 2, {d}), randn(2, 3000, 2, {d})
filled = [torch.empty_like(q), torch.empty(2, 8, {queries}, device="cuda")]
def call():
    return hopper_attention.flash_attn_func(q, k, v, causal=True, num_splits={splits}, return_attn_probs=True,
        out=filled[0], softmax_lse=filled[1])
"""

# Few queries of few sequences: clusters of blocks share each tile.
CACHE = """
q = randn(5, 1, 8, {d})
k, v = randn(200, 16, 2, {d}), randn(200, 16, 2, {d})
used = int32(5, 15, 16, 300, 600)
table = torch.randperm(200, device="cuda").to(torch.int32).reshape(5, 40)
filled = [torch.empty_like(q), torch.empty(5, 8, 1, device="cuda")]
given = dict(cache_seqlens=used, page_table=table, causal=True, num_splits=0)
def call():
    return hopper_attention.flash_attn_with_kvcache(q, k, v, **given, return_softmax_lse=True, out=filled[0],
                                                    softmax_lse=filled[1])
"""

APPEND = """
cache = [k, v]
angles = torch.rand(1000, {d} // 2, device="cuda") * 6
given.update(k=randn(5, 1, 2, {d}), v=randn(5, 1, 2, {d}), workspace=torch.empty(64 << 20, dtype=torch.uint8, device="cuda"),
             rotary_cos=angles.cos().to(q.dtype), rotary_sin=angles.sin().to(q.dtype))
"""

MERGE = """
a, b = (randn(2, 70, 4, {d}), torch.randn(2, 4, 70, device="cuda")), (randn(2, 70, 4, {d}), torch.randn(2, 4, 70, device="cuda"))
filled = [torch.empty_like(x) for x in a]
def call():
    return hopper_attention.merge_states(*a, *b, out=filled[0], lse=filled[1])
"""

COMBINE = """
parts, lse = torch.randn(3, 2, 70, 4, {d}, device="cuda"), torch.randn(3, 2, 70, 4, device="cuda")
filled = [torch.empty(2, 70, 4, {d}, dtype=torch.{dtype}, device="cuda")]
def call():
    return hopper_attention.flash_attn_combine(parts, lse, out=filled[0])
"""

FIRST_CALLS = {
    "varlen": (VARLEN, {"metadata": "None"}),
    "varlen, metadata made in the graph": (VARLEN, {"metadata": "metadata()"}),
    "dense": (DENSE, {"queries": 300, "splits": 1}),
    "dense, tiles in parts": (DENSE, {"queries": 40, "splits": 0}),
    "cache, clusters": (CACHE, {}),
    "append, rotary, everything given": (CACHE + APPEND, {}),
    "merge": (MERGE, {}),
    "combine": (COMBINE, {}),
}


def first_call(name: str, case: Batch) -> str:
    setup, values = FIRST_CALLS[name]
    names = {"d": case.head_dim, "dtype": str(support.DTYPES[case.dtype]).removeprefix("torch."), **values}
    return FRESH.format(setup=setup.format(**names), **names)


def test_the_first_call_of_a_process_inside_a_capture():
    """Of each function: kernels are loaded and allowed their shared memory while nothing may synchronise."""
    case = main_dims(Batch("first call", (1,), (1,)))
    shape = {"batch": 5, "max_seqlen_q": 1, "max_seqlen_k": 640, "heads_q": 8, "heads_kv": 2, "page_size": 16}
    plan = hopper_attention.plan(
        dtype=case.dtype, head_dim=case.head_dim, causal=True, lengths_on_device=True, device="H200", **shape
    )
    assert "by a cluster of" in plan.explain(), plan
    found = run_together({name: ["-c", first_call(name, case)] for name in FIRST_CALLS})
    wrong = {name: said for name, said in found.items() if said[0] != 0 or "right" not in said[1]}
    assert not wrong, "\n".join(f"{name}: exit status {status}\n{text}" for name, (status, text) in wrong.items())


def test_calls_do_not_synchronise():
    case = main_dims(Batch("behind a long kernel", (1, 70, 0), (900, 70, 5), keys="paged", causal=True, num_splits=0))
    made = make(case)
    expected = attend(made)
    metadata = batches.schedule(made)
    results = batches.new_results(made)
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(100_000_000)
        done = torch.cuda.Event()
        again = batches.schedule(made)
        attend(made, results, scheduler_metadata=again)
        attend(made, results)
        done.record()
        waited = done.query()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    torch.cuda.synchronize()
    assert not waited, "the call came back only after the kernels before it"
    assert torch.equal(again, metadata), "metadata differs from run to run"
    require_same(case, "behind a long kernel", results, expected)


class CacheStep:
    """One query and one new key for each of five sequences in pages, for calls of flash_attn_with_kvcache."""

    def __init__(self) -> None:
        lengths = (5, 15, 16, 300, 1000)
        case = main_dims(Batch("step over a cache", (1,) * 5, tuple(n + 1 for n in lengths), keys="paged", page_size=16,
                               call="cache", dense_q=True, causal=True, heads_q=8, num_splits=0))  # fmt: skip
        self.made = make(case.but(poison="zero"))
        used, dtype = batches.int32(list(lengths)), self.made.k.dtype
        generator = torch.Generator(support.DEVICE).manual_seed(7)
        shape = (5, 1, case.heads_k, case.head_dim)
        k, v = (torch.randn(shape, generator=generator, device=support.DEVICE).to(dtype) for _ in range(2))
        angles = torch.rand(2000, case.head_dim // 2, generator=generator, device=support.DEVICE) * 6
        self.given = {
            "cache": {"cache_seqlens": used},
            "append": {"cache_seqlens": used, "k": k, "v": v},
            "append, rotary": {
                **{"cache_seqlens": used, "k": k, "v": v},
                **{"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)},
            },
        }

    def attend(self, name: str, results: tuple[torch.Tensor, torch.Tensor], workspace: torch.Tensor | None):
        return attend(self.made, results, workspace=workspace, **self.given[name])


CACHE_CALLS = ["cache", "append", "append, rotary"]


def calls_with_everything_given() -> dict:
    """Name -> call of each function, with its results and workspace."""
    step = CacheStep()
    kept = batches.new_results(step.made)
    case = main_dims(Batch("everything given", (1, 70, 0), (900, 70, 5), keys="paged", causal=True, num_splits=0))
    made = make(case)
    results, metadata = batches.new_results(made), batches.schedule(made)
    packed = make(main_dims(Batch("everything given", (1, 70, 0), (900, 70, 5), causal=True)))
    of_packed = batches.new_results(packed)
    dense = support.main_dims(Case("everything given", 70, 900, causal=True))
    tensors = support.make_inputs(dense)
    out, lse = support.attend(dense, tensors)
    others, merged = (out.clone(), lse.clone()), (out.clone(), lse.clone())
    workspace = torch.empty(64 << 20, dtype=torch.uint8, device=support.DEVICE)
    return {
        "dense": lambda: support.attend(dense, tensors, out=out, softmax_lse=lse, workspace=workspace),
        "dense, splits": lambda: support.attend(
            dense, tensors, out=out, softmax_lse=lse, workspace=workspace, num_splits=5
        ),
        "packed keys": lambda: attend(packed, of_packed, workspace=workspace),
        "packed keys, splits": lambda: attend(packed, of_packed, workspace=workspace, num_splits=5),
        "paged": lambda: attend(made, results, workspace=workspace),
        "paged, metadata": lambda: attend(made, results, workspace=workspace, scheduler_metadata=metadata),
        "metadata": lambda: batches.schedule(made, out=metadata),
        "merge": lambda: hopper_attention.merge_states(out, lse, *others, out=merged[0], lse=merged[1]),
        **{name: partial(step.attend, name, kept, workspace) for name in CACHE_CALLS},
    }


PACKED_CALLS = ["packed keys", "packed keys, splits"]
PAGED_CALLS = ["paged", "paged, metadata", *CACHE_CALLS]


@pytest.mark.parametrize("name", ["dense", "dense, splits", *PACKED_CALLS, *PAGED_CALLS, "metadata", "merge"])
def test_nothing_is_allocated_where_everything_is_given(name):
    call = calls_with_everything_given()[name]
    call()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("name", CACHE_CALLS)
def test_a_workspace_that_is_given_changes_no_bit(name):
    """Eager and in a graph; its end takes the rotated q."""
    step = CacheStep()
    wanted = step.attend(name, batches.new_results(step.made), None)
    workspace = torch.full((64 << 20,), 0xFF, dtype=torch.uint8, device=support.DEVICE)
    results = batches.new_results(step.made)
    step.attend(name, results, workspace)
    require_same(step.made.batch, f"{name}, eager", results, wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.attend(name, results, workspace)
    workspace.fill_(0xFF)
    for x, poison in zip(results, batches.new_results(step.made), strict=True):
        x.copy_(poison)
    graph.replay()
    require_same(step.made.batch, f"{name}, replay", results, wanted)
    written = not bool((workspace[-step.made.q.nbytes :] == 0xFF).all())
    assert written == ("rotary" in name), "the rotated q went elsewhere"


def test_bounds_on_the_gpu_are_refused_during_capture():
    case = main_dims(Batch("bounds on the GPU", (1, 70), (900, 70), keys="paged", causal=True))
    made = make(case)
    attend(made)
    bound = torch.tensor(70, device=support.DEVICE)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises((ValueError, TypeError, NotImplementedError), match="max_seqlen_q"), torch.cuda.graph(graph):
        attend(made, max_seqlen_q=bound)
    torch.cuda.synchronize()
    attend(made)
