"""Attention on numpy arrays, without torch and without a GPU: the reference runs the public functions.

python examples/attention_numpy.py
"""

import numpy as np

from hopper_attention import flash_attn_func, flash_attn_with_kvcache, merge_states, reference

rng = np.random.default_rng(0)
batch, queries, heads_q, heads_k, head_dim = 2, 100, 8, 2, 64
q = rng.standard_normal((batch, queries, heads_q, head_dim), dtype=np.float32)
k, v = rng.standard_normal((2, batch, queries, heads_k, head_dim), dtype=np.float32)

out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
seen = np.tril(np.ones((queries, queries), bool))
exact, _ = reference.standard_attention(q[0, :, 5], k[0, :, 1], v[0, :, 1], mask=seen)  # head 5 reads K/V head 5 // 4
print("against softmax(q k^T) v:", np.abs(out[0, :, 5] - exact).max())

first = flash_attn_func(q, k[:, :60], v[:, :60], return_attn_probs=True)
rest = flash_attn_func(q, k[:, 60:], v[:, 60:], return_attn_probs=True)
merged, _ = merge_states(*first, *rest)
print("two halves of the keys, merged:", np.abs(merged - flash_attn_func(q, k, v)).max())

k_cache, v_cache = np.zeros((2, batch, 128, heads_k, head_dim), np.float32)
for n in range(3):  # one token at a time; the cache is written in place
    step = slice(n, n + 1)
    token = flash_attn_with_kvcache(q[:, step], k_cache, v_cache, k[:, step], v[:, step], cache_seqlens=n, causal=True)
    print(f"token {n} from the cache:", np.abs(token - out[:, step]).max())
