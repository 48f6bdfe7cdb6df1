"""FlopCounterMode: two matrix products for each query and key of each sequence."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import hopper_attention  # noqa: E402
from torch_ops.samples import int32, values  # noqa: E402

D, DV, HEADS = 16, 8, 4


def counted(function, *args, **kwargs):
    with FlopCounterMode(display=False) as counter:
        function(*args, **kwargs)
    return counter.get_total_flops()


def products(pairs):
    return 2 * HEADS * (D + DV) * pairs


def qkv(*lead_q, lead_k):
    return values(*lead_q, HEADS, D), values(*lead_k, 2, D), values(*lead_k, 2, DV)


def test_dense_is_torch_s_own_count():
    q, k, v = values(2, 5, HEADS, D), values(2, 9, HEADS, D), values(2, 9, HEADS, D)
    own = counted(hopper_attention.flash_attn_func, q, k, v)
    transposed = (x.transpose(1, 2).to("meta") for x in (q, k, v))
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        torch.nn.functional.scaled_dot_product_attention(*transposed)
    assert own == counter.get_total_flops() == 2 * 2 * 2 * HEADS * D * 5 * 9


def test_the_first_call_of_all_is_counted():
    code = """
import torch, hopper_attention
from torch.utils.flop_counter import FlopCounterMode
q = torch.zeros(1, 2, 3, 8)
with FlopCounterMode(display=False) as outer, FlopCounterMode(display=False) as inner:
    hopper_attention.flash_attn_func(q, q, q)
assert outer.get_total_flops() == inner.get_total_flops() == 2 * 3 * 16 * 2 * 2, outer.get_total_flops()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_dense():
    q, k, v = qkv(2, 5, lead_k=(2, 9))
    assert counted(hopper_attention.flash_attn_func, q, k, v, causal=True) == products(2 * 5 * 9)
    assert counted(hopper_attention.flash_attn_func, q, k, v, out=torch.empty(2, 5, HEADS, DV)) == products(2 * 5 * 9)


def test_varlen_counts_each_sequence():
    q, k, v = qkv(7, lead_k=(12,))
    starts = int32(0, 3, 7), int32(0, 4, 12)
    assert counted(hopper_attention.flash_attn_varlen_func, q, k, v, *starts) == products(3 * 4 + 4 * 8)
    used = {"seqused_q": int32(0, 2), "seqused_k": int32(4, 0)}
    assert counted(hopper_attention.flash_attn_varlen_func, q, k, v, *starts, **used) == 0


def test_cache_with_append():
    q, k_cache, v_cache = qkv(2, 1, lead_k=(2, 12))
    new = values(2, 1, 2, D), values(2, 1, 2, DV)
    lengths = int32(3, 12)
    call = hopper_attention.flash_attn_with_kvcache
    assert counted(call, q, k_cache, v_cache, cache_seqlens=lengths) == products(3 + 12)
    assert counted(call, q, k_cache, v_cache, *new, cache_seqlens=lengths) == products(4 + 12)
    assert counted(call, q, k_cache, v_cache) == products(12 + 12)


def test_lengths_count_as_the_kernels_clamp_them():
    q, k_cache, v_cache = qkv(2, 1, lead_k=(2, 12))
    new = values(2, 1, 2, D), values(2, 1, 2, DV)
    call = hopper_attention.flash_attn_with_kvcache
    cases = [
        ((3, -4), {}, 3 + 0),
        ((3, 900), {}, 3 + 12),
        ((-4, 900), {"k": new[0], "v": new[1]}, 1 + 12),
        ((5, 5), {"cache_leftpad": int32(3, 0)}, 2 + 5),
        ((5, 5), {"cache_leftpad": int32(9, -2)}, 0 + 5),
        ((5, 12), {"cache_leftpad": int32(3, 2), "k": new[0], "v": new[1]}, 3 + 10),
    ]
    for lengths, options, pairs in cases:
        assert counted(call, q, k_cache, v_cache, cache_seqlens=int32(*lengths), **options) == products(pairs), options
    table = int32(3, 1, 5, 0).view(2, 2)
    pages = values(6, 8, 2, D), values(6, 8, 2, DV)
    assert counted(call, q, *pages, cache_seqlens=int32(90, -1), page_table=table) == products(16)
    q, k, v = qkv(7, lead_k=(12,))
    used = {"seqused_q": int32(2, -3), "seqused_k": int32(400, 5)}
    starts = int32(0, 3, 7), int32(0, 4, 12)
    assert counted(hopper_attention.flash_attn_varlen_func, q, k, v, *starts, **used) == products(2 * 12)
    used = {
        "seqused_q": int32(900, 900),
        "seqused_k": int32(2, 900),
    }  # of their own queries, and the keys behind a start
    assert counted(hopper_attention.flash_attn_varlen_func, q, k, v, *starts, **used) == products(3 * 2 + 4 * 8)


def test_pages_without_memory_count_with_their_bound():
    q, k_cache, v_cache = (x.to("meta") for x in qkv(2, 1, lead_k=(6, 8)))
    table = int32(3, 1, 5, 0).view(2, 2).to("meta")
    lengths = int32(3, 9).to("meta")
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        call = hopper_attention.flash_attn_with_kvcache
        assert counted(call, q, k_cache, v_cache, cache_seqlens=lengths, page_table=table) == products(2 * 16)


@pytest.mark.parametrize(
    ("bounds", "pairs"), [((4, 8), 2 * 4 * 8), ((None, None), 2 * 3 * 6), ((4, None), 2 * 4 * 6)], ids=str
)
def test_packed_sequences_without_memory_count_with_their_bounds(bounds, pairs):
    """Without a bound as if all had as many rows."""
    q, k, v = (x.to("meta") for x in qkv(7, lead_k=(12,)))
    starts = int32(0, 3, 7).to("meta"), int32(0, 4, 12).to("meta")
    assert counted(hopper_attention.flash_attn_varlen_func, q, k, v, *starts, *bounds) == products(pairs)
