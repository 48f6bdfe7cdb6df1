"""Inputs that are not finite: NaN is seen by the rows that see it and by no others, and keys with scores of -inf weigh
nothing, wherever they lie.
"""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from gpu import support  # noqa: E402
from gpu.support import MAIN, Case, attend, fail, main_dims, make_inputs  # noqa: E402
from gpu.test_grid import name_of  # noqa: E402

pytestmark = pytest.mark.gpu

NAN, INF = float("nan"), float("inf")


def exact(case: Case, t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a causal or full call in float64, with infinities and NaN as they come."""
    ratio = case.heads_q // case.heads_k
    scale = case.dims[0] ** -0.5 if case.scale is None else case.scale
    q, k, v = (t[name].double().transpose(1, 2) for name in "qkv")
    k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
    scores = q @ k.transpose(2, 3) * scale
    if case.causal:
        queries, keys = (torch.arange(n, device=q.device) for n in (case.seqlen_q, case.seqlen_k))
        scores.masked_fill_(keys > queries[:, None] + case.seqlen_k - case.seqlen_q, -INF)
    if t["s_aux"] is not None:
        sinks = t["s_aux"].double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
        v = torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)
    top = scores.amax(-1, keepdim=True)  # NaN if there is one
    weights = torch.exp(scores - torch.where(top == -INF, 0.0, top))
    total = weights.sum(-1, keepdim=True)
    out = weights @ v / torch.where(total == 0, 1.0, total)
    return out.transpose(1, 2), (torch.where(top == -INF, 0.0, top) + total.log())[..., 0]


def check(case: Case, t: dict[str, torch.Tensor]) -> None:
    num_splits = 0 if "cluster" in dict(case.forced) else 1  # as forced; 1 would refuse
    found, wanted = attend(case, t, num_splits=num_splits), exact(case, t)
    for name, x, y in zip(("out", "lse"), found, wanted, strict=True):
        x = x.double()
        if not torch.equal(x.isnan(), y.isnan()):
            fail(case, f"{name}: {int(x.isnan().sum())} NaN, {int(y.isnan().sum())} expected")
        if not torch.equal(x == INF, y == INF) or not torch.equal(x == -INF, y == -INF):
            fail(case, f"{name}: {int(x.isinf().sum())} infinite, {int(y.isinf().sum())} expected")
        known = y.isfinite()
        far = (x[known] - y[known]).abs() > 0.02 + 0.02 * y[known].abs()
        if bool(far.any()):
            fail(case, f"{name}: {int(far.sum())} values are wrong")


def a_nan_query(case: Case, t: dict[str, torch.Tensor]) -> None:
    t["q"][0, case.seqlen_q // 2, 1, 5] = NAN
    t["q"][1, -1] = NAN


def a_nan_key(case: Case, t: dict[str, torch.Tensor]) -> None:
    t["k"][0, case.seqlen_k - case.seqlen_q // 2 - 1, 0, 3] = NAN
    t["k"][1, 0, 1] = NAN


def last_keys_of_minus_infinity(case: Case, t: dict[str, torch.Tensor]) -> None:
    """They are the first that a tile computes, so that rows have no maximum for a while."""
    t["q"][..., 0] = t["q"][..., 0].abs() + 1
    t["k"][:, -case.seqlen_k // 2 :, :, 0] = -INF


def scores_of_minus_infinity_alone(case: Case, t: dict[str, torch.Tensor]) -> None:
    """As if the head saw no key."""
    t["q"][..., 0] = t["q"][..., 0].abs() + 1
    t["k"][0, :, 1, 0] = -INF


INPUTS = [a_nan_query, a_nan_key, last_keys_of_minus_infinity, scores_of_minus_infinity_alone]
WAYS = {
    "16 rows": (2, 1900, 2, ()),
    "16 rows, a cluster": (2, 1900, 2, (("cluster", 4),)),
    "16 rows, parts": (2, 5000, 2, (("num_splits", 3),)),
    "64 rows": (20, 1900, 2, ()),
    "64 rows, a cluster": (12, 1900, 2, (("cluster", 2),)),
    "many rows": (900, 1000, 8, ()),
    "many rows, parts": (333, 5000, 2, (("num_splits", 3),)),
}


@pytest.mark.parametrize("spoil", INPUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_what_is_not_finite(kernel, way, spoil):
    dtype, (head_dim, head_dim_v) = kernel
    queries, keys, heads, forced = WAYS[way]
    case = main_dims(Case(way, queries, keys, heads_q=2 * heads, heads_k=heads, dtype=dtype, head_dim=head_dim,
                          head_dim_v=head_dim_v, forced=forced))  # fmt: skip
    for causal in (False, True):
        for sinks, scale in (("", None), ("fp32", None), ("", 3.0)):  # 3: exponents of 2 reach beyond scores
            here = dataclasses.replace(case, causal=causal, sinks=sinks, scale=scale)
            tensors = make_inputs(here)
            spoil(here, tensors)
            check(here, tensors)


def test_the_reference_agrees():
    """The float64 formula of this file and the library's on the same inputs, so that one does not excuse the other."""
    device, support.DEVICE = support.DEVICE, "cpu"
    try:
        for spoil in INPUTS:
            case = Case("reference", 20, 90, head_dim=64, causal=True, sinks="fp32")
            tensors = make_inputs(case)
            spoil(case, tensors)
            check(case, tensors)
    finally:
        support.DEVICE = device
