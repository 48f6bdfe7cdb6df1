"""check_metadata names what is wrong, and says nothing of what is right."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import hopper_attention
from hopper_attention import check


def int32(*values):
    return np.array(values, np.int32)


def shaped(*shape):
    return SimpleNamespace(shape=shape)


VARLEN = {
    "q": shaped(10, 4, 64),
    "k": shaped(12, 2, 64),
    "cu_seqlens_q": int32(0, 3, 3, 9),
    "cu_seqlens_k": int32(0, 5, 5, 12),
}
PAGED = {
    "q": shaped(3, 2, 4, 64),
    "k": shaped(6, 4, 2, 64),
    "page_table": np.array([[5, 0, -7], [2147480000, 9, 9], [1, 2, 3]], np.int32),
    "seqused_k": int32(7, 0, 12),
}
CACHE = {
    "q": shaped(2, 1, 4, 64),
    "k": shaped(5, 8, 2, 64),
    "cache_seqlens": int32(8, 3),
    "cache_batch_idx": int32(4, 0),
    "cache_leftpad": int32(8, 0),
}
# Twelve keys in pages of four; the pages of the first one or two have been freed.
FREED = {
    "q": shaped(2, 1, 4, 64),
    "k": shaped(6, 4, 2, 64),
    "page_table": np.array([[-1, -1, 3, 5], [4, 2, 1, 0]], np.int32),
    "seqused_k": int32(12, 12),
}
APPEND = {
    "q": shaped(2, 2, 4, 64),
    "k": shaped(6, 4, 2, 64),
    "page_table": np.array([[0, 1, 9], [2, 4, 3]], np.int32),
    "cache_seqlens": int32(3, 7),
}
ORDER = int32(2, 0, 1)


def metadata(order=ORDER, tiles=(1, 2, 3), units=(4, 9, 10), behind=(), drawn=0, facts=(0, 0, 9, 0)):
    """Of three sequences with queries, which are few."""
    return laid_out(drawn, order, tiles, units, facts, *behind)


def laid_out(drawn, order, tiles, units, facts, *behind):
    """The counter, then arrays of 4 places."""
    return int32(
        drawn, *(x for array in (order, tiles, units, facts) for x in (*array, *[0] * (4 - len(array)))), *behind
    )


RIGHT = {
    "packed": VARLEN,
    "packed with used lengths": {**VARLEN, "seqused_q": int32(3, 0, 1), "seqused_k": int32(0, 3, 7)},
    "lengths from seqused_k may pass the next offset": {**VARLEN, "seqused_k": int32(12, 7, 2)},
    "pages, with anything in unused slots": PAGED,
    "a cache": CACHE,
    "one length for all": {**CACHE, "cache_seqlens": 8},
    "a full cache": {**CACHE, "cache_seqlens": None},
    "new keys": {
        **CACHE,
        "cache_seqlens": int32(5, 3),
        "cu_seqlens_k_new": int32(0, 3, 8),
        "cache_leftpad": None,
        "k_new": shaped(8, 2, 64),
    },
    "bounds": {**VARLEN, "max_seqlen_q": 6, "max_seqlen_k": np.int32(7)},
    "no sequence": {**VARLEN, "cu_seqlens_q": int32(0), "cu_seqlens_k": int32(0)},
    "freed pages before the window": {**FREED, "window_size": (3, 0)},
    "freed pages before the chunk": {**FREED, "causal": True, "attention_chunk": 4},
    "a window of all keys, behind padding": {**FREED, "cache_leftpad": int32(8, 0), "window_size": [12, 12]},
    "pages of padding": {**FREED, "cache_leftpad": int32(8, 0)},
    "no query": {**FREED, "cu_seqlens_q": int32(0, 0, 2), "q": shaped(2, 4, 64)},
    "a window beyond 64 bits of keys": {**PAGED, "window_size": (2**62, 2**62), "attention_chunk": 2**62},
    "freed pages that another rank's keys would need": {
        **FREED,
        "window_size": (7, 0),
        "cp_world_size": 2,
        "cp_rank": 1,
        "cp_tot_seqused_k": int32(24, 24),
    },
    "new keys beside each other in a page": {
        **APPEND,
        "seqlen_k_new": 1,
        "page_table": int32(0, 1, 9, 0, 1, 3).reshape(2, 3),
    },
    "new keys, of which k_new has the shape": {**APPEND, "k_new": shaped(2, 4, 2, 64)},
    "packed new keys, with some rows to spare": {
        **APPEND,
        "k_new": shaped(7, 2, 64),
        "cu_seqlens_k_new": int32(0, 1, 5),
    },
    "two sequences read one row": {**CACHE, "cache_batch_idx": int32(4, 4), "cache_leftpad": None},
    "two sequences of one row, of which one appends": {
        **CACHE,
        "cache_batch_idx": int32(4, 4),
        "cache_leftpad": None,
        "cache_seqlens": int32(5, 3),
        "k_new": shaped(3, 2, 64),
        "cu_seqlens_k_new": int32(0, 3, 3),
    },
    "totals of one rank": {**CACHE, "cp_tot_seqused_k": int32(0, 0)},
    "a schedule": {**PAGED, "scheduler_metadata": metadata()},
    "a schedule in a longer buffer": {**PAGED, "scheduler_metadata": metadata(behind=(0, 0, 0))},
    "a sequence without queries has no tiles": {
        **VARLEN,
        "scheduler_metadata": metadata(tiles=(1, 2, 2), units=(4, 9, 9)),
    },
    "some with few queries": {
        **VARLEN,
        "scheduler_metadata": metadata(tiles=(2, 3, 3), units=(4, 9, 9), facts=(1, 2, 5, 0)),
    },
    "longest tiles last": {
        **VARLEN,
        "scheduler_metadata": metadata(tiles=(3 + (3 << 29), 5, 5), units=(4, 9, 9), facts=(2, 2, 0, 0)),
    },
    "all with many": {**VARLEN, "scheduler_metadata": metadata(tiles=(3, 5, 5), units=(4, 9, 9), facts=(2, 2, 0, 0))},
    "made for all rows of a dense q": {
        **PAGED,
        "seqused_q": int32(0, 1, 2),
        "scheduler_metadata": metadata(tiles=(2, 4, 6), facts=(3, 9, 0, 0)),
    },
    "made for the queries of a dense q that count": {
        **PAGED,
        "seqused_q": int32(1, 1, 1),
        "scheduler_metadata": metadata(tiles=(1, 2, 3), facts=(3, 9, 0, 0)),
    },
    "a schedule does not know seqused_q": {**PAGED, "seqused_q": int32(0, 1, 2), "scheduler_metadata": metadata()},
    "prefill alone": {**PAGED, "scheduler_metadata": metadata(facts=(3, 9, 0, 0))},
    "no sequence, with a schedule": {
        **VARLEN,
        "cu_seqlens_q": int32(0),
        "cu_seqlens_k": int32(0),
        "scheduler_metadata": int32(0),
    },
    "the schedule of CPU tensors in a longer buffer": {**PAGED, "scheduler_metadata": int32(*[0] * 17, 5)},
    "offsets of new keys without new keys": {**CACHE, "cu_seqlens_k_new": int32(0, 3, 8)},
    "the schedule of CPU tensors": {**PAGED, "scheduler_metadata": np.zeros(17, np.int32)},
    "ranks": {**CACHE, "cp_world_size": 3, "cp_rank": 1, "cp_tot_seqused_k": int32(24, 10)},
}
WRONG = [
    ("cu_seqlens_q: must start with 0, found 1", VARLEN, {"cu_seqlens_q": int32(1, 3, 3, 9)}),
    ("cu_seqlens_q: of sequence 1 decreases from 3 to 2", VARLEN, {"cu_seqlens_q": int32(0, 3, 2, 9)}),
    ("cu_seqlens_q: ends at 11, past the 10 rows of q", VARLEN, {"cu_seqlens_q": int32(0, 3, 3, 11)}),
    ("cu_seqlens_q: must have 1 dim and not be empty", VARLEN, {"cu_seqlens_q": int32()}),
    ("cu_seqlens_k: must have 4 elements, found 3", VARLEN, {"cu_seqlens_k": int32(0, 5, 12)}),
    ("cu_seqlens_k: of sequence 2 decreases from 5 to 4", VARLEN, {"cu_seqlens_k": int32(0, 5, 5, 4)}),
    ("cu_seqlens_k: ends at 13, past the 12 rows of k", VARLEN, {"cu_seqlens_k": int32(0, 5, 5, 13)}),
    ("seqused_q: of sequence 2 is 7, more than 6", VARLEN, {"seqused_q": int32(3, 0, 7)}),
    ("seqused_q: of sequence 0 is -1, must not be negative .and 1 more", VARLEN, {"seqused_q": int32(-1, 0, -2)}),
    ("seqused_q: must have an element for each of 3", VARLEN, {"seqused_q": int32(1, 0)}),
    ("seqused_k: of sequence 1 is 8, more than 7", VARLEN, {"seqused_k": int32(1, 8, 1)}),
    ("seqused_k: must have 1 dim", VARLEN, {"seqused_k": np.zeros((3, 1), np.int32)}),
    ("max_seqlen_q: of sequence 2 is 5, but there are 6 queries", VARLEN, {"max_seqlen_q": 5}),
    ("max_seqlen_k: of sequence 2 is 6, but there are 7 keys", VARLEN, {"max_seqlen_k": 6}),
    ("seqused_k: is needed", PAGED, {"seqused_k": None}),
    ("seqused_k: of sequence 2 is 13, more than 12", PAGED, {"seqused_k": int32(7, 0, 13)}),
    ("page_table: slot 2 of sequence 0 is page -7, but there are 6 pages", PAGED, {"seqused_k": int32(9, 0, 12)}),
    ("page_table: slot 0 of sequence 1 is page 2147480000", PAGED, {"seqused_k": int32(7, 1, 12)}),
    ("page_table: slot 0 of sequence 1", PAGED, {"seqlen_k_new": 1, "seqused_k": int32(7, 0, 11)}),
    ("page_table: must have a row for each of 3", PAGED, {"page_table": np.zeros((2, 3), np.int32)}),
    ("cache_seqlens: of sequence 0 is 9, more than 8", CACHE, {"cache_seqlens": int32(9, 3)}),
    ("cache_seqlens: of sequence 0 is 9 with the new keys, more than 8", CACHE, {"seqlen_k_new": 1}),
    ("cache_seqlens: of sequence 1 is -3, must not be negative", CACHE, {"cache_seqlens": int32(8, -3)}),
    ("cache_seqlens: is -3, must not be negative", CACHE, {"cache_seqlens": -3}),
    ("cache_seqlens: of sequence 0 is 9, more than 8", CACHE, {"cache_seqlens": 9}),
    ("cache_batch_idx: of sequence 0 is 5, more than 4", CACHE, {"cache_batch_idx": int32(5, 0)}),
    ("cache_batch_idx: of sequence 1 is -1", CACHE, {"cache_batch_idx": int32(0, -1)}),
    ("cache_leftpad: of sequence 1 is 4, more than 3", CACHE, {"cache_leftpad": int32(8, 4)}),
    ("cu_seqlens_k_new: of sequence 1 decreases from 3 to 2", CACHE,
        {"k_new": shaped(3, 2, 64), "cu_seqlens_k_new": int32(0, 3, 2)}),
    ("cu_seqlens_k_new: must have 3 elements", CACHE,
        {"k_new": shaped(3, 2, 64), "cu_seqlens_k_new": int32(0, 3)}),
    ("rotary_seqlens: of sequence 0 is -1", CACHE, {"rotary_seqlens": int32(-1, 0)}),
    ("cp_tot_seqused_k: is needed", CACHE, {"cp_world_size": 2}),
    ("cache_seqlens: of sequence 1 is 3, more than 2, the keys of cp_tot_seqused_k on rank 1 of 2", CACHE,
        {"cp_world_size": 2, "cp_rank": 1, "cp_tot_seqused_k": int32(16, 5)}),
    ("q: must have 4 dims without cu_seqlens_q, found shape .3,", CACHE, {"q": shaped(3)}),
    ("q: must have 3 dims with cu_seqlens_q", VARLEN, {"q": shaped(3, 2, 4, 64)}),
    ("k: must have 4 dims without cu_seqlens_k", PAGED, {"k": shaped(12, 2, 64)}),
    ("page_table: slot 1 of sequence 0 is page -1, but there are 6 pages .queries see keys 7 to 11", FREED,
        {"window_size": (4, 0)}),
    ("page_table: slot 0 of sequence 0 is page -1, .* keys 0 to 11", FREED, {"causal": True}),
    ("page_table: slot 1 of sequence 0 is page -1, .* keys 7 to 11", FREED, {"cache_leftpad": int32(7, 0)}),
    ("page_table: slot 1 of sequence 0 is page -1, .* keys 4 to 11", FREED, {"attention_chunk": 8, "cache_leftpad": int32(4, 0)}),
    ("page_table: slot 2 of sequence 0 is page 9, .*queries see keys 0 to 8", APPEND,
        {"k_new": shaped(8, 2, 64), "cu_seqlens_k_new": int32(0, 6, 6)}),
    ("page_table: slot 2 of sequence 0 is page 9, .*the call appends keys 3 to 8", APPEND,
        {"q": shaped(2, 0, 4, 64), "k_new": shaped(8, 2, 64), "cu_seqlens_k_new": int32(0, 6, 6)}),
    ("page_table: key 7 of sequence 1 is appended to slot 3 of page 0, as is key 3 of sequence 0", APPEND,
        {"seqlen_k_new": 1, "page_table": int32(0, 1, 9, 2, 0, 3).reshape(2, 3)}),
    ("page_table: key 4 of sequence 0 is appended to slot 0 of page 0, as is key 0 of sequence 0", APPEND,
        {"seqlen_k_new": 5, "cache_seqlens": int32(0, 0), "page_table": int32(0, 0, 9, 2, 4, 3).reshape(2, 3)}),
    ("cache_batch_idx: of sequence 1 is 4, the row to which sequence 0 appends, too", CACHE,
        {"cache_batch_idx": int32(4, 4), "cache_seqlens": int32(5, 3), "seqlen_k_new": 2, "cache_leftpad": None}),
    ("cache_seqlens: is needed with new keys", CACHE, {"cache_seqlens": None, "seqlen_k_new": 1}),
    ("seqlen_k_new: must be at least 0, found -1", CACHE, {"seqlen_k_new": -1}),
    ("seqlen_k_new: must be 4, as in k_new, or left out, found 3", APPEND, {"k_new": shaped(2, 4, 2, 64), "seqlen_k_new": 3}),
    ("k_new: dim 0 .batch. must be 2, found shape .3, 1", APPEND, {"k_new": shaped(3, 1, 2, 64)}),
    ("k_new: must have 3 dims with cu_seqlens_k_new", APPEND,
        {"k_new": shaped(2, 4, 2, 64), "cu_seqlens_k_new": int32(0, 1, 2)}),
    ("cu_seqlens_k_new: must not be given together with seqlen_k_new, 1", APPEND,
        {"k_new": shaped(2, 2, 64), "seqlen_k_new": 1, "cu_seqlens_k_new": int32(0, 1, 2)}),
    ("cu_seqlens_k_new: ends at 5, past the 4 rows of k_new", APPEND,
        {"k_new": shaped(4, 2, 64), "cu_seqlens_k_new": int32(0, 1, 5)}),
    ("k: dim 1 .page_size. must be at least 1, found 0", PAGED, {"k": shaped(6, 0, 2, 64)}),
    ("k: dim 0 .batch. must be 2 without cache_batch_idx, found shape .5, 8", CACHE, {"cache_batch_idx": None}),
    ("seqused_k: must not be given together with cache_seqlens", CACHE, {"seqused_k": int32(8, 3)}),
    ("cu_seqlens_k: must not be given together with page_table", PAGED, {"cu_seqlens_k": int32(0, 1, 2, 3)}),
    ("cache_batch_idx: must not be given together with page_table", PAGED, {"cache_batch_idx": int32(0, 1, 2)}),
    ("cache_batch_idx: must not be given together with cu_seqlens_k", VARLEN, {"cache_batch_idx": int32(0, 1, 2)}),
    ("cp_world_size: must be 1 to 65536, found 0", CACHE, {"cp_world_size": 0}),
    ("cp_rank: must be 0 to 1 .cp_world_size - 1., found 2", CACHE, {"cp_world_size": 2, "cp_rank": 2}),
    ("cp_rank: must be 0 to 0 .cp_world_size - 1., found -1", CACHE, {"cp_rank": -1}),
    ("cp_tot_seqused_k: of sequence 1 is -2, must not be negative", CACHE,
        {"cp_world_size": 2, "cp_tot_seqused_k": int32(16, -2)}),
    ("cp_tot_seqused_k: of sequence 1 is -2, must not be negative", CACHE, {"cp_tot_seqused_k": int32(16, -2)}),
    ("window_size: must be -1 .unlimited. or at least 0 on both sides, found .-2, 0", CACHE, {"window_size": (-2, 0)}),
    ("attention_chunk: must be at least 0", CACHE, {"attention_chunk": -1}),
    ("scheduler_metadata: must have at least 17 elements for 3 sequences, found 16", PAGED,
        {"scheduler_metadata": metadata()[:-1]}),
    ("scheduler_metadata: must have 1 dim", PAGED, {"scheduler_metadata": metadata()[None]}),
    ("scheduler_metadata: place 1 has sequence 3, but there are 3", PAGED, {"scheduler_metadata": metadata((2, 3, 1))}),
    ("scheduler_metadata: place 0 has sequence -1", PAGED, {"scheduler_metadata": metadata((-1, 3, 1))}),
    ("scheduler_metadata: places 0 and 2 both have sequence 2", PAGED, {"scheduler_metadata": metadata((2, 0, 2))}),
    ("scheduler_metadata: the sum of tiles decreases from 2 to 1 at place 2", PAGED,
        {"scheduler_metadata": metadata(tiles=(1, 2, 1))}),
    ("scheduler_metadata: the sum of units decreases from 0 to -4 at place 0", PAGED,
        {"scheduler_metadata": metadata(units=(-4, 3, 4))}),
    ("scheduler_metadata: the counter of drawn items, element 0, must be 0 between calls, found 7", PAGED,
        {"scheduler_metadata": metadata(drawn=7)}),
    ("scheduler_metadata: the counter of drawn items, element 16, must be 0 between calls, found -1", PAGED,
        {"scheduler_metadata": metadata(facts=(2, 4, 9, -1))}),
    ("scheduler_metadata: 4 places are of prefill, but there are 3", PAGED,
        {"scheduler_metadata": metadata(facts=(4, 4, 9, 0))}),
    ("scheduler_metadata: 67108863 places are of prefill", PAGED, {"scheduler_metadata": metadata(facts=(-1, 4, 9, 0))}),
    ("scheduler_metadata: place 2 has 0 tiles, but its sequence, 1, has 2 queries", PAGED,
        {"scheduler_metadata": metadata(tiles=(1, 2, 2))}),
    ("scheduler_metadata: place 2 has 0 units, but its sequence, 1, has 2 queries", PAGED,
        {"scheduler_metadata": metadata(units=(4, 9, 9))}),
    ("scheduler_metadata: place 2 has 1 tiles, but its sequence, 1, has 0 queries", VARLEN,
        {"scheduler_metadata": metadata()}),
    ("scheduler_metadata: place 0 has 0 tiles, but its sequence, 1, has 1 queries", CACHE,
        {"scheduler_metadata": laid_out(0, (1, 0), (), (), ())}),
    ("scheduler_metadata: was made for other lengths: place 1 has 2 tiles, but its sequence, 0, is among those of few",
        PAGED, {"scheduler_metadata": metadata(tiles=(1, 3, 4))}),
    ("scheduler_metadata: was made for other lengths: sequence 2 with 6 queries is among those of few queries, "
        "sequence 0 with 3 is not", VARLEN,
        {"scheduler_metadata": metadata((0, 2, 1), (1, 2, 2), (4, 9, 9), facts=(1, 4, 9, 0))}),
    ("scheduler_metadata: was made for other lengths: sequence 1 with 2 queries is among those of few queries, "
        "sequence 2 with 2 is not", PAGED, {"scheduler_metadata": metadata(tiles=(2, 3, 4), facts=(1, 4, 9, 0), order=(2, 1, 0))}),
    ("scheduler_metadata: was made for other lengths: place 1 has 9 tiles, but its sequence, 0, has 3 queries, and "
        "tiles of 3 queries hold those of most others", VARLEN,
        {"scheduler_metadata": metadata(tiles=(2, 11, 11), units=(4, 19, 19), facts=(3, 2, 0, 0))}),
    ("scheduler_metadata: was made for other lengths: sequence 0 is among those of few queries, at most 64, but has 65",
        {**CACHE, "q": shaped(2, 65, 4, 64)}, {"scheduler_metadata": laid_out(0, (0, 1), (1, 2), (1, 2), (0, 0, 1, 0))}),
]  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("given", RIGHT.values(), ids=RIGHT.keys())
def test_nothing_is_said_of_what_is_right(given):
    assert hopper_attention.check_metadata(**given) is None


def test_nothing_is_said_of_metadata_of_the_model_and_something_of_those_for_other_queries():
    """As the kernel makes them: tests/python/gpu/test_schedule.py holds it against the model."""
    import schedule_model

    shapes = schedule_model.shapes_of(128, 128, 8, 2, False)
    random = np.random.default_rng(5)
    named = missed = 0
    for _ in range(300):
        size = int(random.integers(1, 40))
        queries = random.integers(0, random.choice((2, 9, 300)), (2, size))
        keys = random.integers(0, 2000, size)
        made = [schedule_model.work_of(q, keys, schedule_model.Mask(right=0), shapes) for q in queries]
        call = schedule_model.call_of(size, 128, 128, 8, 2)
        cuts = int(random.integers(0, 16)) << schedule_model.PLACES_BITS
        right, other = (schedule_model.metadata(work, call, cuts) for work in made)
        starts = np.concatenate(([0], np.cumsum(queries[0]))).astype(np.int32)
        given = {
            "q": shaped(int(starts[-1]), 8, 128),
            "k": shaped(size, 2000, 2, 128),
            "cu_seqlens_q": starts,
            "cache_seqlens": keys.astype(np.int32),
        }
        assert hopper_attention.check_metadata(**given, scheduler_metadata=right) is None
        needs_others = (made[0].tiles != made[1].tiles).any() or (made[0].decode != made[1].decode).any()
        if not needs_others:
            continue
        try:
            hopper_attention.check_metadata(**given, scheduler_metadata=other)
        except ValueError as error:
            assert str(error).startswith("scheduler_metadata: ")
            named += 1
        else:
            missed += 1
    assert named > 150 and 20 * missed <= named, "tiles of a few sequences may have another size"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("message", "given", "changes"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_wrong_is_named(message, given, changes):
    with pytest.raises(ValueError, match=f"^{message}"):
        hopper_attention.check_metadata(**{**given, **changes})


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_k"])
def test_other_dtypes(name):
    given = {**VARLEN, "seqused_k": int32(1, 2, 3)}
    with pytest.raises(TypeError, match=f"^{name}: dtype must be int32, found int64"):
        hopper_attention.check_metadata(**{**given, name: given[name].astype(np.int64)})


@pytest.mark.parametrize(("error", "changes"), [
    (TypeError, {"causal": "no"}), (TypeError, {"causal": None}), (TypeError, {"attention_chunk": 1.5}),
    (TypeError, {"window_size": (1.5, 0)}), (ValueError, {"window_size": 3}), (TypeError, {"cp_world_size": 1.0}),
    (TypeError, {"seqlen_k_new": 0.5}), (TypeError, {"scheduler_metadata": metadata().astype(np.int64)}),
], ids=str)  # fmt: skip
def test_values_of_other_types(error, changes):
    with pytest.raises(error, match=f"^{next(iter(changes))}: "):
        hopper_attention.check_metadata(**{**PAGED, **changes})


@pytest.mark.parametrize("world", [1, 3])
def test_pages_that_no_query_sees_are_those_of_the_mask(world):
    """Each page in turn is not there: it is named if and only if the mask of the reference shows a key in it."""
    from hopper_attention.reference import Mask, dense_mask, lengths

    size, pages = 4, 6
    random = np.random.default_rng(world)
    named = 0
    for _ in range(200):
        queries, pad = int(random.integers(0, 9)), int(random.integers(0, 9))
        keys = int(random.integers(pad, size * pages + 1))
        total = (keys - pad) * world + int(random.integers(0, world))
        causal, chunk = bool(random.integers(2)), int(random.choice((0, 0, 3, 8)))
        window = tuple(int(x) for x in random.choice((-1, 0, 5), 2))
        rank = int(random.integers(0, world)) if total == (keys - pad) * world else 0
        mask = Mask(window[0], 0 if causal else window[1], chunk, world, rank)
        seen = np.flatnonzero(dense_mask(mask, lengths(queries, keys - pad, total if world > 1 else None)).any(0)) + pad
        given = {"q": shaped(1, queries, 4, 64), "k": shaped(pages, size, 2, 64), "seqused_k": int32(keys)}
        given |= {"cache_leftpad": int32(pad), "causal": causal, "attention_chunk": chunk, "window_size": window}
        given |= {"cp_world_size": world, "cp_rank": rank, "cp_tot_seqused_k": int32(total)}
        for freed in range(pages):
            table = np.arange(pages, dtype=np.int32)[None].copy()
            table[0, freed] = 2147480000
            if freed in seen // size:
                named += 1
                with pytest.raises(ValueError, match=f"^page_table: slot {freed} of sequence 0"):
                    hopper_attention.check_metadata(**given, page_table=table)
            else:
                hopper_attention.check_metadata(**given, page_table=table)
    assert named > 200


def test_a_schedule_of_zeros_on_a_gpu(monkeypatch):
    zeros = np.zeros(17, np.int32).view(type("OnGpu", (np.ndarray,), {"is_cuda": True}))
    with pytest.raises(ValueError, match="^scheduler_metadata: places 0 and 1 both have sequence 0"):
        hopper_attention.check_metadata(**PAGED, scheduler_metadata=zeros)


def test_a_schedule_of_zeros_for_one_sequence_on_a_gpu():
    zeros = np.zeros(17, np.int32).view(type("OnGpu", (np.ndarray,), {"is_cuda": True}))
    given = {"q": shaped(1, 1, 4, 64), "k": shaped(1, 8, 2, 64), "scheduler_metadata": zeros}
    with pytest.raises(ValueError, match="^scheduler_metadata: place 0 has 0 tiles"):
        hopper_attention.check_metadata(**given)
    given |= {"q": shaped(0, 4, 64), "cu_seqlens_q": int32(0, 0)}
    assert hopper_attention.check_metadata(**given) is None


def test_one_length_for_all_is_of_cache_seqlens_alone():
    with pytest.raises(TypeError, match="^seqused_k: .* found int"):
        hopper_attention.check_metadata(**{**PAGED, "seqused_k": 5})


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    given = {"q": torch.zeros(10, 4, 8), "k": torch.zeros(12, 2, 8)}
    given |= {name: torch.from_numpy(VARLEN[name]) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    assert hopper_attention.check_metadata(**given, max_seqlen_q=torch.tensor(6)) is None
    given["cu_seqlens_k"][2] = 3
    with pytest.raises(ValueError, match="^cu_seqlens_k: of sequence 1 decreases from 5 to 3"):
        hopper_attention.check_metadata(**given)


def test_refused_while_a_graph_is_captured(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(check, "is_torch", lambda x: True)
    with pytest.raises(ValueError, match="^check_metadata: copies to the host, which a graph cannot capture"):
        hopper_attention.check_metadata(SimpleNamespace(is_cuda=True), None)
