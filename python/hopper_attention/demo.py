"""`python -m hopper_attention.demo`: attention, checked against float64, explained, timed beside torch SDPA.

On a machine that cannot run the kernels the reference takes their place, and the demo says so. Exit status 1 if an
answer is wrong, 0 otherwise.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import hopper_attention
from hopper_attention import planning

BATCH, SEQLEN, HEADS_Q, HEADS_KV, HEAD_DIM = 4, 4096, 16, 16, 128
CHECKED_ROWS = 16
REPLAYS, CALLS_PER_REPLAY = 20, 10


def say(text: str = "") -> None:
    """A line for the person who watches, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Runs what this machine can run."""
    facts = hopper_attention.info()
    say(f"hopper-attention {facts['version']}")
    reason = facts["message"] if not facts["ready"] else ""
    if not reason and facts["torch"] is None:
        reason = "torch is not installed; the demo needs it to put tensors on the GPU."
    if not reason:
        wanted = usable_dtype()
        if wanted is not None:
            return run_on_gpu(*wanted)
        reason = "this build has no bf16 or fp16 kernel that the demo could use."
    say(f"Not on a GPU: {reason}")
    say("The same on the reference, in numpy, smaller.")
    return run_on_reference()


def usable_dtype() -> tuple[str, int] | None:
    """(dtype, head dim) for the demo, bf16 and 128 if they were built."""
    for dtype in ("bfloat16", "float16"):
        for head_dim in (HEAD_DIM, 64):
            if hopper_attention.is_supported(dtype=dtype, head_dim=head_dim, causal=True)[0]:
                return dtype, head_dim
    return None


def run_on_gpu(dtype_name: str, head_dim: int) -> int:
    """The kernels, on the current GPU."""
    import torch

    from hopper_attention.testing import gates

    device = torch.device("cuda", torch.cuda.current_device())
    say(f"GPU: {torch.cuda.get_device_name(device)}, torch {torch.__version__}, {dtype_name}")
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int) -> Any:
        shape = (BATCH, SEQLEN, heads, head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(
            getattr(torch, dtype_name)
        )

    q, k, v = normal(HEADS_Q), normal(HEADS_KV), normal(HEADS_KV)
    with torch.inference_mode():
        say(
            f"\n1. flash_attn_func(q, k, v, causal=True): batch {BATCH}, {SEQLEN} tokens, "
            f"heads {HEADS_Q}/{HEADS_KV}, head dim {head_dim}"
        )
        out, lse = hopper_attention.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        say(f"   out {tuple(out.shape)}, log-sum-exp {tuple(lse.shape)}")

        say(f"\n2. Checked against float64 on {CHECKED_ROWS} sampled rows of each head")
        rows = torch.linspace(0, SEQLEN - 1, CHECKED_ROWS, device=device).long()
        begin, end = gates.visible_intervals(SEQLEN, SEQLEN, causal=True, device=device)
        result = gates.check(
            out[:, rows], lse[:, :, rows].contiguous(), q[:, rows], k, v, intervals=(begin[rows], end[rows])
        )
        say(f"   {result.message}")
        if not result:
            say("   The answer is wrong. Please report this with the output of python -m hopper_attention.info")
            return 1

        say("\n3. Why it ran this way")
        explain(dtype_name, head_dim, device)

        say("\n4. Speed, causal, median of CUDA graph replays")
        compare_speed(q, k, v, out)
    return 0


def explain(dtype: str, head_dim: int, device: Any) -> None:
    """Prints the plan of the demo's call."""
    plan = planning.plan(
        dtype=dtype,
        head_dim=head_dim,
        causal=True,
        device=device,
        batch=BATCH,
        max_seqlen_q=SEQLEN,
        max_seqlen_k=SEQLEN,
        heads_q=HEADS_Q,
        heads_kv=HEADS_KV,
        num_splits=1,
    )
    say("\n".join("   " + line for line in plan.explain().splitlines()))


def compare_speed(q: Any, k: Any, v: Any, out: Any) -> None:
    """TFLOP/s of this library and of torch SDPA on the same tensors."""
    from torch.nn.functional import scaled_dot_product_attention

    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    calls: dict[str, Callable[[], Any]] = {
        "hopper-attention": lambda: hopper_attention.flash_attn_func(q, k, v, causal=True, out=out),
        "torch SDPA": lambda: scaled_dot_product_attention(*heads_first, is_causal=True),
    }
    flops = 2 * 2 * BATCH * HEADS_Q * SEQLEN * SEQLEN * q.shape[-1] / 2  # two products, half of the keys
    microseconds = median_microseconds(calls)
    for name, time_us in microseconds.items():
        say(f"   {name:17} {time_us:9.1f} us {flops / time_us / 1e6:7.0f} TFLOP/s")
    say(f"   {microseconds['torch SDPA'] / microseconds['hopper-attention']:.2f} times the speed of torch SDPA")


def median_microseconds(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Time of one call on the GPU, for each: CUDA graphs of several calls, replayed in turn."""
    import torch

    graphs = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(CALLS_PER_REPLAY):
                call()
        graphs[name].replay()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPLAYS):
        for name, graph in graphs.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) * 1000 / CALLS_PER_REPLAY)
    return {name: statistics.median(samples) for name, samples in times.items()}


def run_on_reference() -> int:
    """The same function on numpy arrays, and the plan that an H100 would get."""
    import numpy as np

    batch, seqlen, heads_q, heads_kv, head_dim = 1, 256, 4, 2, 64
    random = np.random.default_rng(0)

    def normal(heads: int) -> Any:
        return random.standard_normal((batch, seqlen, heads, head_dim), dtype=np.float32)

    q, k, v = normal(heads_q), normal(heads_kv), normal(heads_kv)
    say(
        f"\n1. flash_attn_func(q, k, v, causal=True): batch {batch}, {seqlen} tokens, "
        f"heads {heads_q}/{heads_kv}, head dim {head_dim}, float32"
    )
    start = time.perf_counter()
    out, lse = hopper_attention.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    say(f"   out {out.shape}, log-sum-exp {lse.shape}, {1000 * (time.perf_counter() - start):.1f} ms")

    say("\n2. Checked against plain float64 attention, row by row")
    error = largest_error(q, k, v, out)
    correct = error < 1e-5
    say(f"   largest error {error:.2g}: {'right' if correct else 'wrong'}")

    say("\n3. What an H100 would do with the full size")
    explain("bfloat16", HEAD_DIM, "H100")
    return 0 if correct else 1


def largest_error(q: Any, k: Any, v: Any, out: Any) -> float:
    """Largest absolute error of `out` on sampled rows, against softmax in float64 as the formula says it."""
    import numpy as np

    group = q.shape[2] // k.shape[2]
    worst = 0.0
    for batch, head in np.ndindex(q.shape[0], q.shape[2]):
        keys, values = (x[batch, :, head // group].astype(np.float64) for x in (k, v))
        for row in np.linspace(0, q.shape[1] - 1, CHECKED_ROWS).astype(int):
            scores = keys[: row + 1] @ q[batch, row, head].astype(np.float64) / np.sqrt(q.shape[3])
            p = np.exp(scores - scores.max())
            exact = p @ values[: row + 1] / p.sum()
            worst = max(worst, float(np.abs(out[batch, row, head] - exact).max()))
    return worst


if __name__ == "__main__":
    raise SystemExit(main())
