"""On a GPU: the Triton peer against the gates, one whole case, the timing, the ceilings, a build beside itself."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
from hopper_attention.bench import peers, run, timing  # noqa: E402
from hopper_attention.bench.suites import Case  # noqa: E402
from hopper_attention.testing import gates  # noqa: E402

pytestmark = pytest.mark.gpu

SHAPES = [
    # batch, queries, keys, heads of q, of k
    (2, 300, 300, 4, 4),
    (1, 129, 513, 4, 1),
    (2, 200, 65, 2, 2),  # causal: rows that see no key
    (1, 1, 1000, 8, 2),
]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_triton_peer(head_dim, causal, dtype):
    triton_fa2 = pytest.importorskip("hopper_attention.bench.triton_fa2")
    for batch, seqlen_q, seqlen_k, heads_q, heads_k in SHAPES:
        generator = torch.Generator("cuda").manual_seed(seqlen_q)
        q, k, v = (
            torch.randn(batch, n, heads, head_dim, generator=generator, device="cuda", dtype=dtype)
            for n, heads in ((seqlen_q, heads_q), (seqlen_k, heads_k), (seqlen_k, heads_k))
        )
        for tile in (None, *{(rows, keys) for rows, keys, _, _ in triton_fa2.CHOICES[head_dim]}):
            out, lse = triton_fa2.attention(q, k, v, causal=causal, tile=tile)
            result = gates.check(out, lse, q, k, v, causal=causal)
            assert result.elementwise <= gates.ELEMENTWISE_BOUND, (seqlen_q, seqlen_k, tile, result.message)
            assert result.lse_ratio <= 1.0, (seqlen_q, seqlen_k, tile, result.message)


def test_one_case_from_tensors_to_times():
    head_dim = next(
        (d for d in (128, 64) if hopper_attention.is_supported(dtype="bfloat16", head_dim=d, causal=True)[0]), None
    )
    if head_dim is None:
        pytest.skip("no bf16 kernel for head dim 64 or 128 in this build")
    case = Case("prefill", "one", 2, 1024, 1024, 8, 8, head_dim)
    entry = run.run_case(case, peers.implementations(["cudnn", "flash"], None, None), seconds=0.05)
    assert entry["status"] == "ok", entry["reason"]
    assert {"ours", "cudnn", "flash"} <= set(entry["results"]), entry["left_out"]
    for name, result in entry["results"].items():
        assert 5 < result["us"] < 5000 and result["spread"] < 1, name


def test_time_grows_with_the_work_and_is_in_microseconds():
    """A negation of 1 GiB moves 2 GiB: 447 us at 4.8 TB/s, the nominal rate of an H200; at most ten times that.

    Not a copy: cudaMemcpy is slower beyond 256 MiB, and time would not grow with the work.
    """
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    part, part_target = source[: 2**26], target[: 2**26]
    calls = {"all": [lambda: torch.neg(source, out=target)], "quarter": [lambda: torch.neg(part, out=part_target)]}
    found = timing.measure(calls, 0.05)
    assert not found.failures
    whole, quarter = (sorted(found.samples[name])[len(found.samples[name]) // 2] for name in ("all", "quarter"))
    assert 400 < whole < 5000
    assert 2.5 < whole / quarter < 5


def test_what_cannot_be_captured_is_a_failure():
    x = torch.randn(8, device="cuda")
    found = timing.measure({"bad": [lambda: float(x.sum())], "good": [lambda: x + 1]}, 0.01)
    assert set(found.failures) == {"bad"} and set(found.samples) == {"good"}
    torch.cuda.synchronize()


def test_ceilings_are_plausible():
    found = timing.ceilings(quick=True)
    assert 100 < found["matmul_tflops"] < 1000
    assert 1000 < found["read_gbs"] < 5000 and 1000 < found["copy_gbs"] < 5000


def test_a_build_takes_as_long_as_itself(tmp_path):
    tool = pathlib.Path(__file__).parents[3] / "tools" / "compare_builds"
    if not tool.exists() or not hopper_attention.is_supported(dtype="bfloat16", head_dim=128)[0]:
        pytest.skip("tools/ is not beside these tests, or no bf16 kernel for head dim 128 is in this build")
    folder, out = pathlib.Path(hopper_attention.__file__).parents[1], tmp_path / "out.json"
    command = [sys.executable, tool, f"one={folder}", f"two={folder}", "--rounds", "1", "--json", out]
    command += ["--only", "^(8/1 512 on 512|varlen mixed|decode b1 128)$"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("all right") == 2, done.stderr
    cases = json.loads(out.read_text())["cases"]
    assert len(cases) == 3
    for name, row in cases.items():
        assert 1 < row["one"]["least"] < 1000 and 0.5 < row["two"]["ratio"] < 2, name
