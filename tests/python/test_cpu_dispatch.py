"""CPU arrays run the reference: every argument arrives there, numpy works without torch, mixtures are refused."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import numpy as np
import pytest

import hopper_attention
from fake_cuda import FastTensor
from hopper_attention.reference import functions

FUNCTIONS = [
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "flash_attn_combine",
    "merge_states",
]


def arrays(seed=0, dtype=np.float32):
    random = np.random.default_rng(seed)
    q, k, v = (
        random.standard_normal((2, length, heads, 16)).astype(dtype) for length, heads in ((9, 4), (13, 2), (13, 2))
    )
    return q, k, v


def plain_attention(q, k, v, causal):
    """float64, from the formula."""
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x.astype(np.float64), group, axis=2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q.astype(np.float64), k) / np.sqrt(q.shape[3])
    if causal:
        hidden = np.arange(k.shape[1]) > np.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        scores[..., hidden] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_arrives(monkeypatch, name):
    public = getattr(hopper_attention, name)
    parameters = inspect.signature(public).parameters
    received = {}

    def spy(*args, **kwargs):
        received.update(inspect.signature(public).bind(*args, **kwargs).arguments)
        return "result"

    monkeypatch.setattr(functions, name, spy)
    first, *others = parameters
    given = {first: np.zeros(1), **{other: object() for other in others}}
    assert public(**given) == "result"
    assert received == given


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_numpy(dtype, causal):
    q, k, v = arrays(dtype=dtype)
    out = hopper_attention.flash_attn_func(q, k, v, causal=causal)
    assert type(out) is np.ndarray and out.dtype == dtype
    np.testing.assert_allclose(
        out, plain_attention(q, k, v, causal), atol={2: 2e-3, 4: 1e-5, 8: 1e-12}[np.dtype(dtype).itemsize]
    )


def test_numpy_lse_and_out():
    q, k, v = arrays()
    out, lse = np.empty_like(q), np.empty((2, 4, 9), np.float32)
    result = hopper_attention.flash_attn_func(q, k, v, return_attn_probs=True, out=out, softmax_lse=lse)
    assert result[0] is out and result[1] is lse
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_torch(dtype):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in arrays())
    out, lse = hopper_attention.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert type(out) is torch.Tensor and out.dtype == q.dtype and lse.shape == (2, 4, 9)
    exact = plain_attention(*(x.double().numpy() for x in (q, k, v)), True)
    np.testing.assert_allclose(out.double().numpy(), exact, atol={"bfloat16": 2e-2, "float16": 2e-3}.get(dtype, 1e-5))


def test_torch_result_passes_the_gates():
    torch = pytest.importorskip("torch")
    from hopper_attention.testing import gates

    q, k, v = (torch.randn(1, n, 4, 64).to(torch.bfloat16) for n in (65, 200, 200))
    options = {"window_size": (50, 3), "softcap": 5.0, "s_aux": torch.tensor([0.0, 1.0, -2.0, 4.0])}
    out, lse = hopper_attention.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    result = gates.check(out, lse, q, k, v, **options)
    assert result, result.message


def test_results_are_on_the_device_of_q_whatever_the_default_device_is():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in arrays())
    lengths = torch.tensor([3, 9], dtype=torch.int32)
    parts, logs = torch.zeros(3, 2, 5, 4, 8), torch.zeros(3, 2, 5, 4)
    with torch.device("meta"):
        found = [
            *hopper_attention.flash_attn_func(q, k, v, return_attn_probs=True),
            *hopper_attention.flash_attn_combine(parts, logs),
            *hopper_attention.merge_states(parts[0], logs[0].mT, parts[1], logs[1].mT),
            schedule_call(cache_seqlens=lengths),
        ]
    assert [x.device.type for x in found] == 7 * ["cpu"]


def test_numpy_works_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np, hopper_attention\n"
        "x = np.ones((1, 3, 2, 8), np.float32)\n"
        "print(hopper_attention.flash_attn_func(x, x, x).shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, timeout=60)
    assert done.stdout.strip() == "(1, 3, 2, 8)", done.stderr


def test_cpu_queries_with_gpu_keys():
    q, k, v = arrays()
    with pytest.raises((ValueError, TypeError), match="^k"):
        hopper_attention.flash_attn_func(q, FastTensor(k.shape, "fp16"), v)


def test_gpu_queries_with_cpu_keys(recorder):
    q, k, v = arrays(dtype=np.float16)
    with pytest.raises(ValueError, match="^k: .*CPU"):
        hopper_attention.flash_attn_func(FastTensor(q.shape, "fp16"), k, v, out=FastTensor(q.shape, "fp16"))
    assert recorder.launches() == 0


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("value", [None, 1, [[1.0]], "text"], ids=["None", "int", "list", "str"])
def test_what_is_no_array(name, value):
    function = getattr(hopper_attention, name)
    required = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    with pytest.raises(
        TypeError, match=f"^{required[0]}: a torch tensor or a numpy array is needed, found {type(value).__name__}"
    ):
        function(*[value] * len(required))


def test_torch_tensors_that_require_grad_are_refused():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in arrays())
    q.requires_grad_()
    with pytest.raises(NotImplementedError, match="requires grad"):
        hopper_attention.flash_attn_func(q, k, v)
    with torch.inference_mode():
        hopper_attention.flash_attn_func(q, k, v)


def test_fake_tensors_go_through_the_operators():
    torch = pytest.importorskip("torch")
    fake_tensor = pytest.importorskip("torch._subclasses.fake_tensor")
    with fake_tensor.FakeTensorMode():
        x = torch.empty(1, 3, 2, 8)
        out = hopper_attention.flash_attn_func(x, x, x)
    assert isinstance(out, fake_tensor.FakeTensor) and out.shape == x.shape


def schedule_call(**changes):
    given = {"batch_size": 2, "max_seqlen_q": 9, "max_seqlen_k": 13, "num_heads_q": 4, "num_heads_kv": 2, "headdim": 64}
    return hopper_attention.get_scheduler_metadata(**{**given, **changes})


LENGTHS, STARTS = np.array([3, 9], np.int32), np.array([0, 4, 9], np.int32)


@pytest.mark.parametrize(
    "given",
    [
        {"cu_seqlens_q": STARTS},
        {"cu_seqlens_k_new": STARTS},
        {"cache_leftpad": LENGTHS},
        {"out": np.ones(40, np.int32)},
    ],
    ids=lambda given: next(iter(given)),
)
def test_a_schedule_of_one_length_is_where_its_tensors_are(given):
    made = schedule_call(cache_seqlens=5, **given)
    assert type(made) is np.ndarray and made.dtype == np.int32 and not made[:17].any() and made[17:].all()
    assert made is given.get("out", made)


@pytest.mark.parametrize("without_torch", [False, True])
def test_a_schedule_of_one_length_without_any_device(monkeypatch, without_torch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if without_torch:
        monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match="^cache_seqlens: is a number, so that another tensor must say"):
        schedule_call(cache_seqlens=5)


@pytest.mark.parametrize("given", [{}, {"out": np.ones(17, np.int32)}, {"out": FastTensor((17,), "int32")}], ids=str)
def test_a_schedule_without_lengths(recorder, given):
    with pytest.raises(ValueError, match="^cache_seqlens: is needed, found None"):
        schedule_call(cache_seqlens=None, **given)


NUMBERS = [
    {"batch_size": -1}, {"batch_size": 1 << 62}, {"max_seqlen_q": None}, {"max_seqlen_q": -2}, {"max_seqlen_k": 1 << 40}, {"num_heads_q": 5},
    {"num_heads_kv": 0}, {"num_heads_kv": -2}, {"headdim": 60}, {"headdim": 0}, {"headdim": 264}, {"headdim_v": 12},
    {"qkv_dtype": "float64"}, {"qkv_dtype": np.float32}, {"page_size": 0}, {"page_size": 1.5}, {"num_splits": 257},
    {"max_seqlen_k_new": -1}, {"window_size": (-3, 0)}, {"window_size": 7}, {"attention_chunk": -1}, {"sm_margin": -1},
    {"causal": "no"}, {"batch_invariant": None},
]  # fmt: skip


@pytest.mark.parametrize("changes", NUMBERS, ids=str)
def test_a_wrong_schedule_is_refused_alike_on_both_devices(recorder, changes):
    said = []
    for lengths in (FastTensor((2,), "int32"), LENGTHS):
        out = FastTensor((17,), "int32") if lengths is not LENGTHS else np.ones(17, np.int32)
        with pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
            schedule_call(**{"cache_seqlens": lengths, "out": out, **changes})
        said.append((caught.type, str(caught.value)))
    assert said[0] == said[1] and out.all()


@pytest.mark.parametrize("name", ["cache_seqlens", "cu_seqlens_q", "cu_seqlens_k_new", "cache_leftpad"])
def test_tensors_of_a_schedule_are_checked_on_the_cpu_too(name):
    """As on the GPU, though nothing is read from them."""
    right = {"cache_seqlens": LENGTHS, name: STARTS if name.startswith("cu_") else LENGTHS}
    assert not schedule_call(**right).any()
    with pytest.raises(ValueError, match=f"^{name} has shape"):
        schedule_call(**{**right, name: right[name][1:]})
    with pytest.raises(TypeError, match=f"^{name} has dtype int64; int32 is needed"):
        schedule_call(**{**right, name: right[name].astype(np.int64)})


@pytest.mark.parametrize("batch, rows", [(0, 0), (2, 0), (1, 1 << 20), (4096, 1)])
@pytest.mark.parametrize("packed", [False, True])
def test_right_schedules_of_all_sizes(batch, rows, packed):
    starts = np.zeros(batch + 1, np.int32) if packed else None
    made = schedule_call(
        batch_size=batch, max_seqlen_q=rows, cache_seqlens=np.ones(batch, np.int32), cu_seqlens_q=starts, page_size=16,
        causal=np.True_, headdim=192, headdim_v=128, qkv_dtype=np.float16,
    )  # fmt: skip
    assert made.shape == (1 + (batch + 3) // 4 * 16,) and not made.any()


@pytest.mark.parametrize("name", ["causal", "batch_invariant"])
@pytest.mark.parametrize("value", ["no", None, 0.5])
@pytest.mark.parametrize("function", ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"])
def test_options_that_are_no_bool(function, name, value):
    q, k, v = arrays()
    more = {}
    if function == "flash_attn_varlen_func":
        q, k, v, more = q[0], k[0], v[0], {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS}
    with pytest.raises(TypeError, match=f"^{name}: True or False is needed, found "):
        getattr(hopper_attention, function)(q, k, v, **more, **{name: value})
