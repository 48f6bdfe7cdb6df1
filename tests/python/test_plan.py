"""Plans and questions about support need no GPU, and say why."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import hopper_attention
from fake_cuda import FastTensor
from hopper_attention import _core, planning
from hopper_attention.testing import force_plan

SHAPE = {"batch": 2, "max_seqlen_q": 1000, "max_seqlen_k": 3000, "heads_q": 16, "heads_kv": 4}


def plan(**changes):
    return hopper_attention.plan(**{"dtype": "bfloat16", "head_dim": 128, "device": "H100", **SHAPE, **changes})


def test_a_plan_has_what_the_api_promises_and_prints_itself():
    found = plan(causal=True)
    assert isinstance(found, hopper_attention.Plan)
    assert found.kernel == "prefill" and found.dtype == "bfloat16"
    assert (found.tile.head_dim, found.tile.head_dim_v) == (128, 128) and found.tile.rows % 64 == 0
    assert found.num_splits >= 1 and found.workspace_bytes >= 0
    assert 0 < found.ctas <= 132 and found.threads == (found.tile.rows // 64 + 1) * 128
    assert str(found) == found.explain()
    assert "causal" in str(found) and "H100" in str(found)
    assert len(found.reasons) >= 5 and all(": " in reason for reason in found.reasons)
    assert repr(found).startswith("Plan(kernel='prefill', dtype='bfloat16', tile=Tile(rows=")


def test_a_chunk_that_leaves_sms_idle_says_what_is_done_about_it():
    chunk = {"batch": 1, "heads_q": 32, "heads_kv": 8, "page_size": 16, "causal": True, "lengths_on_device": True}
    one_round = plan(**chunk, max_seqlen_q=512, max_seqlen_k=8192, total_q=512, num_splits=0)
    assert one_round.tile.rows == 128 and one_round.num_splits == 1 and "fewer rows" in str(one_round)
    in_parts = plan(**chunk, max_seqlen_q=128, max_seqlen_k=8192, total_q=128, num_splits=0)
    assert in_parts.num_splits == 4 and in_parts.ctas == 128 and "4 parts of each tile" in str(in_parts)
    assert "one sequence" in str(in_parts) and in_parts.workspace_bytes <= 64 << 20
    for found in (one_round, in_parts):
        assert plan(**chunk, max_seqlen_q=4096, max_seqlen_k=8192, total_q=16384).tile.rows > found.tile.rows


@pytest.mark.parametrize(
    ("device", "sms"),
    [("H100", 132), ("H200", 132), ("H100 PCIe", 114), (48, 48), (np.int64(1), 1), (_core.DeviceInfo("card", 7), 7)],
    ids=str,
)
def test_devices(device, sms):
    found = plan(device=device)
    assert found.ctas == sms, "more tiles than SMs: each SM gets one block"


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "bf16", "float16", "fp16", "half", np.float16, np.dtype("float16")], ids=str
)
def test_dtypes(dtype):
    assert plan(dtype=dtype).dtype in ("bfloat16", "float16")


def test_torch_dtypes():
    torch = pytest.importorskip("torch")
    assert (
        plan(dtype=torch.bfloat16).dtype == "bfloat16"
        and plan(dtype=torch.half, kv_dtype=torch.float16).dtype == "float16"
    )


def test_equal_tiles_are_equal():
    assert plan().tile == plan(sinks=True).tile and len({plan().tile, plan().tile}) == 1
    assert plan().tile != plan(head_dim=64).tile


def test_smaller_head_dims_run_in_the_next_size():
    assert plan(head_dim=8).tile == plan(head_dim=64).tile
    assert plan(head_dim=72).tile == plan(head_dim=96).tile
    assert plan(head_dim=104).tile == plan(head_dim=128).tile
    assert plan(head_dim=64, head_dim_v=128).tile == plan(head_dim=128).tile


def test_nothing_to_do():
    assert plan(max_seqlen_q=0).kernel == "none"
    assert "nothing to run" in str(plan(batch=0))


WRONG = [
    ("head_dim", ValueError, {"head_dim": 60}),
    ("head_dim", ValueError, {"head_dim": 0}),
    ("head_dim", NotImplementedError, {"head_dim": 512}),
    ("v: head_dim", ValueError, {"head_dim_v": 7}),
    ("head_dim", TypeError, {"head_dim": 64.0}),
    ("heads", ValueError, {"heads_kv": 3}),
    ("heads", ValueError, {"heads_kv": 0}),
    ("batch", ValueError, {"batch": -1}),
    ("max_seqlen_q", TypeError, {"max_seqlen_q": None}),
    ("num_splits", ValueError, {"num_splits": 257}),
    ("window_size", ValueError, {"window_size": (-3, 0)}),
    ("softcap", ValueError, {"softcap": -1.0}),
    ("attention_chunk", ValueError, {"attention_chunk": -1}),
    ("dtype", NotImplementedError, {"dtype": "float32"}),
    ("dtype", NotImplementedError, {"dtype": "float8_e4m3fn"}),
    ("kv_dtype", NotImplementedError, {"kv_dtype": "float8_e4m3fn"}),
    ("page_size", ValueError, {"page_size": 0}),
    ("page_size", ValueError, {"page_size": -16}),
    ("page_size", TypeError, {"page_size": 16.0}),
    ("device", ValueError, {"device": "A100"}),
    ("device", ValueError, {"device": 0}),
    ("device", TypeError, {"device": 1.5}),
    ("sinks", TypeError, {"sinks": "yes"}),
]


@pytest.mark.parametrize(("name", "error", "changes"), WRONG, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_wrong_questions(name, error, changes):
    with pytest.raises(error, match=name):
        plan(**changes)


def test_a_torch_device_that_is_no_gpu():
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="^device: must be one of H100, .*, found .cpu.$"):
        plan(device=torch.device("cpu"))


def test_without_a_gpu_the_message_names_the_way_out():
    try:
        _core.device_info(0)
    except RuntimeError:
        with pytest.raises(RuntimeError, match='pass device="H100" to plan without a GPU'):
            plan(device=None)
    else:
        assert plan(device=None) is not None


def supported(**changes):
    return hopper_attention.is_supported(**{"dtype": "bfloat16", "head_dim": 128, "device": "H100", **changes})


@pytest.mark.parametrize(
    ("word", "changes"),
    [
        ("page_size", {"page_size": 0}),
        ("dtype", {"dtype": "float64"}),
        ("kv_dtype", {"kv_dtype": "float8_e4m3fn"}),
        ("head_dim", {"head_dim": 264}),
        ("head_dim", {"head_dim": 12}),
        ("window_size", {"window_size": (1, 2, 3)}),
        ("A100", {"device": "A100"}),
    ],
)
def test_not_supported_says_why(word, changes):
    answer, reason = supported(**changes)
    assert answer is False and word in reason


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (127, 0), "sinks": True}, {"softcap": 50.0}]
    + [{"page_size": size} for size in (1, 3, 16, 24, 256, 1024)],
    ids=str,
)
def test_supported_where_built(dtype, head_dim, options):
    answer, reason = supported(dtype=dtype, head_dim=head_dim, **options)
    built = any((k.dtype, k.tile.head_dim) == (dtype, head_dim) for k in hopper_attention.built_kernels())
    assert answer == built
    assert reason == "" if built else "HOPPER_ATTENTION_HEAD_DIMS" in reason


def test_supported_is_what_this_build_has(monkeypatch):
    """In a build with kernels of one dtype and head dim, which need not be this one."""
    asked = plan(causal=True, batch=1, max_seqlen_q=1024, max_seqlen_k=1024, heads_q=1, heads_kv=1)
    kernel = SimpleNamespace(family=asked.kernel, dtype="bfloat16", tile=asked.tile)
    monkeypatch.setattr(planning, "_core", SimpleNamespace(**{**vars(_core), "built_kernels": lambda: [kernel]}))
    assert supported(causal=True) == (True, "")
    for other in ({"head_dim": 64}, {"dtype": "float16"}):
        answer, reason = supported(causal=True, **other)
        assert not answer and "(built: bfloat16 128)" in reason
    built = [row for row in hopper_attention.support_matrix() if row["built"]]
    assert built and all(row["dtype"] == "bfloat16" and row["tile"] == asked.tile for row in built)


def test_supported_asks_for_the_plan_of_its_arguments(monkeypatch):
    given = {
        "dtype": "float16",
        "kv_dtype": "float16",
        "head_dim": 64,
        "head_dim_v": 32,
        "page_size": 24,
        "causal": True,
        "window_size": (7, 3),
        "softcap": 5.0,
        "sinks": True,
        "device": 99,
        "heads_q": 6,
        "heads_kv": 3,
        "num_splits": 4,
        "attention_chunk": 8,
        "batch_invariant": True,
    }
    asked = {}
    made = plan()
    monkeypatch.setattr(planning, "plan", lambda **options: asked.update(options) or made)
    hopper_attention.is_supported(**given)
    assert {name: asked[name] for name in given} == given


@pytest.mark.parametrize("off", [0, None], ids=repr)
def test_a_chunk_that_is_off(off):
    assert repr(plan(attention_chunk=off, causal=True)) == repr(plan(causal=True))
    assert supported(attention_chunk=off, causal=True) == supported(causal=True)
    assert (
        supported(attention_chunk=off, causal=True)[1] == "" or "HOPPER_ATTENTION" in supported(attention_chunk=off)[1]
    )


def test_support_matrix_agrees_with_plans():
    rows = hopper_attention.support_matrix()
    assert {row["dtype"] for row in rows} == {"bfloat16", "float16"}
    covered = {(row["dtype"], row["masked"], d) for row in rows for d in row["head_dims"]}
    assert {
        (dtype, masked, d) for dtype in ("bfloat16", "float16") for masked in (False, True) for d in (8, 64, 128, 256)
    } <= covered
    for row in rows:
        for dim, dim_v in zip(row["head_dims"], row["head_dims_v"], strict=True):
            dims = {"head_dim": dim, "head_dim_v": dim_v}
            shape = {"batch": 1, "max_seqlen_q": 1024, "max_seqlen_k": 1024, "heads_q": 1, "heads_kv": 1}
            found = plan(dtype=row["dtype"], causal=row["masked"], **dims, **shape)
            assert found.tile == row["tile"]
            assert supported(dtype=row["dtype"], causal=row["masked"], **dims)[0] == row["built"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_support_matrix_lists_192_with_128(dtype):
    rows = [
        row for row in hopper_attention.support_matrix() if (row["head_dims"], row["head_dims_v"]) == ([192], [128])
    ]
    assert {row["masked"] for row in rows if row["dtype"] == dtype} == {False, True}
    assert all((row["tile"].head_dim, row["tile"].head_dim_v) == (192, 128) for row in rows)


def test_warmup_refuses_what_is_no_gpu():
    for wrong in ("H100", 0):
        with pytest.raises(ValueError, match=f'^device: a CUDA device is needed, "cuda:0" .*, found {wrong!r}'):
            hopper_attention.warmup(wrong)
    if not hopper_attention.built_kernels():
        with pytest.raises(RuntimeError):
            hopper_attention.warmup("cuda:0")


def call(recorder):
    x = FastTensor((1, 4096, 4, 128))
    hopper_attention.flash_attn_func(x, x, x, out=FastTensor(x.shape))
    return recorder.last_launch()["plan"]


def test_forced_plans_end_with_their_block(recorder):
    free = call(recorder)
    with force_plan(ctas=3, heads_per_pass=1):
        forced = call(recorder)
        with force_plan(ctas=2):
            assert call(recorder).ctas == 2
        assert call(recorder).ctas == 3
    assert (forced.ctas, forced.heads_per_pass) == (3, 1) != (free.ctas, free.heads_per_pass)
    with pytest.raises(KeyError), force_plan(tile=(128, 128)):
        assert (call(recorder).tile.rows, call(recorder).tile.keys) == (128, 128)
        raise KeyError
    assert repr(call(recorder)) == repr(free)


def test_forced_plans_that_cannot_be(recorder):
    with force_plan(tile=(1, 1)), pytest.raises(ValueError, match="tile"):
        call(recorder)
    with force_plan(packed_heads=3), pytest.raises(ValueError, match="packed_heads"):
        call(recorder)
    with pytest.raises(ValueError, match="^tile: .*rows, keys"), force_plan(tile=(128,)):
        pass
    assert recorder.launches() == 0


def test_plans_are_kept(recorder):
    first = call(recorder)
    kept = recorder.cached_plans()
    assert repr(call(recorder)) == repr(first) and recorder.cached_plans() == kept == 1


def int32s(*shape):
    return FastTensor(shape, "int32")


VARLEN = {"q": (70, 16, 128), "k": (900, 4, 128), "lengths": {"cu_seqlens_q": (9,), "cu_seqlens_k": (9,)}}
PAGED = {"q": (70, 16, 128), "k": (99, 16, 4, 128), "lengths": {"cu_seqlens_q": (9,), "seqused_k": (8,), "page_table": (8, 40)}}  # fmt: skip
ONE = {"q": (1000, 16, 128), "k": (99, 16, 4, 128), "lengths": {"cu_seqlens_q": (2,), "seqused_k": (1,), "page_table": (1, 64)}}  # fmt: skip
CACHE = {"q": (8, 2, 16, 128), "k": (8, 640, 4, 128), "lengths": {"seqused_k": (8,)}}
PAGED_CACHE = {"q": (8, 2, 16, 128), "k": (99, 16, 4, 128), "lengths": {"seqused_k": (8,), "page_table": (8, 40)}}
RAGGED_CALLS = {
    "varlen": (VARLEN, {"total_q": 70, "max_seqlen_q": 70, "max_seqlen_k": 900}),
    "varlen with bounds": (VARLEN | {"max_seqlen_q": 33, "max_seqlen_k": 501}, {"total_q": 70, "max_seqlen_q": 33, "max_seqlen_k": 501}),
    "varlen, bound beyond the rows": (VARLEN | {"max_seqlen_q": 4096}, {"total_q": 70, "max_seqlen_q": 4096, "max_seqlen_k": 900}),
    "paged, one query each": (PAGED | {"max_seqlen_q": 1}, {"total_q": 70, "max_seqlen_q": 1, "max_seqlen_k": 640, "page_size": 16}),
    "one paged prompt": (ONE, {"batch": 1, "total_q": 1000, "max_seqlen_q": 1000, "max_seqlen_k": 1024, "page_size": 16}),
    "one with rows behind it": (ONE | {"max_seqlen_q": 200}, {"batch": 1, "total_q": 1000, "max_seqlen_q": 200, "max_seqlen_k": 1024, "page_size": 16}),
    "cache": (CACHE, {"lengths_on_device": True, "max_seqlen_q": 2, "max_seqlen_k": 640}),
    "paged cache": (PAGED_CACHE, {"lengths_on_device": True, "max_seqlen_q": 2, "max_seqlen_k": 640, "page_size": 16}),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"num_splits": 1}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("with_metadata", [False, True])
@pytest.mark.parametrize("name", RAGGED_CALLS)
def test_the_plan_of_a_ragged_call_is_the_one_that_is_launched(recorder, name, with_metadata, options):
    shapes, asked = RAGGED_CALLS[name]
    q, k, v, out = (FastTensor(shapes[key]) for key in "qkkq")
    given = {key: int32s(*shape) for key, shape in shapes["lengths"].items()}
    given |= {key: shapes[key] for key in ("max_seqlen_q", "max_seqlen_k") if key in shapes}
    if with_metadata:
        given["scheduler_metadata"] = int32s(33)
    recorder.forward(q, k, v, out, causal=True, **{"num_splits": 0, **options}, **given)
    launched = recorder.last_launch()["plan"]
    shape = {"batch": 8, "heads_q": 16, "heads_kv": 4, "causal": True, "scheduler_metadata": with_metadata}
    found = plan(**{**shape, **asked}, **options)
    assert found.explain() == launched.explain()
    assert repr(found) == repr(launched)


WRONG_RAGGED = [
    ("total_q", ValueError, {"total_q": -1}),
    ("total_q", TypeError, {"total_q": 1.5}),
    ("lengths_on_device", TypeError, {"lengths_on_device": "yes"}),
    ("scheduler_metadata", TypeError, {"scheduler_metadata": None}),
]


@pytest.mark.parametrize(("name", "error", "changes"), WRONG_RAGGED, ids=str)
def test_wrong_ragged_questions(name, error, changes):
    with pytest.raises(error, match=f"^{name}: "):
        plan(**changes)


@pytest.mark.parametrize("rows", [{}, {"total_q": 505}], ids=["dense q", "packed q"])
def test_rotary_takes_room_for_the_rotated_query(rows):
    sizes = {"batch": 3, "max_seqlen_q": 701, "max_seqlen_k": 4000, "heads_q": 6, "heads_kv": 2}
    asked = {"dtype": "bf16", "head_dim": 72, "device": "H100", "lengths_on_device": True, **sizes, **rows}
    without, found = hopper_attention.plan(**asked), hopper_attention.plan(**asked, rotary=True)
    query = rows.get("total_q", 3 * 701) * 6 * 72 * 2
    assert without.workspace_bytes > 0
    assert found.workspace_bytes == -(-without.workspace_bytes // 256) * 256 + -(-query // 256) * 256
    assert found.reasons[-1].startswith(f"workspace: {found.workspace_bytes} bytes with the rotated q, {query} bytes")
