"""Tensors without memory: shapes that no device takes are refused while torch traces, those that only the run knows are
left to it.
"""

from __future__ import annotations

import collections
import re

import pytest

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
import wrong_calls  # noqa: E402
from torch_ops.samples import int32, values  # noqa: E402
from wrong_calls import FUNCTIONS, RIGHT, TorchWorld, contiguous, made  # noqa: E402

OF_ATTENTION = """q without a dim, q with a dim more, k without a dim, v with a dim more, q without dims, heads that do not divide,
    no kv heads, head dims of q and k differ, heads of k and v differ, rows of k and v differ, k in another dtype, v in another dtype,
    out of another shape, out of other heads, out of other columns, out without a dim, sinks of fewer heads, sinks of two dims"""
OF_LSE = "lse of another shape, lse with a dim more"
REFUSED = {
    **dict.fromkeys(wrong_calls.ATTENTION, f"{OF_ATTENTION}, {OF_LSE}"),
    "append": f"{OF_ATTENTION}, new keys of other heads, new keys of another head dim, more new values than keys",
    "flash_attn_combine": "parts of four dims, LSEs of another shape, LSEs of another count, out of another shape",
    "merge_states": """a of five dims, b of another shape, LSE of a transposed, LSE of b of three sequences,
        out of another shape""",
    "get_scheduler_metadata": """heads that do not divide, no kv heads, head dim 60, head dim 512, wider v, negative batch,
        negative bound, too many splits, window below -1, negative chunk, negative margin, pages of no keys""",
}
REFUSED = {(function, " ".join(why.split())) for function, whys in REFUSED.items() for why in whys.split(",")}
REFUSED |= {
    ("flash_attn_varlen_func", "dense q"),
    ("flash_attn_varlen_func", "dense LSE"),
    ("paged", "other pages of v"),
    ("flash_attn_with_kvcache", "cache of another batch"),
    ("flash_attn_with_kvcache", "packed q without offsets"),
    ("flash_attn_with_kvcache", "dense q with offsets"),
}
CALLS = [wrong for wrong in wrong_calls.every() if (wrong.function, wrong.why) in REFUSED]


class MetaWorld(TorchWorld):
    """Tensors on the meta device."""

    def __init__(self) -> None:
        super().__init__("meta")

    def tensor(self, t, right):
        strides = contiguous(t.shape) if t.strides is None else t.strides
        return torch.empty_strided(t.shape, strides, dtype=self.dtypes[t.dtype], device="meta")


WORLD = MetaWorld()


def test_the_calls_are_there():
    assert {(wrong.function, wrong.why) for wrong in CALLS} == REFUSED
    assert min(collections.Counter(function for function, _ in REFUSED).values()) >= 4


@pytest.mark.parametrize("function", [name for name in RIGHT if name not in ("check_metadata", "plan")])
def test_right_calls_are_taken(function):
    given = made(WORLD, RIGHT[function], {})
    FUNCTIONS[function](**given)
    FUNCTIONS[function](**{name: x for name, x in given.items() if name not in wrong_calls.WRITTEN})


@pytest.mark.parametrize("given", [True, False], ids=["results given", "results made"])
@pytest.mark.parametrize("wrong", CALLS, ids=lambda wrong: f"{wrong.function}, {wrong.why}")
def test_shapes_that_no_device_takes_are_refused(wrong, given):
    """With the exception and the name that the call of real tensors would raise."""
    right = made(WORLD, RIGHT[wrong.function], {})
    if not given:
        right = {name: x for name, x in right.items() if name not in (*wrong_calls.WRITTEN, "workspace")}
    with pytest.raises(wrong.error) as raised:
        FUNCTIONS[wrong.function](**{**right, **made(WORLD, wrong.changes, right)})
    assert any(re.search(rf"\b{name}\b", str(raised.value)) for name in wrong.named.split("|")), raised.value


def attend(q, k, v):
    return hopper_attention.flash_attn_func(q, k, v)


class Attend(torch.nn.Module):
    def forward(self, q, k, v):
        return attend(q, k, v)


def dense(heads_q, heads_k, d=16, d_k=16):
    return values(2, 5, heads_q, d), values(2, 9, heads_k, d_k), values(2, 9, heads_k, d)


WRONG = {
    "q has 4 heads and k 3; a multiple is needed": dense(4, 3),
    "q and k have head dims 16 and 32; they must be equal": dense(4, 2, d_k=32),
}


@pytest.mark.parametrize("message", WRONG)
def test_the_message_is_that_of_the_call(message):
    """On tensors of the CPU, of the meta device, and of a fake GPU."""
    with pytest.raises(ValueError, match=message):
        attend(*WRONG[message])
    with pytest.raises(ValueError, match=message):
        attend(*(x.to("meta") for x in WRONG[message]))
    with torch._subclasses.FakeTensorMode():
        fakes = [torch.empty(x.shape, dtype=torch.bfloat16, device="cuda") for x in WRONG[message]]
        with pytest.raises(ValueError, match=message):
            attend(*fakes)


@pytest.mark.parametrize("message", WRONG)
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
@torch.inference_mode()
def test_no_program_is_exported(message, strict):
    """Nothing runs in an export, so that it is the trace that refuses."""
    with pytest.raises(Exception, match=message):
        torch.export.export(Attend(), WRONG[message], strict=strict)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("message", WRONG)
@torch.inference_mode()
def test_nothing_is_compiled(message, dynamic):
    """Where heads are symbols, too."""
    made = []
    torch._dynamo.reset()
    compiled = torch.compile(
        attend, fullgraph=True, dynamic=dynamic, backend=lambda graph, _: made.append(graph) or graph
    )
    with pytest.raises(Exception, match=message):
        compiled(*WRONG[message])
    assert not made
    compiled(*dense(4, 2))
    assert len(made) == 1


class Packs(torch.nn.Module):
    """How many tokens are kept is known at run time alone."""

    def forward(self, x, keep, starts):
        q, k = (x[keep] for _ in range(2))
        return hopper_attention.flash_attn_varlen_func(q, k, k[:, : self.heads_k], starts, starts, 5, 5)


@torch.inference_mode()
def test_what_only_the_run_knows_is_left_to_it():
    packs = Packs()
    given = values(9, 4, 16), torch.arange(9) % 2 == 0, int32(0, 2, 5)
    packs.heads_k = 4
    exported = torch.export.export(packs, given).module()
    assert torch.equal(exported(*given), packs(*given))
    packs.heads_k = 3
    wrong = torch.export.export(packs, given).module()
    with pytest.raises(ValueError, match="^v has shape"):
        wrong(*given)


def schedule_with(window, lengths):
    return hopper_attention.get_scheduler_metadata(
        2, 3, 64, 4, 2, 16, lengths, qkv_dtype=torch.bfloat16, causal=True, window_size=window
    )


@torch.inference_mode()
def test_a_window_may_be_a_symbol_or_known_at_run_time_alone():
    """Without a graph for each of its values."""
    made = []
    torch._dynamo.reset()
    lengths = int32(40, 50)
    by_shape = torch.compile(
        lambda x: schedule_with((x.shape[0], 0), lengths),
        fullgraph=True,
        dynamic=True,
        backend=lambda graph, _: made.append(graph) or graph,
    )
    for size in (5, 7, 11):
        assert torch.equal(by_shape(torch.zeros(size)), schedule_with((size, 0), lengths))
    assert len(made) == 1

    class ByItem(torch.nn.Module):
        def forward(self, m):
            return schedule_with((m.item(), 0), lengths)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(ByItem(), fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(torch.tensor(6)), schedule_with((6, 0), lengths))


def test_dtypes_by_name_are_those_of_the_call():
    def on(device, dtype):
        lengths = torch.zeros(2, dtype=torch.int32, device=device)
        return hopper_attention.get_scheduler_metadata(2, 3, 64, 4, 2, 16, lengths, qkv_dtype=dtype)

    for dtype in ("fp16", "bf16", "float16", torch.bfloat16):
        assert on("meta", dtype).shape == on("cpu", dtype).shape
    with pytest.raises(TypeError, match="^qkv_dtype: a dtype is needed, found 'half a byte'"):
        on("meta", "half a byte")
