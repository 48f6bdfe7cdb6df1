"""The border between numpy and torch: dtypes, rounding, memory of the caller, and numpy without torch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from hopper_attention import reference
from hopper_attention.reference import arrays

WITHOUT_TORCH = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is blocked")

sys.meta_path.insert(0, Block())
import numpy as np
import hopper_attention.reference as reference

x = np.random.default_rng(0).standard_normal((1, 9, 2, 8)).astype(np.float16)
out, lse = reference.flash_attn_func(x, x, x, causal=True, return_attn_probs=True)
want, want_lse = reference.standard_attention(x[0, :, 0], x[0, :, 0], x[0, :, 0], mask=np.tril(np.ones((9, 9), bool)))
assert out.dtype == np.float16 and lse.dtype == np.float32
assert abs(out[0, :, 0] - want).max() < 2e-3 and abs(lse[0, 0] - want_lse).max() < 1e-5
cache = np.zeros((1, 12, 2, 8), np.float16)
reference.flash_attn_with_kvcache(x[:, :1], cache, cache.copy(), x, x, cache_seqlens=2)
assert (cache[:, 2:11] == x).all()
assert "torch" not in sys.modules
print("done")
"""


def test_numpy_works_without_torch():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert done.stdout.strip() == "done", done.stderr


def test_numpy_call_leaves_torch_alone():
    code = "import sys, numpy as np, hopper_attention.reference as r; x = np.ones((1, 2, 1, 4)); "
    code += "r.flash_attn_func(x, x, x); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_bfloat16_rounds_to_nearest_even_as_torch_does():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(20_000) * 2.0 ** rng.integers(-140, 127, 20_000)).astype(np.float32)
    ties = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0xFF800000, 0, 0x80000000], np.uint32).view(np.float32)
    values = np.concatenate([values, ties])
    wanted = torch.from_numpy(values).bfloat16()
    np.testing.assert_array_equal(arrays.bfloat16_from_float(values), wanted.view(torch.int16).numpy().view(np.uint16))
    back = arrays.float_from_bfloat16(arrays.bfloat16_from_float(values))
    np.testing.assert_array_equal(back, wanted.float().numpy())
    assert np.isnan(arrays.float_from_bfloat16(arrays.bfloat16_from_float(np.array([np.nan], np.float32)))).all()


def test_fp8_values_codes_and_rounding_are_those_of_torch():
    torch = pytest.importorskip("torch")
    codes = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(arrays.e4m3_values(), codes.view(torch.float8_e4m3fn).float().numpy())
    values = np.random.default_rng(1).standard_normal(50_000).astype(np.float32) * 60
    values = np.concatenate([values, values / 2**12, np.arange(-448, 449, dtype=np.float32), [2.0**-10, 3 * 2.0**-10]])
    values = np.clip(values, -448, 448).astype(np.float32)
    wanted = torch.from_numpy(values).to(torch.float8_e4m3fn)
    np.testing.assert_array_equal(arrays.round_to_e4m3(values), wanted.float().numpy())
    np.testing.assert_array_equal(arrays.e4m3_codes(values), wanted.view(torch.uint8).numpy())
    assert arrays.round_to_e4m3(np.array([1e6, -np.inf])).tolist() == [448.0, -448.0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_torch_dense_agrees_with_float64_and_keeps_the_dtype(dtype):
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, dtype)
    q, k, v = (torch.randn(2, 30, h, 16, generator=generator).to(dtype) for h in (4, 2, 2))
    out, lse = reference.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    wanted, wanted_lse = reference.flash_attn_func(
        q.double(), k.double(), v.double(), causal=True, return_attn_probs=True
    )
    assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(out.double(), wanted, rtol=torch.finfo(dtype).eps * 0.51, atol=2e-6)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=1e-6)


def test_torch_caches_are_appended_in_place_and_views_are_honoured():
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(1)
    kv = torch.randn(2, 8, 2, 2, 16, generator=generator).bfloat16()  # K and V interleaved: axis 2
    before = kv.clone()
    k, v = kv[:, :, 0], kv[:, :, 1]
    q = torch.randn(2, 4, 1, 16, generator=generator).bfloat16().transpose(1, 2)
    new = torch.randn(2, 1, 2, 16, generator=generator).bfloat16()
    lengths = torch.tensor([3, 7], dtype=torch.int32)
    out = torch.full((2, 1, 4, 32), 9.0, dtype=torch.bfloat16)
    reference.flash_attn_with_kvcache(q, k, v, new, -new, cache_seqlens=lengths, out=out[..., ::2])
    before[0, 3, 0], before[1, 7, 0], before[0, 3, 1], before[1, 7, 1] = new[0, 0], new[1, 0], -new[0, 0], -new[1, 0]
    assert torch.equal(kv, before) and (out[..., 1::2] == 9).all()
    wanted = reference.flash_attn_func(q[:1], before[:1, :4, 0], before[:1, :4, 1])
    assert torch.equal(out[:1, ..., ::2], wanted)


def test_fp8_inputs_use_descales_and_give_bfloat16():
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 6, h, 16, generator=generator).to(torch.float8_e4m3fn) for h in (4, 2, 2))
    scales = [torch.rand(2, 2, generator=generator) + 0.5 for _ in range(3)]
    out, lse = reference.flash_attn_func(
        q, k, v, q_descale=scales[0], k_descale=scales[1], v_descale=scales[2][:1].expand(2, 2), return_attn_probs=True
    )
    factor = [
        s[:, None, :, None].double() for s in (scales[0].repeat_interleave(2, 1), scales[1], scales[2][:1].expand(2, 2))
    ]
    exact = [x.double() * f for x, f in zip((q, k, v), factor, strict=True)]
    wanted, wanted_lse = reference.flash_attn_func(*exact, return_attn_probs=True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), wanted, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)


def test_tensor_that_requires_grad_is_refused_unless_grad_is_off():
    torch = pytest.importorskip("torch")
    q = torch.randn(1, 2, 1, 8, requires_grad=True)
    k = torch.randn(1, 2, 1, 8)
    with pytest.raises(NotImplementedError, match="inference_mode"):
        reference.flash_attn_func(q, k, k)
    with torch.inference_mode():
        assert reference.flash_attn_func(q, k, k).shape == q.shape


def test_tensor_on_another_device_is_refused():
    torch = pytest.importorskip("torch")
    q = torch.zeros(1, 2, 1, 8)
    with pytest.raises(ValueError, match="k is on meta"):
        reference.flash_attn_func(q, q.to("meta"), q)
