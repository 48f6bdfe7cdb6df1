"""Many sequences that begin with the same prompt: its keys are read once for all of them, and merged with each one's own.

python examples/cascade_attention.py

Attention over disjoint keys can be merged exactly when the LSE of both parts is known. The shared part sees all queries
as one sequence, so that K and V of the prefix are read once instead of once for each sequence.
"""

import torch

from hopper_attention import flash_attn_func, flash_attn_varlen_func, merge_states

on_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
device = "cuda" if on_gpu else "cpu"
print("running on", torch.cuda.get_device_name() if on_gpu else "the CPU reference")

torch.manual_seed(0)
batch, prefix, page = (64, 8192, 16) if on_gpu else (5, 200, 16)
heads_q, heads_k, head_dim = 8, 2, 128
own = [1 + 37 * b % 300 for b in range(batch)]  # keys of each sequence behind the prefix


def random(*shape):
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


q = random(batch, heads_q, head_dim)  # one query of each sequence
k_prefix, v_prefix = random(1, prefix, heads_k, head_dim), random(1, prefix, heads_k, head_dim)
width = -(-max(own) // page)
k_own, v_own = (random(batch * width, page, heads_k, head_dim) for _ in range(2))
page_table = torch.randperm(batch * width).to(device=device, dtype=torch.int32).reshape(batch, width)
lengths = torch.tensor(own, dtype=torch.int32, device=device)
cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=device)

with torch.inference_mode():
    # All queries see the whole prefix: no mask.
    shared, shared_lse = flash_attn_func(q[None], k_prefix, v_prefix, num_splits=0, return_attn_probs=True)
    suffix, suffix_lse = flash_attn_varlen_func(
        q,
        k_own,
        v_own,
        cu_seqlens_q,
        max_seqlen_q=1,
        max_seqlen_k=max(own),
        seqused_k=lengths,
        page_table=page_table,
        causal=True,
        num_splits=0,
        return_attn_probs=True,
    )
    out, lse = merge_states(shared[0], shared_lse[0], suffix, suffix_lse)

    error = lse_error = 0.0
    for b in range(batch):
        own_k, own_v = (x[page_table[b].long()].flatten(0, 1)[: own[b]] for x in (k_own, v_own))
        k, v = (torch.cat(pair).double() for pair in ((k_prefix[0], own_k), (v_prefix[0], own_v)))
        scores = torch.einsum("hgd,khd->hgk", q[b].double().unflatten(0, (heads_k, -1)), k) * head_dim**-0.5
        exact = torch.einsum("hgk,khd->hgd", scores.softmax(-1), v).flatten(0, 1)
        error = max(error, (out[b].double() - exact).abs().max().item())
        lse_error = max(lse_error, (lse[:, b].double() - scores.logsumexp(-1).flatten()).abs().max().item())
    print(f"{batch} sequences on a prefix of {prefix}, against float64: {error:.3e}")
    print(f"LSE, against float64: {lse_error:.3e}")
    assert error < 0.02 and lse_error < 1e-3, "the merged result is wrong"
