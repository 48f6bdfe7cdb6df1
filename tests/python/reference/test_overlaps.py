"""Results and caches that share memory with what is read: refused before anything is written, but where it is allowed."""

from __future__ import annotations

import numpy as np
import pytest

import hopper_attention

SHAPE, LSE = (2, 6, 4, 8), (2, 4, 6)


def states(shape=SHAPE, lse=LSE):
    random = np.random.default_rng(0)
    return {
        name: random.standard_normal(lse if name.startswith("lse") else shape).astype(np.float32)
        for name in ("out_a", "lse_a", "out_b", "lse_b")
    }


def window(x, first, shape, strides=None):
    """An array in the memory of `x`, from element `first` on."""
    return np.lib.stride_tricks.as_strided(x.reshape(-1)[first:], shape, strides)


@pytest.mark.parametrize("shape, lse", [(SHAPE, LSE), (SHAPE[1:], LSE[1:])], ids=["batch", "packed"])
@pytest.mark.parametrize("in_place", [("out",), ("lse",), ("out", "lse")], ids=str)
def test_states_are_merged_in_place(shape, lse, in_place):
    given = states(shape, lse)
    expected = hopper_attention.merge_states(**{name: x.copy() for name, x in given.items()})
    found = hopper_attention.merge_states(**given, **{name: given[f"{name}_a"] for name in in_place})
    for mine, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, right)
    assert all(found[("out", "lse").index(name)] is given[f"{name}_a"] for name in in_place)


def memory():
    """States whose arrays begin within more memory, so that others may lie across them."""
    given = {name: np.zeros(2 * x.size, np.float32) for name, x in states().items()}
    for name, x in states().items():
        given[name][: x.size] = x.reshape(-1)
    return given


MERGES = [
    ("out overlaps out_a", "a row behind", lambda m: {"out": window(m["out_a"], 32, SHAPE)}),
    ("out overlaps out_a", "the same memory transposed", lambda m: {"out": window(m["out_a"], 0, SHAPE, (768, 32, 192, 4))}),
    ("out overlaps out_b", "exactly", lambda m: {"out": window(m["out_b"], 0, SHAPE)}),
    ("lse overlaps lse_a", "an element behind", lambda m: {"lse": window(m["lse_a"], 1, LSE)}),
    ("lse overlaps lse_b", "exactly", lambda m: {"lse": window(m["lse_b"], 0, LSE)}),
    ("lse overlaps out_a", "the state", lambda m: {"lse": window(m["out_a"], 7, LSE)}),
    ("lse overlaps out_b", "the other state", lambda m: {"lse": window(m["out_b"], 7, LSE)}),
    ("lse overlaps out;", "the result", lambda m: {"out": (out := np.zeros(SHAPE, np.float32)), "lse": window(out, 3, LSE)}),
    ("out has elements that share memory", "rows within each other",
     lambda m: {"out": window(np.zeros(999, np.float32), 0, SHAPE, (768, 32, 16, 4))}),
    ("lse has elements that share memory", "one value for all", lambda m: {"lse": window(m["lse_a"], 0, LSE, (0, 0, 0))}),
]  # fmt: skip


@pytest.mark.parametrize("message, why, results", MERGES, ids=str)
def test_merged_states_that_overlap(message, why, results):
    whole = memory()
    shapes = {"out_a": SHAPE, "out_b": SHAPE, "lse_a": LSE, "lse_b": LSE}
    given = {name: window(x, 0, shapes[name]) for name, x in whole.items()} | results(whole)
    before = {name: x.copy() for name, x in given.items()}
    with pytest.raises(ValueError, match=f"^{message}"):
        hopper_attention.merge_states(**given)
    for name, x in given.items():
        np.testing.assert_array_equal(x, before[name])


def append_call(k_cache, v_cache, table):
    random = np.random.default_rng(1)
    q, k, v = (random.standard_normal((2, 2, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    lengths = np.array([5, 3], np.int32)
    return {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k": k,
        "v": v,
        "cache_seqlens": lengths,
        "page_table": table,
    }


def test_pages_of_keys_and_values_by_turns():
    """As the engine of transformers keeps them: page i of V lies behind page i of K, and ids count both."""
    pool = np.random.default_rng(2).standard_normal((9, 4, 2, 8)).astype(np.float32)
    k_cache, v_cache = pool[:-1], pool[1:]
    table = np.array([[0, 4], [2, 6]], np.int32)
    apart = append_call(k_cache.copy(), v_cache.copy(), table)
    expected = hopper_attention.flash_attn_with_kvcache(**apart)
    found = hopper_attention.flash_attn_with_kvcache(**append_call(k_cache, v_cache, table))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(k_cache[table], apart["k_cache"][table])
    np.testing.assert_array_equal(v_cache[table], apart["v_cache"][table])


OVERLAPS = {
    "half a page behind": ("k_cache overlaps v_cache", lambda pool: {"v_cache": window(pool, 32, (8, 4, 2, 8))}),
    "the same pages": ("k_cache overlaps v_cache", lambda pool: {"v_cache": pool[:-1]}),
    "new keys among pages": ("v_cache overlaps k;", lambda pool: {"k": window(pool, 8 * 64, (2, 2, 2, 8))}),
    "new values among pages": ("k_cache overlaps v;", lambda pool: {"v": window(pool, 0, (2, 2, 2, 8))}),
    "queries among pages": ("k_cache overlaps q;", lambda pool: {"q": window(pool, 64, (2, 2, 4, 8))}),
    "without pages": ("k_cache overlaps v_cache", lambda pool: {"page_table": None, "k_cache": pool[:2], "v_cache": pool[1:3]}),
}  # fmt: skip


@pytest.mark.parametrize("why", OVERLAPS)
def test_an_append_to_memory_that_is_read(why):
    message, changes = OVERLAPS[why]
    pool = np.ones((9, 4, 2, 8), np.float32)
    given = append_call(pool[:-1], pool[1:], np.array([[0, 4], [2, 6]], np.int32))
    with pytest.raises(ValueError, match=f"^{message}"):
        hopper_attention.flash_attn_with_kvcache(**{**given, **changes(pool)})
    assert (pool == 1).all()


def test_pages_need_lengths():
    pages = np.zeros((3, 4, 2, 8), np.float32)
    with pytest.raises(ValueError, match="^cache_seqlens: is needed with page_table, since pages do not say how many"):
        hopper_attention.flash_attn_with_kvcache(
            np.zeros((1, 1, 2, 8), np.float32), pages, pages, page_table=np.zeros((1, 2), np.int32)
        )
