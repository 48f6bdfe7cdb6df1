"""What the public function does around the launch for torch tensors: allocation, stream, fallback. `_core` is replaced
by a spy, so that CPU tensors can play the part of CUDA tensors.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import hopper_attention
from hopper_attention import _core, cache, gpu, interface, merging, schedule

torch = pytest.importorskip("torch")


ORDER = [
    "q",
    "k",
    "v",
    "out",
    "softmax_lse",
    "sinks",
    "softmax_scale",
    "causal",
    "window_left",
    "window_right",
    "attention_chunk",
    "softcap",
    "num_splits",
    "sm_margin",
    "batch_invariant",
    "stream",
    "workspace",
    "allocate",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_q",
    "seqused_k",
    "page_table",
    "cache_batch_idx",
    "cache_leftpad",
    "cu_seqlens_k_new",
    "cp_tot_seqused_k",
    "scheduler_metadata",
    "seqlen_k_new",
    "seqused_k_all",
    "max_seqlen_q",
    "max_seqlen_k",
    "cp_world_size",
    "cp_rank",
]


@pytest.fixture
def calls(monkeypatch):
    """What `_core` was asked for, in order: arguments by name, and the name of the function as "core". Every tensor
    counts as a CUDA tensor.
    """
    made = []

    def spy(name):
        return lambda *args: made.append({"core": name, **dict(zip(ORDER, args, strict=True))})

    def spy_by_name(name, positional):
        return lambda *args, **options: made.append(
            {"core": name, **dict(zip(positional, args, strict=True)), **options}
        )

    core = SimpleNamespace(
        forward=spy("forward"),
        check=spy("check"),
        append=spy_by_name("append", ["k_new", "v_new", "k_cache", "v_cache"]),
        make_schedule=spy_by_name("make_schedule", ["metadata"]),
        schedule_size=_core.schedule_size,
        has_exchange_api=_core.has_exchange_api,
    )
    for module in (gpu, cache, schedule):
        monkeypatch.setattr(module, "_core", core)
    monkeypatch.setattr(gpu, "use_torch", lambda: None)
    for module in (interface, cache, schedule):
        monkeypatch.setattr(module, "on_cuda", lambda name, x: True)
    yield made


def test_the_order_of_the_spy_is_that_of_the_core():
    shown = _core.forward.__doc__ or ""
    names = [part.split(":")[0].strip() for part in shown[shown.index("(") + 1 : shown.index(") ->")].split(",")]
    assert names == ORDER


def inputs(dtype=torch.bfloat16, head_dim_v=32):
    return tuple(
        torch.zeros(2, length, heads, d, dtype=dtype)
        for length, heads, d in ((5, 4, 64), (7, 2, 64), (7, 2, head_dim_v))
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_out_is_allocated(calls, dtype):
    q, k, v = inputs(dtype)
    out = hopper_attention.flash_attn_func(q, k, v)
    assert out.shape == (2, 5, 4, 32) and out.dtype == dtype and out.is_contiguous()
    (call,) = calls
    assert call["q"] is q and call["k"] is k and call["v"] is v and call["out"] is out
    assert call["softmax_lse"] is None and call["sinks"] is None and call["softmax_scale"] is None


def test_lse_is_allocated_only_when_it_is_returned(calls):
    out, lse = hopper_attention.flash_attn_func(*inputs(), return_attn_probs=True)
    assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32 and lse.is_contiguous()
    assert calls[0]["softmax_lse"] is lse and calls[0]["out"] is out


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("rank", [3, 4], ids=["packed", "dense"])
def test_lse_has_a_dtype_of_its_own(default, rank):
    """Engines set the default dtype to that of the model while they load it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = gpu.empty_lse(torch.zeros((2, 5, 4, 64)[4 - rank :], dtype=torch.float16))
    finally:
        torch.set_default_dtype(before)
    assert found.dtype == torch.float32 and found.shape == ((2, 4, 5) if rank == 4 else (4, 5))


def test_given_results_are_used(calls):
    q, k, v = inputs()
    out, lse = torch.empty(2, 5, 4, 32, dtype=q.dtype), torch.empty(2, 4, 5)
    assert hopper_attention.flash_attn_func(q, k, v, out=out, softmax_lse=lse) is out
    assert calls[0]["out"] is out and calls[0]["softmax_lse"] is lse


@pytest.mark.parametrize("name", ["q", "k", "v", "s_aux", "out", "softmax_lse"])
def test_tensors_that_require_grad(calls, name):
    given = dict(zip("qkv", inputs(), strict=True))
    given |= {"s_aux": torch.zeros(4), "out": torch.zeros(2, 5, 4, 32).bfloat16(), "softmax_lse": torch.zeros(2, 4, 5)}
    given[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"^{name}: requires grad"):
        hopper_attention.flash_attn_func(**given)
    assert not calls
    with torch.no_grad():
        hopper_attention.flash_attn_func(**given)
    assert len(calls) == 1


def test_integers_of_numpy(calls):
    """The bindings take ints alone."""
    given = varlen_inputs()
    values = {"num_splits": 7, "sm_margin": 3, "attention_chunk": 5, "cp_world_size": 4, "cp_rank": 2}
    hopper_attention.flash_attn_varlen_func(
        *given, **{name: np.int64(value) for name, value in values.items()}, cp_tot_seqused_k=given[-1][1:]
    )
    for name, value in values.items():
        assert type(calls[0][name]) is int and calls[0][name] == value, name


def test_numbers_of_other_types(calls):
    hopper_attention.flash_attn_func(*inputs(), softmax_scale=np.float32(0.5), softcap=2, causal=np.True_)
    seen = {name: calls[0][name] for name in ("softmax_scale", "softcap", "causal")}
    assert seen == {"softmax_scale": 0.5, "softcap": 2.0, "causal": True}
    assert [type(x) for x in seen.values()] == [float, float, bool]


def test_arrays_of_other_libraries_have_no_stream_to_ask_for(monkeypatch):
    monkeypatch.setattr(gpu, "stream_comes_with_tensors", lambda: False)
    assert gpu.current_stream(np.zeros(2)) is None


@pytest.mark.parametrize("head_dim_v", [32, 64])
def test_a_transposed_query_gives_a_contiguous_out(calls, head_dim_v):
    q, k, v = inputs(head_dim_v=head_dim_v)
    out = hopper_attention.flash_attn_func(q.transpose(1, 2).contiguous().transpose(1, 2), k, v)
    assert out.is_contiguous() and out.shape == (2, 5, 4, head_dim_v)


def test_a_call_has_the_quick_ones_take_over(calls, monkeypatch):
    switched = []
    monkeypatch.setattr(gpu, "use_torch", lambda: switched.append(len(calls)))
    hopper_attention.flash_attn_func(*inputs())
    assert switched == [0]


def test_wrong_ranks_reach_the_checks(calls):
    q, k, v = inputs()
    hopper_attention.flash_attn_func(q[0, 0], k, v, return_attn_probs=True)
    assert calls[0]["q"].dim() == 2 and calls[0]["softmax_lse"] is None


def test_workspace(calls, monkeypatch):
    given = torch.zeros(16, dtype=torch.uint8)
    hopper_attention.flash_attn_func(*inputs(), workspace=given)
    assert calls[0]["workspace"] is given
    hopper_attention.flash_attn_func(*inputs())
    assert calls[1]["workspace"] is None
    made = calls[1]["allocate"](1000, calls[1]["q"])
    assert made.dtype == torch.uint8 and made.shape == (1000,)
    with pytest.raises(TypeError, match="^workspace: 8 bytes are needed"):
        calls[1]["allocate"](8, object())


def test_parameters_that_require_grad(calls):
    q, k, v = inputs()
    weight = torch.nn.Parameter(k)
    with pytest.raises(NotImplementedError, match="^k: requires grad"):
        hopper_attention.flash_attn_func(q, weight, v)
    assert not calls
    with torch.no_grad():
        hopper_attention.flash_attn_func(q, weight, v)
    assert calls[0]["k"] is weight


def test_the_stream_is_left_to_the_exchange_api(calls):
    if not _core.has_exchange_api(torch.Tensor):
        pytest.skip("torch < 2.10")
    hopper_attention.flash_attn_func(*inputs())
    assert calls[0]["stream"] is None


def test_the_fallback_passes_the_stream_and_detaches(calls, monkeypatch):
    monkeypatch.setattr(gpu, "stream_comes_with_tensors", lambda: False)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0xCAFE0, device=device)
    )
    q, k, v = inputs()
    with torch.no_grad():
        out = hopper_attention.flash_attn_func(q, k.requires_grad_(), v)
    assert calls[0]["stream"] == 0xCAFE0 and calls[0]["out"] is out
    assert not calls[0]["k"].requires_grad and calls[0]["k"].data_ptr() == k.data_ptr()


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32)


def varlen_inputs():
    q, k, v = torch.zeros(9, 4, 64), torch.zeros(11, 2, 64), torch.zeros(11, 2, 32)
    return tuple(x.bfloat16() for x in (q, k, v)) + (lengths(0, 4, 9), lengths(0, 5, 11))


def test_varlen_arguments_arrive(calls):
    q, k, v, starts_q, starts_k = varlen_inputs()
    more = {name: lengths(1, 2) for name in ("seqused_q", "seqused_k", "cp_tot_seqused_k", "scheduler_metadata")}
    out, lse = hopper_attention.flash_attn_varlen_func(
        q, k, v, starts_q, starts_k, 5, 6, **more, return_attn_probs=True, cp_world_size=2, cp_rank=1, num_splits=7
    )
    assert out.shape == (9, 4, 32) and lse.shape == (4, 9) and lse.dtype == torch.float32
    (call,) = calls
    assert all(call[name] is more[name] for name in more)
    assert call["cu_seqlens_q"] is starts_q and call["cu_seqlens_k"] is starts_k and call["page_table"] is None
    expected = {"max_seqlen_q": 5, "max_seqlen_k": 6, "cp_world_size": 2, "cp_rank": 1, "num_splits": 7}
    expected |= {"seqlen_k_new": 0, "seqused_k_all": -1}
    assert {name: call[name] for name in expected} == expected


def test_pages_arrive(calls):
    q, _, _, starts_q, _ = varlen_inputs()
    pages = torch.zeros(6, 16, 2, 64, dtype=torch.bfloat16)
    table, used = torch.zeros(2, 3, dtype=torch.int32), lengths(3, 40)
    hopper_attention.flash_attn_varlen_func(q, pages, pages, starts_q, seqused_k=used, page_table=table)
    (call,) = calls
    assert call["page_table"] is table and call["seqused_k"] is used and call["cu_seqlens_k"] is None
    assert call["max_seqlen_q"] == call["max_seqlen_k"] == -1


def test_totals_of_one_rank_are_left_out(calls):
    hopper_attention.flash_attn_varlen_func(*varlen_inputs(), cp_tot_seqused_k=lengths(5, 6))
    assert calls[0]["cp_tot_seqused_k"] is None


@pytest.mark.parametrize("missing", ["cu_seqlens_q", "cu_seqlens_k"])
def test_offsets_are_needed(calls, missing):
    q, k, v, starts_q, starts_k = varlen_inputs()
    given = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, missing: None}
    with pytest.raises(ValueError, match=f"^{missing}: is needed"):
        hopper_attention.flash_attn_varlen_func(q, k, v, **given)
    assert not calls


class ScalarOnGpu:
    """A 0-d CUDA tensor as `bound` sees one."""

    is_cuda, device, shape = True, "cuda:0", ()
    reads = 0

    def item(self):
        ScalarOnGpu.reads += 1
        return 5


BOUNDS = [
    (5, 5),
    (None, -1),
    (0, 0),
    (torch.tensor(0), 0),
    (torch.tensor(5), 5),
    (torch.tensor(5, dtype=torch.int32), 5),
    (1 << 40, 1 << 40),
]


@pytest.mark.parametrize(("given", "seen"), BOUNDS, ids=str)
def test_bounds(calls, given, seen):
    hopper_attention.flash_attn_varlen_func(*varlen_inputs(), given, given)
    assert calls[0]["max_seqlen_q"] == calls[0]["max_seqlen_k"] == seen


@pytest.mark.parametrize(
    ("given", "error"), [(-1, ValueError), (2.5, TypeError), (torch.tensor(2.5), TypeError), ("5", TypeError)], ids=str
)
@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_wrong_bounds(calls, name, given, error):
    with pytest.raises(error, match=f"^{name}: "):
        hopper_attention.flash_attn_varlen_func(*varlen_inputs(), **{name: given})
    assert not calls


def test_a_bound_on_the_gpu_is_read_once_but_not_in_capture(calls, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ScalarOnGpu.reads = 0
    hopper_attention.flash_attn_varlen_func(*varlen_inputs(), ScalarOnGpu())
    assert calls[0]["max_seqlen_q"] == 5 and ScalarOnGpu.reads == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="^max_seqlen_k: is a tensor on cuda:0, which cannot be read while a graph"):
        hopper_attention.flash_attn_varlen_func(*varlen_inputs(), 5, ScalarOnGpu())
    assert ScalarOnGpu.reads == 1 and len(calls) == 1


def cache_inputs():
    q = torch.zeros(3, 1, 4, 64, dtype=torch.bfloat16)
    k_cache, v_cache = (torch.zeros(3, 100, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    return q, k_cache, v_cache


def new_inputs(length=2):
    return {"k": torch.ones(3, length, 2, 64).bfloat16(), "v": torch.ones(3, length, 2, 64).bfloat16()}


def test_cache_arguments_arrive(calls):
    q, k_cache, v_cache = cache_inputs()
    more = {"cache_batch_idx": lengths(0, 1, 2), "cache_leftpad": lengths(0, 1, 2)}
    used = lengths(5, 6, 7)
    out, lse = hopper_attention.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=used, **more, return_softmax_lse=True, causal=True, cu_seqlens_k_new=used
    )
    assert out.shape == q.shape and lse.shape == (3, 4, 1)
    (call,) = calls
    assert call["core"] == "forward" and call["q"] is q and call["k"] is k_cache and call["v"] is v_cache
    assert call["seqused_k"] is used and call["seqused_k_all"] == -1 and call["num_splits"] == 0
    assert all(call[name] is more[name] for name in more)
    assert call["cu_seqlens_k_new"] is None and call["seqlen_k_new"] == 0, "without k there are no new keys"


@pytest.mark.parametrize(("given", "seen"), [(17, 17), (-4, 0), (0, 0), (None, -1), (torch.tensor(9), 9)], ids=str)
def test_one_cache_length_for_all(calls, given, seen):
    hopper_attention.flash_attn_with_kvcache(*cache_inputs(), cache_seqlens=given)
    assert calls[0]["seqused_k"] is None and calls[0]["seqused_k_all"] == seen


def test_append_comes_after_the_checks_and_before_attention(calls):
    q, k_cache, v_cache = cache_inputs()
    new, used, rows = new_inputs(), lengths(5, 6, 7), lengths(2, 1, 0)
    hopper_attention.flash_attn_with_kvcache(
        q, k_cache, v_cache, **new, cache_seqlens=used, cache_batch_idx=rows, cache_leftpad=rows
    )
    check, append, attention = calls
    assert [call["core"] for call in calls] == ["check", "append", "forward"]
    assert append["k_new"] is new["k"] and append["v_new"] is new["v"]
    assert append["k_cache"] is k_cache and append["v_cache"] is v_cache and append["cache_batch_idx"] is rows
    assert append["seqused_k"] is used and append["rotary_cos"] is None and append["q"] is q
    assert attention["seqlen_k_new"] == check["seqlen_k_new"] == 2 and attention["q"] is q
    assert attention["seqused_k"] is used and attention["cache_leftpad"] is rows
    assert {**check, "core": 0} == {**attention, "core": 0}


def test_packed_new_keys(calls):
    starts, used = lengths(0, 1, 1, 4), lengths(5, 6, 7)
    new = {name: torch.ones(4, 2, 64).bfloat16() for name in "kv"}
    hopper_attention.flash_attn_with_kvcache(*cache_inputs(), **new, cache_seqlens=used, cu_seqlens_k_new=starts)
    assert calls[1]["cu_seqlens_k_new"] is starts and calls[2]["cu_seqlens_k_new"] is starts
    assert calls[2]["seqlen_k_new"] == 0


@pytest.mark.parametrize(
    ("options", "per_position"),
    [({}, False), ({"causal": True}, True), ({"window_size": [3, -1]}, True), ({"attention_chunk": 8}, True),
     ({"window_size": None, "attention_chunk": None}, False)],
    ids=str,
)  # fmt: skip
def test_attention_sees_rotated_queries(calls, options, per_position):
    q, k_cache, v_cache = cache_inputs()
    cos, sin, starts = torch.ones(200, 16), torch.zeros(200, 16), lengths(1, 2, 3)
    hopper_attention.flash_attn_with_kvcache(
        q, k_cache, v_cache, **new_inputs(), rotary_cos=cos, rotary_sin=sin, rotary_seqlens=starts, cache_seqlens=5,
        rotary_interleaved=False, **options
    )  # fmt: skip
    _, append, attention = calls
    assert append["q"] is q and append["rotary_cos"] is cos and append["rotary_sin"] is sin
    assert append["rotary_seqlens"] is starts and append["rotary_interleaved"] is False
    assert append["rotate_q_per_position"] is per_position and append["seqused_k_all"] == 5
    assert attention["q"] is append["q_rotated"] and attention["q"].data_ptr() != q.data_ptr()
    assert attention["q"].shape == q.shape and attention["out"].data_ptr() != attention["q"].data_ptr()


BYTES_OF_Q = 3 * 4 * 64 * 2
ROOMS = [
    ("room for the plan and for q", 4096, 2560),
    ("q starts at a multiple of 256", 4095, 2304),
    ("room for q alone, of a plan that needs none", BYTES_OF_Q, 0),
    ("too small for q", BYTES_OF_Q - 1, None),
]


def rotated_append(workspace):
    """The q of a call that appends rotated keys."""
    table = torch.ones(200, 16)
    inputs = cache_inputs()
    hopper_attention.flash_attn_with_kvcache(
        *inputs, **new_inputs(), rotary_cos=table, rotary_sin=table, cache_seqlens=5, workspace=workspace
    )
    return inputs[0]


@pytest.mark.parametrize(("size", "before"), [room[1:] for room in ROOMS], ids=[room[0] for room in ROOMS])
def test_the_rotated_query_goes_to_the_end_of_a_workspace_that_has_room(calls, size, before):
    workspace = torch.zeros(size, dtype=torch.uint8)
    q = rotated_append(workspace)
    append, attention = calls[-2:]
    rotated, start = append["q_rotated"], workspace.data_ptr()
    assert attention["q"] is rotated and rotated.shape == q.shape and rotated.dtype == q.dtype
    if before is None:
        assert attention["workspace"] is workspace
        assert not start <= rotated.data_ptr() < start + size
    else:
        assert rotated.data_ptr() == start + before
        assert attention["workspace"].data_ptr() in (start, 0) and attention["workspace"].numel() == before


def test_a_workspace_too_small_for_the_plan_and_the_rotated_query_is_for_the_plan(calls, monkeypatch):
    def check(*args):
        if args[ORDER.index("workspace")].numel() < 4096:
            raise ValueError("workspace: 4096 bytes are needed")

    monkeypatch.setattr(cache._core, "check", check)
    workspace = torch.zeros(4096 + BYTES_OF_Q - 1, dtype=torch.uint8)
    rotated_append(workspace)
    append, attention = calls
    assert attention["workspace"] is workspace
    start = workspace.data_ptr()
    assert not start <= append["q_rotated"].data_ptr() < start + workspace.numel()


def test_a_workspace_holds_no_query_that_is_not_rotated(calls):
    workspace = torch.zeros(4096, dtype=torch.uint8)
    hopper_attention.flash_attn_with_kvcache(*cache_inputs(), **new_inputs(), cache_seqlens=5, workspace=workspace)
    assert [call["core"] for call in calls] == ["check", "append", "forward"]
    assert calls[1]["q_rotated"] is None and calls[2]["workspace"] is workspace


def test_the_fallback_appends_on_the_stream_and_detaches(calls, monkeypatch):
    monkeypatch.setattr(gpu, "stream_comes_with_tensors", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0xCAFE0))
    given = {**new_inputs(), "rotary_cos": torch.ones(200, 16), "rotary_sin": torch.ones(200, 16)}
    with torch.no_grad():
        hopper_attention.flash_attn_with_kvcache(
            *cache_inputs(), **{name: x.requires_grad_() for name, x in given.items()}, cache_seqlens=5
        )
    append = calls[1]
    assert append["stream"] == 0xCAFE0
    seen = {"k": "k_new", "v": "v_new"}
    for name, x in given.items():
        found = append[seen.get(name, name)]
        assert not found.requires_grad and found.data_ptr() == x.data_ptr(), name


WRONG_CACHE_CALLS = [
    ("rotary_cos: rotary embedding needs k and v", ValueError, {"rotary_cos": torch.ones(4, 16)}),
    ("rotary_sin: rotary embedding needs k and v", ValueError, {"rotary_sin": torch.ones(4, 16)}),
    ("v: is needed with k", ValueError, {"k": new_inputs()["k"], "cache_seqlens": 5}),
    ("k: is needed with v", ValueError, {"v": new_inputs()["v"], "cache_seqlens": 5}),
    ("cache_seqlens: is needed with k and v", ValueError, new_inputs()),
    ("cache_seqlens: an integer is needed, found float", TypeError, {"cache_seqlens": 5.5}),
    ("cache_seqlens: an integer is needed, found list", TypeError, {"cache_seqlens": [5]}),
    ("k: must have shape", ValueError, {name: torch.ones(4, 2, 64) for name in "kv"} | {"cache_seqlens": 5}),
    ("qv: not available on the GPU yet", NotImplementedError, {"qv": torch.ones(3, 1, 4, 64)}),
]


@pytest.mark.parametrize(("message", "error", "changes"), WRONG_CACHE_CALLS, ids=lambda x: x if type(x) is str else "")
def test_wrong_cache_calls(calls, message, error, changes):
    with pytest.raises(error, match=f"^{message}"):
        hopper_attention.flash_attn_with_kvcache(*cache_inputs(), **changes)
    assert not calls


@pytest.mark.parametrize(("core", "public"), [("k", "k_cache"), ("v", "v_cache"), ("seqused_k", "cache_seqlens")])
@pytest.mark.parametrize("appends", [False, True])
def test_errors_name_the_arguments_of_the_cache(calls, monkeypatch, core, public, appends):
    def fail(*args):
        raise ValueError(f"{core}: dim 0 (batch) must be 3, as in k: found 2")

    monkeypatch.setattr(gpu._core, "check" if appends else "forward", fail)
    more = {**new_inputs(), "cache_seqlens": 3} if appends else {}
    with pytest.raises(ValueError, match=f"^{public}: dim 0 .batch. must be 3, as in k: found 2$"):
        hopper_attention.flash_attn_with_kvcache(*cache_inputs(), **more)
    assert not calls, "nothing was written"


@pytest.mark.parametrize("name", ["k", "v", "rotary_cos", "rotary_sin"])
def test_new_keys_that_require_grad(calls, name):
    given = {**new_inputs(), "rotary_cos": torch.ones(4, 16), "rotary_sin": torch.ones(4, 16)}
    given[name] = given[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"^{name}: requires grad"):
        hopper_attention.flash_attn_with_kvcache(*cache_inputs(), **given, cache_seqlens=3)
    assert [call["core"] for call in calls] == ["check"]


@pytest.mark.parametrize("function", ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"])
@pytest.mark.parametrize("which", [("q",), ("k", "v"), ("v",)], ids=["q", "a cache of fp8", "v"])
def test_fp8_says_so(calls, monkeypatch, function, which):
    def fail(*args):
        raise TypeError("q: dtype must be bf16 or fp16, found another dtype")

    monkeypatch.setattr(gpu._core, "forward", fail)
    q, k, v = varlen_inputs()[:3] if "varlen" in function else cache_inputs()
    q, k, v = (x.to(torch.float8_e4m3fn) if name in which else x for name, x in (("q", q), ("k", k), ("v", v)))
    more = varlen_inputs()[3:] if "varlen" in function else ()
    with pytest.raises(NotImplementedError, match=f"^{which[0]}(_cache)?: fp8 is not available"):
        getattr(hopper_attention, function)(q, k, v, *more, out=torch.zeros(1))


UNNAMED_DTYPES = {  # function, what `_core` says, what the caller is told
    "cu_seqlens_k": ("flash_attn_varlen_func", "forward", "cu_seqlens_k", "int64"),
    "s_aux": ("flash_attn_func", "forward", "sinks (s_aux)", "float64"),
    "page_table": ("flash_attn_with_kvcache", "forward", "page_table", "int64"),
    "cache_seqlens": ("flash_attn_with_kvcache", "check", "seqused_k", "int64"),
    "rotary_cos": ("flash_attn_with_kvcache", "append", "rotary_cos", "float64"),
    "q": ("flash_attn_func", "forward", "q", "float64"),
}


@pytest.mark.parametrize("name", UNNAMED_DTYPES)
def test_dtypes_that_the_library_has_no_name_for_are_named(calls, monkeypatch, name):
    function, core, said, dtype = UNNAMED_DTYPES[name]

    def fail(*args, **options):
        raise TypeError(f"{said}: dtype must be another one, found another dtype")

    monkeypatch.setattr(gpu._core, core, fail)
    given = dict(zip(["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"], varlen_inputs(), strict=False))
    if function != "flash_attn_varlen_func":
        names = ["q", "k_cache", "v_cache"] if "cache" in function else ["q", "k", "v"]
        given = dict(zip(names, cache_inputs(), strict=True))
    if core in ("check", "append"):
        given |= {**new_inputs(), "cache_seqlens": 3, "rotary_cos": torch.ones(4, 16), "rotary_sin": torch.ones(4, 16)}
    given[name] = given[name].double() if name == "q" else torch.ones(3, dtype=getattr(torch, dtype))
    named = "sinks .s_aux." if name == "s_aux" else name
    with pytest.raises(TypeError, match=f"^{named}: dtype must be another one, found {dtype}$"):
        getattr(hopper_attention, function)(**given)


def test_dtypes_of_merges_and_schedules_are_named(calls, monkeypatch):
    def fail(*args, **options):
        raise TypeError(f"{fail.name}: dtype must be fp32, found another dtype")

    monkeypatch.setattr(merging, "_core", SimpleNamespace(combine=fail, merge_states=fail))
    monkeypatch.setattr(gpu._core, "make_schedule", fail)
    x, lse = torch.zeros(2, 3, 4, 8), torch.zeros(2, 4, 3)
    fail.name = "lse_b"
    with pytest.raises(TypeError, match="^lse_b: dtype must be fp32, found float64$"):
        hopper_attention.merge_states(x, lse, x, lse.double())
    fail.name = "lse_partial"
    with pytest.raises(TypeError, match="^lse_partial: dtype must be fp32, found int64$"):
        hopper_attention.flash_attn_combine(x[None], lse.mT[None].long())
    fail.name = "seqused_k"
    with pytest.raises(TypeError, match="^cache_seqlens: dtype must be fp32, found int64$"):
        hopper_attention.get_scheduler_metadata(2, 1, 9, 4, 2, 64, torch.tensor([3, 4]))
    with pytest.raises(TypeError, match="^qkv_dtype: must be bfloat16 or float16, found float8_e4m3fn$"):
        hopper_attention.get_scheduler_metadata(2, 1, 9, 4, 2, 64, torch.tensor([3, 4]), torch.float8_e4m3fn)


@pytest.mark.parametrize("function", ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"])
def test_nothing_is_allocated_where_all_is_given(calls, monkeypatch, function):
    q, k, v = varlen_inputs()[:3] if "varlen" in function else cache_inputs()
    more = varlen_inputs()[3:] if "varlen" in function else ()
    given = {
        "out": torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype),
        "softmax_lse": torch.zeros((4, 9) if "varlen" in function else (3, 4, 1)),
        "workspace": torch.zeros(64, dtype=torch.uint8),
    }
    for name in ("empty", "empty_like", "zeros", "zeros_like", "full", "tensor", "arange"):
        monkeypatch.setattr(torch, name, lambda *args, _name=name, **options: pytest.fail(f"torch.{_name} was called"))
    asks = "return_softmax_lse" if "kvcache" in function else "return_attn_probs"
    out, lse = getattr(hopper_attention, function)(q, k, v, *more, **given, **{asks: True})
    assert out is given["out"] and lse is given["softmax_lse"] and calls[0]["workspace"] is given["workspace"]


def schedule_call(**changes):
    given = {"batch_size": 5, "max_seqlen_q": 1, "max_seqlen_k": 4096, "num_heads_q": 32, "num_heads_kv": 8}
    given |= {"headdim": 128, "cache_seqlens": lengths(1, 2, 3, 4, 5)}
    return hopper_attention.get_scheduler_metadata(**{**given, **changes})


def test_schedule_arguments_arrive(calls):
    used, starts, pad, new = lengths(1, 2, 3, 4, 5), lengths(*range(6)), lengths(*range(5)), lengths(*range(6))
    made = schedule_call(
        cache_seqlens=used, qkv_dtype=torch.float16, headdim_v=64, cu_seqlens_q=starts, cu_seqlens_k_new=new,
        cache_leftpad=pad, page_size=16, causal=True, window_size=(9, 4), attention_chunk=None, num_splits=3,
        sm_margin=2, batch_invariant=True, has_softcap=True, pack_gqa=True, max_seqlen_k_new=7,
    )  # fmt: skip
    assert made.shape == (33,) and made.dtype == torch.int32
    (call,) = calls
    assert call["metadata"] is made and call["seqused_k"] is used and call["cu_seqlens_q"] is starts
    assert call["cache_leftpad"] is pad and call["cu_seqlens_k_new"] is new and call["seqlen_k_new"] == 0
    expected = {"dtype": "float16", "batch": 5, "seqlen_q": 1, "seqlen_k": 4096, "heads_q": 32, "heads_k": 8}
    expected |= {"head_dim": 128, "head_dim_v": 64, "page_size": 16, "causal": True, "window_left": 9}
    expected |= {"window_right": 4, "attention_chunk": 0, "num_splits": 3, "sm_margin": 2, "batch_invariant": True}
    assert {name: call[name] for name in expected} == expected


def test_schedule_defaults_and_out(calls):
    out = lengths(*range(40))
    assert schedule_call(out=out, max_seqlen_k_new=2) is out
    (call,) = calls
    assert call["dtype"] == "bfloat16" and call["head_dim_v"] == 128 and call["page_size"] == 0
    assert call["seqlen_k_new"] == 2 and call["seqused_k_all"] == -1


@pytest.mark.parametrize(("given", "seen"), [(512, 512), (np.int64(512), 512), (0, 0), (None, 0)], ids=repr)
def test_the_chunk_of_a_schedule(calls, given, seen):
    """A schedule made without the chunk of its calls cuts keys that no query sees."""
    schedule_call(attention_chunk=given)
    assert calls[0]["attention_chunk"] == seen


def test_a_schedule_of_no_sequences(calls):
    made = schedule_call(batch_size=0, cache_seqlens=lengths(), cu_seqlens_q=lengths(0))
    assert made.shape == (1,) and calls[0]["metadata"] is made and calls[0]["batch"] == 0


def test_schedule_of_one_length(calls):
    schedule_call(cache_seqlens=77, cu_seqlens_q=lengths(*range(6)))
    assert calls[0]["seqused_k"] is None and calls[0]["seqused_k_all"] == 77


def test_the_device_of_a_schedule_is_that_of_its_first_tensor():
    first, other = lengths(1, 2), lengths(0, 1, 2)
    assert schedule.source(first, None, other) is first and schedule.source(77, None, other, first) is other
    assert schedule.source(torch.tensor(3), None, None) is None
    with pytest.raises(TypeError, match="cache_seqlens, cu_seqlens_q, cu_seqlens_k_new and cache_leftpad"):
        schedule.empty_metadata(2, first.numpy())


WRONG_SCHEDULES = [
    ("batch_size", TypeError, {"batch_size": 1.5}),
    ("batch_size", ValueError, {"batch_size": -1}),
    ("max_seqlen_q", TypeError, {"max_seqlen_q": None}),
    ("max_seqlen_k", ValueError, {"max_seqlen_k": -1}),
    ("page_size", ValueError, {"page_size": 0}),
    ("window_size", ValueError, {"window_size": 3}),
    ("max_seqlen_k_new", ValueError, {"max_seqlen_k_new": -3}),
    ("causal", TypeError, {"causal": "yes"}),
]


@pytest.mark.parametrize(("name", "error", "changes"), WRONG_SCHEDULES, ids=str)
def test_wrong_schedules(calls, name, error, changes):
    with pytest.raises(error, match=f"^{name}: "):
        schedule_call(**changes)
    assert not calls
