"""One call of every operator and of every public function, on any device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


def values(*shape, seed=0, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def int32(*numbers, device="cpu"):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


@dataclass
class Sample:
    """A call of the public `function`, which reaches `operator`."""

    why: str
    function: str
    operator: str
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def samples(device="cpu", dtype=torch.float32, d=16) -> list[Sample]:
    def t(*shape, seed=0):
        return values(*shape, seed=seed, dtype=dtype, device=device)

    def ints(*numbers):
        return int32(*numbers, device=device)

    def f32(*shape, seed=0):
        return values(*shape, seed=seed, device=device)

    def empty(*shape, dtype=dtype):
        return torch.zeros(*shape, dtype=dtype, device=device)

    q, k, v = t(2, 5, 4, d), t(2, 9, 2, d, seed=1), t(2, 9, 2, d, seed=2)
    tq, tk, tv = t(7, 4, d), t(12, 2, d, seed=1), t(12, 2, d, seed=2)
    pages_k, pages_v = t(6, 8, 2, d, seed=3), t(6, 8, 2, d, seed=4)
    table = ints(3, 1, 5, 0).view(2, 2)
    new_k, new_v = t(2, 1, 2, d, seed=5), t(2, 1, 2, d, seed=6)
    parts, logs = f32(3, 2, 5, 4, d), f32(3, 2, 5, 4, seed=1)
    packed = {"cu_seqlens_q": ints(0, 3, 7), "cu_seqlens_k": ints(0, 4, 12)}
    decode = {"cache_seqlens": ints(3, 8), "page_table": table, "causal": True}
    step = (2, 1, 16, 4, 2, d, ints(3, 8))
    return [
        Sample("dense", "flash_attn_func", "fwd", (q, k, v), {"causal": True}),
        Sample(
            "dense with all options",
            "flash_attn_func",
            "fwd",
            (q, k, v),
            {
                "softmax_scale": 0.3,
                "window_size": (4, 1),
                "softcap": 5.0,
                "num_splits": 0,
                "pack_gqa": True,
                "return_attn_probs": True,
                "s_aux": f32(4),
            },
        ),
        *(
            Sample(
                f"dense, num_splits {n}",
                "flash_attn_func",
                "fwd",
                (q, k, v),
                {"num_splits": n, "return_attn_probs": True},
            )
            for n in (0, 2, 256)
        ),
        Sample("dense, out given", "flash_attn_func", "fwd_out", (q, k, v), {"out": empty(2, 5, 4, d)}),
        Sample(
            "dense, lse given",
            "flash_attn_func",
            "fwd_out",
            (q, k, v),
            {"softmax_lse": empty(2, 4, 5, dtype=torch.float32), "return_attn_probs": True, "num_splits": 0},
        ),
        Sample(
            "dense, out given and lse returned",
            "flash_attn_func",
            "fwd_out",
            (q, k, v),
            {"out": empty(2, 5, 4, d), "return_attn_probs": True},
        ),
        Sample(
            "varlen",
            "flash_attn_varlen_func",
            "varlen_fwd",
            (tq, tk, tv),
            {**packed, "max_seqlen_q": 4, "max_seqlen_k": 8, "return_attn_probs": True, "causal": True},
        ),
        Sample(
            "varlen, used lengths",
            "flash_attn_varlen_func",
            "varlen_fwd",
            (tq, tk, tv),
            {**packed, "seqused_q": ints(3, 4), "seqused_k": ints(4, 5)},  # all rows: others hold what was there
        ),
        Sample(
            "varlen, pages, out given",
            "flash_attn_varlen_func",
            "varlen_fwd_out",
            (tq, pages_k, pages_v),
            {
                "cu_seqlens_q": packed["cu_seqlens_q"],
                "seqused_k": ints(9, 4),
                "page_table": table,
                "out": empty(7, 4, d),
                "softmax_lse": empty(4, 7, dtype=torch.float32),
                "window_size": (3, 0),
            },
        ),
        Sample(
            "cache",
            "flash_attn_with_kvcache",
            "kvcache",
            (q[:, :1], k, v),
            {"cache_seqlens": ints(4, 9), "cache_leftpad": ints(0, 2), "return_softmax_lse": True},
        ),
        Sample(
            "cache, one length for all", "flash_attn_with_kvcache", "kvcache", (q[:, :1], k, v), {"cache_seqlens": 7}
        ),
        Sample("cache, pages", "flash_attn_with_kvcache", "kvcache", (q[:, :1], pages_k, pages_v), decode),
        Sample(
            "cache, pages, out given",
            "flash_attn_with_kvcache",
            "kvcache_out",
            (q[:, :1], pages_k, pages_v),
            {**decode, "out": empty(2, 1, 4, d), "num_splits": 3},
        ),
        Sample(
            "append",
            "flash_attn_with_kvcache",
            "kvcache_append",
            (q[:, :1], k.clone(), v.clone(), new_k, new_v),
            {"cache_seqlens": ints(3, 8), "causal": True, "return_softmax_lse": True},
        ),
        Sample(
            "append, rotary, pages",
            "flash_attn_with_kvcache",
            "kvcache_append",
            (q[:, :1], pages_k.clone(), pages_v.clone(), new_k, new_v),
            {**decode, "rotary_cos": t(32, d // 2), "rotary_sin": t(32, d // 2, seed=1), "rotary_interleaved": False},
        ),
        Sample(
            "append, out given",
            "flash_attn_with_kvcache",
            "kvcache_append_out",
            (q[:, :1], k.clone(), v.clone(), new_k, new_v),
            {"cache_seqlens": ints(3, 8), "out": empty(2, 1, 4, d)},
        ),
        Sample("combine", "flash_attn_combine", "combine", (parts, logs)),
        Sample("combine to bf16", "flash_attn_combine", "combine", (parts, logs), {"out_dtype": torch.bfloat16}),
        Sample("combine, out given", "flash_attn_combine", "combine_out", (parts, logs, empty(2, 5, 4, d))),
        Sample("merge", "merge_states", "merge_states", (q, f32(2, 4, 5), t(2, 5, 4, d, seed=7), f32(2, 4, 5, seed=1))),
        Sample(
            "merge, out given",
            "merge_states",
            "merge_states_out",
            (q, f32(2, 4, 5), t(2, 5, 4, d, seed=7), f32(2, 4, 5, seed=1)),
            {"out": empty(2, 5, 4, d)},
        ),
        Sample(
            "schedule",
            "get_scheduler_metadata",
            "get_scheduler_metadata",
            step,
            {"qkv_dtype": torch.bfloat16, "causal": True, "page_size": 8},
        ),
        Sample(
            "schedule, out given",
            "get_scheduler_metadata",
            "get_scheduler_metadata_out",
            step,
            {"out": torch.ones(17, dtype=torch.int32, device=device)},
        ),
    ]


def tensors(result):
    """The tensors of a result, which may be one or a tuple."""
    return result if isinstance(result, tuple) else (result,)


def copies(sample: Sample):
    """args and kwargs with tensors of their own, so that a call that writes leaves the sample alone."""

    def own(x):
        return x.clone() if isinstance(x, torch.Tensor) else x

    return tuple(map(own, sample.args)), {name: own(x) for name, x in sample.kwargs.items()}


def operator_arguments(sample: Sample):
    """(args, kwargs) with which to call the operator of a sample itself, tensors of their own: what a mode sees."""
    import hopper_attention

    seen = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is getattr(torch.ops.hopper_attention, sample.operator).default:
                seen.append(tree_map_only(torch.Tensor, torch.clone, (args, kwargs or {})))
            return function(*args, **(kwargs or {}))

    args, kwargs = copies(sample)
    with Record():
        getattr(hopper_attention, sample.function)(*args, **kwargs)
    (found,) = seen
    return found


class EveryFunction(torch.nn.Module):
    """A step that calls all public functions: prefill, append, schedule, decode over pages, two ways of merging."""

    def __init__(self, d=16):
        super().__init__()
        self.project = torch.nn.Linear(4 * d, 8 * d, bias=False)
        self.d = d

    def forward(self, x, cache, pages, lengths, table, starts):
        import hopper_attention as h

        batch, length, _ = x.shape
        q, k, v = self.project(x).view(batch, length, 8, self.d).split([4, 2, 2], dim=2)
        dense, dense_lse = h.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, softcap=20.0)
        packed, packed_lse = h.flash_attn_varlen_func(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), starts, starts, length, length, return_attn_probs=True
        )
        appended, lse = h.flash_attn_with_kvcache(
            q, cache[0], cache[1], k, v, cache_seqlens=lengths, causal=True, return_softmax_lse=True
        )
        schedule = h.get_scheduler_metadata(
            batch, length, table.shape[1] * pages.shape[2], 4, 2, self.d, lengths, page_size=pages.shape[2]
        )
        paged = h.flash_attn_with_kvcache(
            q,
            pages[0],
            pages[1],
            cache_seqlens=lengths,
            page_table=table,
            scheduler_metadata=schedule,
            out=torch.empty_like(q),
        )
        merged, merged_lse = h.merge_states(dense, dense_lse, appended, lse)
        parts = torch.stack([merged.float(), packed.view_as(merged).float()])
        logs = torch.stack([merged_lse, packed_lse.view(4, batch, length).transpose(0, 1)]).transpose(2, 3)
        return h.flash_attn_combine(parts, logs.contiguous())[0] + paged


class StepOnCaches(torch.nn.Module):
    """A step whose caches are buffers, as an engine's are: mode="reduce-overhead" records no graph that writes to an
    argument. step(x, cache, pages, ...).
    """

    def __init__(self, step, **caches):
        super().__init__()
        self.step = step
        for name, cache in caches.items():
            self.register_buffer(name, cache.clone())

    def forward(self, x, *others):
        return self.step(x, *self.buffers(), *others)


def model_inputs(device="cpu", dtype=torch.float32, d=16):
    """Arguments of EveryFunction.forward: x, K and V caches in one tensor, pages in one tensor, lengths, table, starts."""
    return (
        values(2, 3, 4 * d, dtype=dtype, device=device),
        values(2, 2, 12, 2, d, seed=1, dtype=dtype, device=device),
        values(2, 6, 8, 2, d, seed=2, dtype=dtype, device=device),
        int32(4, 9, device=device),
        int32(3, 1, 5, 0, device=device).view(2, 2),
        int32(0, 3, 6, device=device),
    )
