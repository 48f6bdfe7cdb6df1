"""Real transformers, tiny models with random weights: same tokens and logits as with its eager attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hopper_attention  # noqa: E402
from hopper_attention.integrations import transformers as integration  # noqa: E402
from hopper_attention.integrations import transformers_masks as masks  # noqa: E402
from integrations.tiny_models import NAMES, SLIDING, continuous_batching, model, one_by_one, prompts  # noqa: E402

GEMMA_2 = "gemma 2, softcap and sliding window"
GPT_OSS = "gpt-oss, sinks and sliding window"
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module", autouse=True)
def registered():
    assert integration.register() == integration.NAME
    integration.register()  # twice is no harm


@pytest.fixture
def calls(monkeypatch):
    """Names of the public functions that were called."""
    made = []
    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
        original = getattr(hopper_attention, name)

        def spy(*args, name=name, original=original, **kwargs):
            made.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(hopper_attention, name, spy)
    return made


def generate(name, implementation, new_tokens=12, **options):
    ids, mask = prompts()
    made = model(name, implementation)
    with torch.inference_mode():
        result = made.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
    return result.sequences, torch.stack(result.logits)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic cache", "static cache"])
def test_a_batch_padded_on_the_left_generates_the_same_tokens(name, cache, calls):
    options = {} if cache is None else {"cache_implementation": cache, "disable_compile": True}
    tokens, logits = generate(name, integration.NAME, **options)
    assert "flash_attn_with_kvcache" in calls and "flash_attn_varlen_func" not in calls
    expected, expected_logits = generate(name, "eager", **options)
    torch.testing.assert_close(logits, expected_logits, **TOLERANCE)
    assert torch.equal(tokens, expected)


def test_without_the_mask_function_padding_is_lost(monkeypatch):
    """Why register() registers it: what the test above would not see, were the mask without effect."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    expected, _ = generate("llama", "eager")
    monkeypatch.delitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, integration.NAME)
    tokens, _ = generate("llama", integration.NAME)
    assert torch.equal(tokens[0], expected[0]) and not torch.equal(tokens[1:], expected[1:])


def test_without_padding_nothing_is_gathered(calls):
    made, eager = (model("llama", implementation) for implementation in (integration.NAME, "eager"))
    ids = prompts()[0][:1]
    options = {"max_new_tokens": 5, "do_sample": False}
    with torch.inference_mode():
        assert torch.equal(made.generate(ids, **options), eager.generate(ids, **options))
    assert set(calls) == {"flash_attn_func"}


def logits_of(name, implementation, ids, **inputs):
    with torch.inference_mode():
        return model(name, implementation)(ids, **inputs).logits


@pytest.mark.parametrize("name", ["llama", "gemma 2, softcap and sliding window", "gpt-oss, sinks and sliding window"])
def test_padding_on_the_right_and_in_the_middle(name, calls):
    ids, mask = prompts(side="right")
    mask[0, 4:6] = 0
    got, want = (logits_of(name, i, ids, attention_mask=mask) for i in (integration.NAME, "eager"))
    assert set(calls) == {"flash_attn_varlen_func"}
    whole = [1, 2]  # a sliding window counts tokens between: holes only agree without one
    rows = [0, *whole] if name == "llama" else whole
    for row in rows:
        kept = mask[row].bool()
        torch.testing.assert_close(got[row, kept], want[row, kept], **TOLERANCE)


def test_padding_on_the_right_then_decode():
    """New tokens behind padding: holes in the cache."""

    def steps(implementation):
        ids, mask = prompts(side="right")
        made = model("llama", implementation)
        with torch.inference_mode():
            first = made(ids, attention_mask=mask, use_cache=True)
            grown = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], dim=1)
            positions = mask.sum(dim=1, keepdim=True)
            return made(
                ids[:, :1], attention_mask=grown, position_ids=positions, past_key_values=first.past_key_values
            ).logits

    torch.testing.assert_close(steps(integration.NAME), steps("eager"), **TOLERANCE)


@pytest.fixture
def searches(monkeypatch):
    """How often starts of packed sequences were looked for, which reads the device."""
    made = []
    original = masks.starts_of

    def spy(numbers):
        made.append(numbers)
        return original(numbers)

    monkeypatch.setattr(masks, "starts_of", spy)
    return made


@pytest.mark.parametrize(("name", "kinds_of_masks"), [("llama", 1), ("mistral, sliding window", 1), (GEMMA_2, 2)])
def test_packed_sequences(name, kinds_of_masks, calls, searches):
    """Starts are looked for once for all layers."""
    ids = prompts()[0]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6], [*range(11)], [*range(9), 0, 1]])
    inputs = {"position_ids": positions, "use_cache": False}
    got, want = (logits_of(name, i, ids, **inputs) for i in (integration.NAME, "eager"))
    assert set(calls) == {"flash_attn_varlen_func"}
    assert len(searches) == kinds_of_masks
    torch.testing.assert_close(got, want, **TOLERANCE)


def test_packed_sequences_by_their_starts():
    ids = prompts()[0][:1]
    starts = torch.tensor([0, 4, 11], dtype=torch.int32)
    kwargs = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 7, "max_length_k": 7}
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]])
    got = logits_of("llama", integration.NAME, ids, position_ids=positions, use_cache=False, **kwargs)
    want = logits_of("llama", "eager", ids, position_ids=positions, use_cache=False)
    torch.testing.assert_close(got, want, **TOLERANCE)


def test_an_encoder_with_padding():
    import transformers as t

    config = t.BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    ids, mask = prompts(side="right")
    got = []
    for implementation in (integration.NAME, "eager"):
        torch.manual_seed(0)
        made = t.AutoModel.from_config(config, attn_implementation=implementation).eval()
        with torch.inference_mode():
            got.append(made(ids, attention_mask=mask).last_hidden_state[mask.bool()])
    torch.testing.assert_close(*got, **TOLERANCE)


def test_cross_attention():
    import transformers as t

    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
    config = t.BartConfig(vocab_size=97, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, **sizes)
    ids, mask = prompts(side="right")
    got = []
    for implementation in (integration.NAME, "eager"):
        torch.manual_seed(0)
        made = t.AutoModelForSeq2SeqLM.from_config(config, attn_implementation=implementation).eval()
        with torch.inference_mode():
            got.append(made(ids, attention_mask=mask, decoder_input_ids=ids[:, :4]).logits)
    torch.testing.assert_close(*got, **TOLERANCE)


@pytest.mark.parametrize("name", ["llama", GEMMA_2, GPT_OSS])
def test_continuous_batching(name, calls, searches):
    """Paged: the engine of transformers schedules three prompts of different lengths; same tokens as one by one. On a GPU
    it captures its steps, in which the device cannot be read.
    """
    made = model(name, integration.NAME)
    made.set_attn_implementation(integration.CONTINUOUS_BATCHING_NAME)
    ids, mask = prompts()
    inputs = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
    got = continuous_batching(made, inputs, 8)
    assert set(calls) == {"flash_attn_varlen_func"}
    assert not searches
    assert got == one_by_one(model(name, "eager"), inputs, 8)


def test_continuous_batching_begins_when_its_buffers_are_ready(monkeypatch):
    """transformers clears them on another stream than it fills them from, without an order. No GPU here: a spy waits."""
    pytest.importorskip("transformers", minversion="5.23", reason="older versions have no continuous batching of ours")
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager as Manager

    integration.register()
    assert Manager._create_batch_processor.knows_hopper_attention  # a method that transformers still has
    done = []
    monkeypatch.setattr(Manager, "_create_batch_processor", lambda self: done.append("made") or "processor")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("waited"))
    integration.register()
    integration.register()  # once is enough
    for device, wanted in (("cuda", ["made", "waited"]), ("cpu", ["made"])):
        done.clear()
        manager = SimpleNamespace(model=SimpleNamespace(device=torch.device(device)))
        assert Manager._create_batch_processor(manager) == "processor" and done == wanted


def test_other_implementations_are_still_checked():
    """Of a model that lists the flash implementations it accepts: ours alone is not looked up."""
    made = model("gpt-oss, sinks and sliding window", integration.CONTINUOUS_BATCHING_NAME)
    assert made.config._attn_implementation == integration.CONTINUOUS_BATCHING_NAME
    with pytest.raises((ImportError, ValueError)):
        made.set_attn_implementation("another_flash_attention_3")


def test_continuous_batching_of_older_versions_is_refused():
    """Whose engine asks for an implementation of this name, and hands over pages in another way."""
    made = model("llama", integration.NAME)
    with pytest.raises(NotImplementedError, match=r"^continuous batching: transformers 5\.23 or newer is needed"):
        made.set_attn_implementation(f"paged|{integration.CONTINUOUS_BATCHING_NAME}")


def test_decoding_from_pages(calls):
    """The fast path of continuous batching, which transformers takes on a GPU only: the call as it makes it there."""

    class Pages:
        def update(self, key_states, value_states, layer_idx, kwargs):
            starts = torch.tensor([0, 5, 14], dtype=torch.int32)
            kwargs.update(cu_seq_lens_k=starts, k_cache=k_pages, v_cache=v_pages, block_table=table)
            return key_states, value_states

    torch.manual_seed(0)
    k_pages, v_pages = torch.randn(2, 4, 8, 2, 16)
    table = torch.tensor([[2, -1], [0, 3]], dtype=torch.int32)
    before = k_pages.clone()
    query, key, value = torch.randn(1, 4, 2, 16), torch.randn(1, 2, 2, 16), torch.randn(1, 2, 2, 16)
    layer = torch.nn.Identity()
    layer.layer_idx = 0
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    with torch.inference_mode():
        out, _ = integration.attention(
            layer,
            query,
            key,
            value,
            None,
            cache=Pages(),
            block_table=table,
            is_causal=True,
            cu_seq_lens_q=starts,
            cu_seq_lens_k={"full_attention": starts},
            max_length_q=1,
            max_length_k={"full_attention": 9},
        )
    assert calls == ["flash_attn_with_kvcache"] and out.shape == (1, 2, 4, 16)
    assert torch.equal(k_pages[2, 4], key[0, :, 0]) and torch.equal(k_pages[3, 0], key[0, :, 1])
    changed = (k_pages != before).any(-1).any(-1)
    assert changed.nonzero().tolist() == [[2, 4], [3, 0]]
    for row, slots in enumerate(([(2, i) for i in range(5)], [(0, i) for i in range(8)] + [(3, 0)])):
        keys, values = (torch.stack([pages[p, i] for p, i in slots]) for pages in (k_pages, v_pages))
        heads = [x.transpose(0, 1).repeat_interleave(2, dim=0) for x in (keys, values)]
        want = torch.nn.functional.scaled_dot_product_attention(query[0, :, row, None], *heads)
        torch.testing.assert_close(out[0, row], want[:, 0])


def test_the_name_for_continuous_batching_is_found_here(monkeypatch):
    from transformers import modeling_flash_attention_utils as utils

    monkeypatch.setattr(utils, "_loaded_implementation", None)  # which another test may have set to its spies
    (dense, varlen, cache, _, _), _ = utils.lazy_import_flash_attention(integration.CONTINUOUS_BATCHING_NAME)
    assert dense is hopper_attention.flash_attn_func and varlen is hopper_attention.flash_attn_varlen_func
    assert cache is not None
    made = model("llama", integration.CONTINUOUS_BATCHING_NAME)
    assert made.config._attn_implementation == integration.CONTINUOUS_BATCHING_NAME


def test_masks_of_other_shapes_are_refused():
    from transformers.masking_utils import and_masks, causal_mask_function, or_masks

    known = masks.mask_parts(and_masks(causal_mask_function))
    assert set(known) == {"causal_mask_function"}
    with pytest.raises(NotImplementedError, match="found or_masks"):
        masks.mask_parts(and_masks(causal_mask_function, or_masks(causal_mask_function)))
    with pytest.raises(NotImplementedError, match="found test_masks_of_other_shapes_are_refused"):
        masks.mask_parts(lambda b, h, q, k: k < 3)
    ids, _ = prompts()
    with pytest.raises(NotImplementedError, match="attention_mask: a mask prepared for"):
        logits_of("llama", integration.NAME, ids, attention_mask=torch.zeros(3, 1, 11, 11))


def test_chunks_are_refused():
    import transformers as t

    from integrations.tiny_models import SIZES

    sizes = {**SIZES, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 4}
    made = t.AutoModelForCausalLM.from_config(t.Llama4TextConfig(**sizes), attn_implementation=integration.NAME).eval()
    with torch.inference_mode(), pytest.raises(NotImplementedError, match="found chunked_overlay"):
        made(prompts()[0])


def without_eager(config, auto, **inputs):
    """What a model of our name raises; weights are of no importance."""
    torch.manual_seed(0)
    made = auto._from_config(config, attn_implementation=integration.NAME).eval()
    with torch.inference_mode(), pytest.raises(NotImplementedError) as raised:
        made(**inputs)
    return str(raised.value)


@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "encoder and decoder"])
def test_position_biases_are_refused(decoder):
    import transformers as t

    config = t.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    inputs = {"input_ids": prompts()[0], **({"decoder_input_ids": prompts()[0]} if decoder else {})}
    auto = t.T5ForConditionalGeneration if decoder else t.T5EncoderModel
    assert without_eager(config, auto, **inputs).startswith("position_bias: not available in hopper_attention")


NOT_AVAILABLE = ["position_bias", "attention_bias", "alibi", "indices", "block_indices", "sinks", "head_mask"]


@pytest.mark.parametrize("name", NOT_AVAILABLE)
def test_what_changes_the_result_is_not_dropped(name):
    x = torch.zeros(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match=f"^{name}: not available"):
        integration.attention(torch.nn.Identity(), x, x, x, None, **{name: torch.zeros(1)})
    with torch.inference_mode():
        assert integration.attention(torch.nn.Identity(), x, x, x, None, **{name: None})[0].shape == (1, 3, 2, 8)


SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_model_that_adds_the_mask_itself_is_refused(side):
    import transformers as t

    ids, mask = prompts(side=side)
    said = without_eager(t.MPNetConfig(**SMALL), t.MPNetModel, input_ids=ids, attention_mask=mask)
    assert said.startswith("attention_mask: this model computes with the mask itself (add)")


def test_so_is_one_that_would_take_causal_attention_for_no_mask():
    import transformers as t

    sizes = {"vocab_size": 97, "n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4, "n_positions": 64}
    config = t.CodeGenConfig(**sizes, bos_token_id=None, eos_token_id=None)
    said = without_eager(config, t.CodeGenModel, input_ids=prompts()[0])
    assert said.startswith("attention_mask: this model computes with the mask itself (add)")


def test_a_model_without_padding_may_use_no_mask_itself():
    import transformers as t

    ids, got = prompts()[0], []
    for implementation in (integration.NAME, "eager"):
        torch.manual_seed(0)
        made = t.MPNetModel._from_config(t.MPNetConfig(**SMALL), attn_implementation=implementation).eval()
        with torch.inference_mode():
            got.append(made(ids).last_hidden_state)
    torch.testing.assert_close(*got, **TOLERANCE)


def prepared_mask():
    return integration.mask(3, 11, 11, attention_mask=prompts()[1].bool())


@pytest.mark.parametrize(
    "use",
    [
        lambda m: 1.0 - m,
        lambda m: torch.zeros(3, 4, 11, 11).masked_fill(m, -1.0),
        lambda m: m[:, :, :, :3],
        lambda m: m.to(torch.float32),
        lambda m: m.to(torch.bool),
        lambda m: m.T,
        lambda m: m.data,
        lambda m: bool((m == 0).all()),
        lambda m: m.tolist(),
        lambda m: torch.where(m, 0.0, -1.0),
        lambda m: m.expand(-1, -1, 2, 2),
    ],
    ids=["subtract", "fill", "slice", "float", "bool", "transpose", "data", "compare", "list", "where", "expand"],
)
def test_a_prepared_mask_has_no_values_for_models(use):
    with pytest.raises(NotImplementedError, match="^attention_mask: this model computes with the mask itself"):
        use(prepared_mask())


def test_plain_masks_are_for_the_compiled_decoding_step_alone():
    """Padding, one query: cross attention and steps that are not compiled get a Mask."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    padding = prompts()[1].bool()

    def kind(function, **options):
        made = integration.mask(3, 1, 11, 10, mask_function=function, attention_mask=padding, **options)
        return type(made)

    assert kind(causal_mask_function, allow_is_causal_skip=False) is torch.Tensor
    assert kind(causal_mask_function) is integration.Mask
    assert kind(bidirectional_mask_function, allow_is_causal_skip=False) is integration.Mask


def test_a_prepared_mask_can_be_moved():
    made = prepared_mask()
    assert made.shape == (2, 3, 1, 1) and made.dim() == 4 and made.device.type == "cpu" and "Mask" in repr(made)
    for moved in (made.to("cpu"), made.to("meta"), made.clone(), made.detach()):
        assert isinstance(moved, integration.Mask) and moved.shape == made.shape


@pytest.mark.parametrize("packed", [True, False])
def test_a_moved_mask_keeps_its_starts(searches, packed):
    """One search for all devices of a model."""
    numbers = torch.tensor([[0, 0, 1, 1, 1]])[:, None, None]
    made = (numbers if packed else numbers.int()).as_subclass(integration.Mask)
    starts = made.packed_starts()
    for moved in (made.to("cpu"), made.clone(), made.to("meta"), made.clone().detach()):
        found = moved.packed_starts()
        assert (found is None) == (not packed) and (found is None or found.device == moved.device)
        assert found is None or found.is_meta or torch.equal(found, starts)
    assert len(searches) == packed


def test_a_mask_of_keys_that_hides_no_order():
    """As models make it themselves: which keys count, where there is no diagonal."""
    q, valid = torch.randn(2, 4, 3, 8), torch.tensor([[True, True, False], [True, True, True]])
    layer = torch.nn.Identity()
    with torch.inference_mode():
        out, _ = integration.attention(layer, q, q, q, valid[:, None, None], is_causal=False)
        want = torch.nn.functional.scaled_dot_product_attention(q, q, q, valid[:, None, None]).transpose(1, 2)
        torch.testing.assert_close(out, want)
        with pytest.raises(NotImplementedError, match="^attention_mask: a mask prepared for"):
            integration.attention(layer, q, q, q, valid[:, None, None], is_causal=True)
        # A single query sees what counts, also where the last key does not; what is no mask of ours is not read as one.
        out, _ = integration.attention(layer, q[:, :, :1], q, q, valid[:, None, None], is_causal=True)
        torch.testing.assert_close(out, want[:, :1])
        with pytest.raises(NotImplementedError, match="^attention_mask: a mask prepared for"):
            integration.attention(layer, q[:, :, :1], q, q, valid[:1, None, None].int(), is_causal=True)


@pytest.mark.parametrize("name", ["llama", "gpt-oss, sinks and sliding window"])
def test_decoding_compiled_by_transformers(name):
    """The mask is made outside of the compiled step and goes into it."""
    from transformers import CompileConfig

    torch._dynamo.reset()
    compiling = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compiling._compile_all_devices = True
    tokens, _ = generate(name, integration.NAME, 5, cache_implementation="static", compile_config=compiling)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    assert torch.equal(tokens, generate(name, "eager", 5)[0])


@pytest.mark.parametrize("strict", [False, True])
def test_exported_model(strict):
    torch._dynamo.reset()
    ids, mask = prompts()
    made = model("llama", integration.NAME)
    inputs = {"attention_mask": mask, "use_cache": False}
    with torch.inference_mode():
        program = torch.export.export(made, (ids,), inputs, strict=strict)
        torch.testing.assert_close(program.module()(ids, **inputs).logits, made(ids, **inputs).logits, **TOLERANCE)


def test_a_prepared_mask_goes_into_compiled_code():
    torch._dynamo.reset()
    ids, made = prompts()[0], model("llama", integration.NAME)
    inputs = {"attention_mask": prepared_mask(), "use_cache": False}
    with torch.inference_mode():
        got = torch.compile(made, fullgraph=True, backend="aot_eager")(ids, **inputs).logits
        torch.testing.assert_close(got, made(ids, **inputs).logits, **TOLERANCE)
        copy = torch.zeros(2, 3, 1, 1, dtype=torch.int32)
        torch._foreach_copy_([copy], [inputs["attention_mask"]])  # as CUDA graphs do with inputs
    assert copy[1].flatten().tolist() == [11] * 3


def test_dropout_is_refused():
    x = torch.zeros(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match="^dropout: "):
        integration.attention(torch.nn.Identity(), x, x, x, None, dropout=0.1)


def test_compiled_model():
    torch._dynamo.reset()
    ids, mask = prompts()
    made = model("llama", integration.NAME)
    with torch.inference_mode():
        expected = made(ids, attention_mask=mask, use_cache=False).logits
        compiled = torch.compile(made, fullgraph=True, backend="aot_eager")(ids, attention_mask=mask, use_cache=False)
    torch.testing.assert_close(compiled.logits, expected, **TOLERANCE)


def test_the_window_is_seen():
    """The tiny models' sliding window matters: without it the logits differ."""
    ids, _ = prompts()
    with torch.inference_mode():
        narrow = model("mistral, sliding window", integration.NAME)(ids[:1]).logits
        wide = model("llama", integration.NAME)(ids[:1]).logits
    assert SLIDING < ids.shape[1] and not torch.allclose(narrow, wide, atol=1e-2)
