"""Host time of a call: how long Python is busy until the work is queued. A query (or 32) on 128 keys, eager, beside
torch.add (the floor of a torch call) and the operator of the FlashAttention-3 library. A host's clock and its neighbours
change times by a factor of two, also within a second: all calls take turns, each behind torch.add, and are compared with
that. The shortest turn says what the host does when nobody disturbs it.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hopper_attention.bench.case import Case
from hopper_attention.bench.peers import Implementation

ADD_US = 5.2  # torch.add where the limits below were set
ONE_LAUNCH_US = 6.0  # out and LSE given
ALLOCATING_US = 3.0  # more where the call allocates out
LAUNCH_US = 2.5  # more for each further launch
MODE_US = 15.0  # through torch's dispatcher, under a mode
CALLS = 100  # between synchronisations: few enough that the queue to the GPU never fills
ROUNDS = 100  # turns of each call
WARM_SECONDS = 2.0  # before the first batch: a core that was idle takes half as long again for every call


@dataclass(frozen=True)
class HostCase:
    """A call whose host time is bounded. Everything but what `without` names is given: "out" (and the LSE), "metadata".
    splits: num_splits.
    """

    case: Case
    limit_us: float
    splits: int = 1
    without: tuple[str, ...] = ()
    appends: bool = False
    under_mode: bool = False


def _case(name: str, call: str, page_size: int = 0) -> Case:
    return Case("host", name, 1, 1, 128, 32, 8, 128, causal=page_size > 0, call=call, page_size=page_size)


MANY = 161  # sequences: more than the lanes of a warp hold

HOST_CASES = [
    HostCase(_case("dense", "dense"), ONE_LAUNCH_US),
    HostCase(_case("dense, out allocated", "dense"), ONE_LAUNCH_US + ALLOCATING_US, without=("out",)),
    HostCase(_case("paged", "varlen", 16), ONE_LAUNCH_US),
    HostCase(_case("paged, out allocated", "varlen", 16), ONE_LAUNCH_US + ALLOCATING_US, without=("out",)),
    HostCase(_case("paged cache", "cache", 16), ONE_LAUNCH_US),
    # So many queries that no decode path takes the call, of more sequences and on more keys than those that do without a
    # schedule, one of them with fewer queries than the others: schedule, prefill. Keys so long that tiles may be cut,
    # beside single queries: prefill, decode, combine.
    HostCase(
        Case(
            *("host", "paged, schedule made (2 launches)", MANY, 32, 512, 32, 8, 128),
            causal=True,
            call="varlen",
            page_size=16,
            lengths=(512,) * MANY,
            queries=(31,) + (32,) * (MANY - 1),
        ),
        ONE_LAUNCH_US + LAUNCH_US,
        without=("metadata",),
    ),
    HostCase(
        Case(
            *("host", "paged, mixed batch (3 launches)", MANY, 32, 4096, 32, 8, 128),
            call="varlen",
            page_size=16,
            lengths=(4096,) + (16,) * (MANY - 1),
            queries=(32,) + (1,) * (MANY - 1),
        ),
        ONE_LAUNCH_US + 2 * LAUNCH_US,
        splits=0,
    ),  # fmt: skip
    HostCase(_case("paged cache, append (2 launches)", "cache", 16), ONE_LAUNCH_US + LAUNCH_US, appends=True),
    HostCase(_case("paged, through the dispatcher", "varlen", 16), MODE_US, under_mode=True),
]
CASES = [host_case.case for host_case in HOST_CASES]


@dataclass(frozen=True)
class Timed:
    """A call that takes its turn; without one, the remark says why. limit_us: where torch.add takes ADD_US."""

    case: str
    implementation: str
    call: Callable[[], Any] | None
    limit_us: float | None = None
    mode: Callable[[], Any] = contextlib.nullcontext
    remark: str = ""


@dataclass(frozen=True)
class Times:
    """Of one call: the median and the least of its turns, and the median of its time over torch.add's in the same turn."""

    us: float
    least_us: float
    adds: float


def measure(implementations: list[Implementation], quick: bool = False, device: str = "cuda") -> list[dict[str, Any]]:
    """Rows {"case", "implementation", "us", "least us", "x torch.add", "limit", "within", "remark"}; torch.add comes first.
    The limit is in times of torch.add too, and holds for these.
    """
    import torch

    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    fa3 = next((implementation for implementation in implementations if implementation.name == "fa3"), None)
    with torch.inference_mode():
        x = torch.randn(1024, device=device)

        def add() -> Any:
            return torch.add(x, x)

        rows = [Timed("any", "torch.add", add), *calls(fa3, device)]
        warm_up(add, WARM_SECONDS if device == "cuda" else 0.0, synchronize)
        turns = [(timed.call, timed.mode) for timed in rows if timed.call is not None]
        times = iter(time_calls(turns, add, ROUNDS // 4 if quick else ROUNDS, synchronize))
        return [row(timed, None if timed.call is None else next(times)) for timed in rows]


def calls(fa3: Implementation | None, device: str) -> list[Timed]:
    """Ours for each case, and FA3's behind it where it has the same call."""
    from hopper_attention.bench import inputs

    found = []
    for host_case in HOST_CASES:
        case = host_case.case
        (one_set, *_) = inputs.make(case, device)
        mode = passing_mode if host_case.under_mode else contextlib.nullcontext
        found.append(Timed(case.name, "ours", our_call(host_case, one_set), host_case.limit_us, mode))
        if fa3 is not None and not (host_case.without or host_case.appends or host_case.under_mode):
            found.append(call_of_fa3(fa3, case, one_set))
    return found


def call_of_fa3(fa3: Implementation, case: Case, inputs: Any) -> Timed:
    try:
        whole = fa3.prepare(case, [inputs]).calls[0]
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return Timed(case.name, "fa3", None, remark=str(error).splitlines()[0])
    try:
        return Timed(case.name, "fa3", bare_operator(whole, "fa3"))
    except (NotImplementedError, RuntimeError, ValueError):
        return Timed(case.name, "fa3", whole, remark="with the Python function around the operator")


def row(timed: Timed, times: Times | None) -> dict[str, Any]:
    limit = None if timed.limit_us is None else timed.limit_us / ADD_US
    within = "-" if times is None or limit is None else "yes" if times.adds <= limit else "no"
    return {
        "case": timed.case,
        "implementation": timed.implementation,
        "us": "-" if times is None else times.us,
        "least us": "-" if times is None else times.least_us,
        "x torch.add": "-" if times is None else times.adds,
        "limit": "-" if limit is None else limit,
        "within": within,
        "remark": timed.remark,
    }


def our_call(host_case: HostCase, inputs: Any) -> Callable[[], Any]:
    """The call of the public function, with everything that a caller can make before."""
    import torch

    import hopper_attention

    case = host_case.case
    q = inputs.q
    options: dict[str, Any] = {"causal": case.causal}
    if "out" not in host_case.without:
        shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
        options["out"] = torch.empty_like(q)
        options["softmax_lse"] = torch.empty(shape, dtype=torch.float32, device=q.device)
    if case.call == "dense":
        k, v = inputs.k, inputs.v
        return lambda: hopper_attention.flash_attn_func(q, k, v, **options)
    if "metadata" not in host_case.without:
        options["scheduler_metadata"] = hopper_attention.get_scheduler_metadata(
            case.batch, case.seqlen_q, case.seqlen_k, case.heads_q, case.heads_k, case.head_dim, inputs.used_k,
            qkv_dtype=q.dtype, cu_seqlens_q=inputs.cu_q if case.call == "varlen" else None,
            page_size=case.page_size, causal=case.causal,
        )  # fmt: skip
    options |= {"page_table": inputs.page_table, "num_splits": host_case.splits}
    if host_case.splits != 1 or host_case.without or host_case.appends:
        options["workspace"] = torch.empty(64 << 20, dtype=torch.uint8, device=q.device)
    k, v = inputs.k, inputs.v
    if case.call == "cache":
        if host_case.appends:
            options |= {name: torch.zeros_like(x[:1, :1]) for name, x in (("k", k), ("v", v))}
            options["cache_seqlens"] = inputs.used_k - 1
        else:
            options["cache_seqlens"] = inputs.used_k
        return lambda: hopper_attention.flash_attn_with_kvcache(q, k, v, **options)
    cu_seqlens_q = inputs.cu_q
    options |= {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k, "seqused_k": inputs.used_k}
    return lambda: hopper_attention.flash_attn_varlen_func(q, k, v, cu_seqlens_q, **options)


def passing_mode() -> Any:
    """A dispatch mode that does nothing: what a call costs when torch has to see it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    return Passing()


def bare_operator(call: Callable[[], Any], library: str) -> Callable[[], Any]:
    """The operator whose name contains `library` with the arguments that `call` gives it: without the Python around it.

    Raises ValueError if the call has none.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Found(Exception):
        """Ends the call: a mode cannot return lists of tensors, which some operators give."""

    class Looking(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if library in str(func):
                raise Found(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    try:
        with Looking():
            call()
    except Found as found:
        func, args, kwargs = found.args
        return lambda: func(*args, **kwargs)
    raise ValueError(f"the call has no operator of {library}")


def warm_up(call: Callable[[], Any], seconds: float, synchronize: Callable[[], None]) -> None:
    """Calls for so long, whose times nobody looks at."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(CALLS):
            call()
        synchronize()


def time_calls(
    calls: list[tuple[Callable[[], Any], Callable[[], Any]]],
    beside: Callable[[], Any],
    rounds: int,
    synchronize: Callable[[], None],
) -> list[Times]:
    """Times of (call, mode that it is made under), in that order. In a round each has its turn, behind one of `beside`; the
    first round is not counted.
    """

    def batch(function: Callable[[], Any]) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            function()
        return (time.perf_counter() - start) * 1e6 / CALLS

    turns: list[list[tuple[float, float]]] = [[] for _ in calls]
    for counted in [False] + [True] * rounds:
        for (call, mode), found in zip(calls, turns, strict=True):
            other = batch(beside)
            with mode():
                us = batch(call)
            if counted:
                found.append((us, other))
    synchronize()
    return [
        Times(
            us=statistics.median(us for us, _ in found),
            least_us=min(us for us, _ in found),
            adds=statistics.median(us / other for us, other in found),
        )
        for found in turns
    ]
