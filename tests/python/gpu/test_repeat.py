"""Same inputs, same bits: with busy neighbours, in graphs, on other streams, from many threads."""

from __future__ import annotations

import dataclasses
import threading

import pytest

torch = pytest.importorskip("torch")

from gpu import support  # noqa: E402
from gpu.support import Case, attend, bits, fail, main_dims, make_inputs, require_same, same_bits, verdict  # noqa: E402

pytestmark = pytest.mark.gpu

RERUNS = 100
SHAPES = [
    Case("causal, several tiles for each block", 1500, 1500, batch=4, heads_q=16, heads_k=16, causal=True),
    Case("full, ragged", 1001, 2003, heads_q=16, heads_k=4, head_dim=64),
    Case("everything", 700, 900, causal=True, window=(300, 0), chunk=512, softcap=9.0, sinks="fp32", heads_q=16),
    Case("packed heads", 5, 3000, batch=8, heads_q=16, heads_k=2, causal=True),
    Case("fp16 window", 2000, 2000, dtype="fp16", window=(128, 0), heads_q=8, heads_k=8),
]


@pytest.mark.parametrize("case", SHAPES, ids=lambda c: c.why)
def test_reruns_beside_a_busy_stream(case):
    case = main_dims(case)
    tensors = make_inputs(case)
    first, first_lse = attend(case, tensors)
    expected = bits(first).clone(), bits(first_lse).clone()
    different = torch.zeros((), dtype=torch.int64, device=support.DEVICE)
    side = torch.cuda.Stream()
    hog = torch.empty(1 << 28, dtype=torch.uint8, device=support.DEVICE)
    out, lse = torch.empty_like(first), torch.empty_like(first_lse)
    torch.cuda.synchronize()
    for _ in range(RERUNS):
        with torch.cuda.stream(side):
            hog[: 1 << 27].copy_(hog[1 << 27 :])
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        attend(case, tensors, out=out, softmax_lse=lse)
        different += (bits(out) != expected[0]).sum() + (bits(lse) != expected[1]).sum()
    torch.cuda.synchronize()
    if int(different):
        fail(case, f"{int(different)} elements differed in {RERUNS} reruns")
    assert verdict(case, tensors, first, first_lse), case.line()


@pytest.mark.parametrize("case", SHAPES, ids=lambda c: c.why)
def test_a_replayed_graph_equals_eager(case):
    case = main_dims(case)
    tensors = make_inputs(case)
    other = make_inputs(dataclasses.replace(case, seed=1))
    expected = [tuple(x.clone() for x in attend(case, t)) for t in (tensors, other)]
    out, lse = (torch.full_like(x, float("nan")) for x in expected[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(case, tensors, out=out, softmax_lse=lse)
    if not bool(out.isnan().all()):
        fail(case, "the call ran while it was captured")
    graph.replay()
    require_same(case, "first replay", (out, lse), expected[0])
    for name, x in other.items():
        if x is not None:
            tensors[name].copy_(x)
    for replay in range(3):
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        require_same(case, f"replay {replay} with other inputs", (out, lse), expected[1])


def test_two_calls_of_one_graph_on_parallel_branches():
    case = main_dims(Case("two branches of a graph", 700, 900, causal=True, heads_q=8))
    inputs = [make_inputs(case), make_inputs(dataclasses.replace(case, seed=1))]
    expected = [attend(case, t) for t in inputs]
    results = [tuple(torch.full_like(x, float("nan")) for x in pair) for pair in expected]
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        attend(case, inputs[0], out=results[0][0], softmax_lse=results[0][1])
        with torch.cuda.stream(side):
            attend(case, inputs[1], out=results[1][0], softmax_lse=results[1][1])
        torch.cuda.current_stream().wait_stream(side)
    for _ in range(5):
        graph.replay()
    for found, wanted in zip(results, expected, strict=True):
        require_same(case, "branch", found, wanted)


def test_the_current_stream_is_used():
    """The inputs arrive on a side stream long after the call was made there."""
    case = main_dims(Case("delayed producer on a side stream", 300, 400, causal=True))
    tensors = make_inputs(case)
    expected = attend(case, tensors)
    late = {name: None if x is None else torch.full_like(x, float("nan")) for name, x in tensors.items()}
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        for name in ("q", "k", "v"):
            late[name].copy_(tensors[name])
        found = attend(case, late)
    if side.query():
        fail(case, "the call waited for its inputs: it synchronised")
    side.synchronize()
    require_same(case, "side stream", found, expected)


def test_calls_do_not_synchronise():
    case = main_dims(Case("behind a long kernel", 200, 200))
    tensors = make_inputs(case)
    attend(case, tensors)
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(100_000_000)
        done = torch.cuda.Event()
        attend(case, tensors)
        done.record()
        waited = done.query()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    torch.cuda.synchronize()
    assert not waited, "the call came back only after the kernels before it"


def test_eight_threads_on_their_own_streams():
    cases = [
        main_dims(Case(f"thread {i}", 200 + 37 * i, 500 + i, causal=bool(i % 2), heads_q=4 * (1 + i % 3), seed=i))
        for i in range(8)
    ]
    inputs = [make_inputs(case) for case in cases]
    expected = [attend(case, t) for case, t in zip(cases, inputs, strict=True)]
    torch.cuda.synchronize()
    problems: list[str] = []
    start = threading.Barrier(len(cases))

    def work(i: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                start.wait()
                for _ in range(25):
                    found = attend(cases[i], inputs[i])
                    torch.cuda.current_stream().synchronize()
                    if not all(same_bits(a, b) for a, b in zip(found, expected[i], strict=True)):
                        problems.append(f"{cases[i].line()}\ndiffers on its own thread and stream")
                        return
        except Exception as error:
            problems.append(f"{cases[i].line()}\n{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


def test_a_device_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = main_dims(Case("cuda:1 while cuda:0 is current", 300, 300, causal=True))
    tensors = make_inputs(case)
    expected = attend(case, tensors)
    moved = {name: None if x is None else x.to("cuda:1") for name, x in tensors.items()}
    found = attend(case, moved)
    assert torch.cuda.current_device() == 0
    require_same(case, "cuda:1", tuple(x.to("cuda:0") for x in found), expected)
    with pytest.raises(ValueError, match="^k: .*device"):
        attend(case, {**tensors, "k": moved["k"]})
