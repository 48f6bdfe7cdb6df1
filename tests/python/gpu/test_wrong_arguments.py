"""Wrong arguments raise before anything is launched or written, and the next call is right.

The full list, on made-up tensors, is tests/python/test_validation.py.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
from gpu import support  # noqa: E402
from gpu.support import Case, attend, main_dims, make_inputs, require_same, same_bits  # noqa: E402

pytestmark = pytest.mark.gpu

WRONG = {
    "dtype mix": (TypeError, "^k: dtype", lambda t: {"k": t["k"].float()}),
    "fp32": (TypeError, "^q: dtype", lambda t: {name: t[name].float() for name in "qkv"}),
    "k on the CPU": (ValueError, "^k: .*CPU", lambda t: {"k": t["k"].cpu()}),
    "k of rank 3": (ValueError, "^k: ", lambda t: {"k": t["k"][0]}),
    "batch differs": (ValueError, "^k: .*batch", lambda t: {"k": t["k"][:1]}),
    "lengths of k and v differ": (ValueError, "^v: .*seqlen_k", lambda t: {"v": t["v"][:, :-1]}),
    "heads do not divide": (ValueError, "heads", lambda t: {"q": t["q"][:, :, :3]}),
    "no kv heads": (ValueError, "heads", lambda t: {"k": t["k"][:, :, :0], "v": t["v"][:, :, :0]}),
    "head dim 60": (ValueError, "multiple of 8", lambda t: {name: t[name][..., :60] for name in "qkv"}),
    "head dim too large": (
        NotImplementedError,
        "head_dim.*256.*320",
        lambda t: {name: torch.cat([t[name]] * 8, -1)[..., :320] for name in "qkv"},
    ),
    "misaligned view": (ValueError, "^k: .*16 bytes", lambda t: {"k": misaligned(t["k"])}),
    "row stride not in 16 bytes": (ValueError, "^v: stride", lambda t: {"v": odd_rows(t["v"])}),
    "last stride 2": (ValueError, "^q: .*last dim", lambda t: {"q": torch.cat([t["q"]] * 2, -1)[..., ::2]}),
    "expanded k": (ValueError, "^k: stride", lambda t: {"k": t["k"][:1].expand_as(t["k"])}),
    "NaN scale": (ValueError, "^softmax_scale: ", lambda t: {"softmax_scale": float("nan")}),
    "scale on the GPU": (TypeError, "^softmax_scale: ", lambda t: {"softmax_scale": t["k"].mean()}),
    "negative softcap": (ValueError, "^softcap: ", lambda t: {"softcap": -1.0}),
    "num_splits -5": (ValueError, "^num_splits: ", lambda t: {"num_splits": -5}),
    "num_splits 1000": (ValueError, "^num_splits: ", lambda t: {"num_splits": 1000}),
    "window of three": ((ValueError, TypeError), "^window_size: ", lambda t: {"window_size": (1, 2, 3)}),
    "out of another shape": (ValueError, "^out: ", lambda t: {"out": t["q"][:, :-1].clone()}),
    "out of another dtype": (TypeError, "^out: dtype", lambda t: {"out": t["q"].float()}),
    "out is q": (ValueError, "^out: .*q", lambda t: {"out": t["q"]}),
    "out overlaps v": (ValueError, "^out: .*v", lambda t: {"out": t["v"][:, :100]}),
    "lse transposed": (ValueError, "^softmax_lse: ", lambda t: {"softmax_lse": t["lse"].transpose(1, 2)}),
    "sinks too short": (ValueError, "s_aux", lambda t: {"s_aux": t["lse"][0, :1, 0].contiguous()}),
    "q requires grad": (NotImplementedError, "^q: requires grad", lambda t: {"q": t["q"].clone().requires_grad_()}),
    "qv": (NotImplementedError, "^qv: ", lambda t: {"qv": t["q"]}),
}


def misaligned(x):
    memory = torch.empty(x.numel() + 8, dtype=x.dtype, device=x.device)
    return memory[1 : 1 + x.numel()].view(x.shape).copy_(x)


def odd_rows(x):
    b, s, h, d = x.shape
    memory = torch.zeros(b * s * (h * d + 1), dtype=x.dtype, device=x.device)
    return memory.as_strided(x.shape, (s * (h * d + 1), h * d + 1, d, 1))


@pytest.mark.parametrize("why", WRONG)
def test_wrong_argument(why):
    error, message, change = WRONG[why]
    case = main_dims(Case(why, 100, 150, heads_q=4, heads_k=4 if why == "out overlaps v" else 2))
    tensors = make_inputs(case)
    expected = attend(case, tensors)
    spoiled = torch.full_like(expected[0], 3.0)
    given = {"q": tensors["q"], "k": tensors["k"], "v": tensors["v"], "out": spoiled}
    given.update(change({**tensors, "lse": expected[1]}))
    if given["q"].shape != tensors["q"].shape or given["q"].dtype != tensors["q"].dtype:
        given.pop("out")
    with pytest.raises(error, match=message):
        hopper_attention.flash_attn_func(**given)
    torch.cuda.synchronize()
    assert bool((spoiled == 3.0).all()), "the refused call wrote to out"
    require_same(case, "the call after a refused one", attend(case, tensors), expected)


def test_what_has_no_kernel_says_so():
    case = main_dims(Case("features for later", 10, 10))
    q = make_inputs(case)["q"]
    with pytest.raises(NotImplementedError, match="^qv"):
        hopper_attention.flash_attn_func(q, q, q, qv=q)
    with pytest.raises(NotImplementedError, match="^qv"):
        hopper_attention.flash_attn_with_kvcache(q, q, q, qv=q)


def test_parameters_without_grad_mode_are_taken():
    case = main_dims(Case("parameters under no_grad", 64, 64))
    tensors = make_inputs(case)
    expected, _ = attend(case, tensors)
    with torch.no_grad():
        wants = {**tensors, "q": torch.nn.Parameter(tensors["q"])}
        assert same_bits(attend(case, wants)[0], expected)
    with torch.inference_mode():
        assert same_bits(attend(case, wants)[0], expected)


def test_fake_tensors_give_fake_results():
    fake_tensor = pytest.importorskip("torch._subclasses.fake_tensor")
    with fake_tensor.FakeTensorMode(), torch.no_grad():
        q = torch.empty(1, 64, 2, 64, device=support.DEVICE, dtype=torch.bfloat16)
        out = hopper_attention.flash_attn_func(q, q, q)
        assert type(out) is fake_tensor.FakeTensor
        assert (out.shape, out.dtype, out.device) == (q.shape, q.dtype, q.device)
