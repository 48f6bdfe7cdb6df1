"""Softcap in tiles of many rows: a block whose rows all have scores in the range of a polynomial takes that, others tanh
(kernels/cap_polynomial.h). Each has to be right up to the ends of its range, and which rows a warp goes by must not
depend on memory that no query is in.
"""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
from gpu import support  # noqa: E402
from gpu.support import MAIN, Case, attend, judge_tensors, make_inputs, with_scores  # noqa: E402

pytestmark = pytest.mark.gpu

CAPS = (15.0, 21.0, 30.0, 50.0, 80.0)  # for 15 the wide polynomial alone
AROUND_THE_RANGES = (0.0, 0.5, 7.5, 7.875, 8.0, 11.25, 11.5, 13.0, 18.5, 19.5, 26.0, 26.5, 37.0, 43.25, 44.0, 200.0)


def of(kernel: tuple[str, tuple[int, int]]) -> dict[str, object]:
    dtype, (head_dim, head_dim_v) = kernel
    return {"dtype": dtype, "head_dim": head_dim, "head_dim_v": head_dim_v, "scale": 1.0}


@pytest.mark.parametrize("kernel", MAIN, ids=str)
def test_equal_scores_around_the_ranges(kernel):
    """All keys have the same score, so that the LSE shows the whole error of the form that was taken; then each row has
    another score, so that warps go by their largest and smallest.
    """
    scores = [sign * s for s in AROUND_THE_RANGES for sign in (1, -1)]
    for cap in CAPS:
        case = Case(f"softcap {cap}", 130, 700, softcap=cap, **of(kernel))
        keys = torch.zeros(case.seqlen_k)
        for score in scores:
            rows = torch.full((case.seqlen_q,), score)
            judge_tensors(
                dataclasses.replace(case, why=f"softcap {cap}, scores of {score}"), with_scores(case, rows, keys)
            )
        rows = torch.tensor(scores).repeat(case.seqlen_q)[: case.seqlen_q]
        judge_tensors(
            dataclasses.replace(case, why=f"softcap {cap}, rows with other scores"), with_scores(case, rows, keys)
        )


@pytest.mark.parametrize("kernel", MAIN, ids=str)
@pytest.mark.parametrize("place", [0, -1])
def test_many_keys_below_the_range(place, kernel):
    """One key with the largest score among many far below, where a polynomial is wrong: what that changes has to weigh
    nothing. All keys in one tile.
    """
    for cap in CAPS:
        for largest, others in (
            (-3.0, -19.0), (0.0, -20.0), (4.0, -12.0), (7.5, -8.0), (4.5, -11.5), (11.0, -40.0), (-14.0, -60.0),
            (20.0, -30.0), (35.0, -26.0), (12.0, -120.0),
        ):  # fmt: skip
            case = Case(f"softcap {cap}, one score of {largest}, others {others}", 100, 4000, batch=1, heads_q=2,
                        softcap=cap, **of(kernel))  # fmt: skip
            keys = torch.full((case.seqlen_k,), others)
            keys[place] = largest
            judge_tensors(case, with_scores(case, torch.zeros(case.seqlen_q), keys), num_splits=1)


@pytest.mark.parametrize("kernel", MAIN, ids=str)
@pytest.mark.parametrize("level", [-9.0, 0.0, 6.0], ids=["below 0", "around 0", "above 0"])
def test_a_larger_score_in_a_later_block(level, kernel):
    """A maximum moves only if a block has a score that exceeds it by 5 exponents of 2, 3.47: steps below and above that,
    some of them in one row of a warp alone, from the last block to the first, and negative maxima in all blocks.
    """
    for cap in CAPS:
        for step in (0.5, 3.3, 3.45, 3.5, 3.7, 6.0, 11.0, 30.0):
            case = Case(f"softcap {cap}, from {level} up by {step}", 130, 900, batch=1, heads_q=2, softcap=cap,
                        **of(kernel))  # fmt: skip
            keys = torch.full((case.seqlen_k,), level)
            keys[5] += step
            for rows in (torch.zeros(case.seqlen_q), torch.where(torch.arange(case.seqlen_q) % 16 == 3, 0.0, -20.0)):
                judge_tensors(case, with_scores(case, rows, keys), num_splits=1)


@pytest.mark.parametrize("kernel", MAIN, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_rows_of_any_size(causal, kernel):
    """Random scores whose size changes from row to row and along the keys."""
    for cap in CAPS:
        case = Case(f"softcap {cap}", 400, 900, causal=causal, softcap=cap, **{**of(kernel), "scale": None})
        tensors = make_inputs(case)
        sizes = torch.linspace(0, 12 if case.dtype == "bf16" else 2, case.seqlen_q, device=support.DEVICE)
        along = torch.linspace(0.2, 2, case.seqlen_k, device=support.DEVICE)
        tensors["q"] = (tensors["q"] * sizes[torch.randperm(case.seqlen_q)][:, None, None]).to(tensors["q"].dtype)
        tensors["k"] = (tensors["k"] * along[:, None, None]).to(tensors["k"].dtype)
        judge_tensors(case, tensors)


@pytest.mark.parametrize("kernel", MAIN, ids=str)
@pytest.mark.parametrize("cap", [5.0, 15.0, 50.0], ids=["no polynomial", "the wide one", "both"])
def test_infinite_scores(cap, kernel):
    """tanh of an infinite score is 1 or -1: in blocks with and without a mask, also where all scores of a row are -inf, or
    those of all rows in a block behind others.
    """
    for causal in (False, True):
        case = Case(
            "infinite scores", 300, 700, batch=1, heads_q=6, heads_k=3, causal=causal, softcap=cap, **of(kernel)
        )
        tensors = make_inputs(case)
        q, k, v = (tensors[name] for name in ("q", "k", "v"))
        q.zero_()[..., 0] = 1
        k.zero_()[..., 0] = 1
        q[:, 7, :4, 0] = -1
        k[:, ::2, 0, 0] = float("inf")  # head 0: row 7 has -inf in every other place, and all others inf
        k[:, :, 1, 0] = float("inf")  # head 1: row 7 has nothing but -inf
        k[:, :350, 2, 0] = float("-inf")  # head 2: no row has anything else in the left half
        out, lse = attend(case, tensors, num_splits=1)
        of_heads = k[0, :, :, 0].double().repeat_interleave(2, dim=1)
        scores = cap * torch.tanh(torch.einsum("qh,kh->hqk", q[0, :, :, 0].double(), of_heads) / cap)
        if causal:
            hidden = torch.ones(300, 700, dtype=torch.bool, device=q.device).triu(700 - 300 + 1)
            scores.masked_fill_(hidden, float("-inf"))
        torch.testing.assert_close(lse[0].double(), scores.logsumexp(-1), atol=3e-4, rtol=0)
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[0].double().repeat_interleave(2, dim=1))
        torch.testing.assert_close(out[0].double(), expected, atol=0.02, rtol=0)


@pytest.mark.parametrize("kernel", MAIN, ids=str)
@pytest.mark.parametrize("size", [1.0, 8.0, -1.0], ids=["small scores", "large scores", "scores below 0"])
@pytest.mark.parametrize("heads", [2, 3], ids=["two heads in a tile", "three, which leave a row"])
def test_rows_without_a_query(heads, size, kernel):
    """Rows behind the end of a sequence are of the next one, or of a tile before: no bit depends on them, whatever form
    the warp takes.
    """
    dtype, (head_dim, head_dim_v) = kernel
    torch.manual_seed(0)
    lengths = torch.tensor([0, 70, 140], dtype=torch.int32, device=support.DEVICE)
    keys = torch.tensor([0, 700, 1400], dtype=torch.int32, device=support.DEVICE)
    make = {"dtype": support.DTYPES[dtype], "device": support.DEVICE}
    q = torch.randn(140, heads, head_dim, **make) * size
    k, v = torch.randn(1400, 1, head_dim, **make), torch.randn(1400, 1, head_dim_v, **make)
    if size < 0:
        q[..., 0], k[..., 0] = -30, 4

    def first(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = hopper_attention.flash_attn_varlen_func(
            q, k, v, lengths, keys, 70, 700, softcap=50.0, return_attn_probs=True
        )
        return out[:70].clone(), lse[:, :70].clone()

    expected = first(q)
    for other in (200.0, float("nan"), float("inf")):
        changed = q.clone()
        changed[70:] = other
        assert all(torch.equal(a, b) for a, b in zip(first(changed), expected, strict=True)), f"next one is {other}"
        assert all(torch.equal(a, b) for a, b in zip(first(q), expected, strict=True)), f"the call before had {other}"
