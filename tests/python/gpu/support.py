"""What the gpu tests share: a case with its reason and its reproduction line, inputs, the call, the verdict.

Bitwise comparisons need no tolerance and use `same_bits`; everything else goes through the gates of
`hopper_attention.testing.gates`. The worst values of all gates are kept in `WORST` for tests/gpu_report.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import hopper_attention
from hopper_attention.testing import force_plan, gates

DEVICE = "cuda"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROWS_FOR_RMS = 512  # the RMS gate compares two random errors: with few rows their ratio says nothing
MAX_REPORTED = 5
HEAD_DIMS = [(d, d) for d in (8, 40, 64, 72, 80, 96, 128, 160, 192, 256)] + [(64, 32), (32, 64), (128, 64), (192, 128)]


@dataclass(frozen=True)
class Case:
    """One call. window, chunk, sinks, scale as in flash_attn_func; sinks is the name of their dtype."""

    why: str
    seqlen_q: int
    seqlen_k: int
    batch: int = 2
    heads_q: int = 4
    heads_k: int = 2
    head_dim: int = 128
    head_dim_v: int = 0  # 0: head_dim
    dtype: str = "bf16"
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    chunk: int = 0
    softcap: float = 0.0
    sinks: str = ""
    scale: float | None = None
    inputs: str = "normal"
    seed: int = 0
    forced: tuple[tuple[str, Any], ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """Arguments that flash_attn_func and the gates have in common, without s_aux."""
        return {
            "softmax_scale": self.scale,
            "causal": self.causal,
            "window_size": self.window,
            "attention_chunk": self.chunk,
            "softcap": self.softcap,
        }

    @property
    def dims(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim_v or self.head_dim

    def line(self) -> str:
        """The command that runs this case again, from the root of the repository."""
        given = ", ".join(
            f"{f.name}={getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default or f.name == "why"
        )
        return (
            'reproduce: PYTHONPATH="tests/python:$PYTHONPATH" python -c '
            f'"from gpu.support import *; judge(Case({given}))"'
        )

    def with_enough_rows(self) -> Case:
        """The same with a batch so large that the RMS gate means something."""
        begin, end = gates.visible_intervals(
            self.seqlen_q, self.seqlen_k, causal=self.causal, window_size=self.window, attention_chunk=self.chunk
        )
        rows = max(1, int((end > begin).sum())) * max(self.heads_q, 1)
        return dataclasses.replace(self, batch=max(self.batch, min(128, -(-ROWS_FOR_RMS // rows))))


def supported(head_dim: int, head_dim_v: int = 0, dtype: str = "bf16") -> bool:
    """Whether this build has the kernels. Needs no GPU, so that tests can be collected anywhere."""
    return all(
        hopper_attention.is_supported(
            dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v or None, causal=causal, device="H100"
        )[0]
        for causal in (False, True)
    )


@functools.cache
def built_dims(dtype: str) -> list[tuple[int, int]]:
    """The pairs of HEAD_DIMS that can run."""
    return [dims for dims in HEAD_DIMS if supported(*dims, dtype)]


def built_tiles() -> list[tuple[str, tuple[int, int]]]:
    """(dtype, head dims) of each kernel file of this build, the smallest problem that fills its tile."""
    return sorted({(short(k.dtype), (k.tile.head_dim, k.tile.head_dim_v)) for k in hopper_attention.built_kernels()})


def short(name: str) -> str:
    return {"bfloat16": "bf16", "float16": "fp16"}.get(name, name)


MAIN = built_tiles()


def main_dims(case: Case) -> Case:
    """The case with a dtype and head dims that this build has, those given if it has them."""
    if not MAIN or (case.dtype, case.dims) in MAIN or supported(*case.dims, case.dtype):
        return case
    dtype, (head_dim, head_dim_v) = MAIN[0]
    return dataclasses.replace(case, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v)


def small_masks() -> dict[str, dict[str, Any]]:
    """Every feature alone, every pair, all together; sized for lengths of one to three tiles."""
    single = {
        "causal": {"causal": True},
        "window": {"window": (70, 30)},
        "chunk": {"chunk": 96},
        "softcap": {"softcap": 2.0},
        "sinks": {"sinks": "fp32"},
    }
    masks: dict[str, dict[str, Any]] = {"full": {}, **single}
    for a, b in itertools.combinations(single, 2):
        masks[f"{a} and {b}"] = {**single[a], **single[b]}
    masks["everything"] = {name: value for options in single.values() for name, value in options.items()}
    masks["left window"] = {"window": (50, -1)}
    masks["right window"] = {"window": (-1, 50)}
    masks["window of one key"] = {"window": (0, 0)}
    masks["causal chunk of one tile, bf16 sinks"] = {"chunk": 128, "causal": True, "sinks": "bf16"}
    masks["chunk of one key, fp16 sinks"] = {"chunk": 1, "sinks": "fp16"}
    return masks


def make_inputs(case: Case) -> dict[str, Any]:
    """q, k, v, s_aux of a case; the same for the same seed and device."""
    dtype = DTYPES[case.dtype]
    generator = torch.Generator(DEVICE).manual_seed(case.seed)

    def normal(length: int, heads: int, dim: int) -> torch.Tensor:
        return torch.randn(case.batch, length, heads, dim, generator=generator, device=DEVICE)

    def integers(length: int, heads: int, dim: int, low: int, high: int) -> torch.Tensor:
        shape = (case.batch, length, heads, dim)
        return torch.randint(low, high, shape, generator=generator, device=DEVICE).float()

    d, dv = case.dims
    q, k = normal(case.seqlen_q, case.heads_q, d), normal(case.seqlen_k, case.heads_k, d)
    v = normal(case.seqlen_k, case.heads_k, dv)
    if case.inputs == "large logits":
        q, k = q + 1, k + 40
    elif case.inputs == "spread logits":
        # Probabilities below the normal numbers of fp16 have a larger relative error, whoever computes them; where they
        # decide an element the gates do not apply.
        q = q * (20 if case.dtype == "bf16" else 2)
    elif case.inputs == "one outlier channel":
        q[..., 3] += 30
        k[..., 3] = 30 + 0.3 * k[..., 3]
    elif case.inputs == "equal keys":
        k = k[:, :1].expand_as(k)
    elif case.inputs == "one-hot":
        q = torch.nn.functional.one_hot(integers(case.seqlen_q, case.heads_q, 1, 0, d)[..., 0].long(), d) * 16.0
        k = torch.nn.functional.one_hot(integers(case.seqlen_k, case.heads_k, 1, 0, d)[..., 0].long(), d) * 4.0
    elif case.inputs == "small integers":
        q, k = integers(case.seqlen_q, case.heads_q, d, -2, 3), integers(case.seqlen_k, case.heads_k, d, -2, 3)
        v = integers(case.seqlen_k, case.heads_k, dv, -4, 5)
    elif case.inputs == "zero queries":
        q = torch.zeros_like(q)
    elif case.inputs != "normal":
        raise ValueError(f"inputs: unknown kind {case.inputs!r}")
    sinks = None
    if case.sinks:
        sinks = torch.randn(case.heads_q, generator=generator, device=DEVICE).mul(2).to(DTYPES[case.sinks])
    return {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "s_aux": sinks}


INPUT_KINDS = [
    "normal",
    "large logits",
    "spread logits",
    "one outlier channel",
    "equal keys",
    "one-hot",
    "small integers",
    "zero queries",
]


def with_scores(case: Case, of_row: torch.Tensor, of_key: torch.Tensor) -> dict[str, Any]:
    """Inputs of a case in which the score of row i and key j is of_row[i] + of_key[j], times the scale."""
    tensors = make_inputs(case)
    q, k = torch.zeros_like(tensors["q"]), torch.zeros_like(tensors["k"])
    q[..., 0], k[..., 0] = of_row[:, None].to(q), 1
    q[..., 1], k[..., 1] = 1, of_key[:, None].to(k)
    return {**tensors, "q": q, "k": k}


def attend(case: Case, tensors: dict[str, Any], **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the call, under the forced choices of the case; out alone if `given` says so."""
    forced = force_plan(**dict(case.forced)) if case.forced else contextlib.nullcontext()
    with forced:
        return hopper_attention.flash_attn_func(
            tensors["q"],
            tensors["k"],
            tensors["v"],
            s_aux=tensors["s_aux"],
            **{"return_attn_probs": True, **case.options, **given},
        )


def verdict(case: Case, tensors: dict[str, Any], out: torch.Tensor, lse: torch.Tensor | None) -> gates.GateResult:
    """The three gates; a scale of None and 0.0 are what they are for the call."""
    return gates.check(out, lse, tensors["q"], tensors["k"], tensors["v"], s_aux=tensors["s_aux"], **case.options)


@dataclass
class Worst:
    """The largest values that passed or failed, with the cases they belong to, and how many calls were judged."""

    values: dict[str, float] = dataclasses.field(default_factory=lambda: {"elementwise": 0.0, "rms": 0.0, "lse": 0.0})
    cases: dict[str, str] = dataclasses.field(default_factory=dict)
    judged: int = 0
    random: int = 0

    def add(self, result: gates.GateResult, case: Case, what: str = "") -> None:
        """`what` tells of inputs that are not those of the case."""
        self.judged += 1
        found = {"elementwise": result.elementwise, "rms": result.rms_ratio, "lse": result.lse_ratio or 0.0}
        for name, value in found.items():
            if value > self.values[name]:
                self.values[name], self.cases[name] = value, what or case.line().removeprefix("reproduce: ")


WORST = Worst()


def problem_of(case: Case) -> str:
    """Runs and judges a case: "" or a text that starts with the reproduction line."""
    try:
        tensors = make_inputs(case)
        out, lse = attend(case, tensors)
        result = verdict(case, tensors, out, lse)
    except Exception as error:
        return f"{case.line()}\n{type(error).__name__}: {error}"
    WORST.add(result, case)
    return "" if result else f"{case.line()}\n{result.message}"


def judge(case: Case) -> None:
    """Fails with the reproduction line unless the case passes the gates."""
    judge_all([case])


def judge_tensors(case: Case, tensors: dict[str, Any], **given: Any) -> None:
    """The same with other inputs than those of the case, which its `why` has to tell, and options of the call."""
    result = verdict(case, tensors, *attend(case, tensors, **given))
    what = f"{case.why}; {case.dtype}, head dims {case.dims}, inputs of the test"
    WORST.add(result, case, what)
    if not result:
        pytest.fail(f"{what}: {result.message}", pytrace=False)


def judge_all(cases: Iterable[Case]) -> int:
    """Every case; reports up to MAX_REPORTED failures. Returns how many cases there were."""
    problems, count = [], 0
    for case in cases:
        count += 1
        problem = problem_of(case)
        if problem:
            problems.append(problem)
            if len(problems) == MAX_REPORTED or "CUDA error" in problem or "illegal" in problem:
                break
    if problems:
        pytest.fail(f"{len(problems)} of {count} cases so far failed\n" + "\n".join(problems), pytrace=False)
    return count


def fail(case: Case, text: str) -> None:
    """Fails with the reproduction line first."""
    pytest.fail(f"{case.line()}\n{text}", pytrace=False)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, in which every NaN is equal to itself."""
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(bits(a), bits(b)))


def require_same(case: Case, what: str, found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """Fails unless out and LSE have the same bits; names the first difference."""
    for name, a, b in zip(("out", "lse"), found, expected, strict=True):
        if same_bits(a, b):
            continue
        different = (bits(a) != bits(b)).nonzero()
        at = tuple(different[0].tolist())
        fail(
            case,
            f"{what}: {name} differs in {len(different)} of {a.numel()} elements, first at {at}: "
            f"{float(a.contiguous()[at])!r} instead of {float(b.contiguous()[at])!r}",
        )


def snapshot(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in tensors.items() if x is not None}


def require_unchanged(case: Case, tensors: dict[str, Any], before: dict[str, torch.Tensor]) -> None:
    for name, x in before.items():
        if not same_bits(tensors[name], x):
            fail(case, f"the call changed its input {name}")
