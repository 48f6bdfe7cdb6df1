"""FlashAttention-3's names: modules, operators, schemas, and the packages that look for them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
from hopper_attention.integrations import flash_attn_3  # noqa: E402
from torch_ops.samples import int32, values  # noqa: E402

# The operators as FlashAttention-3 declares them (hopper/flash_api.cpp) and as xformers checks them.
FWD = (
    "flash_attn_3::fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, "
    "Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, "
    "int? max_seqlen_k=None, Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, "
    "Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, "
    "int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, float softcap=0., "
    "bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, "
    "int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
BWD = (
    "flash_attn_3::bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, "
    "int? max_seqlen_k=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, float softcap=0., bool deterministic=False, int sm_margin=0) "
    "-> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)"
)
COMBINE = (
    "flash_attn_3::fwd_combine(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, "
    "ScalarType? out_dtype=None) -> (Tensor(out!), Tensor)"
)
METADATA = (
    "flash_attn_3::get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, "
    "int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? leftpad_k=None, "
    "int? page_size=None, int max_seqlen_k_new=0, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, bool has_softcap=False, int num_splits=0, bool? pack_gqa=None, "
    "int sm_margin=0) -> Tensor"
)
FORWARD_ARGUMENTS = str.split(
    "q k v k_new v_new qv out_ cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k max_seqlen_q "
    "max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale v_descale "
    "softmax_scale causal window_size_left window_size_right attention_chunk softcap rotary_interleaved "
    "scheduler_metadata num_splits pack_gqa sm_margin"
)


@pytest.fixture(autouse=True)
def installed():
    flash_attn_3.install()
    flash_attn_3.install()
    yield
    flash_attn_3.uninstall()


def inputs():
    return values(2, 5, 4, 16), values(2, 9, 2, 16, seed=1), values(2, 9, 2, 16, seed=2)


def same(result, expected):
    for got, want in zip(result, expected, strict=False):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("name", flash_attn_3.MODULES)
def test_modules(name):
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.name == name
    module = importlib.import_module(name)
    assert module.__spec__.name == name and module.__version__


def test_distribution():
    assert importlib.metadata.version("flash_attn_3") == importlib.metadata.version("flash-attn-3") == "3.0.0"
    assert importlib.metadata.packages_distributions()["flash_attn_interface"] == ["flash-attn-3"]
    flash_attn_3.uninstall()
    assert importlib.util.find_spec("flash_attn_3") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn_3")


@pytest.mark.parametrize("text", [FWD, BWD, COMBINE, METADATA], ids=lambda text: text[14 : text.index("(")])
def test_schemas(text):
    wanted = torch._C.parse_schema(text)
    found = getattr(torch.ops.flash_attn_3, wanted.name.split("::")[1]).default._schema
    assert found.is_backward_compatible_with(wanted) and wanted.is_backward_compatible_with(found)
    assert str(found) == str(wanted)


def test_forward_has_its_arguments():
    from flash_attn_interface import _flash_attn_forward

    assert list(inspect.signature(_flash_attn_forward).parameters) == FORWARD_ARGUMENTS and len(FORWARD_ARGUMENTS) == 34
    declared = [a.name for a in torch._C.parse_schema(FWD).arguments]
    renamed = {"q_v": "qv", "out": "out_", "is_causal": "causal", "is_rotary_interleaved": "rotary_interleaved"}
    assert [renamed.get(name, name) for name in declared] == FORWARD_ARGUMENTS


def test_dense():
    q, k, v = inputs()
    expected = hopper_attention.flash_attn_func(q, k, v, causal=True, softcap=3.0, return_attn_probs=True)
    result = torch.ops.flash_attn_3.fwd(q, k, v, is_causal=True, softcap=3.0)
    assert len(result) == 4 and result[2].numel() == result[3].numel() == 0
    same(result, expected)
    out = torch.empty_like(q)
    result = torch.ops.flash_attn_3.fwd(q, k, v, out=out, is_causal=True, softcap=3.0)
    assert result[0].data_ptr() == out.data_ptr()
    same((out,), expected)


def test_columns_that_are_not_contiguous_are_copied():
    q, k, v = inputs()
    expected = hopper_attention.flash_attn_func(q, k, v, return_attn_probs=True)
    strided = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    assert strided[0].stride(-1) != 1
    same(torch.ops.flash_attn_3.fwd(*strided), expected)


def test_varlen():
    q, k, v = (x.flatten(0, 1) for x in inputs())
    starts = int32(0, 3, 10), int32(0, 4, 18)
    expected = hopper_attention.flash_attn_varlen_func(q, k, v, *starts, 7, 14, return_attn_probs=True)
    same(torch.ops.flash_attn_3.fwd(q, k, v, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], max_seqlen_q=7), expected)


def cache_arguments():
    pages_k, pages_v = values(6, 8, 2, 16, seed=3), values(6, 8, 2, 16, seed=4)
    new = values(2, 1, 2, 16, seed=5), values(2, 1, 2, 16, seed=6)
    return values(2, 1, 4, 16), pages_k, pages_v, *new, int32(3, 9), int32(3, 1, 5, 0).view(2, 2)


def test_append_to_pages():
    q, pages_k, pages_v, k, v, lengths, table = cache_arguments()
    expected = hopper_attention.flash_attn_with_kvcache(
        q, pages_k, pages_v, k, v, cache_seqlens=lengths, page_table=table, causal=True, return_softmax_lse=True
    )
    _, again_k, again_v, *_ = cache_arguments()
    same(
        torch.ops.flash_attn_3.fwd(q, again_k, again_v, k, v, seqused_k=lengths, page_table=table, is_causal=True),
        expected,
    )
    assert torch.equal(again_k, pages_k) and not torch.equal(again_k, cache_arguments()[1])


@pytest.mark.parametrize("lengths", [int32(3, 9), None], ids=["lengths", "full cache"])
def test_packed_queries_on_dense_keys(lengths):
    q, k, v = values(7, 4, 16), values(2, 9, 2, 16, seed=1), values(2, 9, 2, 16, seed=2)
    starts = int32(0, 3, 7)
    expected = hopper_attention.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, cu_seqlens_q=starts, max_seqlen_q=4, causal=True, return_softmax_lse=True
    )
    same(
        flash_attn_3._flash_attn_forward(q, k, v, cu_seqlens_q=starts, seqused_k=lengths, max_seqlen_q=4, causal=True),
        expected,
    )
    same(
        torch.ops.flash_attn_3.fwd(q, k, v, cu_seqlens_q=starts, seqused_k=lengths, max_seqlen_q=4, is_causal=True),
        expected,
    )


def test_defaults_of_the_operator_are_not_those_of_the_function(monkeypatch):
    given = []

    def spy(*args, **kwargs):
        given.append((kwargs["rotary_interleaved"], kwargs["num_splits"]))
        return values(1), values(1)

    monkeypatch.setattr(hopper_attention, "flash_attn_with_kvcache", spy)
    q, pages_k, pages_v, k, v, lengths, table = cache_arguments()
    torch.ops.flash_attn_3.fwd(q, pages_k, pages_v, k, v, seqused_k=lengths)
    torch.ops.flash_attn_3.fwd(q, pages_k, pages_v, k, v, seqused_k=lengths, is_rotary_interleaved=True, num_splits=3)
    flash_attn_3._flash_attn_forward(q, pages_k, pages_v, k, v, seqused_k=lengths)
    assert given == [(False, 0), (True, 3), (True, 1)]


def test_interface_functions():
    import flash_attn_interface as fa

    q, k, v = inputs()
    same(
        fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True),
        hopper_attention.flash_attn_func(q, k, v, causal=True, return_attn_probs=True),
    )
    packed = torch.cat([q, k[:, :5], v[:, :5]], dim=2)
    same(
        (fa.flash_attn_qkvpacked_func(packed, num_heads_q=4),),
        (hopper_attention.flash_attn_func(q, k[:, :5], v[:, :5]),),
    )
    three = torch.stack([q, q + 1, q + 2], dim=2)
    same((fa.flash_attn_qkvpacked_func(three),), (hopper_attention.flash_attn_func(q, q + 1, q + 2),))
    result = fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=int32(3, 9), return_softmax_lse=True)
    assert len(result) == 4
    assert "page_table" in inspect.signature(fa.flash_attn_with_kvcache).parameters
    parts, logs = values(3, 2, 5, 4, 16), values(3, 2, 5, 4)
    same(fa.flash_attn_combine(parts, logs), torch.ops.flash_attn_3.fwd_combine(parts, logs))
    metadata = torch.ops.flash_attn_3.get_scheduler_metadata(2, 1, 16, 4, 2, 16, 16, torch.bfloat16, int32(3, 9))
    assert torch.equal(metadata, fa.get_scheduler_metadata(2, 1, 16, 4, 2, 16, int32(3, 9)))


@pytest.mark.parametrize("name", ["seqused_q", "cu_seqlens_k"])
@pytest.mark.parametrize("cache", [{}, {"leftpad_k": int32(0, 0), "seqused_k": int32(3, 3)}], ids=["dense", "a cache"])
def test_lengths_that_dense_queries_cannot_have_are_refused(name, cache):
    with pytest.raises(NotImplementedError, match="^seqused_q and cu_seqlens_k: not available"):
        flash_attn_3._flash_attn_forward(*inputs(), **cache, **{name: int32(1, 2)})


def test_every_argument_of_packed_qkv_arrives_alone(monkeypatch):
    ours, arrived = hopper_attention.flash_attn_func, {}

    def spy(*args, **kwargs):
        bound = inspect.signature(ours).bind(*args, **kwargs)
        bound.apply_defaults()
        arrived.update(bound.arguments)

    monkeypatch.setattr(hopper_attention, "flash_attn_func", spy)
    packed = flash_attn_3.flash_attn_qkvpacked_func
    for name in set(inspect.signature(packed).parameters) - {"qkv", "num_heads_q"}:
        value = object()
        packed(values(2, 5, 3, 4, 16), **{name: value})
        assert arrived[name] is value, name


def test_backward_raises():
    q, k, v = inputs()
    with pytest.raises(NotImplementedError, match="forward only"):
        torch.ops.flash_attn_3.bwd(q, q, k, v, q, values(2, 4, 5))
    import flash_attn_interface

    with pytest.raises(NotImplementedError, match="forward only"):
        flash_attn_interface._flash_attn_backward()


def test_the_shape_of_a_call_is_known_without_memory():
    with torch._subclasses.FakeTensorMode():
        q, k, v = torch.empty(2, 5, 4, 16), torch.empty(2, 9, 2, 16), torch.empty(2, 9, 2, 8)
        out, lse, _, _ = torch.ops.flash_attn_3.fwd(q, k, v)
    assert out.shape == (2, 5, 4, 8) and lse.shape == (2, 4, 5)


def test_the_function_compiles():
    torch._dynamo.reset()
    q, k, v = inputs()
    compiled = torch.compile(flash_attn_3._flash_attn_forward, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        same(compiled(q, k, v, causal=True), flash_attn_3._flash_attn_forward(q, k, v, causal=True))


def test_torch_runs_on_it():
    """torch's own FA3 support: activation, and its calls as it makes them (on CUDA tensors only from the top)."""
    fa3 = pytest.importorskip("torch.nn.attention._fa3")
    torch.nn.attention.activate_flash_attention_impl("FA3")
    try:
        q, k, v = inputs()
        run = fa3._fa3_run_forward
        expected = hopper_attention.flash_attn_func(q, k, v, 0.3, True, return_attn_probs=True)
        same(run(q, k, v, None, None, 5, 9, 0.3, True, None, None, None), expected)
        packed = [x.flatten(0, 1) for x in (q, k, v)]
        starts = int32(0, 3, 10), int32(0, 4, 18)
        expected = hopper_attention.flash_attn_varlen_func(
            *packed, *starts, 7, 14, window_size=(3, 0), return_attn_probs=True
        )
        out = torch.empty_like(packed[0])
        same(run(*packed, *starts, 7, 14, None, False, 3, 0, None, out), expected)
        same((out,), expected)
    finally:
        torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.parametrize("name", ["flash_attn_interface", "flash_attn_3"])
def test_a_real_package_is_left_alone(name, tmp_path):
    (tmp_path / f"{name}.py").write_text("")
    code = "from hopper_attention.integrations import flash_attn_3; flash_attn_3.install()"
    path = [str(tmp_path), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}\n{code}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and f"RuntimeError: {name} is installed" in done.stderr


def test_real_operators_are_left_alone():
    code = (
        "import torch; theirs = torch.library.Library('flash_attn_3', 'DEF'); theirs.define('fwd(Tensor q) -> Tensor')\n"
        "from hopper_attention.integrations import flash_attn_3; flash_attn_3.install()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "RuntimeError: torch.ops.flash_attn_3.fwd is loaded already" in done.stderr


def run_alone(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_diffusers_runs_on_it():
    """Its backend from the top. Its operator is for CUDA tensors: here it has a kernel for others too, the same."""
    pytest.importorskip("diffusers")
    code = (
        "from hopper_attention.integrations import flash_attn_3; flash_attn_3.install()\n"
        "import torch, hopper_attention\n"
        "from diffusers.models import attention_dispatch as d\n"
        "operator = d._wrapped_flash_attn_3\n"
        "operator.register_kernel('cpu')(operator._init_fn)\n"
        "q, k, v = torch.randn(3, 2, 5, 4, 16).bfloat16()\n"
        "with torch.inference_mode(), d.attention_backend('_flash_3'):\n"
        "    out = d.dispatch_attention_fn(q, k, v, is_causal=True, scale=0.3)\n"
        "    backend = d._AttentionBackendRegistry._backends[d.AttentionBackendName._FLASH_3]\n"
        "    again, lse = backend(q, k, v, scale=0.3, is_causal=True, return_lse=True)\n"
        "want, want_lse = hopper_attention.flash_attn_func(q, k, v, 0.3, True, return_attn_probs=True)\n"
        "same = torch.equal(out, want) and torch.equal(again, want) and torch.equal(lse, want_lse.transpose(1, 2))\n"
        "print(d._CAN_USE_FLASH_ATTN_3 and same)"
    )
    assert run_alone(code) == "True"


def test_xformers_accepts_it():
    pytest.importorskip("xformers")
    code = (
        "from hopper_attention.integrations import flash_attn_3; flash_attn_3.install()\n"
        "from xformers.ops.fmha import flash3\n"
        "print(flash3._C_flashattention3 is not None and flash3._flash_attention3_incompatible_reason())"
    )
    assert run_alone(code) == "None"


def test_transformers_finds_its_package():
    pytest.importorskip("transformers")
    code = (
        "from hopper_attention.integrations import flash_attn_3; flash_attn_3.install()\n"
        "import hopper_attention, torch\n"
        "torch.cuda.is_available = lambda: True\n"
        "from transformers.utils import is_flash_attn_3_available\n"
        "from transformers.modeling_flash_attention_utils import lazy_import_flash_attention\n"
        "functions = lazy_import_flash_attention('flash_attention_3')[0]\n"
        "print(is_flash_attn_3_available() and functions[0] is hopper_attention.flash_attn_func)"
    )
    assert run_alone(code) == "True"
