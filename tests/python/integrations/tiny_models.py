"""Tiny transformers models with random weights: each uses other features of attention."""

from __future__ import annotations

import torch

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
SLIDING = 5


def configuration(name: str, **changes):
    import transformers as t

    sizes = {**SIZES, **changes}
    if name == "llama":
        return t.LlamaConfig(**sizes)
    if name == "mistral, sliding window":
        return t.MistralConfig(**sizes, sliding_window=SLIDING)
    if name == "gemma":
        return t.GemmaConfig(**sizes)
    if name == "gemma 2, softcap and sliding window":
        return t.Gemma2Config(**sizes, sliding_window=SLIDING, attn_logit_softcapping=2.0, query_pre_attn_scalar=8)
    if name == "gemma 3, sliding window":
        return t.Gemma3TextConfig(**sizes, sliding_window=SLIDING, query_pre_attn_scalar=8)
    if name == "gpt-oss, sinks and sliding window":
        # torch's grouped products of fp16 copy to the host, which no CUDA graph allows.
        experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "batched_mm"}
        return t.GptOssConfig(**sizes, sliding_window=SLIDING, **experts)
    raise ValueError(name)


NAMES = [
    "llama",
    "mistral, sliding window",
    "gemma",
    "gemma 2, softcap and sliding window",
    "gemma 3, sliding window",
    "gpt-oss, sinks and sliding window",
]


def model(name: str, implementation: str, device="cpu", dtype=torch.float32, **changes):
    """The same weights for every implementation."""
    import transformers as t

    torch.manual_seed(0)
    config = configuration(name, **changes)
    made = t.AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.normal_()
            elif parameter.dim() > 1:
                parameter.normal_(std=0.3)  # far from uniform attention, so that a wrong mask changes tokens
    return made.eval().to(device, dtype)


def prompts(device="cpu", side="left"):
    """Three prompts of 11, 7 and 3 tokens, padded on one side: ids and mask."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, SIZES["vocab_size"], (3, 11), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate((11, 7, 3)):
        padding = slice(0, 11 - length) if side == "left" else slice(length, 11)
        ids[row, padding], mask[row, padding] = SIZES["pad_token_id"], 0
    return ids.to(device), mask.to(device)


def continuous_batching(made, inputs: list[list[int]], new_tokens: int) -> list[list[int]]:
    """What transformers' engine generates for prompts of different lengths, which it schedules together."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    options = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32, block_size=32)
    results = made.generate_batch(
        inputs=inputs, generation_config=options, continuous_batching_config=batching, progress_bar=False
    )
    outputs = [results[key] for key in sorted(results, key=lambda key: int(key.rsplit("_", 1)[1]))]
    assert len(outputs) == len(inputs) and all(output.error is None for output in outputs)
    return [output.generated_tokens for output in outputs]


def one_by_one(made, inputs: list[list[int]], new_tokens: int) -> list[list[int]]:
    """The same without batches."""
    found = []
    for prompt in inputs:
        ids = torch.tensor([prompt], device=made.device)
        with torch.inference_mode():
            found.append(made.generate(ids, max_new_tokens=new_tokens, do_sample=False)[0, len(prompt) :].tolist())
    return found
