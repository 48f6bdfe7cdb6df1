"""Every algorithm of hopper_attention.reference is standard attention, in float64, over random shapes and tiles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hopper_attention import reference

TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}
SETTINGS = settings(max_examples=150, deadline=None, derandomize=True)


def attention_by_hand(q, k, v, seen, scale=None, softcap=0.0, sink=None):
    """The definition, one query at a time, over the keys it sees; shares nothing with the package."""
    out, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), -np.inf)
    for i in range(len(q)):
        keys = np.flatnonzero(seen[i])
        scores = k[keys] @ q[i] * (q.shape[1] ** -0.5 if scale is None else scale)
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        logits = scores if sink is None else np.append(scores, sink)
        if len(logits):
            lse[i] = logits.max() + np.log(np.exp(logits - logits.max()).sum())
            out[i] = np.exp(scores - lse[i]) @ v[keys]
    return out, lse


@st.composite
def problems(draw):
    """q, k, v in float64 with large and small logits, and a mask that leaves some rows without keys."""
    n, m = draw(st.integers(0, 40)), draw(st.integers(0, 50))
    d, dv = draw(st.sampled_from([1, 4, 8])), draw(st.sampled_from([1, 5, 8]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    q = rng.standard_normal((n, d)) * draw(st.sampled_from([0.0, 1.0, 30.0]))
    k, v = rng.standard_normal((m, d)), rng.standard_normal((m, dv))
    limit = st.integers(-1, 20)
    mask = reference.Mask(draw(limit), draw(limit), draw(st.integers(0, 15)))
    return q, k, v, mask


def seen_by_hand(mask, n, m):
    """The mask of api.md, element by element."""
    seen = np.zeros((n, m), bool)
    for i in range(n):
        position = i + m - n
        for j in range(m):
            left = mask.left == -1 or j >= position - mask.left
            right = mask.right == -1 or j <= position + mask.right
            chunk = mask.chunk == 0 or j // mask.chunk == position // mask.chunk
            seen[i, j] = left and right and chunk
    return seen


def agree(found, wanted):
    np.testing.assert_allclose(found[0], wanted[0], **TOLERANCE)
    np.testing.assert_allclose(found[1], wanted[1], **TOLERANCE)


TILES = st.integers(1, 24)


@SETTINGS
@given(problems(), TILES, TILES)
def test_forward_algorithms_agree_with_the_definition(problem, block_q, block_k):
    q, k, v, mask = problem
    seen = seen_by_hand(mask, len(q), len(k))
    wanted = attention_by_hand(q, k, v, seen)
    agree(reference.standard_attention(q, k, v, mask=seen), wanted)
    agree(reference.one_pass_attention(q, k, v, mask=seen), wanted)
    agree(reference.flash_attention_1(q, k, v, mask=seen, block_q=block_q, block_k=block_k), wanted)
    agree(reference.flash_attention_2(q, k, v, mask=seen, block_q=block_q, block_k=block_k), wanted)
    agree(reference.flash_attention_3(q, k, v, mask=mask, block_q=block_q, block_k=block_k), wanted)


@SETTINGS
@given(problems(), TILES, TILES, st.sampled_from([0.0, 5.0]), st.sampled_from([None, -np.inf, -2.0, 40.0]))
def test_softcap_and_sink_enter_the_kernel_order_as_in_the_definition(problem, block_q, block_k, softcap, sink):
    q, k, v, mask = problem
    seen = seen_by_hand(mask, len(q), len(k))
    with np.errstate(invalid="ignore"):  # the definition's max of a lone -inf sink
        wanted = attention_by_hand(q, k, v, seen, softcap=softcap, sink=None if sink == -np.inf else sink)
    found = reference.flash_attention_3(
        q, k, v, mask=mask, block_q=block_q, block_k=block_k, softcap=softcap, sink=sink
    )
    agree(found, wanted)
    agree(reference.standard_attention(q, k, v, mask=seen, softcap=softcap, sink=sink), wanted)


@SETTINGS
@given(problems(), st.integers(1, 9), TILES)
def test_splits_with_and_without_keys_combine_to_the_whole(problem, num_splits, block):
    q, k, v, mask = problem
    seen = seen_by_hand(mask, len(q), len(k))
    agree(reference.split_kv_attention(q, k, v, num_splits, mask=seen, block=block), attention_by_hand(q, k, v, seen))


@SETTINGS
@given(st.integers(0, 60), st.integers(1, 12), st.integers(1, 20))
def test_split_bounds_cover_every_key_once_and_cut_at_blocks(keys, num_splits, block):
    bounds = reference.split_bounds(keys, num_splits, block)
    assert len(bounds) == num_splits
    assert [key for begin, end in bounds for key in range(begin, end)] == list(range(keys))
    assert all(begin % block == 0 or begin == keys for begin, _ in bounds)
    blocks = [-(-(end - begin) // block) for begin, end in bounds]
    assert max(blocks) - min(blocks) <= 1


@SETTINGS
@given(problems(), st.integers(1, 6), st.randoms())
def test_sequential_merge_gives_the_same_in_any_order(problem, parts, random):
    q, k, v, mask = problem
    seen = seen_by_hand(mask, len(q), len(k))
    order = reference.split_bounds(len(k), parts, 1)
    random.shuffle(order)
    results = [reference.standard_attention(q, k[a:b], v[a:b], mask=seen[:, a:b]) for a, b in order]
    outs, lses = np.stack([out for out, _ in results]), np.stack([lse for _, lse in results])
    agree(reference.sequential_merge(outs, lses), attention_by_hand(q, k, v, seen))


@pytest.mark.parametrize("no_keys", [-np.inf, np.inf])
def test_combine_never_reads_the_output_of_a_part_without_keys(no_keys):
    outs, lses = np.full((3, 2, 4), np.nan), np.full((3, 2), no_keys)
    outs[1, 0], lses[1, 0] = 7.0, 0.5
    out, lse = reference.combine_parts(outs, lses)
    np.testing.assert_array_equal(out, [[7.0] * 4, [0.0] * 4])
    np.testing.assert_array_equal(lse, [0.5, -np.inf])


@SETTINGS
@given(st.integers(0, 6), st.integers(0, 30), st.sampled_from([1.0, 300.0]), st.integers(0, 2**32 - 1))
def test_softmax_in_three_and_in_two_passes(rows, columns, size, seed):
    rng = np.random.default_rng(seed)
    x = np.where(rng.random((rows, columns)) < 0.3, -np.inf, rng.standard_normal((rows, columns)) * size)
    wanted = np.zeros_like(x)
    for i, j in np.argwhere(np.isfinite(x)):
        wanted[i, j] = 1 / np.exp(x[i][np.isfinite(x[i])] - x[i, j]).sum() if size == 1.0 else np.nan
    three, two = reference.safe_softmax(x), reference.online_softmax(x)
    np.testing.assert_allclose(two, three, **TOLERANCE)
    if size == 1.0:
        np.testing.assert_allclose(three, wanted, **TOLERANCE)
    some = np.isfinite(x).any(axis=1)
    np.testing.assert_allclose(three.sum(axis=1), some.astype(float), **TOLERANCE)


@SETTINGS
@given(problems(), TILES, TILES, st.sampled_from([0.1, 0.5, 0.9]))
def test_dropout_is_the_explicit_mask_whatever_the_tile(problem, block_q, block_k, probability):
    q, k, v, mask = problem
    seen = seen_by_hand(mask, len(q), len(k))
    keep = reference.dropout_keep(3, np.arange(len(q)), np.arange(len(k)), probability)
    scores = np.where(seen, q @ k.T * q.shape[1] ** -0.5, -np.inf)
    out, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), -np.inf)
    for i in np.flatnonzero(seen.any(axis=1)):
        p = np.exp(scores[i] - scores[i].max())
        out[i] = (p / p.sum() * keep[i] / (1 - probability)) @ v
        lse[i] = scores[i].max() + np.log(p.sum())
    found = reference.flash_attention_1(
        q, k, v, mask=seen, dropout=probability, seed=3, block_q=block_q, block_k=block_k
    )
    agree(found, (out, lse))


def test_dropout_keeps_the_wanted_share_and_depends_on_the_seed():
    rows, keys = np.arange(400), np.arange(500)
    keep = reference.dropout_keep(1, rows, keys, 0.3)
    assert abs(keep.mean() - 0.7) < 4 * np.sqrt(0.21 / keep.size)
    assert abs(keep.mean(axis=0) - 0.7).max() < 6 * np.sqrt(0.21 / 400)
    assert (keep != reference.dropout_keep(2, rows, keys, 0.3)).mean() > 0.3


@SETTINGS
@given(problems(), TILES, TILES)
def test_backward_agrees_with_autograd(problem, block_q, block_k):
    torch = pytest.importorskip("torch")
    q, k, v, mask = problem
    seen = seen_by_hand(mask, len(q), len(k))
    out, lse = reference.flash_attention_2(q, k, v, mask=seen)
    dout = np.random.default_rng(0).standard_normal(out.shape)
    found = reference.flash_attention_2_backward(q, k, v, out, lse, dout, mask=seen, block_q=block_q, block_k=block_k)
    leaves = [torch.from_numpy(x.copy()).requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].T * q.shape[1] ** -0.5
    rows = torch.from_numpy(seen.any(axis=1))
    p = scores[rows].masked_fill(~torch.from_numpy(seen)[rows], -torch.inf).softmax(-1)
    (p @ leaves[2] * torch.from_numpy(dout)[rows]).sum().backward()
    for gradient, leaf in zip(found, leaves, strict=True):
        np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-9, atol=1e-9)


@SETTINGS
@given(problems(), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]))
def test_grouped_heads_equal_repeated_heads(problem, group, heads_k):
    q, k, v, mask = problem
    seen = seen_by_hand(mask, len(q), len(k))
    queries = np.stack([q * (h + 1) for h in range(group * heads_k)], axis=1)
    keys, values = (np.stack([x + h for h in range(heads_k)], axis=1) for x in (k, v))
    out, lse = reference.attention_by_heads(queries, keys, values, mask=seen)
    for h in range(group * heads_k):
        head_k = h // group
        wanted = attention_by_hand(queries[:, h], keys[:, head_k], values[:, head_k], seen)
        agree((out[:, h], lse[h]), wanted)
    packed = reference.pack_group(queries, heads_k, heads_k - 1)
    rows_seen = np.repeat(seen, group, axis=0)
    agree(
        reference.standard_attention(packed, keys[:, -1], values[:, -1], mask=rows_seen),
        (out[:, -group:].reshape(len(packed), v.shape[1]), lse[-group:].T.reshape(-1)),
    )


def test_fp8_uses_the_offset_and_the_descales_and_stays_near_the_exact_result():
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((64, 32)) for _ in range(3))
    seen = np.ones((64, 64), bool)
    wanted = attention_by_hand(q, k, v, seen, scale=0.2)
    out, lse = reference.flash_attention_3(
        q, k / 4, v / 8, scale=0.1, block_k=16, p_dtype="float8_e4m3fn", q_descale=2.0, k_descale=4.0, v_descale=8.0
    )
    np.testing.assert_allclose(lse, wanted[1], **TOLERANCE)  # the sum takes P before rounding
    error = np.abs(out - wanted[0]).max()
    assert 1e-6 < error < 2**-4 * np.abs(v).max()


def test_fp8_offset_keeps_probabilities_that_would_vanish_without_it():
    q, k = np.array([[1.0]]), np.array([[0.0]] + [[-7.7]] * 400)
    v = np.concatenate([[[0.0]], np.ones((400, 1))])
    wanted = attention_by_hand(q, k, v, np.ones((1, 401), bool))
    out, _ = reference.flash_attention_3(q, k, v, p_dtype="float8_e4m3fn")
    assert np.exp(-7.7) < 2**-10  # e4m3's smallest number is 2^-9
    np.testing.assert_allclose(out, wanted[0], rtol=0.07)


@pytest.mark.parametrize("p_dtype, unit", [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_rounded_probabilities_stay_within_one_unit(p_dtype, unit):
    rng = np.random.default_rng(6)
    q, k, v = (rng.standard_normal((50, 16)) for _ in range(3))
    wanted = attention_by_hand(q, k, v, np.ones((50, 50), bool))
    out, _ = reference.flash_attention_3(q, k, v, block_k=16, p_dtype=p_dtype)
    bound = unit * attention_by_hand(q, k, np.abs(v), np.ones((50, 50), bool))[0]
    assert (np.abs(out - wanted[0]) <= bound).all()
    assert np.abs(out - wanted[0]).max() > unit * 1e-3


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_numpy_of_any_float_dtype(dtype):
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((20, 8)).astype(dtype) for _ in range(3))
    exact = [x.astype(np.float64) for x in (q, k, v)]
    wanted = attention_by_hand(*exact, np.ones((20, 20), bool))
    for function in (reference.standard_attention, reference.flash_attention_1, reference.flash_attention_3):
        out, lse = function(q, k, v)
        assert out.dtype == lse.dtype == (np.float64 if dtype == "float64" else np.float32)
        np.testing.assert_allclose(out, wanted[0], atol=1e-5)
        np.testing.assert_allclose(lse, wanted[1], atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_torch_of_any_float_dtype_gives_torch(dtype):
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(8)
    q, k, v = (torch.randn(20, 8, generator=generator).to(getattr(torch, dtype)) for _ in range(3))
    seen = np.tril(np.ones((20, 20), bool))
    wanted = attention_by_hand(*(x.double().numpy() for x in (q, k, v)), seen)
    out, lse = reference.flash_attention_2(q, k, v, mask=torch.from_numpy(seen))
    assert out.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    np.testing.assert_allclose(out.numpy(), wanted[0], atol=1e-5)
    np.testing.assert_allclose(lse.numpy(), wanted[1], atol=1e-5)
