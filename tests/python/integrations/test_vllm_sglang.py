"""vLLM's and SGLang's spelling, against the signatures of vllm 0.33 and sglang 0.5.23; the backend on stand-ins."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
from hopper_attention.integrations import sglang, vllm  # noqa: E402
from torch_ops.samples import int32, values  # noqa: E402

# name=default where there is one, in order
VLLM_VARLEN = """q k v max_seqlen_q cu_seqlens_q max_seqlen_k cu_seqlens_k=None seqused_k=None q_v=None dropout_p=0.0
    softmax_scale=None causal=False window_size=None softcap=0.0 alibi_slopes=None deterministic=False
    return_attn_probs=False block_table=None return_softmax_lse=False out=None scheduler_metadata=None q_descale=None
    k_descale=None v_descale=None num_splits=0 output_scale=None fa_version=3 s_aux=None cp_world_size=1 cp_rank=0
    cp_tot_seqused_k=None mask_mod=None block_sparse_tensors=None aux_tensors=None aux_tensor_leading_dims=None
    dynamic_causal=None gather_kv_indices=None gather_kv_valid_length=None"""
VLLM_METADATA = """batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens qkv_dtype=None
    headdim_v=None cu_seqlens_q=None cu_seqlens_k_new=None cache_leftpad=None page_size=None max_seqlen_k_new=0
    causal=False window_size=(-1,-1) has_softcap=False num_splits=0 pack_gqa=None sm_margin=0"""
SGLANG_CACHE = """q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None cache_seqlens=None
    cache_batch_idx=None cache_leftpad=None page_table=None cu_seqlens_q=None cu_seqlens_k_new=None max_seqlen_q=None
    rotary_seqlens=None q_descale=None k_descale=None v_descale=None softmax_scale=None causal=False
    window_size=(-1,-1) attention_chunk=None softcap=0.0 rotary_interleaved=True scheduler_metadata=None num_splits=0
    pack_gqa=None only_qv=False sm_margin=0 return_softmax_lse=False sinks=None score_mod=None aux_tensors=None sfq=None
    sfk=None sfv=None rel_bias=None rel_bias_prep_cache=None ver=3 out=None max_seqlen_k=None mask_mod=None"""
SGLANG_VARLEN = """q k v cu_seqlens_q cu_seqlens_k max_seqlen_q=None max_seqlen_k=None seqused_q=None seqused_k=None
    page_table=None softmax_scale=None causal=False qv=None q_descale=None k_descale=None v_descale=None
    window_size=(-1,-1) attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None only_qv=False sm_margin=0
    return_softmax_lse=False sinks=None score_mod=None aux_tensors=None sfq=None sfk=None sfv=None rel_bias=None
    rel_bias_prep_cache=None ver=3 out=None mask_mod=None"""

SGLANG_METADATA = """batch_size max_seqlen_q max_seqlen_k num_heads num_heads_k headdim cache_seqlens qkv_dtype=None
    headdim_v=None cu_seqlens_q=None cu_seqlens_k=None cu_seqlens_k_new=None seqused_q=None leftpad_k=None
    page_size=None max_seqlen_k_new=0 causal=False window_size=(-1,-1) attention_chunk=0 has_softcap=False num_splits=0
    pack_gqa=None sm_margin=0"""  # of sglang-kernel 0.4.10, with bf16 for qkv_dtype=None


@pytest.mark.parametrize(
    "function, wanted",
    [
        (vllm.flash_attn_varlen_func, VLLM_VARLEN),
        (vllm.get_scheduler_metadata, VLLM_METADATA),
        (sglang.flash_attn_with_kvcache, SGLANG_CACHE),
        (sglang.flash_attn_varlen_func, SGLANG_VARLEN),
        (sglang.get_scheduler_metadata, SGLANG_METADATA),
    ],
    ids=["vllm varlen", "vllm metadata", "sglang cache", "sglang varlen", "sglang metadata"],
)
def test_signatures(function, wanted):
    found = [
        name if p.default is p.empty else f"{name}={p.default}".replace(", ", ",")
        for name, p in inspect.signature(function).parameters.items()
    ]
    assert found == wanted.split()


def paged():
    return {
        "q": values(7, 4, 16),
        "k": values(6, 16, 2, 16, seed=1),
        "v": values(6, 16, 2, 16, seed=2),
        "cu_seqlens_q": int32(0, 3, 7),
        "table": int32(3, 1, 5, 0).view(2, 2),
        "lengths": int32(20, 9),
    }


def expected_paged(p, **options):
    return hopper_attention.flash_attn_varlen_func(
        p["q"],
        p["k"],
        p["v"],
        p["cu_seqlens_q"],
        seqused_k=p["lengths"],
        page_table=p["table"],
        causal=True,
        return_attn_probs=True,
        **options,
    )


def same(result, expected):
    assert len(result) >= 2
    for got, want in zip(result, expected, strict=False):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_vllm_paged_with_everything():
    p = paged()
    out, sinks = torch.empty(7, 4, 16), values(4, seed=3)
    metadata = vllm.get_scheduler_metadata(2, 4, 32, 4, 2, 16, p["lengths"], torch.bfloat16, page_size=16)
    assert metadata.shape == (17,)
    result = vllm.flash_attn_varlen_func(
        p["q"],
        p["k"],
        p["v"],
        4,
        p["cu_seqlens_q"],
        32,
        seqused_k=p["lengths"],
        block_table=p["table"],
        causal=True,
        window_size=[5, 0],
        softcap=3.0,
        s_aux=sinks,
        out=out,
        scheduler_metadata=metadata,
        return_softmax_lse=True,
    )
    assert result[0] is out
    same(result, expected_paged(p, window_size=(5, 0), softcap=3.0, s_aux=sinks))


def test_vllm_packed():
    q, k, v = values(7, 4, 16), values(12, 2, 16, seed=1), values(12, 2, 16, seed=2)
    starts = int32(0, 3, 7), int32(0, 4, 12)
    result = vllm.flash_attn_varlen_func(q, k, v, 4, starts[0], 8, starts[1], num_splits=1)
    assert torch.equal(result, hopper_attention.flash_attn_varlen_func(q, k, v, *starts))


@pytest.mark.parametrize("setting, invariant", [("1", True), ("2", True), ("01", True), ("0", False), (None, False)])
def test_vllm_batch_invariant(setting, invariant, monkeypatch):
    if setting is None:
        monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    else:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", setting)
    vllm.batch_invariant.cache_clear()
    given = []
    for name in ("flash_attn_varlen_func", "get_scheduler_metadata"):
        monkeypatch.setattr(
            hopper_attention, name, lambda *args, **kwargs: given.append(kwargs.get("batch_invariant", False))
        )
    p = paged()
    vllm.flash_attn_varlen_func(p["q"], p["k"], p["v"], 4, p["cu_seqlens_q"], 32, seqused_k=p["lengths"])
    vllm.get_scheduler_metadata(2, 4, 32, 4, 2, 16, p["lengths"])
    vllm.batch_invariant.cache_clear()
    assert given == [invariant, invariant]


REFUSED = {
    **{name.split("=")[0]: object() for name in VLLM_VARLEN.split()[-7:]},  # what only FlashAttention-4 has
    **{"dropout_p": 0.1, "alibi_slopes": object(), "output_scale": object(), "fa_version": 4},
}


@pytest.mark.parametrize("name", REFUSED)
def test_vllm_refuses_what_is_not_available(name):
    p = paged()
    with pytest.raises(NotImplementedError, match=f"^{name}: not available"):
        vllm.flash_attn_varlen_func(
            p["q"], p["k"], p["v"], 4, p["cu_seqlens_q"], 32, seqused_k=p["lengths"], **{name: REFUSED[name]}
        )


@pytest.mark.parametrize("version", [2, 3, None])
def test_vllm_versions_run_the_same(version):
    p = paged()
    result = vllm.flash_attn_varlen_func(
        p["q"], p["k"], p["v"], 4, p["cu_seqlens_q"], 32, seqused_k=p["lengths"], block_table=p["table"], causal=True,
        return_softmax_lse=True, fa_version=version,
    )  # fmt: skip
    same(result, expected_paged(p))


def test_vllm_scale_does_not_count_the_columns_of_q_v():
    p = paged()
    options = {"seqused_k": p["lengths"], "block_table": p["table"], "q_v": values(7, 4, 16, seed=5)}
    args = (p["q"], p["k"], p["v"], 4, p["cu_seqlens_q"], 32)
    default, given, other = (
        vllm.flash_attn_varlen_func(*args, **options, softmax_scale=scale) for scale in (None, 16**-0.5, 32**-0.5)
    )
    assert torch.equal(default, given) and not torch.equal(default, other)


def test_vllm_needs_one_kind_of_key_lengths():
    p = paged()
    for lengths in ({}, {"seqused_k": p["lengths"], "cu_seqlens_k": p["cu_seqlens_q"]}):
        with pytest.raises(ValueError, match="^cu_seqlens_k, seqused_k: one of them is needed"):
            vllm.flash_attn_varlen_func(p["q"], p["k"], p["v"], 4, p["cu_seqlens_q"], 32, **lengths)


def test_sglang_decode():
    p = paged()
    q = p["q"][:2].unsqueeze(1)
    sinks, out = values(4, seed=3), torch.empty(2, 1, 4, 16)
    result = sglang.flash_attn_with_kvcache(
        q=q,
        k_cache=p["k"],
        v_cache=p["v"],
        page_table=p["table"],
        cache_seqlens=p["lengths"],
        causal=True,
        sinks=sinks,
        out=out,
        return_softmax_lse=True,
        ver=3,
    )
    assert len(result) == 4 and result[0] is out
    same(
        result,
        hopper_attention.flash_attn_with_kvcache(
            q,
            p["k"],
            p["v"],
            cache_seqlens=p["lengths"],
            page_table=p["table"],
            causal=True,
            s_aux=sinks,
            return_softmax_lse=True,
        ),
    )


def test_sglang_prefill_over_pages_and_packed():
    p = paged()
    result = sglang.flash_attn_varlen_func(
        p["q"],
        p["k"],
        p["v"],
        p["cu_seqlens_q"],
        int32(0, 20, 29),
        4,
        20,
        None,
        p["lengths"],
        p["table"],
        None,
        True,
        return_softmax_lse=True,
    )
    same(result, expected_paged(p))
    k, v = values(12, 2, 16, seed=1), values(12, 2, 16, seed=2)
    starts = p["cu_seqlens_q"], int32(0, 4, 12)
    assert torch.equal(
        sglang.flash_attn_varlen_func(p["q"], k, v, *starts, 4, 8),
        hopper_attention.flash_attn_varlen_func(p["q"], k, v, *starts),
    )
    dense = values(2, 5, 4, 16), values(2, 5, 2, 16), values(2, 5, 2, 16)
    assert torch.equal(
        sglang.flash_attn_varlen_func(*dense, None, None, causal=True),
        hopper_attention.flash_attn_func(*dense, causal=True),
    )


def test_sglang_schedule_as_its_backend_asks_for_it():
    metadata = sglang.get_scheduler_metadata(
        batch_size=2,
        max_seqlen_q=1,
        max_seqlen_k=32,
        num_heads=4,
        num_heads_k=2,
        headdim=16,
        cache_seqlens=int32(3, 9),
        qkv_dtype=torch.bfloat16,
        cu_seqlens_q=int32(0, 1, 2),
        page_size=16,
        causal=True,
        has_softcap=False,
        num_splits=0,
    )
    assert metadata.shape == (17,) and metadata.dtype == torch.int32


def test_sglang_schedule_by_position(monkeypatch):
    given = []
    monkeypatch.setattr(hopper_attention, "get_scheduler_metadata", lambda *args: given.append(args))
    lengths, starts, new, pad = (object() for _ in range(4))
    sizes = (2, 1, 32, 4, 2, 16)
    sglang.get_scheduler_metadata(*sizes, lengths, torch.bfloat16, None, starts, None, new, None, pad, 16, 3, True)
    assert given[0][:15] == (*sizes, lengths, torch.bfloat16, None, starts, new, pad, 16, 3, True)
    for name in ("cu_seqlens_k", "seqused_q"):
        with pytest.raises(NotImplementedError, match=f"^{name}: not available"):
            sglang.get_scheduler_metadata(*sizes, lengths, **{name: starts})


@pytest.mark.parametrize(
    "name, value",
    [("ver", 4), ("only_qv", True), ("score_mod", print), ("mask_mod", print), ("sfq", 1), ("rel_bias", 1)],
)
def test_sglang_refuses_what_only_fa4_has(name, value):
    p = paged()
    with pytest.raises(NotImplementedError, match=f"^{name}: not available"):
        sglang.flash_attn_with_kvcache(p["q"], p["k"], p["v"], **{name: value})
    with pytest.raises(NotImplementedError, match=f"^{name}: not available"):
        sglang.flash_attn_varlen_func(p["q"], p["k"], p["v"], p["cu_seqlens_q"], None, **{name: value})


def modules(monkeypatch, **contents):
    """Stand-ins for packages that are not here; a key a__b is the module a.b."""
    for path, names in contents.items():
        path = path.replace("__", ".")
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                module = ModuleType(name)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, name, module)
                if end > 1:
                    monkeypatch.setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module, raising=False)
        for name, value in names.items():
            setattr(sys.modules[path], name, value)


@pytest.fixture
def sglang_packages(monkeypatch):
    """Stand-ins for what `install()` changes."""
    monkeypatch.delenv(sglang.SWITCH, raising=False)
    monkeypatch.setenv(sglang.SWITCH, "")  # install() sets it: gone after the test
    path = "sglang.kernels.ops.attention.flash_attention_v3"
    modules(
        monkeypatch,
        sgl_kernel__flash_attn={"flash_attn_with_kvcache": 1, "flash_attn_varlen_func": 2, "get_scheduler_metadata": 3},
        **{path.replace(".", "__"): {"_load_fa3_kernels": None}},
    )
    return sys.modules["sgl_kernel.flash_attn"], sys.modules[path]


def test_sglang_install(sglang_packages):
    kernels, loader = sglang_packages
    sglang.install()
    for name in ("flash_attn_with_kvcache", "flash_attn_varlen_func", "get_scheduler_metadata"):
        assert getattr(kernels, name) is getattr(sglang, name)
    assert loader._load_fa3_kernels() == {
        "flash_attn_with_kvcache": sglang.flash_attn_with_kvcache,
        "flash_attn_varlen_func": sglang.flash_attn_varlen_func,
    }


@pytest.mark.parametrize("setting, installs", [("1", True), ("true", True), ("0", False), ("", False)])
def test_sglang_plugin_waits_for_its_switch(sglang_packages, monkeypatch, setting, installs):
    monkeypatch.setenv(sglang.SWITCH, setting)
    sglang.plugin()
    kernels, _ = sglang_packages
    assert (kernels.flash_attn_varlen_func is sglang.flash_attn_varlen_func) == installs


CHILD = """
from importlib.metadata import EntryPoint
EntryPoint("hopper-attention", {value!r}, "sglang.srt.plugins").load()()
import sgl_kernel.flash_attn as kernels
print(kernels.flash_attn_varlen_func.__module__)
"""


def test_sglang_install_reaches_processes_that_are_spawned(sglang_packages, tmp_path):
    """As SGLang does: each process loads the entry point that pyproject.toml names."""
    value = "hopper_attention.integrations.sglang:plugin"
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'[project.entry-points."sglang.srt.plugins"]\nhopper-attention = "{value}"' in text
    (tmp_path / "sgl_kernel").mkdir()
    functions = "def flash_attn_with_kvcache(): pass\ndef flash_attn_varlen_func(): pass\n"
    (tmp_path / "sgl_kernel" / "flash_attn.py").write_text(functions)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])

    def child():
        environment = {**os.environ, "PYTHONPATH": path}
        command = [sys.executable, "-c", CHILD.format(value=value)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    assert child() == "sgl_kernel.flash_attn"
    sglang.install()
    assert child() == "hopper_attention.integrations.sglang"


@dataclass
class Metadata:
    """What vLLM's FlashAttentionMetadata holds of a step."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: object
    max_seq_len: int
    seq_lens: object
    block_table: object
    scheduler_metadata: object = None
    causal: object = True
    max_num_splits: int = 0
    mm_prefix_query_range_tensor: object = None
    rswa_prefix_lens: object = None
    use_cascade: bool = False
    prefix_scheduler_metadata: object = None


class TheirBackend:
    pass


class TheirImpl:
    dcp_world_size = 1

    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads,
        alibi_slopes,
        sliding_window,
        kv_cache_dtype,
        logits_soft_cap=None,
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
        sinks=None,
    ):
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.alibi_slopes, self.kv_cache_dtype, self.attn_type, self.sinks = (
            alibi_slopes,
            kv_cache_dtype,
            attn_type,
            sinks,
        )
        self.sliding_window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.logits_soft_cap = logits_soft_cap or 0

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ):
        self.step = attn_metadata
        return "theirs"


class TheirBuilder:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.num_heads_q, self.num_heads_kv, self.headdim, self.block_size = 4, 2, 16, 16
        self.kv_cache_dtype, self.aot_sliding_window = torch.bfloat16, (-1, -1)

    def _get_scheduler_metadata(self, **kwargs):
        return "theirs"

    def build(self, metadata):
        return metadata


@pytest.fixture
def backend(monkeypatch):
    registered = {}
    custom = SimpleNamespace(is_overridden=lambda: bool(registered))
    modules(
        monkeypatch,
        vllm__config={"get_layers_from_vllm_config": lambda config, kind, names: {n: config[n] for n in names}},
        vllm__model_executor__layers__attention={"Attention": object},
        vllm__v1__attention__backend={"AttentionType": SimpleNamespace(DECODER="decoder", ENCODER="encoder")},
        vllm__v1__attention__backends__registry={
            "AttentionBackendEnum": SimpleNamespace(CUSTOM=custom),
            "register_backend": lambda member, path: registered.update({"CUSTOM": path}),
        },
        vllm__v1__attention__backends__flash_attn={
            "FlashAttentionBackend": TheirBackend,
            "FlashAttentionImpl": TheirImpl,
            "FlashAttentionMetadataBuilder": TheirBuilder,
            "_maybe_symmetrize_window": lambda window, causal: (
                (window[0], window[0]) if window[0] >= 0 and causal is False else window
            ),
            "logger": SimpleNamespace(info_once=lambda *args: None),
        },
    )
    monkeypatch.delitem(sys.modules, "hopper_attention.integrations.vllm_backend", raising=False)
    asked = inspect.signature(hopper_attention.is_supported)

    def is_supported(head_dim, **kwargs):
        """As on a GPU with all kernels; a question that the real one does not take is an error."""
        asked.bind(head_dim=head_dim, **kwargs)
        return head_dim <= 256, "" if head_dim <= 256 else f"head dim {head_dim}"

    monkeypatch.setattr(hopper_attention, "is_supported", is_supported)
    vllm.register()
    vllm.register()
    path, name = registered["CUSTOM"].rsplit(".", 1)
    yield getattr(importlib.import_module(path), name)
    sys.modules.pop("hopper_attention.integrations.vllm_backend", None)


def impl(backend, head_size=16, alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto", **options):
    return backend.get_impl_cls()(4, head_size, 0.25, 2, alibi_slopes, sliding_window, kv_cache_dtype, **options)


@pytest.mark.parametrize(
    "options, reason",
    [
        ({}, ""),
        ({"sliding_window": 6, "logits_soft_cap": 3.0}, ""),
        ({"alibi_slopes": [1.0]}, "alibi slopes"),
        ({"kv_cache_dtype": "fp8"}, "a cache of fp8"),
        ({"attn_type": "encoder"}, "attention type encoder"),
        ({"head_size": 512}, "head dim 512"),
    ],
    ids=str,
)
def test_vllm_layers_that_are_not_supported_fall_back(backend, options, reason):
    made = impl(backend, **options)
    assert made.why_not == reason
    if reason:
        assert made.forward(None, None, None, None, None, object(), None) == "theirs"


def step(p, **options):
    return Metadata(7, 4, p["cu_seqlens_q"], 32, p["lengths"], p["table"], **options)


@pytest.mark.parametrize("window", [None, 6])
def test_vllm_layer(backend, window):
    p = paged()
    cache = torch.cat([p["k"], p["v"]], dim=-1).transpose(1, 2).contiguous()  # (pages, Hk, page size, 2 D)
    query, output = torch.cat([p["q"], p["q"]]), torch.full((14, 4, 16), 7.0)  # padded, as under a CUDA graph
    sinks = values(4, seed=3)
    made = impl(backend, sliding_window=window, sinks=sinks)
    assert made.forward(None, query, None, None, cache, step(p), output) is output
    window_size = (-1, -1) if window is None else (window - 1, 0)
    expected = expected_paged(p, softmax_scale=0.25, window_size=window_size, s_aux=sinks)
    assert torch.equal(output[:7], expected[0]) and (output[7:] == 7).all()


@pytest.mark.parametrize(
    "special",
    [{"causal": torch.zeros(2)}, {"mm_prefix_query_range_tensor": 1}, {"rswa_prefix_lens": 1}, {"use_cascade": True}],
    ids=lambda x: next(iter(x)),
)
def test_vllm_steps_of_another_kind_fall_back(backend, special):
    p = paged()
    assert impl(backend).forward(None, p["q"], None, None, None, step(p, **special), None) == "theirs"
    assert impl(backend).forward(None, p["q"], None, None, None, step(p), None, output_scale=1) == "theirs"
    assert impl(backend).forward(None, p["q"], None, None, None, None, None) == "theirs"


def test_vllm_schedule_is_ours_if_all_layers_are(backend, monkeypatch):
    p = paged()
    arguments = {
        "aot_schedule": True,
        "batch_size": 2,
        "cu_query_lens": p["cu_seqlens_q"],
        "max_query_len": 4,
        "seqlens": p["lengths"],
        "max_seq_len": 32,
        "causal": True,
        "max_num_splits": 0,
    }
    layers = {
        "a": SimpleNamespace(impl=impl(backend)),
        "b": SimpleNamespace(impl=impl(backend, head_size=512)),
        "c": SimpleNamespace(impl=object()),
    }
    builder = backend.get_builder_cls()(None, ["a"], layers, None)
    metadata = builder._get_scheduler_metadata(**arguments)
    assert metadata.shape == (17,)
    assert builder._get_scheduler_metadata(**{**arguments, "aot_schedule": False}) == "theirs"
    built = builder.build(step(p, scheduler_metadata=metadata))
    given = []
    monkeypatch.setattr(vllm, "flash_attn_varlen_func", lambda *args, **kw: given.append(kw["scheduler_metadata"]))
    cache, output = torch.zeros(6, 2, 16, 32), torch.zeros(7, 4, 16)
    impl(backend).forward(None, p["q"], None, None, cache, built, output)
    assert given[-1] is metadata
    cascade = builder.build(step(p, scheduler_metadata=metadata, prefix_scheduler_metadata=metadata, use_cascade=True))
    layer = impl(backend)
    assert layer.forward(None, p["q"], None, None, cache, cascade, output) == "theirs"
    assert layer.step.scheduler_metadata is layer.step.prefix_scheduler_metadata is None, (
        "our schedule in their kernels"
    )
    assert cascade.scheduler_metadata is cascade.prefix_scheduler_metadata is metadata
    for names in (["a", "b"], ["c"], []):
        mixed = backend.get_builder_cls()(None, names, layers, None)
        assert mixed._get_scheduler_metadata(**arguments) == "theirs"
        impl(backend).forward(
            None, p["q"], None, None, cache, mixed.build(step(p, scheduler_metadata="theirs")), output
        )
        assert given[-1] is None


def test_importing_the_package_imports_no_engine():
    import subprocess

    code = (
        "import sys, hopper_attention, hopper_attention.integrations\n"
        "names = 'torch transformers vllm sglang sgl_kernel jax flash_attn_interface'.split()\n"
        "print([name for name in names if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
