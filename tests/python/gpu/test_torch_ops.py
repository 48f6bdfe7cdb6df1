"""The torch operators on the GPU: opcheck, compiled models, CUDA graphs, torch's own FA3 callers, transformers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
from hopper_attention import torch_ops  # noqa: E402
from torch_ops.samples import (  # noqa: E402
    EveryFunction,
    StepOnCaches,
    copies,
    int32,
    model_inputs,
    operator_arguments,
    samples,
    tensors,
    values,
)

pytestmark = pytest.mark.gpu

D = 64
HALF = {"rtol": 2e-2, "atol": 2e-2}  # of bf16 results that went through another order of operations
WHY = [sample.why for sample in samples()]


def sample_on_gpu(why):
    return next(s for s in samples("cuda", torch.bfloat16, D) if s.why == why)


def operator(name):
    return getattr(torch.ops.hopper_attention, name).default


@pytest.mark.parametrize("why", WHY)
def test_the_operator_gives_what_the_function_gives(why):
    sample = sample_on_gpu(why)
    args, kwargs = copies(sample)
    expected = getattr(hopper_attention, sample.function)(*args, **kwargs)
    again, options = copies(sample)
    result = getattr(torch_ops, sample.function)(*again, **options)
    for got, want in zip(tensors(result), tensors(expected), strict=True):
        assert (got.stride(), got.dtype) == (want.stride(), want.dtype)
        assert torch.equal(got, want)
    for got, want in zip(again, args, strict=True):
        assert not isinstance(got, torch.Tensor) or torch.equal(got, want)


@pytest.mark.parametrize("why", WHY)
def test_fake_kernels_and_schemas(why):
    """torch.library.opcheck without its test of autograd: there is none."""
    sample = sample_on_gpu(why)
    args, kwargs = operator_arguments(sample)
    torch.library.opcheck(
        operator(sample.operator),
        args,
        kwargs,
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@torch.inference_mode()
def test_compiled_model():
    torch._dynamo.reset()
    model = EveryFunction(D).eval().to("cuda", torch.bfloat16)
    inputs, same = (model_inputs("cuda", torch.bfloat16, D) for _ in range(2))
    expected = model(*inputs)
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(*same), expected, **HALF)
    torch.testing.assert_close(same[1], inputs[1], **HALF)
    torch.testing.assert_close(compiled(*model_inputs("cuda", torch.bfloat16, D)), expected, **HALF)


def append_to_halves(q, cache, k, v, lengths):
    """Both caches are views of one argument; the second call reads what the first one wrote."""
    for step in range(2):
        out = hopper_attention.flash_attn_with_kvcache(
            q, cache[:, :, 0], cache[:, :, 1], k, v, cache_seqlens=lengths + step, causal=True
        )
    return out, cache.sum()


def halves_inputs():
    """Arguments of append_to_halves but the lengths; the cache is (B, S, K or V, Hk, D)."""
    half = {"dtype": torch.bfloat16, "device": "cuda"}
    cache = values(2, 40, 2, 2, D, seed=3, **half)
    return values(2, 1, 4, D, **half), cache, *(values(2, 1, 2, D, seed=i, **half) for i in (1, 2))


@torch.inference_mode()
def test_compiled_appends_to_views_of_one_tensor():
    torch._dynamo.reset()
    lengths = int32(4, 7, device="cuda")
    compiled = torch.compile(append_to_halves, fullgraph=True)
    for _ in range(2):
        given, same = halves_inputs(), halves_inputs()
        expected = append_to_halves(*given, lengths)
        result = compiled(*same, lengths)
        for got, want in zip((*result, *same), (*expected, *given), strict=True):
            torch.testing.assert_close(got, want, **HALF)
        assert torch.equal(same[1], given[1]) and not torch.equal(same[1], halves_inputs()[1])


@pytest.fixture
def replays(monkeypatch):
    """One entry for each CUDA graph that was replayed."""
    made = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: made.append(1) or replay(graph))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return made


def compare_with_replays(compiled, eager, arguments_of, replays):
    """Both have caches of their own. mode="reduce-overhead" runs a step as it is, records the next and replays it then,
    for the lengths of each step.
    """
    steps = ((4, 9), (0, 7), (8, 3), (1, 1), (9, 9))
    for lengths in steps:
        args = arguments_of(int32(*lengths, device="cuda"))
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(compiled(*args), eager(*args), **HALF)
        for got, want in zip(compiled.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(got, want, **HALF)
    skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    assert (skips, len(replays) >= len(steps) - 2) == (0, True), f"{skips} skips, {len(replays)} replays"


@torch.inference_mode()
def test_compiled_model_in_a_cuda_graph(replays):
    x, cache, pages, _, table, starts = model_inputs("cuda", torch.bfloat16, D)
    step = EveryFunction(D).eval().to("cuda", torch.bfloat16)
    eager, model = (StepOnCaches(step, cache=cache, pages=pages) for _ in range(2))
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    compare_with_replays(compiled, eager, lambda lengths: (x, lengths, table, starts), replays)
    assert not torch.equal(model.cache, cache), "nothing was appended"


@torch.inference_mode()
def test_appends_to_views_of_one_tensor_in_a_cuda_graph(replays):
    q, cache, k, v = halves_inputs()
    eager, model = (StepOnCaches(append_to_halves, cache=cache) for _ in range(2))
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    compare_with_replays(compiled, eager, lambda lengths: (q, k, v, lengths), replays)
    assert not torch.equal(model.cache, cache), "nothing was appended"


@torch.inference_mode()
def test_exported_model():
    torch._dynamo.reset()
    model = EveryFunction(D).eval().to("cuda", torch.bfloat16)
    inputs, same, traced = (model_inputs("cuda", torch.bfloat16, D) for _ in range(3))
    program = torch.export.export(model, traced).module()
    expected = model(*inputs)
    torch.testing.assert_close(program(*same), expected, **HALF)
    torch.testing.assert_close(same[1], inputs[1], **HALF)
    assert not torch.equal(same[1], traced[1]), "nothing was appended"


@torch.inference_mode()
def test_captured_through_the_operator():
    """Lengths change between capture and replay; bitwise the eager result."""
    q, k, v = (
        values(*shape, seed=i, dtype=torch.bfloat16, device="cuda")
        for i, shape in enumerate(((2, 1, 4, D), (6, 16, 2, D), (6, 16, 2, D)))
    )
    lengths, table = int32(3, 30, device="cuda"), int32(3, 1, 5, 0, device="cuda").view(2, 2)
    out = torch.empty_like(q)

    def call():
        torch_ops.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, page_table=table, causal=True, num_splits=4, out=out
        )

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for new in ((3, 30), (32, 1), (0, 17)):
        lengths.copy_(int32(*new, device="cuda"))
        out.fill_(float("nan"))
        graph.replay()
        expected = hopper_attention.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, page_table=table, causal=True, num_splits=4
        )
        assert torch.equal(out, expected)


@torch.inference_mode()
def test_eager_calls_do_not_reach_the_dispatcher(monkeypatch):
    for name in torch_ops.calls.FUNCTIONS:
        monkeypatch.setattr(torch_ops, name, lambda *args, **kwargs: pytest.fail("went through the operator"))
    for why in WHY:
        sample = sample_on_gpu(why)
        getattr(hopper_attention, sample.function)(*sample.args, **sample.kwargs)


@pytest.fixture
def fa3():
    from hopper_attention.integrations import flash_attn_3

    pytest.importorskip("torch.nn.attention._fa3")
    flash_attn_3.install()
    torch.nn.attention.activate_flash_attention_impl("FA3")
    yield
    torch.nn.attention.restore_flash_attention_impl()
    flash_attn_3.uninstall()


@torch.inference_mode()
def test_torch_s_scaled_dot_product_attention(fa3, monkeypatch):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    calls = []
    original = hopper_attention.flash_attn_func
    monkeypatch.setattr(hopper_attention, "flash_attn_func", lambda *a, **k: calls.append(1) or original(*a, **k))
    q, k, v = (values(2, 4, n, 128, seed=i, dtype=torch.bfloat16, device="cuda") for i, n in enumerate((100, 100, 100)))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    with sdpa_kernel(SDPBackend.MATH):
        want = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    assert calls == [1]
    torch.testing.assert_close(out.float(), want, **HALF)


@torch.inference_mode()
def test_torch_s_varlen_attention(fa3):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    q, k, v = (values(150, 4, 128, seed=i, dtype=torch.bfloat16, device="cuda") for i in range(3))
    starts = int32(0, 40, 150, device="cuda")
    out = varlen.varlen_attn(q, k, v, starts, starts, 110, 110, window_size=(-1, 0))
    want = hopper_attention.flash_attn_varlen_func(q, k, v, starts, starts, 110, 110, causal=True)
    torch.testing.assert_close(out, want, **HALF)


@pytest.mark.parametrize("name", ["llama", "gemma 2, softcap and sliding window", "gpt-oss, sinks and sliding window"])
def test_transformers_generate_the_same_tokens(name):
    pytest.importorskip("transformers")
    from hopper_attention.integrations import transformers as integration
    from integrations.tiny_models import model, prompts

    integration.register()
    ids, mask = prompts("cuda")
    tokens = []
    for implementation in (integration.NAME, "eager"):
        made = model(name, implementation, "cuda", torch.float16)
        with torch.inference_mode():
            tokens.append(made.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False))
    assert torch.equal(*tokens)


# How long transformers' clearing of its buffers is held up, as by other processes on the GPU, in cycles.
HELD = (1_000_000, 3_000_000, 10_000_000)


@pytest.mark.parametrize("held", HELD)
def test_transformers_continuous_batching_waits_for_its_buffers(held, monkeypatch):
    """Without the wait, prompts are zeros where they are cleared behind the copy that fills them."""
    pytest.importorskip(
        "transformers", minversion="5.23", reason="transformers 5.23 is needed, whose engine this is for"
    )
    from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingAsyncIOs

    from hopper_attention.integrations import transformers as integration
    from integrations.tiny_models import continuous_batching, model, one_by_one, prompts

    integration.register()
    reset = ContinuousBatchingAsyncIOs.reset

    resets = []

    def late(self):
        resets.append(self)
        torch.cuda._sleep(held)
        reset(self)

    monkeypatch.setattr(ContinuousBatchingAsyncIOs, "reset", late)
    ids, mask = prompts()
    inputs = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
    made = model("llama", integration.CONTINUOUS_BATCHING_NAME, "cuda", torch.float16)
    expected = one_by_one(model("llama", "eager", "cuda", torch.float16), inputs, 8)
    assert continuous_batching(made, inputs, 8) == expected
    assert resets  # behind the steps that warm up


@pytest.mark.parametrize("name", ["llama", "gemma 2, softcap and sliding window", "gpt-oss, sinks and sliding window"])
def test_transformers_continuous_batching(name, monkeypatch):
    """It captures its steps, and takes its fast path for decoding where no layer has a window; both on a GPU alone."""
    pytest.importorskip(
        "transformers", minversion="5.23", reason="transformers 5.23 is needed, whose engine this is for"
    )
    from hopper_attention.integrations import transformers as integration
    from integrations.tiny_models import continuous_batching, model, one_by_one, prompts

    decoded = []
    original = hopper_attention.flash_attn_with_kvcache

    def spy(*args, **kwargs):
        decoded.append(torch.cuda.is_current_stream_capturing())
        return original(*args, **kwargs)

    monkeypatch.setattr(hopper_attention, "flash_attn_with_kvcache", spy)
    integration.register()
    ids, mask = prompts()
    inputs = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
    made = model(name, integration.NAME, "cuda", torch.float16)
    made.set_attn_implementation(integration.CONTINUOUS_BATCHING_NAME)
    assert continuous_batching(made, inputs, 8) == one_by_one(model(name, "eager", "cuda", torch.float16), inputs, 8)
    assert any(decoded) == (name == "llama")
