"""A seeded random run: sizes, masks, options and inputs in combinations that nobody thought of."""

from __future__ import annotations

import os
import random

import pytest

torch = pytest.importorskip("torch")

from gpu.support import INPUT_KINDS, MAIN, WORST, Case, built_dims, judge_all  # noqa: E402

pytestmark = pytest.mark.gpu

CASES = int(os.environ.get("HOPPER_ATTENTION_RANDOM_CASES", "1000"))
PARTS = 4
MOST_SCORES = 1 << 24  # batch * heads * queries * keys of one case
EDGES = (1, 2, 31, 63, 64, 65, 127, 128, 129, 176, 191, 192, 193, 255, 256, 257)


def random_case(seed: int) -> Case:
    """The case of a seed; the same on every machine with the same kernels."""
    r = random.Random(seed)

    def length() -> int:
        return r.choice([r.choice(EDGES), r.randint(1, 400), r.randint(1, 400), r.randint(400, 2500)])

    dtype = r.choice(sorted({dtype for dtype, _ in MAIN}))
    head_dim, head_dim_v = r.choice(built_dims(dtype))
    heads_k = r.choice([1, 1, 2, 3])
    heads_q = heads_k * r.choice([1, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
    q, k = length(), length()
    window = r.choice([(-1, -1), (-1, -1), (r.randint(0, 300), r.randint(0, 300)), (r.randint(0, 300), -1)])
    window = r.choice([window, window, (-1, r.randint(0, 300)), (r.randint(0, 2000), 0)])
    case = Case(
        f"random {seed}",
        q,
        k,
        batch=max(1, min(r.randint(1, 5), MOST_SCORES // (heads_q * q * k))),
        heads_q=heads_q,
        heads_k=heads_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        causal=r.random() < 0.5,
        window=window if r.random() < 0.5 else (-1, -1),
        chunk=r.choice([0, 0, 0, r.randint(1, 600), 128]),
        softcap=r.choice([0.0, 0.0, 0.0, round(r.uniform(0.5, 80.0), 3)]),
        sinks=r.choice(["", "", "fp32", "bf16", "fp16"]),
        scale=r.choice([None, None, None, round(r.uniform(0.01, 0.5 if dtype == "bf16" else 0.15), 4)]),
        inputs=r.choice(["normal"] * 6 + INPUT_KINDS),
        seed=seed,
        forced=r.choice([(), (), (), (("ctas", r.randint(1, 8)),), (("packed_heads", 1),)]),
    )
    return case.with_enough_rows()


@pytest.mark.parametrize("part", range(PARTS))
def test_random_cases(part):
    WORST.random += judge_all(random_case(seed) for seed in range(part, CASES, PARTS))
