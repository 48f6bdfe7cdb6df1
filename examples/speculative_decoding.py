"""Speculative decoding: 4 queries of each sequence, the last token and 3 guesses, are verified in one call.

python examples/speculative_decoding.py

Causal attention is aligned at the end, so query i of 4 sees all keys but the last 3 - i: what it would see alone. Guesses
that are not accepted are forgotten by a shorter length; their keys are overwritten later.
"""

import torch

from hopper_attention import flash_attn_with_kvcache

on_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
device = "cuda" if on_gpu else "cpu"
print("running on", torch.cuda.get_device_name() if on_gpu else "the CPU reference")

torch.manual_seed(0)
lengths = [3000, 17, 64, 900] if on_gpu else [70, 17, 64, 5]  # keys before the step
guesses, heads_q, heads_k, head_dim, page = 4, 8, 2, 128, 16
batch = len(lengths)


def random(*shape):
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


width = -(-(max(lengths) + 3 * guesses) // page)
k_cache, v_cache = (random(batch * width, page, heads_k, head_dim) for _ in range(2))
page_table = torch.randperm(batch * width).to(device=device, dtype=torch.int32).reshape(batch, width)
before = torch.tensor(lengths, dtype=torch.int32, device=device)

with torch.inference_mode():
    worst = 0.0
    for step in range(3):
        q = random(batch, guesses, heads_q, head_dim)
        k_new, v_new = (random(batch, guesses, heads_k, head_dim) for _ in range(2))
        fixed = {"page_table": page_table, "causal": True}
        out = flash_attn_with_kvcache(q, k_cache, v_cache, k_new, v_new, cache_seqlens=before, **fixed)

        # The same token by token, on the cache that already holds the keys.
        for i in range(guesses):
            alone = flash_attn_with_kvcache(q[:, i : i + 1], k_cache, v_cache, cache_seqlens=before + i + 1, **fixed)
            worst = max(worst, (alone[:, 0].float() - out[:, i].float()).abs().max().item())

        accepted = torch.tensor([1 + (b + step) % guesses for b in range(batch)], dtype=torch.int32, device=device)
        before = before + accepted  # the other guesses are behind the length now, and never seen again
    print(f"{guesses} queries in one call, against one by one: {worst:.3e}")
    assert worst < 0.02, "the queries differ from those that are alone"
    print("accepted lengths:", before.tolist())
