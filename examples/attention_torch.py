"""Attention on torch tensors: on a Hopper GPU where there is one, else the same calls on the CPU reference.

python examples/attention_torch.py
"""

import torch

from hopper_attention import flash_attn_func

on_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
device = "cuda" if on_gpu else "cpu"
print("running on", torch.cuda.get_device_name() if on_gpu else "the CPU reference")

torch.manual_seed(0)
batch, length, heads_q, heads_k, head_dim = 1, 1024, 16, 4, 128
q = torch.randn(batch, length, heads_q, head_dim, device=device, dtype=torch.bfloat16)
k = torch.randn(batch, length, heads_k, head_dim, device=device, dtype=torch.bfloat16)
v = torch.randn_like(k)

with torch.inference_mode():
    out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)  # lse (B, Hq, Sq), natural log
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2).double() for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    print("against float64:", (out.double() - exact).abs().max().item())

    sinks = torch.zeros(heads_q, device=device)
    windowed = flash_attn_func(q, k, v, causal=True, window_size=(127, 0), softcap=50.0, s_aux=sinks)
    print("window of 128 keys, softcap, sinks:", tuple(windowed.shape), windowed.dtype)
