"""A long prompt in chunks, as engines run it beside decoding: each chunk appends its keys to a paged cache and sees all
keys before it. The chunks together give what the prompt gives in one call.

python examples/chunked_prefill.py
"""

import torch

from hopper_attention import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

on_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
device = "cuda" if on_gpu else "cpu"
print("running on", torch.cuda.get_device_name() if on_gpu else "the CPU reference")

torch.manual_seed(0)
length, chunk, page = (5000, 512, 16) if on_gpu else (300, 64, 16)
heads_q, heads_k, head_dim = 8, 2, 128


def random(*shape):
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


q, k, v = random(1, length, heads_q, head_dim), *(random(1, length, heads_k, head_dim) for _ in range(2))
pages = -(-length // page)
k_cache, v_cache = (torch.zeros(pages, page, heads_k, head_dim, device=device, dtype=torch.bfloat16) for _ in range(2))
page_table = torch.randperm(pages).to(device=device, dtype=torch.int32)[None]

with torch.inference_mode():
    whole = flash_attn_func(q, k, v, causal=True)

    parts = []
    for start in range(0, length, chunk):
        rows = slice(start, min(start + chunk, length))
        before = torch.tensor([start], dtype=torch.int32, device=device)
        parts.append(
            flash_attn_with_kvcache(
                q[:, rows],
                k_cache,
                v_cache,
                k[:, rows],
                v[:, rows],
                cache_seqlens=before,
                page_table=page_table,
                causal=True,
            )
        )
    difference = (torch.cat(parts, 1).float() - whole.float()).abs().max().item()
    print(f"{len(parts)} chunks of {chunk} tokens, against one call: {difference:.3e}")
    assert difference < 0.02, "the chunks differ from the whole prompt"

    # The step of an engine: the last chunk beside two sequences that decode, each with its own pages, in one call.
    used = torch.tensor([length, 40, 7], dtype=torch.int32, device=device)
    queries = [length - rows.start, 1, 1]
    cu_seqlens_q = torch.tensor([0, *queries], device=device).cumsum(0, dtype=torch.int32)
    mixed_q = torch.cat([q[0, rows], random(2, heads_q, head_dim)])
    table = page_table.expand(3, -1).contiguous()  # the decoding sequences share the prompt's first pages here
    mixed = flash_attn_varlen_func(
        mixed_q,
        k_cache,
        v_cache,
        cu_seqlens_q,
        max_seqlen_q=max(queries),
        max_seqlen_k=length,
        seqused_k=used,
        page_table=table,
        causal=True,
    )
    difference = (mixed[: queries[0]].float() - whole[0, rows].float()).abs().max().item()
    print(f"the last chunk beside two single queries, against one call: {difference:.3e}")
    assert difference < 0.02, "the mixed step differs from the whole prompt"
    exact = torch.nn.functional.scaled_dot_product_attention(
        mixed_q[None, -1:].transpose(1, 2).double(),
        *(x[:, :7].transpose(1, 2).double() for x in (k, v)),
        enable_gqa=True,
    )
    error = (mixed[-1].double() - exact[0, :, 0]).abs().max().item()
    print(f"a single query, against float64: {error:.3e}")
    assert error < 0.02, "the single query is wrong"
