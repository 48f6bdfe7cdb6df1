"""Wrong arguments of the public function on (made-up) CUDA tensors: the exception names the argument, nothing is
launched, and the next right call works.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import hopper_attention
from fake_cuda import CUDA, FastTensor
from hopper_attention.arguments import check_torch_inputs


def right_call(**changes):
    given = {
        "q": FastTensor((2, 64, 4, 64)),
        "k": FastTensor((2, 128, 2, 64)),
        "v": FastTensor((2, 128, 2, 64)),
        "out": FastTensor((2, 64, 4, 64)),
    }
    return {**given, **changes}


Q, K, LSE = (2, 64, 4, 64), (2, 128, 2, 64), (2, 4, 64)


@dataclass(frozen=True)
class Wrong:
    why: str
    error: type[Exception]
    message: str
    changes: dict[str, Any] = field(default_factory=dict)


CASES = [
    Wrong("float32 inputs", TypeError, "^q: dtype", {"q": FastTensor(Q, "fp32")}),
    Wrong("float64 inputs", TypeError, "^q: dtype", {"q": FastTensor(Q, "fp64")}),
    Wrong("integer inputs", TypeError, "^q: dtype", {"q": FastTensor(Q, "int32")}),
    Wrong("fp8 inputs", TypeError, "^q: dtype", {"q": FastTensor(Q, "fp8")}),
    Wrong("dtype of k differs", TypeError, "^k: dtype .*bf16.*fp16", {"k": FastTensor(K, "fp16")}),
    Wrong("dtype of v differs", TypeError, "^v: dtype .*bf16.*fp16", {"v": FastTensor(K, "fp16")}),
    Wrong("k on the CPU", ValueError, "^k: .*device", {"k": FastTensor(K, device=(1, 0))}),
    Wrong("v on another GPU", ValueError, "^v: .*cuda:0.*cuda:1", {"v": FastTensor(K, device=(CUDA, 1))}),
    Wrong("out on another GPU", ValueError, "^out: .*cuda:0.*cuda:1", {"out": FastTensor(Q, device=(CUDA, 1))}),
    Wrong("q of rank 3", ValueError, "^q: .*3 dims", {"q": FastTensor((64, 4, 64))}),
    Wrong("k of rank 5", ValueError, "^k: .*5 dims", {"k": FastTensor((1, *K))}),
    Wrong("q without dims", ValueError, "^q: .*0 dims", {"q": FastTensor(())}),
    Wrong("batch of k", ValueError, "^k: .*batch", {"k": FastTensor((3, 128, 2, 64))}),
    Wrong("lengths of k and v differ", ValueError, "^v: .*seqlen_k", {"v": FastTensor((2, 127, 2, 64))}),
    Wrong("heads of k and v differ", ValueError, "^v: .*heads", {"v": FastTensor((2, 128, 4, 64))}),
    Wrong("head dims of q and k differ", ValueError, "^k: .*head_dim", {"k": FastTensor((2, 128, 2, 128))}),
    Wrong(
        "heads do not divide",
        ValueError,
        "heads.*4.*3",
        {"k": FastTensor((2, 128, 3, 64)), "v": FastTensor((2, 128, 3, 64))},
    ),
    Wrong("no kv heads", ValueError, "heads", {"k": FastTensor((2, 128, 0, 64)), "v": FastTensor((2, 128, 0, 64))}),
    Wrong(
        "head dim not a multiple of 8",
        ValueError,
        "head_dim.*multiple of 8.*60",
        {
            "q": FastTensor((2, 64, 4, 60)),
            "k": FastTensor((2, 128, 2, 60)),
            "v": FastTensor((2, 128, 2, 60)),
            "out": FastTensor((2, 64, 4, 60)),
        },
    ),
    Wrong(
        "head dim too large",
        NotImplementedError,
        "head_dim.*256.*320",
        {
            "q": FastTensor((2, 64, 4, 320)),
            "k": FastTensor((2, 128, 2, 320)),
            "v": FastTensor((2, 128, 2, 320)),
            "out": FastTensor((2, 64, 4, 320)),
        },
    ),
    Wrong("last stride not 1", ValueError, "^q: .*last dim", {"q": FastTensor(Q, strides=(64 * 4 * 64, 4 * 64, 1, 4))}),
    Wrong(
        "row stride not in 16 bytes",
        ValueError,
        "^k: stride of dim 1.*16 bytes.*found 132",
        {"k": FastTensor(K, strides=(128 * 132, 132, 66, 1))},
    ),
    Wrong("address not in 16 bytes", ValueError, "^v: .*16 bytes", {"v": FastTensor(K, data=0x7F0000000002)}),
    Wrong("expanded dim", ValueError, "^k: stride of dim 0.*0", {"k": FastTensor(K, strides=(0, 128, 64, 1))}),
    Wrong(
        "negative stride",
        ValueError,
        "^q: stride of dim 1.*negative",
        {"q": FastTensor(Q, strides=(64 * 256, -256, 64, 1))},
    ),
    Wrong("null address", ValueError, "^q: .*null", {"q": FastTensor(Q, data=0)}),
    Wrong("out of another shape", ValueError, "^out: ", {"out": FastTensor((2, 65, 4, 64))}),
    Wrong("out of another dtype", TypeError, "^out: dtype", {"out": FastTensor(Q, "fp16")}),
    Wrong("out with equal addresses", ValueError, "^out: ", {"out": FastTensor(Q, strides=(0, 256, 64, 1))}),
    Wrong("lse of another shape", ValueError, "^softmax_lse: ", {"softmax_lse": FastTensor((2, 64, 4), "fp32")}),
    Wrong("lse of another dtype", TypeError, "^softmax_lse: dtype", {"softmax_lse": FastTensor(LSE, "bf16")}),
    Wrong(
        "lse not contiguous",
        ValueError,
        "^softmax_lse: .*contiguous",
        {"softmax_lse": FastTensor(LSE, "fp32", strides=(256, 1, 4))},
    ),
    Wrong("sinks of another shape", ValueError, "s_aux.*", {"s_aux": FastTensor((2,), "fp32")}),
    Wrong("sinks of another dtype", TypeError, "s_aux.*dtype", {"s_aux": FastTensor((4,), "int64")}),
    Wrong("NaN scale", ValueError, "^softmax_scale: ", {"softmax_scale": math.nan}),
    Wrong("infinite scale", ValueError, "^softmax_scale: ", {"softmax_scale": math.inf}),
    Wrong("scale beyond float32", ValueError, "^softmax_scale: ", {"softmax_scale": 1e300}),
    Wrong("scale that is text", TypeError, "^softmax_scale: ", {"softmax_scale": "0.1"}),
    Wrong("NaN softcap", ValueError, "^softcap: ", {"softcap": math.nan}),
    Wrong("negative softcap", ValueError, "^softcap: ", {"softcap": -1.0}),
    Wrong("softcap None", TypeError, "^softcap: ", {"softcap": None}),
    Wrong("negative splits", ValueError, "^num_splits: .*-5", {"num_splits": -5}),
    Wrong("too many splits", ValueError, "^num_splits: .*1000", {"num_splits": 1000}),
    Wrong("splits beyond 64 bits", ValueError, "^num_splits: .*64 bits", {"num_splits": 1 << 80}),
    Wrong("fractional splits", TypeError, "^num_splits: .*1.5", {"num_splits": 1.5}),
    Wrong("negative margin", ValueError, "^sm_margin: ", {"sm_margin": -1}),
    Wrong("window below -1", ValueError, "^window_size: left.*-2", {"window_size": (-2, 0)}),
    Wrong("right window below -1", ValueError, "^window_size: right.*-7", {"window_size": (0, -7)}),
    Wrong("window of three", ValueError, "^window_size: ", {"window_size": (1, 2, 3)}),
    Wrong("window that is a number", ValueError, "^window_size: .*128", {"window_size": 128}),
    Wrong("fractional window", TypeError, "^window_size: ", {"window_size": (1.5, 0)}),
    Wrong("negative chunk", ValueError, "^attention_chunk: .*-3", {"attention_chunk": -3}),
    Wrong("causal that is text", TypeError, "^causal: ", {"causal": "yes"}),
    Wrong("batch_invariant that is None", TypeError, "^batch_invariant: ", {"batch_invariant": None}),
    Wrong("qv", NotImplementedError, "^qv: ", {"qv": FastTensor(Q)}),
    Wrong("no out for tensors that nobody can allocate", TypeError, "^out: ", {"out": None}),
    Wrong("no lse for tensors that nobody can allocate", TypeError, "^softmax_lse: ", {"return_attn_probs": True}),
    Wrong("q None", TypeError, "^q: .*NoneType", {"q": None}),
    Wrong("k None", ValueError, "^k: ", {"k": None}),
    Wrong("k a list", TypeError, "^k: .*list", {"k": [1.0]}),
    Wrong("k a numpy array", (ValueError, TypeError), "^k: ", {"k": np.zeros(K, np.float16)}),
    Wrong("workspace on the CPU", ValueError, "^workspace: ", {"workspace": np.zeros(16, np.uint8)}),
    Wrong("workspace of another dtype", TypeError, "^workspace: dtype", {"workspace": FastTensor((16,), "fp32")}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.why)
def test_wrong_argument(recorder, case):
    with pytest.raises(case.error, match=case.message):
        hopper_attention.flash_attn_func(**right_call(**case.changes))
    assert recorder.launches() == 0
    hopper_attention.flash_attn_func(**right_call())
    assert recorder.launches() == 1


@pytest.mark.parametrize("written", ["out", "softmax_lse"])
@pytest.mark.parametrize("read", ["q", "k", "v", "s_aux"])
def test_results_must_not_overlap_inputs(recorder, written, read):
    args = right_call(softmax_lse=FastTensor(LSE, "fp32"), s_aux=FastTensor((4,), "fp32"))
    shape, dtype = (Q, "bf16") if written == "out" else (LSE, "fp32")
    args[written] = FastTensor(shape, dtype, data=args[read].data)
    with pytest.raises(ValueError, match=f"^{written}: .*{read}"):
        hopper_attention.flash_attn_func(**args)
    assert recorder.launches() == 0


ALLOWED = {
    "k and v interleaved in one tensor": {
        "k": FastTensor(K, strides=(128 * 256, 256, 128, 1), data=0x100000),
        "v": FastTensor(K, strides=(128 * 256, 256, 128, 1), data=0x100000 + 128),
    },
    "any stride of a dim of size 1": {
        "q": FastTensor((1, 64, 1, 64), strides=(3, 64, 3331333, 1)),
        "k": FastTensor((1, 128, 1, 64), strides=(7, 64, 5, 1)),
        "v": FastTensor((1, 128, 1, 64)),
        "out": FastTensor((1, 64, 1, 64)),
    },
    "no queries": {"q": FastTensor((2, 0, 4, 64)), "out": FastTensor((2, 0, 4, 64))},
    "no keys": {"k": FastTensor((2, 0, 2, 64)), "v": FastTensor((2, 0, 2, 64))},
    "no batch": {
        "q": FastTensor((0, 64, 4, 64)),
        "k": FastTensor((0, 128, 2, 64)),
        "v": FastTensor((0, 128, 2, 64)),
        "out": FastTensor((0, 64, 4, 64)),
    },
    "window as a list": {"window_size": [5, 3]},
    "window None": {"window_size": None},
    "chunk None": {"attention_chunk": None},
    "numpy numbers": {
        "num_splits": np.int32(2),
        "softcap": np.float32(3.0),
        "causal": np.True_,
        "softmax_scale": np.float64(0.1),
    },
    "hints and descales without effect": {
        "pack_gqa": True,
        "deterministic": True,
        "q_descale": FastTensor((2, 2), "fp32"),
        "k_descale": FastTensor((2, 2), "fp32"),
        "v_descale": FastTensor((2, 2), "fp32"),
    },
}


@pytest.mark.parametrize("changes", ALLOWED.values(), ids=ALLOWED.keys())
def test_allowed(recorder, changes):
    args = right_call(**changes)
    assert hopper_attention.flash_attn_func(**args) is args["out"]


def test_normalised_values(recorder):
    hopper_attention.flash_attn_func(**right_call(window_size=[5, 3], attention_chunk=None, softcap=2))
    seen = recorder.last_launch()
    assert (seen["window_left"], seen["window_right"], seen["attention_chunk"], seen["softcap"]) == (5, 3, 0, 2.0)
    hopper_attention.flash_attn_func(**right_call(window_size=None, causal=1))
    seen = recorder.last_launch()
    assert (seen["window_left"], seen["window_right"], seen["causal"]) == (-1, -1, True)
    assert seen["num_splits"] == 1 and seen["softmax_scale"] is None


def test_a_given_lse_is_filled_even_when_not_returned(recorder):
    lse = FastTensor(LSE, "fp32")
    args = right_call(softmax_lse=lse)
    assert hopper_attention.flash_attn_func(**args) is args["out"]
    assert recorder.last_launch()["softmax_lse"]["data"] == lse.data
    assert hopper_attention.flash_attn_func(**args, return_attn_probs=True) == (args["out"], lse)


def test_positional_arguments_arrive_at_their_names(recorder):
    args = right_call()
    descale = FastTensor((2, 2), "fp32")
    values = (0.5, True, None, descale, descale, descale, (9, 4), 33, 7.0, 2, None, False, 5, False)
    hopper_attention.flash_attn_func(args["q"], args["k"], args["v"], *values, out=args["out"])
    seen = recorder.last_launch()
    expected = {"softmax_scale": 0.5, "causal": True, "window_left": 9, "window_right": 4, "attention_chunk": 33}
    expected |= {"softcap": 7.0, "num_splits": 2, "sm_margin": 5, "batch_invariant": False}
    assert {name: seen[name] for name in expected} == expected


def int32(*shape, **options):
    return FastTensor(shape, "int32", **options)


def right_varlen_call(**changes):
    """Three packed sequences."""
    given = {"q": FastTensor((20, 4, 64)), "k": FastTensor((30, 2, 64)), "v": FastTensor((30, 2, 64))}
    given |= {"cu_seqlens_q": int32(4), "cu_seqlens_k": int32(4), "out": FastTensor((20, 4, 64))}
    return {**given, "workspace": FastTensor((1 << 28,), "uint8"), **changes}


def right_paged_call(**changes):
    """The same queries on 12 pages of 16 keys."""
    pages = {"k": FastTensor((12, 16, 2, 64)), "v": FastTensor((12, 16, 2, 64)), "page_table": int32(3, 5)}
    return right_varlen_call(**{"cu_seqlens_k": None, "seqused_k": int32(3), **pages, **changes})


def right_cache_call(**changes):
    """One query for each of three sequences, on a cache of 8."""
    given = {"q": FastTensor((3, 1, 4, 64)), "k_cache": FastTensor((8, 100, 2, 64)), "out": FastTensor((3, 1, 4, 64))}
    given |= {"v_cache": FastTensor((8, 100, 2, 64)), "cache_seqlens": int32(3), "cache_batch_idx": int32(3)}
    return {**given, "workspace": FastTensor((1 << 28,), "uint8"), **changes}


CALLS = {
    "varlen": (hopper_attention.flash_attn_varlen_func, right_varlen_call),
    "paged": (hopper_attention.flash_attn_varlen_func, right_paged_call),
    "cache": (hopper_attention.flash_attn_with_kvcache, right_cache_call),
}
WRONG_LENGTHS = [
    ("varlen", Wrong("no cu_seqlens_q", ValueError, "^cu_seqlens_q: is needed", {"cu_seqlens_q": None})),
    ("varlen", Wrong("no cu_seqlens_k", ValueError, "^cu_seqlens_k: is needed", {"cu_seqlens_k": None})),
    ("varlen", Wrong("dense q", ValueError, "^q: .*total_q.*4 dims", {"q": FastTensor(Q)})),
    ("varlen", Wrong("int64 offsets", TypeError, "^cu_seqlens_q: dtype .*int32", {"cu_seqlens_q": FastTensor((4,), "int64")})),
    ("varlen", Wrong("offsets on the CPU", ValueError, "^cu_seqlens_k: .*CPU", {"cu_seqlens_k": np.zeros(4, np.int32)})),
    ("varlen", Wrong("offsets that are a list", TypeError, "^cu_seqlens_q: a tensor is needed, found list", {"cu_seqlens_q": [0, 3]})),
    ("varlen", Wrong("another batch", ValueError, "^cu_seqlens_k: .*4 .*found 5", {"cu_seqlens_k": int32(5)})),
    ("varlen", Wrong("seqused_q", ValueError, "^seqused_q: .*found 4", {"seqused_q": int32(4)})),
    ("varlen", Wrong("offsets with gaps", ValueError, "^cu_seqlens_q: must be contiguous", {"cu_seqlens_q": int32(4, strides=(2,))})),
    ("varlen", Wrong("dense LSE", ValueError, "^softmax_lse: .*heads_q, total_q", {"softmax_lse": FastTensor((1, 4, 20), "fp32")})),
    ("varlen", Wrong("too many splits", ValueError, "^num_splits: .*257", {"num_splits": 257})),
    ("varlen", Wrong("no such rank", ValueError, "^cp_rank: ", {"cp_world_size": 2, "cp_rank": 2, "cp_tot_seqused_k": int32(3)})),
    ("varlen", Wrong("ranks without totals", ValueError, "^cp_tot_seqused_k: ", {"cp_world_size": 2})),
    ("varlen", Wrong("fractional ranks", TypeError, "^cp_world_size: ", {"cp_world_size": 2.0})),
    ("varlen", Wrong("short metadata", ValueError, "^scheduler_metadata: .*17.*found 16", {"scheduler_metadata": int32(16)})),
    ("varlen", Wrong("workspace of floats", TypeError, "^workspace: dtype", {"workspace": FastTensor((64,), "fp32")})),
    ("varlen", Wrong("workspace at 8 bytes", ValueError, "^workspace: .*16 bytes", {"workspace": FastTensor((64,), "uint8", data=0x7F0000000008)})),
    ("varlen", Wrong("qv", NotImplementedError, "^qv: ", {"qv": FastTensor(Q)})),
    ("paged", Wrong("both kinds of keys", ValueError, "^cu_seqlens_k: .*page_table", {"cu_seqlens_k": int32(4)})),
    ("paged", Wrong("no lengths", ValueError, "^seqused_k: .*page_table", {"seqused_k": None})),
    ("paged", Wrong("int64 table", TypeError, "^page_table: dtype", {"page_table": FastTensor((3, 5), "int64")})),
    ("paged", Wrong("table of another batch", ValueError, "^page_table: dim 0", {"page_table": int32(4, 5)})),
    ("paged", Wrong("transposed table", ValueError, "^page_table: stride of the last dim", {"page_table": int32(3, 5, strides=(1, 3))})),
    ("paged", Wrong("other pages of v", ValueError, "^v: dim 1 .page_size", {"v": FastTensor((12, 8, 2, 64))})),
    ("cache", Wrong("another batch", ValueError, "^k_cache: dim 0 .batch", {"cache_batch_idx": None})),
    ("cache", Wrong("pages with indices", ValueError, "^cache_batch_idx: .*page_table", {"page_table": int32(3, 5)})),
    ("cache", Wrong("v_cache of another dtype", TypeError, "^v_cache: dtype", {"v_cache": FastTensor((8, 100, 2, 64), "fp16")})),
    ("cache", Wrong("lengths of another batch", ValueError, "^cache_seqlens: .*found 2", {"cache_seqlens": int32(2)})),
    ("cache", Wrong("float lengths", TypeError, "^cache_seqlens: dtype", {"cache_seqlens": FastTensor((3,), "fp32")})),
    ("cache", Wrong("padding of another batch", ValueError, "^cache_leftpad: .*found 2", {"cache_leftpad": int32(2)})),
    ("cache", Wrong("pages without lengths", ValueError, "^cache_seqlens: is needed with page_table",
        {"cache_batch_idx": None, "page_table": int32(3, 5), "cache_seqlens": None})),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "case"), WRONG_LENGTHS, ids=lambda x: x if isinstance(x, str) else x.why)
def test_wrong_lengths_and_layouts(recorder, kind, case):
    function, right = CALLS[kind]
    with pytest.raises(case.error, match=case.message):
        function(**right(**case.changes))
    assert recorder.launches() == 0
    function(**right())
    assert recorder.launches() == 1


def test_lengths_arrive(recorder):
    args = right_paged_call(seqused_q=int32(3), scheduler_metadata=int32(17), max_seqlen_q=7, max_seqlen_k=70)
    hopper_attention.flash_attn_varlen_func(**args)
    seen = recorder.last_launch()
    for name in ("cu_seqlens_q", "seqused_q", "seqused_k", "page_table", "scheduler_metadata"):
        assert seen[name]["data"] == args[name].data and seen[name]["dtype"] == "int32"
    assert (seen["max_seqlen_q"], seen["max_seqlen_k"], seen["cu_seqlens_k"]) == (7, 70, None)
    hopper_attention.flash_attn_with_kvcache(**right_cache_call(cache_seqlens=40, cache_leftpad=int32(3)))
    seen = recorder.last_launch()
    assert seen["seqused_k_all"] == 40 and seen["seqused_k"] is None and seen["cache_leftpad"] is not None


def test_a_wrong_attention_call_appends_nothing(recorder):
    new = {"k": FastTensor((3, 1, 2, 64)), "v": FastTensor((3, 1, 2, 64))}
    with pytest.raises(ValueError, match="^num_splits: "):
        hopper_attention.flash_attn_with_kvcache(**right_cache_call(**new, num_splits=1000))
    with pytest.raises(ValueError, match="^out: shares memory with q"):
        q = FastTensor((3, 1, 4, 64))
        hopper_attention.flash_attn_with_kvcache(**right_cache_call(**new, q=q, out=q))
    assert recorder.launches() == 0


@pytest.mark.parametrize("name", ["cache_seqlens", "cu_seqlens_q", "out"])
def test_schedules_of_tensors_elsewhere(recorder, name):
    given = {"cache_seqlens": int32(5), "cu_seqlens_q": int32(6), "out": int32(33)}
    given[name] = FastTensor(given[name].shape, "int32", device=(CUDA, 1))
    with pytest.raises(ValueError, match="must be on the device of out, cuda:|must be on the device of out .metadata"):
        hopper_attention.get_scheduler_metadata(5, 1, 4096, 32, 8, 128, **given)


WRONG_SCHEDULES = [
    ("^out: must have at least 33 elements for 5 sequences, found 32", ValueError, {"out": int32(32)}),
    ("^out: dtype", TypeError, {"out": FastTensor((33,), "fp32")}),
    ("^cache_seqlens: .*5 for the batch of batch_size, found 4", ValueError, {"cache_seqlens": int32(4)}),
    ("^cu_seqlens_q: .*found 5", ValueError, {"cu_seqlens_q": int32(5)}),
    ("^qkv_dtype: ", TypeError, {"qkv_dtype": np.float64}),
    ("^num_splits: ", ValueError, {"num_splits": 257}),
    ("^max_seqlen_k: ", ValueError, {"max_seqlen_k": 1 << 40}),
]


@pytest.mark.parametrize(("message", "error", "changes"), WRONG_SCHEDULES, ids=lambda x: x if type(x) is str else "")
def test_wrong_schedules(message, error, changes):
    names = ["batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim"]
    given = {**dict(zip(names, (5, 1, 4096, 32, 8, 128), strict=True)), "cache_seqlens": int32(5), "out": int32(33)}
    with pytest.raises(error, match=message):
        hopper_attention.get_scheduler_metadata(**{**given, **changes})


def test_tensors_that_require_grad():
    torch = pytest.importorskip("torch")
    plain, wants = torch.zeros(2), torch.zeros(2, requires_grad=True)
    with pytest.raises(NotImplementedError, match="^k: requires grad.*torch.inference_mode"):
        check_torch_inputs(q=plain, k=wants)
    with pytest.raises(NotImplementedError, match="^v: requires grad"):
        check_torch_inputs(v=torch.nn.Parameter(torch.zeros(2)))
    with torch.no_grad():
        check_torch_inputs(q=wants)
    with torch.inference_mode():
        check_torch_inputs(q=wants, k=torch.nn.Parameter(torch.zeros(2)), s_aux=None)


def test_fake_tensors_do_not_reach_the_kernels(recorder):
    torch = pytest.importorskip("torch")
    fake_tensor = pytest.importorskip("torch._subclasses.fake_tensor")
    with fake_tensor.FakeTensorMode(), torch.inference_mode():
        q = torch.empty(2, 64, 4, 64, device="cuda", dtype=torch.bfloat16)
        assert hopper_attention.flash_attn_func(q, q, q).shape == q.shape
    with pytest.raises(TypeError, match="^q: a plain torch.Tensor is needed, found FakeTensor"):
        check_torch_inputs(q=q)
    assert recorder.launches() == 0


class OnGpu:
    """A number that says it is on a GPU."""

    is_cuda, device = True, "cuda:0"

    def __index__(self):
        raise AssertionError("reading it synchronises")

    __float__ = __index__


@pytest.mark.parametrize("name", ["softmax_scale", "softcap", "num_splits", "sm_margin", "attention_chunk"])
def test_values_on_the_gpu_are_not_read(recorder, name):
    with pytest.raises(TypeError, match=f"^{name}: a value on the host is needed, found a tensor on cuda:0"):
        hopper_attention.flash_attn_func(**right_call(**{name: OnGpu()}))
