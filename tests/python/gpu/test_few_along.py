"""Steps that seem to be prompts alone, or have few sequences of few queries: one kernel for many queries takes all."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gpu.batches import Batch, judge_all, judged_results, main_dims, make, require_same  # noqa: E402
from gpu.few_sequences import require_graph_serves, require_same_again  # noqa: E402
from gpu.fixed_splits import plan_of  # noqa: E402
from gpu.support import MAIN  # noqa: E402
from gpu.test_grid import name_of, on  # noqa: E402
from gpu.test_ranked_tiles import several  # noqa: E402

pytestmark = pytest.mark.gpu

APART = ((64, 64), (128, 128), (192, 192), (256, 256))  # head dims of which a kernel computes tiles of few rows apart
STEPS = {  # (queries, keys)
    "prompts alone": ((37, 37), (90, 90), (250, 250), (480, 480), (640, 640)),
    "beside a short one": ((300, 300), (500, 500), (1, 90)),
    "beside a long one, and one without keys": ((300, 300), (500, 900), (1, 12_000), (1, 0)),
    "chunks of long prompts": ((200, 5000), (150, 9000), (100, 700)),
    "chunks and drafts": ((256, 4000), (3, 6000), (2, 300), (90, 2000)),
    "nobody has keys": ((200, 0), (100, 0), (1, 0)),
}
HEADS = ((16, 2), (16, 8), (8, 1))


def step(why: str, **given) -> Batch:
    """With an engine's bound on keys, what a page table has room for."""
    layout = {"keys": "paged", "page_size": 16, "causal": True, "num_splits": 0, "metadata": True}
    return main_dims(several(why, STEPS[why], **{**layout, **given}).but(room_k=131_072))


def takes_along(case: Batch) -> bool:
    text = plan_of(case, max_seqlen_q=max(case.q_lengths) + case.slack).explain()
    return "seem to" in text and "decode kernel" not in text


@pytest.mark.parametrize("why", STEPS)
@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_one_kernel_takes_all(kernel, why):
    """With a schedule that is given and one that the call makes, sinks, softcap, a window and pages of gathered keys."""
    for heads_q, heads_k in HEADS:
        case = step(why, heads_q=heads_q, heads_k=heads_k, **on(kernel))
        assert case.dims in APART or takes_along(case)
        judge_all([case, case.but(metadata=False), case.but(sinks="fp32", softcap=20.0), case.but(page_size=1)])
        judge_all([case.but(window=(700, 0)), case.but(causal=False), case.but(extra_q=31)])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_tiles_of_head_dims_that_have_a_kernel_for_both(head_dim):
    """More of them than that kernel is for, also beside a single query on many keys, which is cut."""
    prompts = tuple((n, n) for n in (1200, 700, 600, 1500))
    for more in ((), ((1, 14_000),), ((1, 0), (2, 3000))):
        case = several("more tiles", (*prompts, *more), head_dim=head_dim, heads_q=32, heads_k=8, num_splits=0)
        case = main_dims(case.but(keys="paged", page_size=16, causal=True, room_k=131_072))
        assert case.dims not in APART or takes_along(case)
        judge_all([case, case.but(metadata=True), case.but(metadata=True, softcap=30.0)])
        require_same_again(case)


@pytest.mark.parametrize("why", STEPS)
@pytest.mark.parametrize("head_dim", [96, 192, 256])
def test_the_same_bits_from_run_to_run_and_in_any_pages(head_dim, why):
    case = step(why, head_dim=head_dim, heads_q=16, heads_k=2, metadata=False)
    require_same_again(case)
    expected = judged_results(make(case))
    for page_size in (1, 24, 64):
        require_same(case, f"pages of {page_size}", judged_results(make(case.but(page_size=page_size))), expected)


@pytest.mark.parametrize(("head_dim", "heads_q"), [(128, 32), (256, 16)])
def test_a_graph_serves_other_lengths(head_dim, heads_q):
    """Captured for prompts, replayed with single queries on long keys, one prompt beside others, and nothing."""
    lengths = {"q_lengths": (900,) * 5, "k_lengths": (9000,) * 5, "slack": 700}
    case = step("prompts alone", head_dim=head_dim, heads_q=heads_q, heads_k=8, metadata=False).but(**lengths)
    assert case.dims[0] != head_dim or takes_along(case)
    require_graph_serves(case, [
        ((900, 9000),) * 5,
        ((1, 9000), (1, 10), (0, 0), (2, 400), (1, 8000)),
        ((1496, 1500), *(((1, 9000),) * 4)),
        ((500, 500), (1, 9000), (900, 900), (1, 0), (98, 98)),
        ((0, 0),) * 5,
    ])  # fmt: skip
