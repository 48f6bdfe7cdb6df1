"""The gates bite: a CPU emulation of the kernel passes, and each seeded defect of it is rejected."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

torch = pytest.importorskip("torch")
gates = pytest.importorskip("hopper_attention.testing.gates")

LOG2E = math.log2(math.e)
STEP = 16  # keys of one MMA instruction
DEFECTS = {
    "scale off by 0.5 %": "scale",
    "mask one key too wide": "wide",
    "mask one key too narrow": "narrow",
    "newest key dropped": "newest",
    "stale V row": "stale",
    "row sum not rescaled": "sum",
    "output not rescaled": "output",
    "output accumulated in bf16": "accumulator",
    "LSE in base 2": "lse_base",
    "LSE without the scale": "lse_scale",
    "empty row gives NaN": "empty",
    "a block of keys counted twice": "twice",
    "V of another stage": "stage",
    "heads swapped": "heads",
    "diagonal from the top left": "corner",
    "rows one too low": "rows",
    "LSE off by a thousandth": "lse_off",
    "softcap left out": "softcap",
    "rows of another tile": "tile",
}


@dataclass(frozen=True)
class Case:
    why: str
    seqlen_q: int
    seqlen_k: int
    heads_q: int = 2
    heads_k: int = 1
    head_dim: int = 64
    dtype: Any = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case("full", 192, 1024),
    Case("causal, ragged", 300, 777, options={"causal": True}),
    Case("fp16", 130, 1024, dtype=torch.float16, options={"causal": True}),
    Case("window", 200, 900, options={"window_size": (300, 5)}),
    Case("chunk", 256, 1000, options={"attention_chunk": 512, "causal": True}),
    Case("softcap", 128, 1024, options={"softcap": 3.0}),
    Case("rows that see no key", 900, 640, options={"causal": True}),
    Case("narrow V scale", 64, 64, head_dim=8, options={"softmax_scale": 0.5}),
]


def rounded(x, dtype):
    return x.to(dtype).float()


def emulate(q, k, v, *, softmax_scale=None, softcap=0.0, s_aux=None, defect=None, block=64, **mask):
    """What the kernel does: blocks of keys from the right, exp2, P rounded to the dtype, sums in float32."""
    dtype = q.dtype
    group = q.shape[2] // k.shape[2]
    scale = (q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale) * (1.005 if defect == "scale" else 1.0)
    begin, end = gates.visible_intervals(q.shape[1], k.shape[1], **mask)
    newest = end - 1
    if defect == "wide":
        begin = (begin - 1).clamp(min=0)
        end = torch.where(end > begin, (end + 1).clamp(max=k.shape[1]), end)
    if defect == "narrow":
        end = torch.maximum(end - 1, begin)
    if defect == "corner":
        shift = k.shape[1] - q.shape[1]
        begin, end = ((x - shift).clamp(0, k.shape[1]) for x in (begin, end))
    qf = q.float().transpose(1, 2)  # (B, Hq, Sq, D)
    kf = k.float().transpose(1, 2).repeat_interleave(group, 1)
    vf = v.float().transpose(1, 2).repeat_interleave(group, 1).clone()
    if defect == "stale":
        row = v.shape[1] * 3 // 4  # seen by some query in every case
        vf[:, :, row] = vf[:, :, row - 1]
    top = torch.full(qf.shape[:3], -math.inf)
    total = torch.zeros(qf.shape[:3])
    output = torch.zeros(*qf.shape[:3], v.shape[3])
    for first in reversed(range(0, k.shape[1], block)):
        keys = torch.arange(first, min(first + block, k.shape[1]))
        scores = qf @ kf[:, :, keys].transpose(-1, -2) * scale
        if softcap and defect != "softcap":
            scores = softcap * torch.tanh(scores / softcap)
        visible = (keys >= begin[:, None]) & (keys < end[:, None])
        if defect == "newest":
            visible &= keys != newest[:, None]
        scores = scores.masked_fill(~visible, -math.inf)
        new_top = torch.maximum(top, scores.amax(-1))
        base = new_top.masked_fill(new_top == -math.inf, 0.0)
        p = torch.exp2((scores - base[..., None]) * LOG2E)
        rescale = torch.exp2((top - base) * LOG2E)
        defective = first == k.shape[1] * 3 // 4 // block * block  # seen by some query in every case
        if defect == "twice" and defective:
            p = 2 * p
        values = vf[:, :, keys - block if defect == "stage" and defective else keys]
        total = total * (1.0 if defect == "sum" else rescale) + p.sum(-1)
        output = output * (1.0 if defect == "output" else rescale[..., None])
        for part in range(0, len(keys), STEP):  # what one MMA instruction adds
            output = output + rounded(p[..., part : part + STEP], dtype) @ values[:, :, part : part + STEP]
            if defect == "accumulator":
                output = rounded(output, torch.bfloat16)
        top = new_top
    lse = top + total.log()
    if s_aux is not None:
        lse = torch.logaddexp(lse, s_aux.float()[:, None])
        total = torch.where(top == -math.inf, 1.0, (lse - top).exp())
    if defect == "lse_base":
        lse = lse * LOG2E
    if defect == "lse_scale":
        lse = lse + top * 0.001
    if defect == "lse_off":
        lse = lse + 1e-3
    out = output / (total if defect == "empty" else torch.where(total == 0, 1.0, total))[..., None]
    if defect == "heads":
        out, lse = out.flip(1), lse.flip(1)
    if defect == "rows":
        out = out.roll(1, 2)
    if defect == "tile":
        out[:, :, :STEP] = out[:, :, -STEP:].clone()
    return out.to(dtype).transpose(1, 2), lse


def inputs(case, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(case.dtype)

    q = normal(2, case.seqlen_q, case.heads_q, case.head_dim)
    k = normal(2, case.seqlen_k, case.heads_k, case.head_dim)
    return q, k, normal(2, case.seqlen_k, case.heads_k, case.head_dim)


def applies(defect, case):
    """Defects that change nothing in a case are no defects there."""
    masked = bool({"causal", "window_size", "attention_chunk"} & set(case.options))
    if defect == "wide":
        return masked
    if defect == "empty":
        return case.seqlen_q > case.seqlen_k and masked
    if defect in ("sum", "output", "twice", "stage"):
        return case.seqlen_k > 64  # more than one block
    if defect == "corner":
        return masked and case.seqlen_q != case.seqlen_k
    if defect == "softcap":
        return "softcap" in case.options
    if defect == "accumulator":
        return case.seqlen_k > 700  # its error grows with the keys; below, that of plain PyTorch is larger
    return True


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.why)
def test_the_true_thing_passes(case):
    q, k, v = inputs(case)
    result = gates.check(*emulate(q, k, v, **case.options), q, k, v, **case.options)
    assert result, result.message


SEEDED = [
    pytest.param(defect, case, id=f"{name}, {case.why}")
    for name, defect in DEFECTS.items()
    for case in CASES
    if applies(defect, case)
]


@pytest.mark.parametrize(("defect", "case"), SEEDED)
def test_a_seeded_defect_is_rejected(defect, case):
    q, k, v = inputs(case)
    result = gates.check(*emulate(q, k, v, defect=defect, **case.options), q, k, v, **case.options)
    assert not result, result.message


def test_sinks_count_in_the_denominator_and_the_lse():
    case = Case("sinks", 100, 80, heads_q=4, options={"causal": True, "s_aux": torch.tensor([0.0, 2.0, -3.0, 9.0])})
    q, k, v = inputs(case)
    out, lse = emulate(q, k, v, **case.options)
    assert gates.check(out, lse, q, k, v, **case.options)
    assert torch.equal(lse[:, :, 0], case.options["s_aux"].expand(2, 4)), "row 0 sees no key"
    without = {**case.options, "s_aux": None}
    assert not gates.check(*emulate(q, k, v, **without), q, k, v, **case.options)


def test_one_wrong_element_is_found_and_named():
    case = CASES[1]
    q, k, v = inputs(case)
    out, lse = emulate(q, k, v, **case.options)
    out[1, 7, 1, 3] += 0.1
    result = gates.check(out, lse, q, k, v, **case.options)
    assert not result and "batch 1, head 1, row 7, column 3" in result.message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite_values_are_rejected(value):
    case = CASES[0]
    q, k, v = inputs(case)
    out, lse = emulate(q, k, v)
    bad = out.clone()
    bad[0, 5, 0, 0] = value
    assert not gates.check(bad, lse, q, k, v)
    bad_lse = lse.clone()
    bad_lse[0, 0, 5] = value
    assert not gates.check(out, bad_lse, q, k, v)


def test_blocks_do_not_change_the_verdict(monkeypatch):
    case = CASES[1]
    q, k, v = inputs(case)
    out, lse = emulate(q, k, v, **case.options)
    whole = gates.check(out, lse, q, k, v, **case.options)
    monkeypatch.setattr(gates, "_BLOCK_SCORES", 777 * 37)
    parts = gates.check(out, lse, q, k, v, **case.options)
    assert parts.elementwise == pytest.approx(whole.elementwise, rel=1e-6)
    assert parts.rms_ratio == pytest.approx(whole.rms_ratio, rel=1e-3)
    assert parts.lse_ratio == pytest.approx(whole.lse_ratio, rel=1e-6)


def test_intervals_replace_the_mask_options():
    case = CASES[3]
    q, k, v = inputs(case)
    out, lse = emulate(q, k, v, **case.options)
    intervals = gates.visible_intervals(case.seqlen_q, case.seqlen_k, **case.options)
    assert gates.check(out, lse, q, k, v, intervals=intervals)
    assert not gates.check(out, lse, q, k, v)


@pytest.mark.parametrize("seqlens", [(0, 5), (5, 0), (0, 0)])
def test_empty_lengths(seqlens):
    q, k = torch.zeros(1, seqlens[0], 2, 8, dtype=torch.float16), torch.zeros(1, seqlens[1], 2, 8, dtype=torch.float16)
    out, lse = torch.zeros_like(q), torch.full((1, 2, seqlens[0]), -math.inf)
    assert gates.check(out, lse, q, k, k)
    if seqlens[0]:
        assert not gates.check(out + 1e-7, lse, q, k, k)
        assert not gates.check(out, lse + math.inf, q, k, k)


def brute_force(row, seqlen_q, seqlen_k, causal, window_size, chunk):
    """The keys of one query, one by one."""
    diagonal = row + seqlen_k - seqlen_q
    left, right = window_size
    seen = []
    for key in range(seqlen_k):
        if causal and key > diagonal:
            continue
        if not causal and right >= 0 and key > diagonal + right:
            continue
        if left >= 0 and key < diagonal - left:
            continue
        if chunk and key // chunk != diagonal // chunk:
            continue
        seen.append(key)
    return seen


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_size", [(-1, -1), (0, 0), (3, -1), (-1, 2), (2, 4)])
@pytest.mark.parametrize("chunk", [0, 1, 4, 100])
@pytest.mark.parametrize("seqlens", [(7, 13), (13, 7), (1, 9), (9, 9), (4, 0)])
def test_intervals_against_brute_force(seqlens, chunk, window_size, causal):
    begin, end = gates.visible_intervals(*seqlens, causal=causal, window_size=window_size, attention_chunk=chunk)
    for row in range(seqlens[0]):
        assert list(range(int(begin[row]), int(end[row]))) == brute_force(row, *seqlens, causal, window_size, chunk)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", lambda out, lse, q: (out, lse, q.float())),
        ("out", lambda out, lse, q: (out[:, :-1], lse, q)),
        ("out", lambda out, lse, q: (out.half(), lse, q)),
        ("lse", lambda out, lse, q: (out, lse.transpose(1, 2), q)),
        ("lse", lambda out, lse, q: (out, lse.double(), q)),
    ],
)
def test_what_does_not_belong_together_is_refused(name, change):
    q, k, v = inputs(CASES[0])
    out, lse, q = change(*emulate(q, k, v), q)
    with pytest.raises(ValueError, match=f"^{name}:"):
        gates.check(out, lse, q, k, v)
