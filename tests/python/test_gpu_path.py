"""What the public function does around the launch for torch tensors: allocation, stream, fallback. `_core` is replaced
by a spy, so that CPU tensors can play the part of CUDA tensors.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import hopper_attention
from hopper_attention import _core, gpu, interface

torch = pytest.importorskip("torch")


@pytest.fixture
def calls(monkeypatch):
    """Arguments of `_core.forward`, by name; every tensor counts as a CUDA tensor."""
    order = "q k v out softmax_lse sinks softmax_scale causal window_left window_right attention_chunk softcap"
    order = [*order.split(), "num_splits", "sm_margin", "batch_invariant", "stream"]
    made = []
    spy = SimpleNamespace(
        forward=lambda *args: made.append(dict(zip(order, args, strict=True))), has_exchange_api=_core.has_exchange_api
    )
    monkeypatch.setattr(gpu, "_core", spy)
    monkeypatch.setattr(interface, "on_cuda", lambda name, x: True)
    yield made


def inputs(dtype=torch.bfloat16, head_dim_v=32):
    return tuple(
        torch.zeros(2, length, heads, d, dtype=dtype)
        for length, heads, d in ((5, 4, 64), (7, 2, 64), (7, 2, head_dim_v))
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_out_is_allocated(calls, dtype):
    q, k, v = inputs(dtype)
    out = hopper_attention.flash_attn_func(q, k, v)
    assert out.shape == (2, 5, 4, 32) and out.dtype == dtype and out.is_contiguous()
    (call,) = calls
    assert call["q"] is q and call["k"] is k and call["v"] is v and call["out"] is out
    assert call["softmax_lse"] is None and call["sinks"] is None and call["softmax_scale"] is None


def test_lse_is_allocated_only_when_it_is_returned(calls):
    out, lse = hopper_attention.flash_attn_func(*inputs(), return_attn_probs=True)
    assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32 and lse.is_contiguous()
    assert calls[0]["softmax_lse"] is lse and calls[0]["out"] is out


def test_given_results_are_used(calls):
    q, k, v = inputs()
    out, lse = torch.empty(2, 5, 4, 32, dtype=q.dtype), torch.empty(2, 4, 5)
    assert hopper_attention.flash_attn_func(q, k, v, out=out, softmax_lse=lse) is out
    assert calls[0]["out"] is out and calls[0]["softmax_lse"] is lse


@pytest.mark.parametrize("head_dim_v", [32, 64])
def test_a_transposed_query_gives_a_contiguous_out(calls, head_dim_v):
    q, k, v = inputs(head_dim_v=head_dim_v)
    out = hopper_attention.flash_attn_func(q.transpose(1, 2).contiguous().transpose(1, 2), k, v)
    assert out.is_contiguous() and out.shape == (2, 5, 4, head_dim_v)


def test_wrong_ranks_reach_the_checks(calls):
    q, k, v = inputs()
    hopper_attention.flash_attn_func(q[0], k, v, return_attn_probs=True)
    assert calls[0]["q"].dim() == 3 and calls[0]["softmax_lse"] is None


def test_workspace(calls):
    hopper_attention.flash_attn_func(*inputs(), workspace=None)
    with pytest.raises(ValueError, match="^workspace: "):
        hopper_attention.flash_attn_func(*inputs(), workspace=torch.zeros(16, dtype=torch.uint8))


def test_parameters_that_require_grad(calls):
    q, k, v = inputs()
    weight = torch.nn.Parameter(k)
    with pytest.raises(NotImplementedError, match="^k: requires grad"):
        hopper_attention.flash_attn_func(q, weight, v)
    assert not calls
    with torch.no_grad():
        hopper_attention.flash_attn_func(q, weight, v)
    assert calls[0]["k"] is weight


def test_the_stream_is_left_to_the_exchange_api(calls):
    if not _core.has_exchange_api(torch.Tensor):
        pytest.skip("torch < 2.10")
    hopper_attention.flash_attn_func(*inputs())
    assert calls[0]["stream"] is None


def test_the_fallback_passes_the_stream_and_detaches(calls, monkeypatch):
    monkeypatch.setattr(gpu, "stream_comes_with_tensors", lambda: False)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0xCAFE0, device=device)
    )
    q, k, v = inputs()
    with torch.no_grad():
        out = hopper_attention.flash_attn_func(q, k.requires_grad_(), v)
    assert calls[0]["stream"] == 0xCAFE0 and calls[0]["out"] is out
    assert not calls[0]["k"].requires_grad and calls[0]["k"].data_ptr() == k.data_ptr()
