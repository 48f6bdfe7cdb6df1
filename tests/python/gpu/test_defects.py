"""The gates reject wrong answers of the GPU: each defect is made from real kernels with one thing wrong.

Defects inside the kernel (a row sum that is not rescaled, an accumulator in bf16) are emulated in
tests/python/test_gates.py.
"""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from gpu.support import Case, attend, fail, main_dims, make_inputs, verdict  # noqa: E402

pytestmark = pytest.mark.gpu

CASES = [
    Case("full", 300, 1000),
    Case("causal", 500, 777, causal=True),
    Case("window", 500, 900, window=(200, 0)),
    Case("fp16 causal", 500, 777, dtype="fp16", causal=True),
    Case("d 64, softcap, sinks", 400, 600, head_dim=64, softcap=20.0, sinks="fp32", causal=True),
]


def scale_off(case, t):
    return attend(dataclasses.replace(case, scale=case.dims[0] ** -0.5 * 1.005), t)


def one_key_too_many_on_the_left(case, t):
    return attend(dataclasses.replace(case, window=(201, 0)), t) if case.window != (-1, -1) else None


def one_key_too_few_on_the_left(case, t):
    return attend(dataclasses.replace(case, window=(199, 0)), t) if case.window != (-1, -1) else None


def one_key_too_many_on_the_right(case, t):
    if not case.causal:
        return None
    return attend(dataclasses.replace(case, causal=False, window=(-1, 1)), t)


def newest_key_dropped(case, t):
    short = {**t, "k": t["k"][:, :-1], "v": t["v"][:, :-1]}
    return attend(dataclasses.replace(case, causal=False, window=(-1, -1)), short) if not case.causal else None


def newest_key_of_each_row_dropped(case, t):
    """Causal on one key less: each query sees the keys up to the one before its own."""
    if not case.causal:
        return None
    return attend(case, {**t, "k": t["k"][:, :-1].contiguous(), "v": t["v"][:, :-1].contiguous()})


def stale_v_row(case, t):
    v = t["v"].clone()
    v[:, case.seqlen_k - 150] = v[:, case.seqlen_k - 151]
    return attend(case, {**t, "v": v})


def lse_off(case, t):
    out, lse = attend(case, t)
    return out, lse + 1e-3


def lse_in_base_two(case, t):
    out, lse = attend(case, t)
    return out, lse * 1.4426950408889634


def wrong_kv_head(case, t):
    return attend(case, {**t, "k": t["k"].flip(2).contiguous()})


def no_softcap(case, t):
    return attend(dataclasses.replace(case, softcap=0.0), t) if case.softcap else None


def no_sinks(case, t):
    return attend(case, {**t, "s_aux": None}) if case.sinks else None


def one_element(case, t):
    out, lse = attend(case, t)
    out[1, 77, 1, 5] += 0.05
    return out, lse


def a_tile_of_the_run_before(case, t):
    out, lse = attend(case, t)
    old, _ = attend(case, make_inputs(dataclasses.replace(case, seed=9)))
    out[1, 256:, 1] = old[1, 256:, 1]
    return out, lse


DEFECTS = [
    scale_off,
    one_key_too_many_on_the_left,
    one_key_too_few_on_the_left,
    one_key_too_many_on_the_right,
    newest_key_dropped,
    newest_key_of_each_row_dropped,
    stale_v_row,
    lse_off,
    lse_in_base_two,
    wrong_kv_head,
    no_softcap,
    no_sinks,
    one_element,
    a_tile_of_the_run_before,
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda f: f.__name__.replace("_", " "))
def test_a_seeded_defect_is_rejected(defect):
    applied = 0
    for case in map(main_dims, CASES):
        tensors = make_inputs(case)
        right = verdict(case, tensors, *attend(case, tensors))
        if not right:
            fail(case, f"without a defect: {right.message}")
        wrong = defect(case, tensors)
        if wrong is None:
            continue
        applied += 1
        result = verdict(case, tensors, *wrong)
        if result:
            fail(case, f"{defect.__name__} passed the gates: {result.message}")
    assert applied, "the defect changes nothing in any case"
