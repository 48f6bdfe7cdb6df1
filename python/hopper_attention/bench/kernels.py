"""The kernels beside attention: scheduler metadata, combine and merge against a copy, append with rotary embedding.

Suite mixed: metadata, combine, merge. Suite decode: what append and rotary add to a step, and the launches of a step.
Rows {"case", "us", "goal us", "GB/s", "of copy", "goal of copy", "remark"}; every answer is checked first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from hopper_attention.bench import timing
from hopper_attention.bench.case import Case
from hopper_attention.bench.suites import decode_case

SUITES = ("mixed", "decode")
TRAFFIC = 100e6  # bytes that combine and merge move in one call
COLD_BYTES = 250e6  # that the rotated sets of one of them take together
METADATA_GOALS = {256: 4.0, 4096: 8.0}
SECONDS = 0.3
FAILED = "failed: "  # how the remark of a row begins whose kernel was wrong or raised
HEADS, HEAD_DIM, SPLITS = 32, 128, 4

Measure = Callable[..., "timing.Measured"]


def measure(
    suite: str,
    implementations: Sequence[Any],
    quick: bool,
    say: Callable[[str], None],
    device: str = "cuda",
    measure: Measure = timing.measure,
) -> list[dict[str, Any]]:
    """All rows of a suite ("all": of both). A kernel that is not there yet leaves its row with the reason."""
    import torch

    groups: list[Callable[..., list[dict[str, Any]]]] = []
    if suite in ("mixed", "all"):
        groups += [metadata, merge, combine]
    if suite in ("decode", "all"):
        groups += [append]
    found = []
    seconds = SECONDS / 5 if quick else SECONDS
    with torch.inference_mode():
        for group in groups:
            try:
                rows = group(implementations, seconds, device, measure)
            except NotImplementedError as error:
                rows = [row(group.__name__, None, remark=first_line(error))]
            except Exception as error:
                rows = [row(group.__name__, None, remark=f"{FAILED}{first_line(error)}")]
            for one in rows:
                say(f"{suite} / {one['case']}: {one['us']} us {one['remark']}")
            found += rows
    return found


def row(case: str, us: float | None, traffic: float = 0.0, copy_us: float = 0.0, **given: Any) -> dict[str, Any]:
    """One row; traffic: bytes moved, copy_us: what a copy of as many takes."""
    found: dict[str, Any] = {"case": case, "us": "-" if us is None else us, "goal us": "-"}
    found["GB/s"] = traffic / us / 1e3 if us and traffic else "-"
    found["of copy"] = copy_us / us if us and copy_us else "-"
    return {**found, "goal of copy": "-", "remark": "", **given}


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def any_failed(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether a kernel gave a wrong answer or raised."""
    return any(str(one.get("remark", "")).startswith(FAILED) for one in rows)


def medians(measured: timing.Measured) -> dict[str, float]:
    """Name -> us. Raises the first failure: there is nothing to leave out here."""
    for error in measured.failures.values():
        raise error
    return {name: statistics.median(samples) for name, samples in measured.samples.items()}


def metadata(implementations: Sequence[Any], seconds: float, device: str, measure: Measure) -> list[dict[str, Any]]:
    """Times of get_scheduler_metadata for single queries beside prompts, and FA3's where its library is there."""
    import torch

    import hopper_attention

    found = []
    for batch, goal in METADATA_GOALS.items():
        generator = torch.Generator(device).manual_seed(batch)
        used = torch.randint(1, 8192, (batch,), generator=generator, device=device, dtype=torch.int32)
        queries = torch.where(torch.arange(batch, device=device) % 32 == 0, 512, 1).to(torch.int32)
        cu = torch.nn.functional.pad(queries.cumsum(0, dtype=torch.int32), (1, 0))
        target = torch.empty(1 + 4 * (-(-batch // 4) * 4), dtype=torch.int32, device=device)
        shape = (batch, 512, 8192, 32, 8, 128)
        options = {"qkv_dtype": torch.bfloat16, "cu_seqlens_q": cu, "page_size": 16, "causal": True}

        def ours(shape: tuple = shape, used: Any = used, target: Any = target, options: dict = options) -> None:
            hopper_attention.get_scheduler_metadata(*shape, used, out=target, **options)

        calls = {"ours": [ours]}
        ours()
        for peer in implementations:
            if peer.name == "fa3":
                calls["fa3"] = [fa3_metadata(peer.library, shape, used, cu)]
                calls["fa3"][0]()
        times = medians(measure(calls, seconds))
        remark = f"FA3 {times['fa3']:.1f} us" if "fa3" in times else ""
        found.append(
            row(f"scheduler metadata, {batch} sequences", times["ours"], **{"goal us": goal, "remark": remark})
        )
    return found


def fa3_metadata(library: Any, shape: tuple[int, ...], used: Any, cu: Any) -> Callable[[], Any]:
    import torch

    names = ("batch", "max_seqlen_q", "max_seqlen_k", "heads", "kv_heads", "d")
    given = {**dict(zip(names, shape, strict=True)), "dv": shape[-1], "dtype": torch.bfloat16, "page_size": 16}
    return lambda: library.scheduler_metadata(**given, seqused_k=used, cu_seqlens_q=cu, causal=True)


def copies(bytes_moved: float, sets: int, device: str) -> list[Callable[[], Any]]:
    """Calls that read and write so many bytes in all, each in memory of its own."""
    import torch

    elements = int(bytes_moved / 2) // 8
    pairs = [torch.ones(2, elements, dtype=torch.int64, device=device) for _ in range(sets)]
    # Not copy_(): see timing.memory_gbs.
    return [lambda pair=pair: torch.bitwise_not(pair[0], out=pair[1]) for pair in pairs]


def cold_sets() -> int:
    return max(1, -(-int(COLD_BYTES) // int(TRAFFIC)))


def random_lse(*shape: int, device: str, generator: Any) -> Any:
    import torch

    return torch.randn(*shape, generator=generator, device=device) * 2


def require_close(what: str, found: Any, exact: Any, unit: float) -> None:
    """AssertionError unless every element is within two units of the exact result."""
    error = float(((found.double() - exact).abs() / exact.abs().clamp(min=0.05)).max())
    if not error <= 2 * unit:
        raise AssertionError(f"{what}: relative error {error:.3g}, at most {2 * unit:.3g} is right")


def merge(implementations: Sequence[Any], seconds: float, device: str, measure: Measure) -> list[dict[str, Any]]:
    """merge_states of two bf16 results, beside a copy that moves as many bytes."""
    import torch

    import hopper_attention

    tokens = max(1, int(TRAFFIC / (3 * HEADS * (2 * HEAD_DIM + 4))))
    generator = torch.Generator(device).manual_seed(0)
    calls, sets, moved = [], [], 0.0
    for _ in range(cold_sets()):
        a, b = (
            torch.randn(tokens, HEADS, HEAD_DIM, generator=generator, device=device).to(torch.bfloat16)
            for _ in range(2)
        )
        la, lb = (random_lse(HEADS, tokens, device=device, generator=generator) for _ in range(2))
        out, lse = torch.empty_like(a), torch.empty_like(la)
        moved = sum(x.nbytes for x in (a, b, la, lb, out, lse))

        def call(a: Any = a, la: Any = la, b: Any = b, lb: Any = lb, out: Any = out, lse: Any = lse) -> Any:
            hopper_attention.merge_states(a, la, b, lb, out=out, lse=lse)
            return out, lse

        sets.append((a, la, b, lb))
        calls.append(call)
    a, la, b, lb = sets[0]
    out, lse = calls[0]()
    exact_lse = torch.logaddexp(la.double(), lb.double())
    weights = [(x.double() - exact_lse).exp().T[..., None] for x in (la, lb)]
    exact = weights[0] * a.double() + weights[1] * b.double()
    # The sum of two parts can cancel; what counts is the size of what was added.
    scale = weights[0] * a.double().abs() + weights[1] * b.double().abs()
    require_close("merge_states", (out.double() - exact) / scale.clamp(min=1e-3) + 1, torch.ones_like(scale), 2.0**-8)
    require_close("LSE of merge_states", lse, exact_lse, 1e-5)
    times = medians(measure({"ours": calls, "copy": copies(moved, cold_sets(), device)}, seconds))
    name = f"merge_states, {moved / 1e6:.0f} MB, bf16"
    return [row(name, times["ours"], moved, times["copy"], **{"goal of copy": 0.85})]


def combine(implementations: Sequence[Any], seconds: float, device: str, measure: Measure) -> list[dict[str, Any]]:
    """flash_attn_combine of float32 parts into bf16, beside a copy that moves as many bytes."""
    import torch

    import hopper_attention

    rows = max(1, int(TRAFFIC / (HEADS * (SPLITS * (4 * HEAD_DIM + 4) + 2 * HEAD_DIM + 4))))
    generator = torch.Generator(device).manual_seed(0)
    calls, sets, moved = [], [], 0.0
    for _ in range(cold_sets()):
        parts = torch.randn(SPLITS, 1, rows, HEADS, HEAD_DIM, generator=generator, device=device)
        logs = random_lse(SPLITS, 1, rows, HEADS, device=device, generator=generator)
        out = torch.empty(1, rows, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
        moved = parts.nbytes + logs.nbytes + out.nbytes + logs[0].nbytes

        def call(parts: Any = parts, logs: Any = logs, out: Any = out) -> Any:
            _, lse = hopper_attention.flash_attn_combine(parts, logs, out=out, out_dtype=torch.bfloat16)
            return out, lse

        sets.append((parts, logs))
        calls.append(call)
    parts, logs = sets[0]
    out, lse = calls[0]()
    exact_lse = torch.logsumexp(logs.double(), 0)
    weights = (logs.double() - exact_lse).exp()[..., None]
    exact, scale = ((weights * x.double()).sum(0) for x in (parts, parts.abs()))
    require_close("combine", (out.double() - exact) / scale.clamp(min=1e-3) + 1, torch.ones_like(scale), 2.0**-8)
    require_close("LSE of combine", lse, exact_lse, 1e-5)
    times = medians(measure({"ours": calls, "copy": copies(moved, cold_sets(), device)}, seconds))
    name = f"flash_attn_combine, {moved / 1e6:.0f} MB, {SPLITS} parts"
    return [row(name, times["ours"], moved, times["copy"], **{"goal of copy": 0.85})]


APPEND_CASE = decode_case(64, 4096, 32, 8)
APPEND_GOAL = 4.0


def append(
    implementations: Sequence[Any], seconds: float, device: str, measure: Measure, case: Case = APPEND_CASE
) -> list[dict[str, Any]]:
    """One decode step with and without appending its key, rotated; and how many kernels each launches. The step is the
    call of the decode table, on tensors made in the same way, and is timed in turn with the others.
    """
    import torch

    import hopper_attention
    from hopper_attention.bench import inputs, peers

    sets = inputs.make(case, device)
    positions = torch.arange(case.seqlen_k + 1, device=device)[:, None]
    frequencies = 1e4 ** (-torch.arange(0, case.head_dim, 2, device=device) / case.head_dim)
    cos, sin = (f(positions * frequencies).to(sets[0].q.dtype) for f in (torch.cos, torch.sin))
    generator = torch.Generator(device).manual_seed(1)
    shape = (case.batch, 1, case.heads_k, case.head_dim)
    k_new, v_new = (torch.randn(shape, generator=generator, device=device).to(sets[0].q.dtype) for _ in range(2))
    before = sets[0].used_k - 1
    ours = peers.Ours()
    schedule, _ = ours.metadata(case, sets[0])
    plain, without_lse, full = ours.prepare(case, sets).calls, [], []
    for one in sets:
        out, lse = peers.results_for(case, one)
        fixed = {"page_table": one.page_table, "causal": True, "out": out, "scheduler_metadata": schedule}

        def step_without_lse(one: Any = one, fixed: dict = fixed) -> Any:
            return hopper_attention.flash_attn_with_kvcache(one.q, one.k, one.v, cache_seqlens=one.used_k, **fixed)

        def step_with_append(one: Any = one, fixed: dict = fixed, lse: Any = lse) -> Any:
            return hopper_attention.flash_attn_with_kvcache(
                *(one.q, one.k, one.v, k_new, v_new),
                rotary_cos=cos,
                rotary_sin=sin,
                cache_seqlens=before,
                softmax_lse=lse,
                **fixed,
            )

        without_lse.append(step_without_lse)
        full.append(step_with_append)
    check_append(case, sets[0], full[0](), cos, sin)
    plain[0]()
    without_lse[0]()
    times = medians(measure({"step": plain, "without LSE": without_lse, "append": full}, seconds))
    added = times["append"] - times["step"]
    remark = f"{launches(plain[0], device)} launches without, {launches(full[0], device)} with append"
    read = case.kv_bytes()
    return [
        row(f"step, {case.name}", times["step"], read),
        row("the same without LSE", times["without LSE"], read),
        row("the same with append and rotary", times["append"], read, remark=remark),
        row("append and rotary add", added, **{"goal us": APPEND_GOAL}),
    ]


def check_append(case: Case, one: Any, out: Any, cos: Any, sin: Any) -> None:
    """AssertionError unless the result is attention of the rotated query over the cache as it is after the append."""
    from hopper_attention.bench import check

    position = case.seqlen_k - 1
    q = one.q.float()
    pairs, c, s = q.unflatten(-1, (-1, 2)), cos[position].float(), sin[position].float()
    a, b = pairs[..., 0], pairs[..., 1]
    import dataclasses

    import torch

    turned = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2).to(one.q.dtype)
    verdict = check.judge(case, dataclasses.replace(one, q=turned), out, None)
    if not verdict.passed:
        raise AssertionError(f"append: wrong: {verdict.message}")


def launches(call: Callable[[], Any], device: str) -> str:
    """Kernels of one call by the profiler; "?" where it is not to be had."""
    if device == "cpu":
        return "?"
    import torch
    from torch.autograd import DeviceType

    try:
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            call()
            torch.cuda.synchronize()
        count = sum(event.device_type == DeviceType.CUDA for event in found.events())
    except RuntimeError:
        return "?"
    return str(count) if count else "?"
