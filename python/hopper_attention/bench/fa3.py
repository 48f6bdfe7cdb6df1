"""The FlashAttention-3 library that engines ship (vLLM's build, varlen calls only), loaded from a file that is given.

Its calling convention is that of the library in the vLLM 0.33 wheel; another build can be called through a file with
the same three functions (`--fa3-py`).
"""

from __future__ import annotations

import importlib.util
import lzma
import pathlib
import tempfile
from types import ModuleType
from typing import Any

SPLITTING_UP_TO = 512  # queries; more keep all SMs busy without splits


def load(path: str) -> None:
    """Loads the library; one that ends in .xz is unpacked first. Raises OSError if that fails."""
    import torch

    if path.endswith(".xz"):
        with tempfile.NamedTemporaryFile(suffix=".so") as unpacked:
            unpacked.write(lzma.decompress(pathlib.Path(path).read_bytes()))
            unpacked.flush()
            torch.ops.load_library(unpacked.name)
        return
    torch.ops.load_library(path)


def convention(path: str | None) -> Any:
    """The module whose load, forward and scheduler_metadata are used: this one, or the given file."""
    if path is None:
        import sys

        return sys.modules[__name__]
    spec = importlib.util.spec_from_file_location("fa3_convention", path)
    if spec is None or spec.loader is None:
        raise OSError(f"--fa3-py {path}: is not a Python file")
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    """q (T, Hq, D); k, v (Tk, Hk, D) or (pages, page_size, Hk, D). Returns out (T, Hq, Dv), lse (Hq, T).

    num_splits: 0 lets its heuristic choose, 1 turns splitting off. window (left, 0) takes the place of causal.
    """
    import torch

    return torch.ops._vllm_fa3_C.fwd(
        q,
        k,
        v,
        *(None, None, None),  # new keys, new values, qv
        out,
        cu_seqlens_q,
        cu_seqlens_k,
        *(None, None),  # offsets of new keys, used queries
        seqused_k,
        max_seqlen_q,
        max_seqlen_k,
        page_table,
        *(None, None, None, None, None),  # batch index, left padding, rotary cos, sin, lengths
        *(None, None, None),  # descales
        softmax_scale,
        causal,
        *window,
        softcap,
        True,  # interleaved rotary
        metadata,
        num_splits,
        None,  # GQA packing is its choice
        0,  # SM margin
        sinks,
        *(1, 0, None),  # context parallel: size, rank, lengths
    )[:2]


def scheduler_metadata(
    *,
    batch,
    max_seqlen_q,
    max_seqlen_k,
    heads,
    kv_heads,
    d,
    dv,
    dtype,
    seqused_k,
    cu_seqlens_q,
    page_size=None,
    causal=True,
    window=(-1, -1),
    softcap=0.0,
    num_splits=0,
):
    """What engines compute once for each step and pass to every layer."""
    import torch

    lengths = (seqused_k, cu_seqlens_q, None, None, None, None)
    mask = (causal, *window, softcap > 0)
    shape = (batch, max_seqlen_q, max_seqlen_k, heads, kv_heads, d, dv)
    return torch.ops._vllm_fa3_C.get_scheduler_metadata(
        *shape, dtype, *lengths, page_size, 0, *mask, num_splits, None, 0
    )
