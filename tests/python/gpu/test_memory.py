"""Where tensors lie, and what lies around them, never changes a bit of the result; nothing else is written."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
from gpu import support  # noqa: E402
from gpu.layouts import LAYOUTS, PACKED, PoisonedOut, out_strides  # noqa: E402
from gpu.support import (  # noqa: E402
    MAIN,
    Case,
    attend,
    fail,
    main_dims,
    make_inputs,
    require_same,
    require_unchanged,
    same_bits,
    snapshot,
    verdict,
)
from hopper_attention.testing import gates  # noqa: E402

pytestmark = pytest.mark.gpu

SHAPES = [
    Case("ragged", 200, 333, heads_q=6, heads_k=3),
    Case("ragged causal", 300, 200, heads_q=6, heads_k=2, causal=True, sinks="fp32"),
    Case("packed heads", 3, 500, heads_q=8, heads_k=1, causal=True),
    Case("one row, one head, batch 1", 1, 130, batch=1, heads_q=1, heads_k=1),
    Case("one key", 70, 1, batch=1, heads_q=2, heads_k=1),
    Case("a padded head dim", 150, 260, head_dim=72, window=(60, 9)),
    Case("fp16", 129, 129, heads_q=3, heads_k=3, dtype="fp16", chunk=64),
]


def available(case: Case) -> Case:
    return case if support.supported(*case.dims, case.dtype) else main_dims(case)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", SHAPES, ids=lambda c: c.why)
def test_strided_inputs_equal_the_contiguous_copy(case, layout):
    case = available(case)
    tensors = make_inputs(case)
    expected = attend(case, tensors)
    assert verdict(case, tensors, *expected), case.line()
    views = LAYOUTS[layout](tensors)
    before = snapshot(views)
    require_same(case, layout, attend(case, views), expected)
    require_unchanged(case, views, before)


@pytest.mark.parametrize("layout", PACKED)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_qkv_equals_the_contiguous_copy(layout, causal):
    case = main_dims(Case(layout, 260, 260, heads_q=4, heads_k=4, causal=causal))
    tensors = make_inputs(case)
    require_same(case, layout, attend(case, PACKED[layout](tensors)), attend(case, tensors))


@pytest.mark.parametrize("case", SHAPES, ids=lambda c: c.why)
def test_out_with_any_strides_inside_poisoned_memory(case):
    case = available(case)
    tensors = make_inputs(case)
    expected = attend(case, tensors)
    shape = tuple(expected[0].shape)
    lse_size = expected[1].numel()
    for name, (strides, offset) in out_strides(shape).items():
        place = PoisonedOut(shape, strides, expected[0].dtype, support.DEVICE, offset)
        lse_memory = torch.full((lse_size + 66,), 777.25, device=support.DEVICE)
        lse = lse_memory[33 : 33 + lse_size].view(expected[1].shape)
        out, returned = attend(case, tensors, out=place.out, softmax_lse=lse)
        if out is not place.out or returned is not lse:
            fail(case, f"{name}: given results were not returned")
        require_same(case, f"out with strides: {name}", (out, lse), expected)
        if place.touched_outside() or place.untouched_inside():
            fail(case, f"{name}: {place.touched_outside()} elements written outside out, "
                       f"{place.untouched_inside()} not written inside")  # fmt: skip
        if not bool((lse_memory[:33] == 777.25).all() and (lse_memory[33 + lse_size :] == 777.25).all()):
            fail(case, f"{name}: memory beside softmax_lse was written")


def test_a_given_lse_is_filled_when_it_is_not_returned():
    case = main_dims(Case("softmax_lse given", 130, 200, causal=True))
    tensors = make_inputs(case)
    out, expected = attend(case, tensors)
    lse = torch.full_like(expected, float("nan"))
    only_out = hopper_attention.flash_attn_func(
        tensors["q"], tensors["k"], tensors["v"], softmax_lse=lse, **case.options
    )
    require_same(case, "softmax_lse given", (only_out, lse), (out, expected))
    without = hopper_attention.flash_attn_func(tensors["q"], tensors["k"], tensors["v"], **case.options)
    require_same(case, "without softmax_lse", (without, expected), (out, expected))


def tiles_of(case: Case) -> list[slice]:
    """The queries of each tile, from the plan: the first tile has the slabs that are left over."""
    plan = hopper_attention.plan(
        dtype=support.DTYPES[case.dtype],
        head_dim=case.dims[0],
        head_dim_v=case.dims[1],
        causal=case.causal,
        window_size=case.window,
        attention_chunk=case.chunk,
        softcap=case.softcap,
        sinks=bool(case.sinks),
        batch=case.batch,
        max_seqlen_q=case.seqlen_q,
        max_seqlen_k=case.seqlen_k,
        heads_q=case.heads_q,
        heads_kv=case.heads_k,
        num_splits=1,
    )
    slab = min(plan.tile.rows, 64)
    slabs, queries = plan.tile.rows // slab, slab // plan.packed_heads
    count = math.ceil(case.seqlen_q / queries)
    ends = [*range(count, 0, -slabs), 0][::-1]  # in slabs, from the last tile, which is full
    return [slice(a * queries, min(b * queries, case.seqlen_q)) for a, b in itertools.pairwise(ends)]


POISONED = [
    Case("causal, keys right of the first tiles", 500, 777, causal=True),
    Case("causal, equal lengths", 640, 640, causal=True),
    Case("causal, packed heads", 70, 600, batch=40, heads_q=16, heads_k=2, causal=True),  # SMs have several tiles
    Case("window, keys on both sides", 600, 900, window=(100, 30)),
    Case("window that cuts a block on the left", 130, 1000, window=(100, 0)),
    Case("window of one key", 300, 450, window=(0, 0)),
    Case("chunks that no tile divides", 500, 900, chunk=200),
    Case("causal chunks", 500, 900, chunk=200, causal=True),
    Case("softcap in a window", 600, 900, window=(100, 30), softcap=5.0, sinks="fp32"),
    Case("softcap, scores in the range of the polynomial", 500, 900, causal=True, softcap=50.0),
    Case("more queries than keys", 700, 300, causal=True),
    Case("decode in a window", 1, 2000, window=(300, 0), causal=True, heads_q=8, heads_k=1),
]


@pytest.mark.parametrize("kernel", MAIN, ids=str)
@pytest.mark.parametrize("case", POISONED, ids=lambda c: c.why)
def test_keys_that_a_tile_cannot_see_never_reach_it(case, kernel):
    """For each tile: garbage in every row of K and V outside the union of its rows' keys, its rows keep their bits."""
    dtype, (head_dim, head_dim_v) = kernel
    case = dataclasses.replace(case, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v)
    tensors = make_inputs(case)
    clean_out, clean_lse = attend(case, tensors)
    assert verdict(case, tensors, clean_out, clean_lse), case.line()
    begin, end = gates.visible_intervals(
        case.seqlen_q, case.seqlen_k, causal=case.causal, window_size=case.window, attention_chunk=case.chunk
    )
    hidden_somewhere = False
    for rows in tiles_of(case):
        seen = end[rows] > begin[rows]
        low, high = (int(begin[rows][seen].min()), int(end[rows][seen].max())) if bool(seen.any()) else (0, 0)
        hidden_somewhere |= low > 0 or high < case.seqlen_k
        for garbage in (float("nan"), float("inf"), -3e4):
            poisoned = {name: x.clone() if name in "kv" else x for name, x in tensors.items()}
            for name in ("k", "v"):
                poisoned[name][:, :low] = garbage
                poisoned[name][:, high:] = garbage
            out = torch.full_like(clean_out, float("nan"))
            lse = torch.full_like(clean_lse, float("nan"))
            attend(case, poisoned, out=out, softmax_lse=lse)
            if not same_bits(out[:, rows], clean_out[:, rows]) or not same_bits(lse[:, :, rows], clean_lse[:, :, rows]):
                fail(case, f"rows {rows.start} to {rows.stop - 1} see keys {low} to {high - 1} only, but {garbage} "
                           "in the other keys changes them")  # fmt: skip
    assert hidden_somewhere, "the case hides no key from any tile: it tests nothing"


def test_one_sequence_never_reaches_another():
    case = main_dims(Case("garbage in the other sequences and heads", 200, 300, batch=3, causal=True))
    tensors = make_inputs(case)
    clean = attend(case, tensors)
    poisoned = {name: x.clone() if name in ("q", "k", "v") else x for name, x in tensors.items()}
    for name in ("q", "k", "v"):
        poisoned[name][0] = float("nan")
        poisoned[name][2] = float("inf")
    out, lse = attend(case, poisoned)
    require_same(case, "sequence 1", (out[1], lse[1]), (clean[0][1], clean[1][1]))
    poisoned = {name: x.clone() if name in ("k", "v") else x for name, x in tensors.items()}
    poisoned["k"][:, :, 0] = float("nan")
    poisoned["v"][:, :, 0] = float("nan")
    out, lse = attend(case, poisoned)
    half = case.heads_q // case.heads_k
    require_same(case, "heads of the other K/V head", (out[:, :, half:], lse[:, half:]),
                 (clean[0][:, :, half:], clean[1][:, half:]))  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("odd", [0, 1], ids=["out by TMA", "out element by element"])
def test_offsets_beyond_32_bits(odd, causal):
    """Batch and row strides that put elements of q, k, v and out beyond 2^31 elements and 2^32 bytes."""
    case = main_dims(Case("strides beyond 2^31 elements", 150, 200, batch=2, heads_q=2, heads_k=1, causal=causal))
    span = 2**31 + 2**20
    if support.DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < 5 * 2 * span:
        pytest.skip("not enough free GPU memory for four tensors of 4 GiB")
    tensors = make_inputs(case)
    expected = attend(case, tensors)

    def far(x: torch.Tensor, extra: int = 0) -> torch.Tensor:
        b, s, h, d = x.shape
        memory = torch.empty(span, dtype=x.dtype, device=x.device)
        view = memory.as_strided((b, s, h, d), (2**31 + 64 + extra, h * d, d, 1))
        return view.copy_(x)

    views = {**tensors, **{name: far(tensors[name]) for name in ("q", "k", "v")}}
    out = far(torch.zeros_like(expected[0]), odd)
    found = attend(case, views, out=out)
    require_same(case, "batch strides beyond 2^31 elements", found, expected)
    del views, out, found
    rows = 2**31 // case.seqlen_k // 64 * 64 + 64  # the last rows lie beyond 2^31 elements
    memory = torch.empty(rows * case.seqlen_k + 2**20, dtype=tensors["k"].dtype, device=tensors["k"].device)
    one = dataclasses.replace(case, batch=1, seed=1)
    tensors = make_inputs(one)
    b, s, h, d = tensors["k"].shape
    k = memory.as_strided((b, s, h, d), (0, rows, d, 1)).copy_(tensors["k"])
    require_same(one, "row stride of k beyond", attend(one, {**tensors, "k": k}), attend(one, tensors))
