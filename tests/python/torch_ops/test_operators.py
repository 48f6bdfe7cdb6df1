"""Operators: schemas follow the public functions, fake kernels tell the truth, calls give what the functions give."""

from __future__ import annotations

import inspect
import subprocess
import sys
import timeit

import pytest

torch = pytest.importorskip("torch")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: E402

import hopper_attention  # noqa: E402
from hopper_attention import gpu, interface, torch_ops  # noqa: E402
from hopper_attention.torch_ops import kernels  # noqa: E402
from hopper_attention.watching import is_watched  # noqa: E402
from torch_ops.samples import copies, operator_arguments, samples, tensors, values  # noqa: E402

SAMPLES = samples()
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
BY_WHY = pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.why)


class Passing(TorchDispatchMode):
    """Passes on what it sees, and keeps it."""

    def __init__(self, name, seen):
        super().__init__()
        self.name, self.seen = name, seen

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append((self.name, function, types, len(args), kwargs))
        return function(*args, **(kwargs or {}))


def operator(name):
    return getattr(torch.ops.hopper_attention, name).default


def test_every_operator_has_a_sample():
    assert {sample.operator for sample in SAMPLES} == set(torch_ops.SCHEMAS)


@BY_WHY
def test_opcheck(sample):
    """Schema (what is written, what aliases), fake kernel against the real one, tracing with symbolic shapes."""
    args, kwargs = operator_arguments(sample)
    torch.library.opcheck(operator(sample.operator), args, kwargs)


@BY_WHY
def test_the_operator_gives_what_the_function_gives(sample):
    """Called under a mode, the public function goes through the operator that the sample names."""
    args, kwargs = copies(sample)
    expected = getattr(hopper_attention, sample.function)(*args, **kwargs)
    seen = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    again, options = copies(sample)
    with Record():
        result = getattr(hopper_attention, sample.function)(*again, **options)
    assert operator(sample.operator) in seen
    assert [f for f in seen if f.namespace == "hopper_attention"] == [operator(sample.operator)]
    for got, want in zip(tensors(result), tensors(expected), strict=True):
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    for name in ("out", "softmax_lse"):
        if name in options:
            torch.testing.assert_close(options[name], kwargs[name], rtol=0, atol=0)
    if sample.operator.startswith("kvcache_append"):
        assert torch.equal(again[1], args[1]) and torch.equal(again[2], args[2])
        assert not torch.equal(again[1], sample.args[1])


@BY_WHY
def test_meta_tensors_give_shapes(sample):
    def to_meta(x):
        return x.to("meta") if isinstance(x, torch.Tensor) else x

    args, kwargs = copies(sample)
    expected = tensors(getattr(hopper_attention, sample.function)(*args, **kwargs))
    result = tensors(
        getattr(hopper_attention, sample.function)(
            *map(to_meta, sample.args), **{name: to_meta(x) for name, x in sample.kwargs.items()}
        )
    )
    for got, want in zip(result, expected, strict=True):
        assert got.is_meta and (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)


LSE_DTYPES = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


@pytest.mark.parametrize("dtype", LSE_DTYPES, ids=str)
@pytest.mark.parametrize("given", [False, True], ids=["all allocated", "out given"])
def test_meta_tensors_give_the_dtypes_of_results(dtype, given):
    def results(device):
        q, k, v = (torch.zeros(1, 3, 2, 8, dtype=dtype, device=device) for _ in range(3))
        options = {"out": torch.empty_like(q)} if given else {}
        return hopper_attention.flash_attn_func(q, k, v, return_attn_probs=True, **options)

    for device in ("cpu", "meta"):
        out, lse = results(device)
        assert out.dtype == dtype and lse.dtype == LSE_DTYPES[dtype], device


OF_ATTENTION = [name for name in sorted(torch_ops.SCHEMAS) if hasattr(kernels, f"{name.removesuffix('_out')}_out")]


def public_parameters(name):
    function = next(sample.function for sample in SAMPLES if sample.operator == name)
    return function, inspect.signature(getattr(hopper_attention, function)).parameters


@pytest.mark.parametrize("name", sorted(set(torch_ops.SCHEMAS) - set(OF_ATTENTION)))
def test_parameters_are_those_of_the_public_function(name):
    _, public = public_parameters(name)
    arguments = operator(name)._schema.arguments
    assert [a.name for a in arguments] == [p for p in public if p in {a.name for a in arguments}]
    for argument in arguments:
        default = public[argument.name].default
        if argument.has_default_value():
            found = argument.default_value
            assert (tuple(found) if isinstance(found, list) else found) == default, argument.name


@pytest.mark.parametrize("name", OF_ATTENTION)
def test_tensors_of_attention_have_the_names_of_the_public_function(name):
    _, public = public_parameters(name)
    arguments = operator(name)._schema.arguments
    assert {a.name for a in arguments if "Tensor" in str(a.type)} <= set(public)
    for argument in arguments:
        if argument.name in public and argument.has_default_value() and not argument.name.startswith("max_seqlen"):
            assert argument.default_value == public[argument.name].default, argument.name


NOT_OF = {
    "fwd": ("out", "softmax_lse", "workspace"),
    "varlen_fwd": ("out", "softmax_lse", "workspace"),
    "kvcache_append": ("out", "softmax_lse", "workspace"),
    "kvcache": ("out", "softmax_lse", "workspace", "k", "v", "rotary_cos", "rotary_sin", "rotary_seqlens",
                "cu_seqlens_k_new", "rotary_interleaved"),
}  # fmt: skip
WITHOUT_EFFECT = ("pack_gqa", "deterministic")


def arrived_at(function, given, monkeypatch):
    """The arguments of the public `function` behind its operator, which is called with `given` under a mode."""
    arrived = []

    def spy(*args, **kwargs):
        bound = inspect.signature(original).bind(*args, **kwargs)
        bound.apply_defaults()
        arrived.append(bound.arguments)
        return torch.zeros(2, 3, 4, 5), torch.zeros(2, 4, 3)

    original = getattr(interface, function)
    with monkeypatch.context() as patch, Passing("mode", []):
        patch.setattr(interface, function, spy)
        original(**given)
    (found,) = arrived
    return found


def arguments_of(name):
    """Values of all arguments of the public function of an operator that are not its defaults."""
    _, public = public_parameters(name)
    not_of = NOT_OF.get(name, NOT_OF["kvcache"][3:] if name == "kvcache_out" else ())
    numbers = {"softmax_scale": 0.25, "softcap": 7.5, "window_size": (11, 12)}
    given = {}
    for place, parameter in enumerate(public):
        kind = torch_ops.schema.TYPES.get(parameter, "Tensor")
        if parameter in not_of or parameter in WITHOUT_EFFECT:
            continue
        if kind == "bool":
            given[parameter] = not public[parameter].default
        else:
            given[parameter] = numbers.get(parameter, torch.zeros(2, 3, 4, 5) if kind == "Tensor" else 20 + place)
    return given


@pytest.mark.parametrize("name", OF_ATTENTION)
def test_every_argument_arrives(name, monkeypatch):
    """Through the operator, whatever the form in which it travels."""
    function, _ = public_parameters(name)
    given = arguments_of(name)
    found = arrived_at(function, given, monkeypatch)
    for parameter, value in given.items():
        if name.endswith("_out") and parameter.startswith("return_"):
            continue
        same = found[parameter] is value if isinstance(value, torch.Tensor) else found[parameter] == value
        assert same, f"{parameter}: {found[parameter]} instead of {value}"


@pytest.mark.parametrize("name", OF_ATTENTION)
def test_every_flag_arrives_alone(name, monkeypatch):
    """All of them travel in one number."""
    function, public = public_parameters(name)
    given = arguments_of(name)
    flags = [parameter for parameter in given if torch_ops.schema.TYPES.get(parameter) == "bool"]
    assert len(flags) >= 3
    for alone in flags:
        others = {flag: public[flag].default for flag in flags if flag != alone}
        found = arrived_at(function, {**given, **others}, monkeypatch)
        for flag in flags:
            if not (name.endswith("_out") and flag.startswith("return_")):
                assert found[flag] == (flag == alone) ^ public[flag].default, f"{flag} with {alone} alone"


LEAST = {
    "flash_attn_func": ("q", "k", "v"),
    "flash_attn_varlen_func": ("q", "k", "v", "cu_seqlens_q"),
    "flash_attn_with_kvcache": ("q", "k_cache", "v_cache"),
}


@pytest.mark.parametrize("function", LEAST)
def test_every_argument_arrives_alone(function, monkeypatch):
    """What is rarely given travels together, and is left out where all of it is at its defaults."""
    public = inspect.signature(getattr(hopper_attention, function)).parameters
    numbers = {"softmax_scale": 0.25, "softcap": 7.5, "window_size": (11, -1)}
    least = {name: torch.zeros(2, 3, 4, 5) for name in LEAST[function]}
    for name in set(public) - set(least) - set(WITHOUT_EFFECT):
        kind = torch_ops.schema.TYPES.get(name, "Tensor")
        value = not public[name].default if kind == "bool" else numbers.get(name, 3)
        if kind == "Tensor":
            value = torch.zeros(2, 4, 3)
        beside = {"k": torch.zeros(2, 3, 4, 5)} if name == "cu_seqlens_k_new" else {}  # has no effect without
        found = arrived_at(function, {**least, **beside, name: value}, monkeypatch)
        if not name.startswith("return_"):
            assert found[name] is value if kind == "Tensor" else found[name] == value, name
        for other in set(public) - {*least, *beside, name, "out", "softmax_lse", *WITHOUT_EFFECT}:
            assert found[other] is public[other].default or found[other] == public[other].default, (
                f"{other} with {name}"
            )


def test_what_is_written_is_declared():
    written = {
        name: {a.name for a in operator(name)._schema.arguments if a.alias_info and a.alias_info.is_write}
        for name in torch_ops.SCHEMAS
    }
    assert written["kvcache_append"] == {"k_cache", "v_cache"}
    assert written["kvcache_append_out"] == {"k_cache", "v_cache", "out", "softmax_lse", "workspace"}
    assert written["kvcache_out"] == written["fwd_out"] == {"out", "softmax_lse", "workspace"}
    assert written["merge_states_out"] == {"out", "lse"}
    assert not any(names for name, names in written.items() if not name.endswith("_out") and name != "kvcache_append")


@pytest.mark.parametrize("name", torch_ops.calls.FUNCTIONS)
def test_signatures_stay_real(name):
    function = getattr(hopper_attention, name)
    assert function is getattr(interface, name) and not hasattr(function, "__wrapped__")
    assert all(
        p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in inspect.signature(function).parameters.values()
    )


@BY_WHY
def test_eager_calls_do_not_reach_the_dispatcher(sample, monkeypatch):
    for name in torch_ops.calls.FUNCTIONS:
        monkeypatch.setattr(torch_ops, name, lambda *args, **kwargs: pytest.fail("went through the operator"))
    args, kwargs = copies(sample)
    getattr(hopper_attention, sample.function)(*args, **kwargs)


def takes_splits(sample):
    return "num_splits" in inspect.signature(getattr(hopper_attention, sample.function)).parameters


@pytest.mark.parametrize("operator", sorted({sample.operator for sample in SAMPLES if takes_splits(sample)}))
def test_fake_kernels_tell_the_truth_for_every_num_splits(operator):
    sample = next(s for s in SAMPLES if s.operator == operator and takes_splits(s))
    function = getattr(hopper_attention, sample.function)
    args, kwargs = copies(sample)
    expected = [(x.shape, x.dtype, x.stride()) for x in tensors(function(*args, **kwargs))]
    mode = torch._subclasses.FakeTensorMode()
    args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, copies(sample))
    with mode:
        for splits in range(257):
            found = tensors(function(*args, **{**kwargs, "num_splits": splits}))
            assert [(x.shape, x.dtype, x.stride()) for x in found] == expected, splits


def test_who_watches():
    x = torch.zeros(2)
    assert not is_watched(x) and not is_watched(torch.nn.Parameter(x)) and not is_watched(None)
    assert not is_watched(x.numpy())
    with torch.inference_mode():
        assert not is_watched(torch.zeros(2))
    assert is_watched(x.to("meta"))
    with torch._subclasses.FakeTensorMode():
        fake = torch.zeros(2)
    assert is_watched(fake)
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert is_watched(x)
    seen = []
    torch.func.functionalize(lambda y: seen.append(is_watched(y)) or y)(x)
    torch.jit.trace(lambda y: seen.append(is_watched(y)) or y + 1, (x,), check_trace=False)
    assert seen == [True, True]
    assert not is_watched(x)


def test_asking_costs_little():
    """0.2 us for each call of a public function on an idle core, where torch.add takes 0.95."""
    x = torch.zeros(2)

    def least(call):
        return min(timeit.repeat(call, number=2000, repeat=3))

    rounds = [(least(lambda: is_watched(x)), least(lambda: torch.add(x, x))) for _ in range(4)]  # machines differ
    assert min(asking for asking, _ in rounds) < min(adding for _, adding in rounds)


def of_this_package(seen):
    return [call for call in seen if call[1].namespace == "hopper_attention"]


@BY_WHY
def test_a_mode_sees_what_torch_s_dispatcher_shows_it(sample, monkeypatch):
    """Once, the innermost first, the modes behind it after."""
    gpu.use_torch()
    seen = {"handed over": [], "dispatched": []}
    for way, calls in seen.items():
        if way == "dispatched":
            monkeypatch.setattr(torch_ops, "_modes", lambda: 0)
        args, kwargs = copies(sample)
        with Passing("outer", calls), Passing("inner", calls):
            getattr(hopper_attention, sample.function)(*args, **kwargs)
    handed_over, dispatched = map(of_this_package, seen.values())
    assert [call[:2] for call in handed_over] == [(name, operator(sample.operator)) for name in ("inner", "outer")]
    assert [(*call[:3], set(call[4] or ())) for call in handed_over] == [
        (*call[:3], set(call[4] or ())) for call in dispatched
    ]


def test_modes_are_there_again_after_an_error():
    q, k, v = SAMPLES[0].args
    seen = []
    with Passing("outer", seen), Passing("inner", seen) as inner:
        with pytest.raises(ValueError, match="softcap"):
            hopper_attention.flash_attn_func(q, k, v, softcap=-1.0)
        assert torch._C._len_torch_dispatch_stack() == 2 and torch._C._get_dispatch_stack_at(1) is inner
    assert [call[0] for call in of_this_package(seen)] == ["inner", "outer"]


@pytest.fixture
def on_stub(recorder, monkeypatch):
    """CPU tensors play the part of CUDA tensors, and launches are recorded. The call of an operator: its name and arguments."""
    gpu.use_torch()
    recorder.count_host_memory_as_cuda(True)
    monkeypatch.setattr(interface, "on_cuda", lambda name, x: True)
    q, k, v = (torch.zeros(2, 3, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    starts = torch.arange(3, dtype=torch.int32) * 3
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    new = [x[:, :1].clone() for x in (k, v)]
    lengths = torch.ones(2, dtype=torch.int32)
    out, lse = torch.empty_like(q), torch.empty(2, 4, 3)
    yield {
        "fwd": (q, k, v),
        "fwd_out": (q, k, v, out, lse),
        "varlen_fwd": (*packed, starts, starts),
        "varlen_fwd_out": (*packed, starts, out.flatten(0, 1), None, None, starts),
        "kvcache": (q, k, v, lengths),
        "kvcache_out": (q, k, v, out, lse, None, lengths),
        "kvcache_append": (q, k, v, *new, None, None, None, None, lengths),
        "kvcache_append_out": (q, k, v, out, lse, None, *new, None, None, None, None, lengths),
    }
    recorder.count_host_memory_as_cuda(False)


def launches_of(recorder, call):
    before = recorder.launches()
    call()
    return recorder.launches() - before


def events_of(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.name for event in profile.events()}


class SeesFunctions(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen = [*getattr(self, "seen", []), function]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", OF_ATTENTION)
def test_operators_called_from_python_do_not_reach_the_dispatcher(name, on_stub, recorder, monkeypatch):
    """Below a mode, in a compiled graph: unless something has to see the call. Either way it is one launch."""
    if not recorder.has_exchange_api(torch.Tensor):
        pytest.skip("torch < 2.10 has no exchange API")
    args, dispatched = on_stub[name], []
    through_torch = operator(name)._op.dispatched
    monkeypatch.setattr(operator(name)._op, "dispatched", lambda *a: dispatched.append(a) or through_torch(*a))
    result, written = operator(name)(*args), name.endswith("_out")
    assert result is None if written else [type(x) for x in result] == [torch.Tensor] * 2
    assert launches_of(recorder, lambda: operator(name)(*args)) == 1 and not dispatched
    with Passing("mode", []):
        assert launches_of(recorder, lambda: operator(name)(*args)) == 1 and len(dispatched) == 1
    assert f"hopper_attention::{name}" in events_of(lambda: operator(name)(*args))
    with SeesFunctions() as mode:
        assert launches_of(recorder, lambda: operator(name)(*args)) == 1
    assert operator(name) in mode.seen or dispatched


def test_operators_called_from_python_refuse_what_the_dispatcher_refuses(on_stub):
    q, k, v = on_stub["fwd"]
    for args in ((q, k), (q, k, v, *[None] * 30), (q, k, "v"), (q, k, v, None, 1.5)):
        with pytest.raises(RuntimeError, match="hopper_attention::fwd"):
            operator("fwd")(*args)
    with pytest.raises(NotImplementedError, match="^k: requires grad"):
        operator("fwd")(q, k.clone().requires_grad_(), v)
    with pytest.raises(ValueError, match="^softcap: "):
        operator("fwd")(q, k, v, None, 1, 0, None, -1.0)


def test_a_trace_before_dispatch_records_operators(on_stub):
    graph = make_fx(lambda q, k, v: operator("fwd")(q, k, v), pre_dispatch=True)(*on_stub["fwd"])
    assert operator("fwd") in [node.target for node in graph.graph.nodes]


def test_tensors_that_are_not_plain_go_through_torch_s_dispatcher():
    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            found.append((function, types))
            return torch.zeros(2, 5, 4, 16), torch.zeros(0)

    found, seen = [], []
    q, k, v = SAMPLES[0].args
    with Passing("mode", seen):
        hopper_attention.flash_attn_func(q.as_subclass(Wrapped), k, v)
    assert of_this_package(seen)[0][2] == (Wrapped,)
    assert (operator("fwd"), (Wrapped,)) in found


def test_tensors_that_require_grad_are_refused():
    q, k, v = SAMPLES[0].args
    with (
        torch.utils.flop_counter.FlopCounterMode(display=False),
        pytest.raises(NotImplementedError, match="^k: requires grad"),
    ):
        hopper_attention.flash_attn_func(q, k.clone().requires_grad_(), v)


def test_transforms():
    """vmap loops over the operator, make_fx records it, grad is refused."""
    q, k, v = SAMPLES[0].args
    more = [torch.stack([x, x + 1]) for x in (q, k, v)]
    mapped = torch.func.vmap(hopper_attention.flash_attn_func)(*more)
    for i in range(2):
        assert torch.equal(mapped[i], hopper_attention.flash_attn_func(*(x[i] for x in more)))
    graph = make_fx(lambda q, k, v: hopper_attention.flash_attn_func(q, k, v))(q, k, v)
    assert operator("fwd") in [node.target for node in graph.graph.nodes]
    with pytest.raises(NotImplementedError, match="^q: requires grad"):
        torch.func.grad(lambda x: hopper_attention.flash_attn_func(x, k, v).sum())(q)


@pytest.mark.parametrize(
    "name, value, error",
    [
        ("window_size", 3, ValueError),
        ("softcap", "much", TypeError),
        ("causal", "yes", TypeError),
        ("batch_invariant", "yes", TypeError),
        ("return_attn_probs", "yes", TypeError),
        ("pack_gqa", "yes", TypeError),
        ("deterministic", "yes", TypeError),
        ("num_splits", torch.tensor(3), TypeError),
    ],
)
def test_wrong_values_are_refused_before_the_operator(name, value, error):
    q, k, v = (x.to("meta") for x in SAMPLES[0].args)
    with pytest.raises(error, match=f"^{name}: "):
        hopper_attention.flash_attn_func(q, k, v, **{name: value})


def test_a_bound_in_a_tensor_is_left_out():
    q, k, v = (x.flatten(0, 1).to("meta") for x in SAMPLES[0].args)
    starts = torch.zeros(3, dtype=torch.int32, device="meta")
    out = hopper_attention.flash_attn_varlen_func(q, k, v, starts, starts, torch.tensor(5), torch.tensor(9))
    assert out.shape == q.shape


def test_what_must_be_known_while_tracing_is_no_tensor():
    """torch.jit.trace has sizes in tensors."""
    lengths = torch.ones(2, dtype=torch.int32)
    for name, given in (("batch_size", (torch.tensor(2), 1)), ("max_seqlen_q", (2, torch.tensor(1)))):
        with pytest.raises(
            TypeError, match=rf"^{name}: an integer is needed, found a tensor; pass an int.*int\(size\)"
        ):
            hopper_attention.get_scheduler_metadata(*given, 16, 4, 2, 16, lengths.to("meta"))


def test_the_package_defines_no_operator_until_it_is_needed():
    code = (
        "import torch, hopper_attention, sys\n"
        "x = torch.zeros(1, 3, 2, 8); hopper_attention.flash_attn_func(x, x, x)\n"
        "assert 'hopper_attention.torch_ops' not in sys.modules\n"
        "x = x.to('meta'); hopper_attention.flash_attn_func(x, x, x)\n"
        "print(torch.ops.hopper_attention.fwd.default._schema.name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "hopper_attention::fwd", done.stderr


class OfVaryingLengths(torch.nn.Module):
    """The bound on the lengths is read from the device, as packers of batches do."""

    def forward(self, q, k, v, starts, lengths):
        longest = lengths.max().item()
        return hopper_attention.flash_attn_varlen_func(q, k, v, starts, starts, longest, longest)


def packed_tensors():
    q, k, v = (torch.randn(6, heads, 64).bfloat16() for heads in (4, 2, 2))
    return q, k, v, torch.tensor([0, 3, 6], dtype=torch.int32), torch.tensor([3, 3])


def test_bounds_that_are_known_at_run_time_alone_compile_and_export(monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "capture_scalar_outputs", True)
    given = packed_tensors()
    expected = OfVaryingLengths()(*given)
    torch._dynamo.reset()
    compiled = torch.compile(OfVaryingLengths(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), expected)
    exported = torch.export.export(OfVaryingLengths(), given)
    torch.testing.assert_close(exported.module()(*given), expected)


@pytest.fixture
def world(monkeypatch, recorder):
    """CPU tensors play the part of CUDA tensors, and launches are recorded: what is plain is called directly."""
    monkeypatch.setattr(interface, "on_cuda", lambda name, x: True)
    recorder.count_host_memory_as_cuda(True)
    gpu.use_torch()
    yield recorder
    recorder.count_host_memory_as_cuda(False)


def dense_tensors():
    return [torch.zeros(2, 3, heads, 64).bfloat16() for heads in (4, 2, 2)]


@pytest.mark.parametrize("by_name", [True, False], ids=["the operator", "the function"])
def test_a_trace_of_torch_jit_records_operators(world, by_name):
    """Of tensors of the kernels. What is not recorded would be a constant in the trace."""

    def attend(q, k, v):
        out = torch.empty_like(q)
        if by_name:
            operator("fwd_out")(q, k, v, out)
        else:
            hopper_attention.flash_attn_func(q, k, v, out=out)
        return out

    with torch.inference_mode():
        traced = torch.jit.trace(attend, tuple(dense_tensors()), check_trace=False)
    assert "hopper_attention::fwd_out" in str(traced.graph)


@BY_WHY
@torch.inference_mode()
def test_a_trace_of_torch_jit_computes_with_what_it_is_given(sample):
    def attend(*given):
        left = iter(given)
        args, kwargs = tree_map_only(torch.Tensor, lambda x: next(left), (sample.args, sample.kwargs))
        return tensors(getattr(hopper_attention, sample.function)(*args, **kwargs))

    def given(factor):
        found = tree_leaves(copies(sample))
        return [x * factor if x.is_floating_point() else x for x in found if isinstance(x, torch.Tensor)]

    traced = torch.jit.trace(attend, tuple(given(1.0)))
    assert f"hopper_attention::{sample.operator}(" in str(traced.graph)
    others, same = given(1.5), given(1.5)
    for got, want in zip((*traced(*others), *others), (*attend(*same), *same), strict=True):
        assert torch.equal(got, want)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # the scale is kept as it is
def test_a_traced_call_takes_other_shapes_and_is_kept_in_a_file(tmp_path):
    def attend(q, lse):
        return hopper_attention.flash_attn_func(q, q, q, q.shape[-1] ** -0.5, softmax_lse=lse), lse

    with torch.inference_mode():
        torch.jit.trace(attend, (values(1, 4, 2, 16), torch.zeros(1, 2, 4))).save(str(tmp_path / "call.pt"))
        loaded = torch.jit.load(str(tmp_path / "call.pt"))
        for got, want in zip(*(f(values(2, 7, 2, 16), torch.zeros(2, 2, 7)) for f in (loaded, attend)), strict=True):
            assert torch.equal(got, want)


def test_every_kind_of_profile_sees_operators(world):
    q, k, v = dense_tensors()
    of_all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    for options in ({}, {"experimental_config": of_all_threads}):
        with torch.inference_mode(), torch.profiler.profile(**options) as profile:
            operator("fwd_out")(q, k, v, torch.empty_like(q))
        assert any(event.key == "hopper_attention::fwd_out" for event in profile.key_averages())


REFUSED = {
    "an integer instead of lengths": ("kvcache", {"cache_seqlens": 3}),
    "no result to write to": ("kvcache_out", {"out": None}),
    "a bound that is no integer": ("kvcache", {"max_seqlen_q": 1.5}),
    "text that nobody reads": ("kvcache", {"q_descale": "x"}),
    "options that are too large": ("kvcache", {"options": [1 << 70, -1, 0, 0, 1, 0]}),
}


@pytest.mark.parametrize("why", REFUSED)
def test_direct_calls_refuse_what_the_schema_refuses(world, why):
    name, change = REFUSED[why]
    q, k, v = dense_tensors()
    given = {"q": q, "k_cache": k, "v_cache": v, "out": torch.empty_like(q), "cache_seqlens": torch.ones(2).int()}
    arguments = operator(name)._schema.arguments
    values = [{**given, **change}.get(x.name, x.default_value) for x in arguments]
    with torch.inference_mode(), pytest.raises((RuntimeError, TypeError, ValueError)):
        operator(name)(*values)
