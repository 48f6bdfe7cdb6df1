"""jax arrays in, jax arrays out."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import hopper_attention  # noqa: E402
from hopper_attention.integrations import jax as integration  # noqa: E402
from torch_ops.samples import int32, samples, tensors  # noqa: E402


def to_jax(x):
    return jax.dlpack.from_dlpack(x.contiguous()) if isinstance(x, torch.Tensor) else x


FUNCTIONS = ("fwd", "varlen_fwd", "kvcache", "combine", "merge_states")
SAMPLES = [s for s in samples(dtype=torch.bfloat16) if s.operator in FUNCTIONS and "bf16" not in s.why]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.why)
def test_results_are_those_of_torch(sample):
    expected = getattr(hopper_attention, sample.function)(*sample.args, **sample.kwargs)
    result = getattr(integration, sample.function)(
        *map(to_jax, sample.args), **{name: to_jax(x) for name, x in sample.kwargs.items()}
    )
    for got, want in zip(tensors(result), tensors(expected), strict=True):
        assert isinstance(got, jax.Array) and str(got.dtype) == str(want.dtype).removeprefix("torch.")
        np.testing.assert_array_equal(np.asarray(got.astype(jnp.float32)), want.float().numpy())


def test_arguments_are_not_copied():
    x = jnp.ones((1, 3, 2, 16), jnp.float32)
    assert integration._to_torch(x).data_ptr() == x.unsafe_buffer_pointer()


def arrays():
    return tuple(jnp.ones((1, n, 2, 16), jnp.float32) for n in (3, 5, 5))


def test_tracing_is_refused():
    with pytest.raises(TypeError, match="jax.jit, grad and vmap are not available"):
        jax.jit(integration.flash_attn_func)(*arrays())


def test_writing_is_refused():
    q, k, v = arrays()
    with pytest.raises(NotImplementedError, match="^out: jax arrays are not written"):
        integration.flash_attn_func(q, k, v, out=q)
    with pytest.raises(NotImplementedError, match="^k: jax arrays are not written"):
        integration.flash_attn_with_kvcache(q, k, v, cache_seqlens=3, k=k, v=v)


def test_an_array_and_a_length():
    q, k, v = arrays()
    out = integration.flash_attn_with_kvcache(q, k, v, cache_seqlens=to_jax(int32(2)))
    np.testing.assert_allclose(np.asarray(out), 1.0, rtol=1e-6)


def test_a_cache_call_has_the_public_parameters():
    """cache_seqlens by position, by name, or left out for a full cache."""
    q, k, v = arrays()
    lengths = to_jax(int32(2))
    nothing = (None,) * 5  # k, v, qv, rotary_cos, rotary_sin
    by_position = integration.flash_attn_with_kvcache(q, k, v, *nothing, lengths, causal=True)
    by_name = integration.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)
    np.testing.assert_array_equal(np.asarray(by_position), np.asarray(by_name))
    full = integration.flash_attn_with_kvcache(q, k, v)
    np.testing.assert_array_equal(np.asarray(full), np.asarray(integration.flash_attn_func(q, k, v)))
    with pytest.raises(NotImplementedError, match="^v: jax arrays are not written"):
        integration.flash_attn_with_kvcache(q, k, v, None, v, cache_seqlens=lengths)


def test_other_arrays_are_refused():
    q, k, v = map(np.asarray, arrays())
    for call in (integration.flash_attn_func, integration.flash_attn_with_kvcache):
        with pytest.raises(TypeError, match="^q: a jax array is needed, found ndarray"):
            call(q, k, v)
    with pytest.raises(TypeError, match="^out_a: a jax array is needed, found ndarray"):
        integration.merge_states(q, k, q, k)
    with pytest.raises(TypeError, match="^out_partial: a jax array is needed, found ndarray"):
        integration.flash_attn_combine(q, k)
