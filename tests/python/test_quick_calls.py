"""Calls of plain torch tensors take a short way, `_core.attend_*`; every other call the long one, by `gpu` and `cache`.
Both launch the same, wrong calls raise the same, and what is not plain never takes the short way. CPU tensors play the
part of CUDA tensors; launches are recorded.
"""

from __future__ import annotations

import gc
import sys
import weakref

import pytest

import hopper_attention
import wrong_calls
from hopper_attention import _core, cache, gpu, interface, merging, testing
from wrong_calls import ATTENTION, FUNCTIONS, RIGHT, STUB, TorchWorld, made

torch = pytest.importorskip("torch", minversion="2.10")

from torch.utils._pytree import tree_map_only  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from hopper_attention.bench.host import passing_mode  # noqa: E402

SHORT = ("attend_dense", "attend_packed", "attend_cache")


@pytest.fixture
def world(monkeypatch, recorder):
    for module in (interface, cache):
        monkeypatch.setattr(module, "on_cuda", lambda name, x: True)
    recorder.count_host_memory_as_cuda(True)
    gpu.use_torch()
    with torch.inference_mode():
        yield TorchWorld("cpu")
    recorder.count_host_memory_as_cuda(False)


class Ways:
    """Counts calls by the way they take; `long_only` closes the short one."""

    def __init__(self, monkeypatch):
        self.taken = {"short": 0, "long": 0}
        self.long_only = False
        for name in SHORT:
            monkeypatch.setattr(interface._core, name, self.short(getattr(_core, name)))
        monkeypatch.setattr(gpu, "forward", self.long(gpu.forward))

    def short(self, attend):
        def call(*args):
            done = None if self.long_only else attend(*args)
            self.taken["short"] += done is not None
            return done

        return call

    def long(self, forward):
        def call(*args):
            self.taken["long"] += 1
            return forward(*args)

        return call


@pytest.fixture
def ways(monkeypatch):
    return Ways(monkeypatch)


def arguments(world, function, changes=None):
    """Those of the right call, changed."""
    right = made(world, RIGHT[function], {})
    return {**right, **made(world, changes or {}, right)}


def launched(given):
    """What was launched; of tensors that the call made itself, without the address."""
    known = {x.data_ptr() for x in given.values() if isinstance(x, torch.Tensor)}

    def without_new_addresses(seen):
        return {
            name: {**x, "data": x["data"] if x["data"] in known else "new"} if isinstance(x, dict) else str(x)
            for name, x in seen.items()
        }

    made_launches = (_core.launches(), _core.appends())
    seen = without_new_addresses(_core.last_launch())
    return made_launches, seen, without_new_addresses(_core.last_append()) if made_launches[1] else None


def outcome(function, given):
    """(what was launched or raised, where the results are)."""
    _core.stub_backend(_core.device_info("H100"))
    try:
        found = FUNCTIONS[function](**given)
    except Exception as error:
        assert (_core.launches(), _core.appends()) == (0, 0)
        return type(error), str(error)
    results = found if isinstance(found, tuple) else (found,)
    return launched(given), [
        (x.shape, x.stride(), x.dtype, next((n for n, y in given.items() if x is y), "new")) for x in results
    ]


# Changes of right calls.
LENGTHS = {"cache_seqlens": 50, "cache_batch_idx": None}
WITHOUT_RESULTS = {"out": None, "softmax_lse": None, "workspace": None}
PLAIN = [
    *((function, {}) for function in ATTENTION),
    *((function, WITHOUT_RESULTS) for function in ATTENTION),
    *((function, {"window_size": [5, 0], "softmax_scale": 0.3, "softcap": 2, "causal": True}) for function in ATTENTION),
    *((function, {"attention_chunk": 7, "num_splits": 3, "sm_margin": 2, "batch_invariant": True})
      for function in ATTENTION),
    *((function, {"window_size": None, "attention_chunk": None, "num_splits": 0}) for function in ATTENTION),
    ("flash_attn_func", {**WITHOUT_RESULTS, "return_attn_probs": True}),
    ("flash_attn_func", {"return_attn_probs": True, "causal": True, "pack_gqa": True, "deterministic": True}),
    ("flash_attn_varlen_func", {**WITHOUT_RESULTS, "return_attn_probs": True, "max_seqlen_q": None}),
    ("flash_attn_varlen_func", {"seqused_q": None, "seqused_k": None, "max_seqlen_k": None}),
    ("paged", {"cp_world_size": 2, "cp_rank": 1, "cp_tot_seqused_k": wrong_calls.ints(20, 140, 0)}),
    ("paged", {"cp_tot_seqused_k": wrong_calls.ints(20, 140, 0)}),
    ("paged", {"scheduler_metadata": wrong_calls.T((17,), "int32")}),
    ("flash_attn_with_kvcache", {**WITHOUT_RESULTS, "return_softmax_lse": True, "cache_leftpad": None}),
    ("flash_attn_with_kvcache", {"cache_seqlens": 50}),
    ("flash_attn_with_kvcache", {"cache_seqlens": -3}),
    ("flash_attn_with_kvcache", {"cu_seqlens_k_new": wrong_calls.ints(0, 1, 2, 3), "rotary_interleaved": False}),
    ("append", {"rotary_cos": None, "rotary_sin": None, "rotary_seqlens": None, "cache_seqlens": 5}),
    ("append", {"rotary_interleaved": False, "causal": True}),
    ("append", {"window_size": (3, -1), "rotary_seqlens": None}),
    ("append", {"k": wrong_calls.T((7, 2, 64)), "v": wrong_calls.T((7, 2, 64)),
                "cu_seqlens_k_new": wrong_calls.ints(0, 2, 2, 7)}),
    ("append", {**WITHOUT_RESULTS, "q": wrong_calls.T((3, 2, 4, 64), strides=(1024, 512, 128, 1))}),
]  # fmt: skip


@pytest.mark.parametrize(("function", "changes"), PLAIN, ids=str)
def test_both_ways_launch_the_same(world, ways, function, changes):
    given = arguments(world, function, changes)
    short = outcome(function, given)
    assert ways.taken == {"short": 1, "long": 0}, short
    ways.long_only = True
    assert short == outcome(function, given)
    assert ways.taken == {"short": 1, "long": 1}
    assert short[0][0] == (1, 1 if function == "append" else 0)


@pytest.mark.parametrize(("function", "changes"), PLAIN, ids=str)
def test_operators_launch_the_same_in_the_short_way(world, ways, function, changes):
    if isinstance(changes.get("cache_seqlens"), int):
        changes = {**changes, "cache_seqlens": wrong_calls.ints(20, 40, 0)}  # operators take a tensor
    given = arguments(world, function, changes)
    direct = outcome(function, given)
    with passing_mode():
        assert direct == outcome(function, given)
    assert ways.taken == {"short": 2, "long": 0}


@pytest.mark.parametrize(
    "wrong",
    [w for w in wrong_calls.every() if w.function in ATTENTION and w.on != STUB],
    ids=lambda w: f"{w.function}, {w.why}",
)
def test_wrong_calls_raise_the_same(world, ways, wrong):
    given = arguments(world, wrong.function, wrong.changes)
    short = outcome(wrong.function, given)
    assert ways.taken["short"] == 0 or isinstance(short[0], tuple), "what is not refused here is a question of a GPU"
    ways.long_only = True
    assert short == outcome(wrong.function, given)


def test_a_workspace_that_is_too_small_is_missed_before_the_append(world, ways):
    small = torch.empty(16, dtype=torch.uint8)
    with testing.force_plan(num_splits=2, cluster=-1):
        given = arguments(world, "append", {"workspace": small, "num_splits": 0})
        error, message = outcome("append", given)
        assert error is ValueError and message.startswith("workspace: this call needs")
        outcome("append", given | {"workspace": None})
    assert ways.taken == {"short": 1, "long": 0}


@pytest.fixture
def allocated(monkeypatch):
    """What Python was asked to allocate: empty_like and empty."""
    made = []
    for name in ("empty_like", "empty"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, real=real, **k: made.append(real(*a, **k)) or made[-1])
    gpu.use_torch.__wrapped__()
    yield made
    monkeypatch.undo()
    gpu.use_torch.__wrapped__()


@pytest.mark.parametrize("way", ["short", "long"])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_rotated_query_goes_to_the_end_of_the_workspace(world, ways, allocated, way, missing):
    """With the bytes of the plan and of q, each rounded up to 256; with one less it is allocated."""
    ways.long_only = way == "long"
    with testing.force_plan(num_splits=2, cluster=-1):
        given = arguments(world, "append", {"workspace": None, "num_splits": 0})
        FUNCTIONS["append"](**given)
        of_plan = -(-_core.last_launch()["plan"].workspace_bytes // 256) * 256
        size = -(-given["q"].nbytes // 256) * 256
        assert of_plan > 0
        workspace = torch.zeros(of_plan + size - missing, dtype=torch.uint8)
        allocated.clear()
        FUNCTIONS["append"](**given | {"workspace": workspace})
    rotated, seen = _core.last_append()["q_rotated"], _core.last_launch()
    assert seen["q"] == rotated and tuple(rotated["shape"]) == given["q"].shape
    inside = workspace.data_ptr() + of_plan == rotated["data"]
    assert (inside, len(allocated)) == ((True, 0) if not missing else (False, 1))
    assert tuple(seen["workspace"]["shape"]) == (of_plan if not missing else workspace.numel(),)
    assert seen["workspace"]["data"] == workspace.data_ptr()


def test_a_rotated_query_does_not_go_where_results_are(world, ways):
    given = arguments(world, "append")
    given["workspace"] = torch.zeros(1 << 20, dtype=torch.uint8)
    given["out"] = given["workspace"][-given["q"].nbytes :].view(given["q"].dtype).view(given["q"].shape)
    error, message = outcome("append", given)
    assert error is ValueError and message.startswith("out: shares memory with workspace")
    ways.long_only = True
    assert outcome("append", given) == (error, message)


def test_a_rotated_query_goes_behind_a_result_that_ends_where_the_workspace_begins(world, ways, allocated):
    given = arguments(world, "append", {"num_splits": 1})
    size = given["q"].nbytes
    memory = torch.zeros(2 * size + 256, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 256 :]
    given["out"] = memory[:size].view(given["q"].dtype).view(given["q"].shape)
    workspace = memory[size:][-(memory.data_ptr() + size) % 256 :][: -(-size // 256) * 256]
    assert workspace.numel() >= size and given["out"].data_ptr() + 2 * size > workspace.data_ptr()
    with testing.force_plan(cluster=1):
        FUNCTIONS["append"](**given | {"workspace": workspace})
    assert _core.last_launch()["plan"].workspace_bytes == 0 and not allocated
    assert _core.last_append()["q_rotated"]["data"] == workspace.data_ptr()


class Subclass(torch.Tensor):
    pass


class Whole(int):
    pass


NOT_PLAIN = {
    "array": ("flash_attn_func", lambda g: {"k": g["k"].float().numpy()}),
    "tensor subclass": ("flash_attn_func", lambda g: {"q": g["q"].as_subclass(Subclass)}),
    "subclass of int": ("flash_attn_func", lambda g: {"num_splits": Whole(2)}),
    "flag of numpy": ("flash_attn_func", lambda g: {"causal": __import__("numpy").bool_(True)}),
    "integer as flag": ("flash_attn_func", lambda g: {"causal": 1}),
    "bound in a tensor": ("flash_attn_varlen_func", lambda g: {"max_seqlen_q": torch.tensor(20)}),
    "length in a tensor": ("flash_attn_with_kvcache", lambda g: {"cache_seqlens": torch.tensor(20)}),
    "no offsets of q": ("flash_attn_varlen_func", lambda g: {"cu_seqlens_q": None}),
    "no offsets of k": ("flash_attn_varlen_func", lambda g: {"cu_seqlens_k": None}),
    "integer of 65 bits": ("flash_attn_func", lambda g: {"sm_margin": 1 << 64}),
    "query that is not there": ("flash_attn_func", lambda g: {"q": None}),
    "meta tensor": ("flash_attn_func", lambda g: {"q": g["q"].to("meta")}),
    "qv": ("flash_attn_func", lambda g: {"qv": g["q"]}),
    "rotary without keys": ("append", lambda g: {"k": None, "v": None}),
    "values without keys": ("append", lambda g: {"k": None}),
    "cos without sin": ("append", lambda g: {"rotary_sin": None}),
    "no length before the append": ("append", lambda g: {"cache_seqlens": None}),
}


@pytest.mark.parametrize("why", NOT_PLAIN)
def test_what_is_not_plain_takes_the_long_way(world, ways, why):
    function, change = NOT_PLAIN[why]
    given = arguments(world, function)
    given |= change(given)
    outcome(function, given)
    assert ways.taken["short"] == 0


class Wrapped(torch.Tensor):
    """A tensor whose class takes the operators on it, as those of quantized or distributed weights do."""

    seen: list[str] = []

    @staticmethod
    def __new__(cls, inner):
        strides = {"strides": inner.stride(), "device": inner.device}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, **strides)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function.namespace)
        return function(*tree_map_only(cls, lambda x: x.inner, args), **(kwargs or {}))


OF_TENSORS = [
    (function, name)
    for function in ATTENTION
    for name, value in RIGHT[function].items()
    if isinstance(value, wrong_calls.T)
]


@pytest.mark.parametrize(("function", "name"), OF_TENSORS, ids=str)
def test_a_class_that_takes_operators_gets_the_call(world, ways, function, name):
    given = arguments(world, function)
    outcome(function, given)
    direct = launched(given)
    _core.stub_backend(_core.device_info("H100"))
    Wrapped.seen.clear()
    FUNCTIONS[function](**given | {name: Wrapped(given[name])})
    assert "hopper_attention" in Wrapped.seen and launched(given) == direct


def test_merged_results_that_negate_are_refused(world):
    given = arguments(world, "merge_states")
    given["lse_a"] = torch.zeros(given["lse_a"].shape, dtype=torch.complex64).conj().imag
    with pytest.raises(ValueError, match="^lse_a: is a view that negates"):
        merging.merge_states(**given)


def test_inputs_that_negate_have_no_unit_stride(world, ways):
    """So that they are refused without being asked for."""
    given = arguments(world, "flash_attn_func")
    real = torch.zeros(given["k"].shape, dtype=torch.complex32).conj().imag
    assert real.is_neg() and real.stride(-1) == 2
    error, message = outcome("flash_attn_func", {**given, "q": given["q"].half(), "k": real, "v": given["v"].half(),
                                                 "out": None})  # fmt: skip
    assert error is ValueError and message.startswith("k: ")


def test_tensors_that_require_grad_take_the_long_way_in_grad_mode(world, ways):
    with torch.inference_mode(False):
        given = arguments(world, "flash_attn_func")
        outcome("flash_attn_func", given)
        assert ways.taken["short"] == 1, "grad mode alone is no reason"
        given["s_aux"] = torch.nn.Parameter(given["s_aux"])
        error, message = outcome("flash_attn_func", given)
        assert error is NotImplementedError and message.startswith("s_aux: requires grad")
        with torch.no_grad():
            outcome("flash_attn_func", given)
    assert ways.taken == {"short": 2, "long": 0}


def test_who_watches_gets_the_call(world, ways):
    given = arguments(world, "flash_attn_func", {"out": None, "softmax_lse": None})
    with FlopCounterMode(display=False) as counter:
        outcome("flash_attn_func", given)
    assert counter.get_total_flops() > 0
    # The mode has seen the operator, and its kernel is a plain call again.
    assert ways.taken == {"short": 1, "long": 0}
    seen = []
    torch.func.functionalize(lambda q: seen.append(_core.attend_dense(*dense(given | {"q": q}))) or q)(given["q"])
    assert seen == [None]


def dense(given):
    """Arguments of attend_dense."""
    return (
        given["q"], given["k"], given["v"], None, False, (-1, -1), 0, 0.0, 1, 0, False, None, given.get("out"), None,
        False, None,
    )  # fmt: skip


def test_tensors_in_host_memory_take_the_long_way(world):
    given = arguments(world, "flash_attn_func")
    assert _core.attend_dense(*dense(given)) is given["out"]
    _core.count_host_memory_as_cuda(False)
    assert _core.attend_dense(*dense(given)) is None


def test_arguments_are_counted():
    for name in SHORT:
        with pytest.raises(TypeError, match=f"^{name}: [0-9]+ arguments are needed, found 3"):
            getattr(_core, name)(1, 2, 3)


def test_references_are_returned(world, ways):
    given = arguments(world, "append", WITHOUT_RESULTS)
    values = [*given.values(), None, True]
    FUNCTIONS["append"](**given)
    before = [sys.getrefcount(x) for x in values]
    for _ in range(50):
        FUNCTIONS["append"](**given)
    after = [sys.getrefcount(x) for x in values]
    assert ways.taken["short"] == 51
    assert all(abs(b - a) < 20 for a, b in zip(before, after, strict=True))


def test_a_failing_allocation_is_raised(world, monkeypatch):
    def fail(q, v):
        raise MemoryError("no room")

    monkeypatch.setattr(gpu, "empty_output", fail)
    gpu.use_torch.__wrapped__()
    try:
        given = arguments(world, "flash_attn_func", {"out": None, "v": wrong_calls.T((2, 128, 2, 32))})
        with pytest.raises(MemoryError, match="no room"):
            hopper_attention.flash_attn_func(**given)
    finally:
        monkeypatch.undo()
        gpu.use_torch.__wrapped__()
    assert _core.launches() == 0


def test_the_reliability_sections_watch_what_the_short_way_allocates(monkeypatch):
    from reliability import _memory

    seen = []
    with monkeypatch.context() as spied:
        spied.setattr(_core, "use_torch", lambda **given: seen.append(given["empty_like"]))
        before = torch.empty_like
        with _memory.watched():
            guarded = torch.empty_like
    assert guarded is not before and seen == [guarded, before]
    _memory.hand_over()


def test_functions_that_were_replaced_are_let_go():
    """The guard of the reliability sections holds all that it allocated: each graph of the soak kept its workspace."""
    from reliability import _memory

    with _memory.watched() as allocations:
        kept = weakref.ref(allocations)
    del allocations
    gc.collect()
    assert kept() is None
