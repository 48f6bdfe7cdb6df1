"""DRAM bytes of our kernel beside the prediction of `reference.io`: counted by ncu, which runs this file once a case.

python -m hopper_attention.bench.traffic NAME     makes one call of the case between profiler start and stop
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from hopper_attention.bench.case import Case

CASES = [
    Case("io", "full 4k, b4, 16 heads", 4, 4096, 4096, 16, 16, 128, causal=False),
    Case("io", "causal 16k, b1, 32/8", 1, 16384, 16384, 32, 8, 128),
    Case("io", "causal 64k, b1, 8/1", 1, 65536, 65536, 8, 1, 128),
]
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9}
NCU_SECONDS = 120


def measure(say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each case; without ncu the predictions alone, with the reason in `remark`."""
    return [measure_case(case, say) for case in CASES]


def measure_case(case: Case, say: Callable[[str], None]) -> dict[str, Any]:
    compulsory, predicted = prediction(case)
    row: dict[str, Any] = {
        "case": case.name,
        "compulsory MB": compulsory / 1e6,
        "predicted MB": predicted / 1e6,
        "read MB": "-",
        "written MB": "-",
        "counted / predicted": "-",
        "remark": "",
    }
    try:
        read, written = count(case)
        row.update({"read MB": read / 1e6, "written MB": written / 1e6})
        row["counted / predicted"] = (read + written) / predicted
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        row["remark"] = str(error).splitlines()[0]
    say(f"io / {case.name}: {row['counted / predicted']} of the prediction {row['remark']}")
    return row


def prediction(case: Case, device: str | None = None) -> tuple[int, int]:
    """(compulsory, predicted) bytes of the plan that the case gets on `device`."""
    import hopper_attention
    from hopper_attention.reference import io as model

    plan = hopper_attention.plan(
        dtype="bfloat16",
        head_dim=case.head_dim,
        causal=case.causal,
        device=device,
        batch=case.batch,
        max_seqlen_q=case.seqlen_q,
        max_seqlen_k=case.seqlen_k,
        heads_q=case.heads_q,
        heads_kv=case.heads_k,
        num_splits=1,
    )
    traffic = model.kernel_dram_bytes(
        case.batch,
        case.heads_q,
        case.heads_k,
        model.Shape(case.seqlen_q, case.seqlen_k, case.head_dim),
        tile_rows=plan.tile.rows,
        packed_heads=plan.packed_heads,
        heads_per_pass=plan.heads_per_pass,
        ctas=plan.ctas,
        causal=case.causal,
    )
    return traffic.compulsory, traffic.total


def count(case: Case) -> tuple[float, float]:
    """(read, written) bytes of all kernels of one call. Raises OSError without ncu, ValueError if it counts nothing."""
    ncu = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if ncu is None:
        raise OSError("ncu is not installed")
    command = [ncu, "--csv", "--page", "raw", "--clock-control", "none", "--profile-from-start", "off"]
    command += ["--cache-control", "all", "--metrics", ",".join(METRICS)]
    command += [sys.executable, "-m", "hopper_attention.bench.traffic", case.name]
    result = subprocess.run(command, capture_output=True, text=True, timeout=NCU_SECONDS, env=dict(os.environ))
    return parse(result.stdout)


def parse(text: str) -> tuple[float, float]:
    """Sums of the two metrics in ncu's raw CSV: a line of names, a line of units, a line for each kernel."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.reader(io.StringIO("\n".join(lines))))
    if len(rows) < 3 or any(metric not in rows[0] for metric in METRICS):
        errors = [line for line in text.splitlines() if "ERROR" in line]
        raise ValueError(f"ncu counted nothing: {(errors or ['no output'])[0]}")
    totals = []
    for metric in METRICS:
        column = rows[0].index(metric)
        scale = UNITS[rows[1][column]]
        totals.append(sum(float(row[column].replace(",", "")) * scale for row in rows[2:]))
    return totals[0], totals[1]


def call_once(name: str) -> int:
    """One profiled call of the case, after one that is not."""
    import torch

    from hopper_attention.bench import inputs
    from hopper_attention.bench.peers import Ours

    (case,) = [case for case in CASES if case.name == name]
    with torch.inference_mode():
        (call,) = Ours().prepare(case, inputs.make(case, "cuda")).calls
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(call_once(sys.argv[1]))
