"""Row maxima and sums. Kernels of many queries with head dims above 64 compare scores as integers, which are in order as
long as one of them is not negative, and in reverse order if all are (mend_negative() in kernels/softmax.h). Sizes are
such that probabilities beside a wrong maximum would overflow, or all be 0, but for one pattern.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
from gpu import support  # noqa: E402
from gpu.support import MAIN, Case, judge_tensors, with_scores  # noqa: E402

pytestmark = pytest.mark.gpu

KEYS = 700  # several blocks of every tile


def of_keys(**given: float) -> torch.Tensor:
    """Scores of keys: from `low` to `high` in no order, and `first`, `middle`, `last` for a key at that place."""
    torch.manual_seed(0)
    low, high = given.pop("low"), given.pop("high")
    scores = low + (high - low) * torch.rand(KEYS)
    places = {"first": 0, "middle": KEYS // 2, "last": KEYS - 1}
    for place, score in given.items():
        scores[places[place]] = score
    return scores


PATTERNS = {
    "all negative": of_keys(low=-400, high=-150),
    "all negative but small": of_keys(low=-0.5, high=-0.001),
    "one key of 0": of_keys(low=-400, high=-150, middle=0),
    "a positive first key, which comes last": of_keys(low=-400, high=-150, first=30),
    "a positive last key, which comes first": of_keys(low=-400, high=-150, last=30),
    "a negative key far above the others": of_keys(low=-400, high=-300, middle=-2),
    "both signs": of_keys(low=-300, high=300),
    "all positive": of_keys(low=150, high=400),
}


@pytest.mark.parametrize("kernel", MAIN, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_signs_of_scores(causal, kernel):
    """Every pattern of keys, under rows that raise all scores, lower them, or leave them as they are: the two rows of a
    thread, 8 apart, then have maxima of different sign.
    """
    dtype, (head_dim, head_dim_v) = kernel
    rows = torch.tensor([0.0, -200.0, 200.0, -1.0, 1.0]).repeat(70)[:300]
    for pattern, keys in PATTERNS.items():
        case = Case(pattern, 300, KEYS, batch=6, heads_q=8, causal=causal, scale=1.0, dtype=dtype, head_dim=head_dim,
                    head_dim_v=head_dim_v)  # fmt: skip
        judge_tensors(case, with_scores(case, rows, keys))


@pytest.mark.parametrize("kernel", MAIN, ids=str)
@pytest.mark.parametrize("place", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("queries", [1, 12, 4352])  # columns of a tile, a tile of 64 rows, of 128 and more
def test_many_small_probabilities_beside_a_large_one(queries, place, kernel):
    """40,000 keys of e^-15.5, which together are 0.7 % of a sum near 1: added one by one, each would be rounded to a
    multiple of 2^-23. The kernels of rows with head dim 64 do that (kReductions in kernels/traits.h). Each tile has all
    keys.
    """
    dtype, (head_dim, head_dim_v) = kernel
    torch.manual_seed(0)
    make = {"dtype": support.DTYPES[dtype], "device": support.DEVICE}
    heads, keys = 4, 40_000
    q = torch.zeros(1, queries, heads, head_dim, **make)
    k = torch.zeros(1, keys, 1, head_dim, **make)
    v = torch.randn(1, keys, 1, head_dim_v, **make)
    q[..., 0] = 1
    k[..., 0] = -15.5
    k[:, place] = 0
    out, lse = hopper_attention.flash_attn_func(q, k, v, softmax_scale=1.0, num_splits=1, return_attn_probs=True)
    scores = k[0, :, 0, 0].double()
    exact = scores.logsumexp(0)
    one_by_one = queries > 1 and head_dim_v <= 64
    assert float((lse.double() - exact).abs().max()) < (6e-4 if one_by_one else 2e-4)
    expected = (scores - exact).exp() @ v[0, :, 0].double()
    torch.testing.assert_close(out.double(), expected.expand(out.shape), atol=1e-3, rtol=1 / 128)
