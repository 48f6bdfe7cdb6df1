"""flash_attn_varlen_func on packed sequences: lengths, masks, ratios, what is written and what is not."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
from gpu import batches, support  # noqa: E402
from gpu.batches import Batch, attend, fail, int32, judge_all, judged_results, main_dims, make, require_same  # noqa: E402
from gpu.fixed_splits import plan_of  # noqa: E402
from gpu.support import MAIN, built_dims, small_masks  # noqa: E402
from gpu.test_grid import name_of, on  # noqa: E402
from gpu.test_random_batches import RATIOS  # noqa: E402

pytestmark = pytest.mark.gpu

AROUND_TILES = (0, 1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257)


def spread_lengths(count: int, longest: int, seed: int) -> tuple[int, ...]:
    """Lengths from 0 to `longest`, their logarithms spread evenly, in random order."""
    found = [0, 1, *(round(longest ** (i / (count - 2))) for i in range(1, count - 1))]
    random.Random(seed).shuffle(found)
    return tuple(found)


CASES = [
    Batch("one sequence", (200,), (200,), causal=True),
    Batch("equal lengths", (300,) * 5, (300,) * 5, causal=True),
    Batch("32 prompts", (512,) * 32, (512,) * 32, heads_q=8, heads_k=2, causal=True),
    Batch("skewed, 1 to 4k", spread_lengths(12, 4000, 0), spread_lengths(12, 4000, 0), causal=True),
    Batch("skewed queries beside other keys", spread_lengths(12, 2000, 1), spread_lengths(12, 4000, 2), causal=True),
    Batch("queries without keys", (5, 70, 1), (0, 0, 0)),
    Batch("queries without keys, sinks", (5, 70, 1), (0, 0, 0), sinks="fp32"),
    Batch("keys without queries", (0, 0, 0), (5, 70, 1)),
    Batch("empty sequences between others", (0, 7, 0, 0, 130, 0), (9, 7, 0, 300, 130, 0), causal=True),
    Batch("padding of a captured batch", (1, 1, 1, 0, 0, 0, 0, 0), (90, 800, 3000, 0, 0, 0, 0, 0), tail_q=5),
    Batch("more queries than keys", (300, 90, 1), (100, 1, 0), causal=True),
    Batch("one prompt among single queries", (1,) * 20 + (900,) + (1,) * 20, (700,) * 20 + (900,) + (50,) * 20),
    Batch("a chunk of a long prompt", (256, 1), (6000, 6000), heads_q=8, heads_k=1, causal=True),
    Batch("one query on many keys", (1,), (20000,), heads_q=8, heads_k=1, num_splits=0),
    Batch("4 queries on many keys", (4,) * 3, (9000, 20001, 64), heads_q=8, heads_k=1, num_splits=0, causal=True),
    Batch("splits without keys for them", (1, 1, 3), (1, 0, 70), num_splits=128),
    Batch("splits of a window", (1, 5), (9000, 3000), window=(300, 0), num_splits=7),
    Batch("splits with sinks", (1, 70), (9000, 3000), sinks="bf16", num_splits=3),
    Batch("lengths from seqused", (5, 90, 1), (40, 90, 600), extra_q=7, extra_k=9, causal=True),
    Batch("bounds far too large", (5, 90, 1), (40, 90, 600), slack=100000, causal=True, num_splits=0),
    Batch("no bounds", (5, 90, 1), (40, 90, 600), slack=-1, causal=True, num_splits=0),
    Batch("(192, 128)", (300, 1), (500, 900), head_dim=192, head_dim_v=128, heads_q=4, heads_k=4, causal=True),
    Batch("a head dim that is padded", (300, 1), (500, 900), head_dim=72, causal=True, num_splits=0),
    Batch("heads first", (130, 9), (200, 900), strides="heads first", causal=True),
    Batch("K and V beside each other", (130, 9), (200, 900), strides="interleaved", causal=True),
]


@pytest.mark.usefixtures("either_tile")
@pytest.mark.parametrize("metadata", [False, True], ids=["", "metadata"])
@pytest.mark.parametrize("case", CASES, ids=lambda b: b.why)
def test_lengths(case, metadata):
    judge_all(
        main_dims(case.but(metadata=metadata, dtype=dtype, batch_invariant=invariant))
        for dtype in ("bf16", "fp16")
        for invariant in (False, True)
    )


@pytest.mark.parametrize("mask", small_masks())
@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_lengths_around_tiles(kernel, mask):
    """Every length beside every other one, as sequences of one call; then as a few queries, with and without splits."""
    r = random.Random(1)
    pairs = [(q, k) for q in AROUND_TILES for k in AROUND_TILES]
    few = [(q, k) for q in (1, 2, 4, 9) for k in (*AROUND_TILES, 700, 3001)]
    r.shuffle(pairs)
    r.shuffle(few)
    judge_all(
        Batch(
            f"{mask}, {len(chosen)} pairs of lengths, {splits} splits",
            *zip(*chosen, strict=True),
            num_splits=splits,
            **on(kernel, **small_masks()[mask]),
        )
        for chosen, splits in ((pairs, 1), (few, 0), (few, 1), (few, 3))
    )


@pytest.mark.parametrize(
    "layout", [{}, {"keys": "paged"}, {"keys": "paged", "page_size": 1}], ids=["", "pages", "rows"]
)
def test_slabs_skip_several_blocks(layout):
    """Chunks that end inside a tile, of as many keys as the next begins with. Where O lies in the ring of K and V, the
    blocks that a slab skips need the slots that O of the tile before is in.
    """
    if not built_dims("bf16"):
        pytest.skip("no bf16 kernels were built")
    lengths = (1500, 1310, 1001, 1100, 1500, 1400)
    judge_all(
        Batch(f"head dims {d} and {dv}, softcap {softcap}", lengths, lengths, heads_q=8, heads_k=8, head_dim=d,
              head_dim_v=dv, chunk=1000, softcap=softcap, num_splits=splits, **layout)
        for d, dv in built_dims("bf16")
        for softcap in (0.0, 30.0)
        for splits in (1, 2)
    )  # fmt: skip


@pytest.mark.usefixtures("either_tile")
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_head_ratios(kernel, ratio):
    lengths = ((1, 300), (5, 129), (0, 10), (33, 200), (64, 64), (129, 257), (130, 100), (1, 2500))
    heads = {"heads_q": ratio if ratio > 16 else 2 * ratio, "heads_k": 1 if ratio > 16 else 2}
    judge_all(
        Batch(
            f"{ratio} heads of q for each of k, {mask}, {kind}",
            *zip(*chosen, strict=True),
            num_splits=splits,
            **heads,
            **on(kernel, **small_masks()[mask]),
        )
        for mask in ("full", "causal", "window", "everything")
        for kind, chosen, splits in (
            ("mixed", lengths, 1),
            ("decode", [(1, k) for _, k in lengths], 0),
            ("4 queries", [(4, k) for _, k in lengths], 2),
        )
    )


@pytest.mark.parametrize("size", [1, 31, 32, 33, 255, 256, 257, 992, 993, 4096])
def test_batch_sizes(size):
    r = random.Random(size)
    judge_all(
        main_dims(
            Batch(
                f"{size} sequences, {kind}",
                tuple(r.choice(queries) for _ in range(size)),
                tuple(r.randint(0, 200) for _ in range(size)),
                heads_q=4,
                heads_k=1,
                causal=True,
                metadata=metadata,
                num_splits=splits,
            )
        )
        for kind, queries in (("single queries", (1,)), ("mixed", (0, 1, 1, 1, 40)))
        for metadata in (False, True)
        for splits in (0, 1)
    )


def test_no_sequences():
    case = main_dims(Batch("no sequences", (), (), tail_q=4))
    made = make(case)
    judged_results(made)


def test_results_are_allocated():
    case = main_dims(Batch("out and LSE made by the call", (70, 1, 9), (70, 600, 30), tail_q=0, causal=True))
    made = make(case)
    expected = judged_results(made)
    found = attend(made, out=None, softmax_lse=None)
    require_same(case, "out and LSE made by the call", found, expected)
    only = hopper_attention.flash_attn_varlen_func(made.q, made.k, made.v, causal=True, **made.lengths)
    require_same(case, "only out", (only, expected[1]), expected)


@pytest.mark.parametrize("splits", [0, 1, 3])
def test_max_seqlen_as_tensors(splits):
    """Bounds as 0-d tensors, as transformers passes them; one on the GPU is read once."""
    case = main_dims(Batch("bounds as tensors", (70, 1, 9), (70, 600, 30), causal=True, num_splits=splits))
    made = make(case)
    expected = judged_results(made)
    for device in ("cpu", support.DEVICE):
        bounds = {name: torch.tensor(made.lengths[name], device=device) for name in ("max_seqlen_q", "max_seqlen_k")}
        require_same(case, f"bounds on {device}", attend(made, **bounds), expected)


def test_rows_of_no_sequence_never_count():
    """q has more rows than cu_seqlens_q[-1], and gaps behind seqused_q: whatever they hold, no bit changes."""
    case = main_dims(Batch("garbage in rows of no sequence", (5, 90, 1, 0, 33), (40, 90, 600, 9, 33), extra_q=7,
                           tail_q=200, causal=True, heads_q=8))  # fmt: skip
    made = make(case)
    expected = judged_results(made)
    unowned = ~batches.rows_that_count(made)
    for value in (0.0, float("inf"), 1e4):
        made.q[unowned] = value
        require_same(case, f"{value} in rows of no sequence", attend(made), expected)


def test_offsets_that_do_not_start_at_zero():
    case = main_dims(Batch("offsets from 5", (20, 3), (50, 70), causal=True))
    made = make(case)
    expected = judged_results(made)
    pad_q, pad_k = (x.new_full((5, *x.shape[1:]), float("nan")) for x in (made.q, made.k))
    pad_v = made.v.new_full((5, *made.v.shape[1:]), float("nan"))
    made.q, made.k, made.v = (torch.cat(pair) for pair in ((pad_q, made.q), (pad_k, made.k), (pad_v, made.v)))
    made.lengths["cu_seqlens_q"] = made.lengths["cu_seqlens_q"] + 5
    made.lengths["cu_seqlens_k"] = made.lengths["cu_seqlens_k"] + 5
    out, lse = attend(made)
    require_same(case, "offsets from 5", (out[5:], lse[:, 5:].contiguous()), expected)


def test_equal_lengths_are_the_dense_call():
    """The same gates, and the same bits where both calls use the same tile."""
    for causal in (False, True):
        case = main_dims(Batch("equal lengths", (384,) * 3, (384,) * 3, causal=causal, tail_q=0, heads_q=8))
        made = make(case)
        out, lse = judged_results(made)
        q, k, v = (x[: 3 * 384].unflatten(0, (3, 384)) for x in (made.q, made.k, made.v))
        dense, dense_lse = hopper_attention.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
        difference = (dense.flatten(0, 1).float() - out.float()).abs().max()
        if float(difference) > 0.02 or not torch.allclose(dense_lse.transpose(0, 1).flatten(1), lse, atol=4e-4):
            fail(case, f"differs from the dense call by {float(difference)}")


def equal_lengths(mask: str, kernel, **options) -> Batch:
    return Batch(
        f"equal lengths, {mask}", (300,) * 6, (420,) * 6, tail_q=0, **options, **on(kernel, **small_masks()[mask])
    )


@pytest.mark.parametrize("mask", small_masks())
@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_equal_lengths_need_no_schedule(kernel, mask):
    """There are rows for nothing else, so that tiles follow from their index. With one key more in the bound there could
    be others, and a schedule shares the same tiles out, or blocks find them by their ranks: same bits, where heads of
    one ratio share none.
    """
    case = equal_lengths(mask, kernel, heads_q=3, heads_k=3)
    assert "schedule   none: there are as many rows" in plan_of(case).explain()
    otherwise = plan_of(case.but(room_k=421), total_k=6 * 420).explain()
    assert ("a kernel makes it first" in otherwise) != ("ranked by the blocks themselves" in otherwise)
    made = make(case)
    expected = judged_results(made)
    require_same(case, "with another bound", attend(made, max_seqlen_k=421), expected)
    judge_all(equal_lengths(mask, kernel, heads_q=8, heads_k=2, metadata=metadata) for metadata in (False, True))


@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_a_graph_captured_with_rows_for_the_longest_serves_shorter_sequences(kernel):
    """As an engine pads a captured batch of prompts: lengths change on the device, what the host knows does not."""
    case = equal_lengths("causal", kernel, heads_q=8, heads_k=2)
    made = make(case)
    results = batches.new_results(made)
    attend(made, results)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(made, results)
    starts = {name: made.lengths[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    for lengths in (
        ((300, 0, 1, 129, 300, 7), (420, 30, 1, 129, 0, 400)),
        ((0,) * 6, (420,) * 6),
        ((9,) * 6, (9,) * 6),
    ):
        for tensor, numbers in zip(starts.values(), lengths, strict=True):
            tensor.copy_(int32(batches.offsets(numbers)))
        for x in results:
            x.fill_(7.0)
        graph.replay()
        replayed = [x.clone() for x in results]
        for x in results:
            x.fill_(7.0)
        require_same(case, f"lengths {lengths}", tuple(replayed), attend(made, results, max_seqlen_k=421))


def test_metadata_made_for_other_bounds():
    """max_seqlen_*, num_splits, softcap, sinks and LSE may differ between metadata and call."""
    if not batches.has_schedules():
        pytest.skip("no scheduler metadata on this device")
    case = main_dims(Batch("metadata for other bounds", (1, 5, 200, 0), (900, 5, 300, 7), causal=True, num_splits=0))
    made = make(case)
    for bounds in ((200, 900), (1, 1), (4096, 131072)):
        for splits in (0, 1, 5):
            metadata = batches.schedule(made, max_seqlen_q=bounds[0], max_seqlen_k=bounds[1], num_splits=splits)
            assert metadata.shape == (1 + 4 * 4,) and metadata.dtype == torch.int32
            judged_results(made, scheduler_metadata=metadata)


def test_metadata_in_a_buffer_of_the_caller():
    """Engines copy it into a buffer of their own, at any offset, and zero the tail."""
    if not batches.has_schedules():
        pytest.skip("no scheduler metadata on this device")
    case = main_dims(Batch("copied metadata", (1, 5, 200, 0, 3), (900, 5, 300, 7, 70), causal=True, num_splits=0))
    made = make(case)
    metadata = batches.schedule(made)
    expected = judged_results(made, scheduler_metadata=metadata)
    for offset in (0, 1, 5):
        buffer = torch.zeros(2000, dtype=torch.int32, device=support.DEVICE)
        buffer[offset : offset + len(metadata)] = metadata
        found = attend(made, scheduler_metadata=buffer[offset : offset + len(metadata)])
        require_same(case, f"metadata at offset {offset}", found, expected)
    into = torch.full_like(metadata, -1)
    returned = batches.schedule(made, out=into)
    assert returned.data_ptr() == into.data_ptr()
    if not torch.equal(into, metadata):
        fail(case, "metadata differs when it is written into a given buffer")


def test_cu_seqlens_of_the_wrong_kind_are_refused_before_anything_runs():
    case = main_dims(Batch("wrong lengths", (5, 3), (5, 3)))
    made = make(case)
    for wrong in (made.lengths["cu_seqlens_q"].long(), made.lengths["cu_seqlens_q"].float()):
        with pytest.raises((TypeError, ValueError), match="cu_seqlens_q"):
            attend(made, cu_seqlens_q=wrong)
    with pytest.raises((TypeError, ValueError), match="seqused_k"):
        attend(made, seqused_k=int32([1, 2, 3]))
    judged_results(made)
