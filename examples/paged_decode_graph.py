"""A decode loop over a paged K/V cache: one CUDA graph is captured and replayed for every token.

python examples/paged_decode_graph.py

What changes from step to step lies in tensors whose addresses stay: lengths, page table, metadata, the new token. The
bounds are those of the longest context, once. Without a Hopper GPU the same steps run eagerly on the CPU reference.
"""

import torch

from hopper_attention import flash_attn_with_kvcache, get_scheduler_metadata

on_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
device = "cuda" if on_gpu else "cpu"
print("running on", torch.cuda.get_device_name() if on_gpu else "the CPU reference")

torch.manual_seed(0)
prompts = [700, 33, 1500] if on_gpu else [70, 33, 5]  # keys in the cache before the loop
steps, batch, heads_q, heads_k, head_dim, page = 20, len(prompts), 8, 2, 128, 16
longest = 4096


def random(*shape):
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


# The cache, and an allocator that hands out its pages in no order.
pages = 400
k_cache, v_cache = random(pages, page, heads_k, head_dim), random(pages, page, heads_k, head_dim)
free = torch.randperm(pages).tolist()
page_table = torch.full((batch, longest // page), -1, dtype=torch.int32, device=device)
for b, length in enumerate(prompts):
    for i in range(-(-length // page)):
        page_table[b, i] = free.pop()

# What a step reads and writes, at fixed addresses.
lengths = torch.tensor(prompts, dtype=torch.int32, device=device)  # before the new token
q, k_new, v_new = random(batch, 1, heads_q, head_dim), *(random(batch, 1, heads_k, head_dim) for _ in range(2))
out = torch.empty_like(q)


def make_metadata():
    """Once for each step, for all layers of a model."""
    return get_scheduler_metadata(
        batch, 1, longest, heads_q, heads_k, head_dim, lengths, page_size=page, max_seqlen_k_new=1, causal=True
    )


metadata = make_metadata() if on_gpu else None  # the reference needs none


def attend():
    """Appends the new token's key and value to the cache and attends to all keys, its own included."""
    flash_attn_with_kvcache(
        q, k_cache, v_cache, k_new, v_new, cache_seqlens=lengths, page_table=page_table, causal=True, out=out,
        scheduler_metadata=metadata,
    )  # fmt: skip


with torch.inference_mode():
    run = attend
    if on_gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend()
        run = graph.replay
    error = 0.0
    for _ in range(steps):
        for b, length in enumerate(lengths.tolist()):  # a page for the new token where it begins one
            if length % page == 0:
                page_table[b, length // page] = free.pop()
        for tensor in (q, k_new, v_new):
            tensor.copy_(torch.randn_like(tensor))
        if on_gpu:
            metadata.copy_(make_metadata())
        run()
        lengths += 1
        for b, length in enumerate(lengths.tolist()):
            used = page_table[b, : -(-length // page)].long()
            k, v = (x[used].flatten(0, 1)[None, :length].transpose(1, 2).double() for x in (k_cache, v_cache))
            assert torch.equal(k[0, :, -1], k_new[b, 0].double()), "the new key is not at the end of the cache"
            exact = torch.nn.functional.scaled_dot_product_attention(
                q[b : b + 1].transpose(1, 2).double(), k, v, enable_gqa=True
            )
            error = max(error, (out[b].double() - exact[0].transpose(0, 1)).abs().max().item())
    print(f"{steps} steps for {batch} sequences, against float64: {error:.3e}")
    assert error < 0.02, "the result is wrong"
