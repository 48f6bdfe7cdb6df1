"""Softcap in tiles of many rows: a block whose rows all have scores in the range of a polynomial takes that, others tanh
(kernels/cap_polynomial.h). Either has to be right up to the ends of its range, and which rows a warp goes by must not
depend on memory that no query is in.
"""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
from gpu import support  # noqa: E402
from gpu.support import MAIN, Case, attend, make_inputs, verdict  # noqa: E402

pytestmark = pytest.mark.gpu

CAPS = (21.0, 30.0, 50.0, 80.0)
AROUND_THE_RANGE = (0.0, 0.5, 7.5, 7.875, 8.0, 11.25, 11.5, 18.75, 19.0, 30.0, 200.0)


def of(kernel: tuple[str, tuple[int, int]]) -> dict[str, object]:
    dtype, (head_dim, head_dim_v) = kernel
    return {"dtype": dtype, "head_dim": head_dim, "head_dim_v": head_dim_v, "scale": 1.0}


def with_scores(case: Case, of_row: torch.Tensor, of_key: torch.Tensor) -> dict[str, object]:
    """Inputs of a case in which the score of row i and key j is of_row[i] + of_key[j]."""
    tensors = make_inputs(case)
    q, k = torch.zeros_like(tensors["q"]), torch.zeros_like(tensors["k"])
    q[..., 0], k[..., 0] = of_row[:, None].to(q), 1
    q[..., 1], k[..., 1] = 1, of_key[:, None].to(k)
    return {**tensors, "q": q, "k": k}


def judge(case: Case, tensors: dict[str, object]) -> None:
    result = verdict(case, tensors, *attend(case, tensors))
    assert result, f"{case.why}: {result.message}"
    support.WORST.add(result, case)


@pytest.mark.parametrize("kernel", MAIN, ids=str)
def test_equal_scores_around_the_range(kernel):
    """All keys have the same score, so that the LSE shows the whole error of the form that was taken; then each row has
    another score, so that warps go by their largest and smallest.
    """
    scores = [sign * s for s in AROUND_THE_RANGE for sign in (1, -1)]
    for cap in CAPS:
        case = Case(f"softcap {cap}", 130, 700, softcap=cap, **of(kernel))
        keys = torch.zeros(case.seqlen_k)
        for score in scores:
            rows = torch.full((case.seqlen_q,), score)
            judge(dataclasses.replace(case, why=f"softcap {cap}, scores of {score}"), with_scores(case, rows, keys))
        rows = torch.tensor(scores).repeat(case.seqlen_q)[: case.seqlen_q]
        judge(dataclasses.replace(case, why=f"softcap {cap}, rows with other scores"), with_scores(case, rows, keys))


@pytest.mark.parametrize("kernel", MAIN, ids=str)
@pytest.mark.parametrize("place", [0, -1])
def test_many_keys_below_the_range(place, kernel):
    """One key with the largest score among many far below: the polynomial is wrong there, where they weigh nothing."""
    for cap in CAPS:
        for largest, others in ((-3.0, -19.0), (0.0, -20.0), (4.0, -12.0), (7.5, -8.0), (4.5, -11.5), (11.0, -40.0)):
            case = Case(f"softcap {cap}, one score of {largest}, others {others}", 100, 4000, batch=1, heads_q=2,
                        softcap=cap, **of(kernel))  # fmt: skip
            keys = torch.full((case.seqlen_k,), others)
            keys[place] = largest
            judge(case, with_scores(case, torch.zeros(case.seqlen_q), keys))


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
        judge(case, tensors)


@pytest.mark.parametrize("kernel", MAIN, ids=str)
def test_infinite_scores(kernel):
    """tanh of an infinite score is 1 or -1: in blocks with and without a mask, also where all scores of a row are -inf."""
    for causal in (False, True):
        case = Case("infinite scores", 300, 700, batch=1, causal=causal, softcap=50.0, **of(kernel))
        tensors = make_inputs(case)
        q, k, v = (tensors[name] for name in ("q", "k", "v"))
        q.zero_()[..., 0] = 1
        k.zero_()[..., 0] = 1
        q[:, 7, :, 0] = -1
        k[:, ::2, 0, 0] = float("inf")  # head 0: row 7 has -inf in every other place, and all others inf
        k[:, :, 1, 0] = float("inf")  # head 1: row 7 has nothing but -inf
        out, lse = attend(case, tensors)
        of_heads = k[0, :, :, 0].double().repeat_interleave(2, dim=1)
        scores = 50 * torch.tanh(torch.einsum("qh,kh->hqk", q[0, :, :, 0].double(), of_heads) / 50)
        if causal:
            hidden = torch.ones(300, 700, dtype=torch.bool, device=q.device).triu(700 - 300 + 1)
            scores.masked_fill_(hidden, float("-inf"))
        torch.testing.assert_close(lse[0].double(), scores.logsumexp(-1), atol=3e-4, rtol=0)
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[0].double().repeat_interleave(2, dim=1))
        torch.testing.assert_close(out[0].double(), expected, atol=0.02, rtol=0)


@pytest.mark.parametrize("kernel", MAIN, ids=str)
@pytest.mark.parametrize("heads", [2, 3], ids=["two heads in a tile", "three, which leave a row"])
def test_rows_without_a_query(heads, kernel):
    """Rows behind the end of a sequence are of the next one, or of a tile before: no bit depends on them."""
    dtype, (head_dim, head_dim_v) = kernel
    torch.manual_seed(0)
    lengths = torch.tensor([0, 70, 140], dtype=torch.int32, device=support.DEVICE)
    keys = torch.tensor([0, 700, 1400], dtype=torch.int32, device=support.DEVICE)
    make = {"dtype": support.DTYPES[dtype], "device": support.DEVICE}
    q = torch.randn(140, heads, head_dim, **make)
    k, v = torch.randn(1400, 1, head_dim, **make), torch.randn(1400, 1, head_dim_v, **make)

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
