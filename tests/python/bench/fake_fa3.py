"""Stands in for the FA3 library: its calling convention, answered by the reference. `SEEN` keeps what was passed."""

from __future__ import annotations

import torch

from hopper_attention.reference import functions

SEEN: list[dict] = []


def load(path):
    if "missing" in path:
        raise OSError(f"{path}: cannot be loaded")


def forward(
    q,
    k,
    v,
    *,
    softmax_scale,
    causal,
    cu_seqlens_q,
    max_seqlen_q,
    max_seqlen_k,
    cu_seqlens_k=None,
    seqused_k=None,
    page_table=None,
    window=(-1, -1),
    softcap=0.0,
    sinks=None,
    metadata=None,
    num_splits=0,
    out=None,
):
    assert q.dim() == 3 and k.dim() == (3 if page_table is None else 4)
    assert not (causal and window != (-1, -1))
    SEEN.append({"causal": causal, "window": window, "num_splits": num_splits, "metadata": metadata, "sinks": sinks})
    return functions.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_k=seqused_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window,
        softcap=softcap,
        s_aux=sinks,
        page_table=page_table,
        out=out,
        return_attn_probs=True,
    )


def scheduler_metadata(*, batch, page_size, **given):
    return torch.full((4,), page_size or 0, dtype=torch.int32)
