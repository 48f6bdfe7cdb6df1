"""A chunk of one sequence whose keys its call does not know: the schedule cuts its tiles each by itself."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gpu import batches  # noqa: E402
from gpu.batches import Batch, attend, judge_all, judged_results, main_dims, make, require_same  # noqa: E402
from gpu.fixed_splits import plan_of  # noqa: E402
from gpu.support import MAIN  # noqa: E402
from gpu.test_grid import name_of, on  # noqa: E402

pytestmark = pytest.mark.gpu

EVEN = 1 << 30  # of the first fact
CHUNKS = {  # queries, keys, heads
    "three parts": (325, 2874, 16, 2),
    "two parts": (308, 7804, 20, 20),
    "two parts of rising tiles": (1411, 5649, 8, 8),
    "whole": (151, 924, 64, 8),
    "a fresh prompt": (1063, 1403, 8, 4),
    "fewer keys than queries": (500, 90, 8, 1),
    "no keys": (100, 0, 8, 1),
}
CUT = "three parts"
CUT_DIMS = (64, 96, 128, 192, 256)  # of (192, 128) 42 tiles are in as many parts as fill the grid, whatever the keys


def chunk(name: str, **given) -> Batch:
    queries, keys, heads_q, heads_k = CHUNKS[name]
    layout = {
        "keys": "paged",
        "heads_q": heads_q,
        "heads_k": heads_k,
        "causal": True,
        "num_splits": 0,
        "metadata": True,
    }
    return main_dims(Batch(f"one chunk, {name}", (queries,), (keys,), room_k=131_072, **{**layout, **given}))


def require_cut(case: Batch) -> None:
    facts = batches.schedule(make(case))[1 + 3 * 4 :]
    assert int(facts[0]) & EVEN
    assert "in even parts" in plan_of(case).explain()


@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_one_chunk_whose_keys_are_not_known(kernel, name):
    """With a schedule that is given and one that the call makes, sinks, softcap, a window, pages whose keys are gathered,
    and a bound on parts.
    """
    case = chunk(name, **on(kernel))
    if name == CUT and case.dims in [(d, d) for d in CUT_DIMS]:
        require_cut(case)
    judge_all([case, case.but(metadata=False), case.but(sinks="fp32", softcap=20.0), case.but(page_size=1)])
    judge_all([case.but(window=(2000, 0)), case.but(causal=False), case.but(num_splits=3)])


def test_the_same_bits_from_run_to_run():
    made = make(chunk(CUT))
    require_cut(made.batch)
    expected = judged_results(made)
    for _ in range(20):
        require_same(made.batch, "again", attend(made), expected)


def test_fewer_blocks_than_metadata_were_made_for():
    """Each takes several parts."""
    case = chunk(CUT)
    judge_all(case.but(forced=(("ctas", ctas),)) for ctas in (131, 100, 7, 1))
