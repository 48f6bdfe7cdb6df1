"""Wrong arguments of `_core.append` on made-up CUDA tensors: the exception names the argument of
flash_attn_with_kvcache, and nothing is launched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from fake_cuda import CPU, CUDA, FastTensor, SlowTensor
from hopper_attention import _core

NEW, CACHE, LENGTHS = (2, 3, 2, 64), (2, 9, 2, 64), (2,)
Q, TABLE = (2, 5, 4, 64), (100, 16)


def right_call(kind=FastTensor, **changes):
    given = {
        "k_new": kind(NEW),
        "v_new": kind(NEW),
        "k_cache": kind(CACHE),
        "v_cache": kind(CACHE),
        "seqused_k": kind(LENGTHS, "int32"),
        "rotary_cos": kind(TABLE),
        "rotary_sin": kind(TABLE),
        "q": kind(Q),
        "q_rotated": kind(Q),
    }
    return {**given, **changes}


@dataclass(frozen=True)
class Wrong:
    why: str
    error: type[Exception]
    message: str
    changes: dict[str, Any] = field(default_factory=dict)


WITHOUT_ROTARY = {"rotary_cos": None, "rotary_sin": None}
CASES = [
    Wrong("k a list", TypeError, "^k: .*list", {"k_new": [1.0]}),
    Wrong("k None", ValueError, "^k: .*none was given", {"k_new": None}),
    Wrong("lengths a list", TypeError, "^cache_seqlens: .*list", {"seqused_k": [1, 2]}),
    Wrong("no lengths", ValueError, "^cache_seqlens: .*needed", {"seqused_k": None}),
    Wrong("lengths twice", ValueError, "^cache_seqlens: .*one of them", {"seqused_k_all": 3}),
    Wrong("lengths in fp32", TypeError, "^cache_seqlens: dtype.*int32", {"seqused_k": FastTensor(LENGTHS, "fp32")}),
    Wrong("fp32 cache", TypeError, "^k_cache: dtype", {"k_cache": FastTensor(CACHE, "fp32")}),
    Wrong("fp8 cache", TypeError, "^k_cache: dtype", {"k_cache": FastTensor(CACHE, "fp8")}),
    Wrong("v in fp16", TypeError, "^v: dtype.*bf16.*fp16", {"v_new": FastTensor(NEW, "fp16")}),
    Wrong("cache on the CPU", ValueError, "^k_cache: .*CUDA", {"k_cache": FastTensor(CACHE, device=(CPU, 0))}),
    Wrong("v on another GPU", ValueError, "^v: .*cuda:0.*cuda:1", {"v_new": FastTensor(NEW, device=(CUDA, 1))}),
    Wrong("batch of the cache", ValueError, "^k_cache: dim 0", {"k_new": FastTensor((1, *NEW[1:])),
          "v_new": FastTensor((1, *NEW[1:])), "seqused_k": FastTensor((1,), "int32")}),
    Wrong("packed k", ValueError, "^k: .*seqlen_new", {"k_new": FastTensor(NEW[1:])}),
    Wrong("page table of rank 1", ValueError, "^page_table: .*1 dims", {"page_table": FastTensor((2,), "int32")}),
    Wrong("pages and index", ValueError, "^cache_batch_idx: .*page_table",
          {"page_table": FastTensor((2, 4), "int32"), "cache_batch_idx": FastTensor(LENGTHS, "int32")}),
    Wrong("index of another batch", ValueError, "^cache_batch_idx: ", {"cache_batch_idx": FastTensor((3,), "int32")}),
    Wrong("cu_seqlens_q of another batch", ValueError, "^cu_seqlens_q: ", {"cu_seqlens_q": FastTensor((9,), "int32"),
          "q": FastTensor(Q[1:]), "q_rotated": FastTensor(Q[1:])}),
    Wrong("cos alone", ValueError, "^rotary_sin: .*together", {"rotary_sin": None}),
    Wrong("cos in fp16", TypeError, "^rotary_cos: dtype", {"rotary_cos": FastTensor(TABLE, "fp16")}),
    Wrong("too many columns", ValueError, "^rotary_cos: covers 128 columns.*64",
          {"rotary_cos": FastTensor((100, 64)), "rotary_sin": FastTensor((100, 64))}),
    Wrong("rotary without q_rotated", ValueError, "^q_rotated: .*none was given", {"q_rotated": None}),
    Wrong("q_rotated without rotary", ValueError, "^q_rotated: .*rotary_cos", WITHOUT_ROTARY),
    Wrong("q in the cache", ValueError, "^k_cache: shares memory with q,", {**WITHOUT_ROTARY, "q_rotated": None,
          "k_cache": FastTensor(CACHE, data=1 << 40), "q": FastTensor(Q, data=1 << 40)}),
    Wrong("rotary_seqlens of another batch", ValueError, "^rotary_seqlens: ",
          {"rotary_seqlens": FastTensor((3,), "int32")}),
    Wrong("k within a vector", ValueError, "^k: the address.*16 bytes", {"k_new": FastTensor(NEW, data=0x7F0000000002)}),
    Wrong("K and V share memory", ValueError, "^k_cache: shares memory with v_cache",
          {"k_cache": FastTensor(CACHE, data=1 << 40), "v_cache": FastTensor(CACHE, data=1 << 40)}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.why)
def test_wrong_arguments_are_named(case):
    with pytest.raises(case.error, match=case.message):
        _core.append(**right_call(**case.changes))


@pytest.mark.parametrize("kind", [FastTensor, SlowTensor])
def test_a_call_without_work_is_right_and_launches_nothing(kind):
    """All checks pass, so that each wrong argument above is the only one; without tokens there is nothing to launch."""
    empty = {"k_new": kind((2, 0, 2, 64)), "v_new": kind((2, 0, 2, 64)), "q": kind((2, 0, 4, 64))}
    _core.append(**right_call(kind, q_rotated=kind((2, 0, 4, 64)), **empty))


@pytest.mark.skipif(bool(_core.built_kernels()), reason="the build has kernels: made-up memory must not reach them")
def test_a_build_without_kernels_says_so():
    with pytest.raises(NotImplementedError, match="^append: .*host-only"):
        _core.append(**right_call())


def test_options_have_names():
    given = right_call()
    tensors = [given.pop(name) for name in ("k_new", "v_new", "k_cache", "v_cache")]
    with pytest.raises(TypeError):
        _core.append(*tensors, given["seqused_k"])
