"""vLLM's and SGLang's spelling, against what tools/engine_signatures found in their wheels; the backend on stand-ins."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
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

ROOT = Path(__file__).parents[3]
INTEGRATIONS = ROOT / "python" / "hopper_attention" / "integrations"
ENGINES = json.loads((ROOT / "tests" / "engine_signatures.json").read_text(encoding="utf-8"))  # tools/engine_signatures
VLLM = ENGINES["vllm"]["modules"]
THEIRS = VLLM["vllm/v1/attention/backends/flash_attn.py"]  # what vllm_backend calls so
VLLM_FUNCTIONS = VLLM["vllm/vllm_flash_attn/flash_attn_interface.py"]
KERNELS = ENGINES["sglang-kernel"]["modules"]["sgl_kernel/flash_attn.py"]
DISPATCHER = ENGINES["sglang"]["modules"]["sglang/kernels/ops/attention/flash_attention.py"]
LOADER = ENGINES["sglang"]["modules"]["sglang/kernels/ops/attention/flash_attention_v3.py"]

WHERE = {"vllm": VLLM_FUNCTIONS, "sgl_kernel": KERNELS, "sglang": DISPATCHER, "sglang v3": LOADER}
# Ours take the same by position up to here; all of it where nothing stands here. The functions of sgl_kernel are replaced;
# those of sglang call them, and have other parameters last.
LAST_BY_POSITION = {"sglang": "aux_tensors", "sglang v3": "sinks"}
OTHER_DEFAULTS = {"qkv_dtype": ("torch.bfloat16", None)}  # None is torch.bfloat16: the library imports no torch for it
UNUSED = {
    vllm.flash_attn_varlen_func: {
        "deterministic": "of the backward pass",
        "return_attn_probs": "vLLM returns the same with it",
    },
    sglang.flash_attn_with_kvcache: {
        "max_seqlen_k": "a bound; the cache has one",
        "pack_gqa": "a hint for speed; the plan decides",
    },
}
FA4_ONLY = {
    vllm.flash_attn_varlen_func: [
        "output_scale",
        "mask_mod",
        "block_sparse_tensors",
        "aux_tensors",
        "aux_tensor_leading_dims",
        "dynamic_causal",
        "gather_kv_indices",
        "gather_kv_valid_length",
    ],
    sglang.flash_attn_with_kvcache: [
        "score_mod",
        "aux_tensors",
        "sfq",
        "sfk",
        "sfv",
        "rel_bias",
        "rel_bias_prep_cache",
        "mask_mod",
    ],
}
FA4_ONLY[sglang.flash_attn_varlen_func] = FA4_ONLY[sglang.flash_attn_with_kvcache]


def names(parameters):
    return [parameter["name"] for parameter in parameters]


def call_of(module, name):
    return module[name]["parameters"]


@pytest.mark.parametrize(
    "ours, where",
    [
        (vllm.flash_attn_varlen_func, "vllm"),
        (vllm.get_scheduler_metadata, "vllm"),
        (sglang.flash_attn_with_kvcache, "sgl_kernel"),
        (sglang.flash_attn_varlen_func, "sgl_kernel"),
        (sglang.get_scheduler_metadata, "sgl_kernel"),
        (sglang.flash_attn_with_kvcache, "sglang"),
        (sglang.flash_attn_varlen_func, "sglang"),
        (sglang.flash_attn_with_kvcache, "sglang v3"),
        (sglang.flash_attn_varlen_func, "sglang v3"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_signatures_are_those_of_the_engines(ours, where):
    wanted = call_of(WHERE[where], ours.__name__)
    assert {parameter["kind"] for parameter in wanted} == {"POSITIONAL_OR_KEYWORD"}
    found = inspect.signature(ours).parameters
    assert {p.kind for p in found.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert set(names(wanted)) <= set(found)
    count = names(wanted).index(LAST_BY_POSITION[where]) + 1 if where in LAST_BY_POSITION else len(wanted)
    assert list(found)[:count] == names(wanted)[:count]
    for parameter in wanted:
        name, text = parameter["name"], parameter.get("value", parameter["default"])
        if name in OTHER_DEFAULTS:
            assert (text, found[name].default) == OTHER_DEFAULTS[name]
        elif text is None:
            assert found[name].default is inspect.Parameter.empty, name
        else:
            assert found[name].default == ast.literal_eval(text), name
    for name in set(found) - set(names(wanted)):
        assert found[name].default is not inspect.Parameter.empty, f"{name}: they do not give it"


def test_what_the_adapters_have_more_is_of_another_function_there():
    for function in (sglang.flash_attn_with_kvcache, sglang.flash_attn_varlen_func):
        theirs = {name for module in (KERNELS, DISPATCHER) for name in names(call_of(module, function.__name__))}
        assert set(inspect.signature(function).parameters) == theirs
    for function in (vllm.flash_attn_varlen_func, vllm.get_scheduler_metadata):
        assert list(inspect.signature(function).parameters) == names(call_of(VLLM_FUNCTIONS, function.__name__))


@pytest.mark.parametrize("module", [vllm, sglang], ids=["vllm", "sglang"])
def test_every_argument_is_used_or_has_a_reason_not_to_be(module):
    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata"):
        function = getattr(module, name, None)
        if function is not None:
            read = {node.id for node in ast.walk(ast.parse(inspect.getsource(function))) if isinstance(node, ast.Name)}
            assert set(inspect.signature(function).parameters) - read == set(UNUSED.get(function, {})), name


# What other names their arguments have here, by function of ours, and what has to be given beside one to be read.
RENAMED = {
    vllm.flash_attn_varlen_func: {"q_v": "qv", "block_table": "page_table", "return_softmax_lse": "return_attn_probs"},
    vllm.get_scheduler_metadata: {},
    sglang.flash_attn_with_kvcache: {"sinks": "s_aux"},
    sglang.flash_attn_varlen_func: {"sinks": "s_aux", "return_softmax_lse": "return_attn_probs"},
    sglang.get_scheduler_metadata: {
        "num_heads": "num_heads_q",
        "num_heads_k": "num_heads_kv",
        "leftpad_k": "cache_leftpad",
    },
}
BESIDE = {
    "q_v": {"softmax_scale": 0.5},
    "cp_tot_seqused_k": {"cp_world_size": 2},
    "rotary_interleaved": {"rotary_cos": "cos"},
}
NOT_AVAILABLE = {
    vllm.flash_attn_varlen_func: ("dropout_p", "alibi_slopes", "fa_version"),
    vllm.get_scheduler_metadata: (),
    sglang.flash_attn_with_kvcache: ("only_qv", "ver"),
    sglang.flash_attn_varlen_func: ("only_qv", "ver"),
    sglang.get_scheduler_metadata: ("cu_seqlens_k", "seqused_q"),
}


@pytest.mark.parametrize("adapter", RENAMED, ids=lambda f: f"{f.__module__.split('.')[-1]} {f.__name__}")
def test_every_argument_arrives_alone(adapter, monkeypatch):
    """The adapters leave out what engines seldom give: one argument must be enough for it to be passed on."""
    ours = getattr(hopper_attention, adapter.__name__)
    arrived = {}

    def spy(*args, **kwargs):
        bound = inspect.signature(ours).bind(*args, **kwargs)
        bound.apply_defaults()
        arrived.update(bound.arguments)

    monkeypatch.setattr(hopper_attention, adapter.__name__, spy)
    parameters = inspect.signature(adapter).parameters
    left_out = {*FA4_ONLY.get(adapter, ()), *UNUSED.get(adapter, ()), *NOT_AVAILABLE[adapter]}
    required = {name: name for name, p in parameters.items() if p.default is inspect.Parameter.empty}
    if adapter is vllm.flash_attn_varlen_func:
        left_out |= {"cu_seqlens_k"}  # seqused_k is given instead, the other way round below
        required["seqused_k"] = "seqused_k"
    for name in parameters:
        if name in left_out:
            continue
        value = object()
        adapter(**{**required, **BESIDE.get(name, {}), name: value})
        assert arrived[RENAMED[adapter].get(name, name)] is value, name
    if adapter is vllm.flash_attn_varlen_func:
        del required["seqused_k"]
        adapter(**required, cu_seqlens_k="starts")
        assert arrived["cu_seqlens_k"] == "starts" and arrived["seqused_k"] is None


@pytest.mark.parametrize("name", ["cu_seqlens_k", "seqused_q", "seqused_k", "page_table"])
def test_sglang_dense_queries_have_no_lengths(name):
    q, k, v = values(2, 3, 4, 16), values(2, 5, 2, 16), values(2, 5, 2, 16)
    given = {"cu_seqlens_k": None, name: int32(1, 2)}
    with pytest.raises(NotImplementedError, match=f"^{name}: not available"):
        sglang.flash_attn_varlen_func(q, k, v, None, **given)


# The names under which vllm_backend has instances of vLLM's classes; what it sets on them itself is not vLLM's.
INSTANCES = {
    "FlashAttentionMetadata": ("attn_metadata", "metadata", "step"),
    "Attention": ("layer",),
    "AttentionType": ("AttentionType",),
}


def vllm_class(name):
    """What the JSON says of a class, wherever it is."""
    found = [module[name] for module in VLLM.values() if "body" in module.get(name, ())]
    return found[0] if found else None


def members(name):
    """Of a class of vLLM and those of its bases that are recorded."""
    described = vllm_class(name)
    if described is None:
        return set()
    own = {*described["body"], *described["set_on_self"], *described["methods"]}
    return own.union(*(members(base.split("[")[0]) for base in described["bases"]))


def read_of(node, name):
    """Attributes that the code of a node reads of a variable."""
    return {
        one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute)
        and isinstance(one.ctx, ast.Load)
        and isinstance(one.value, ast.Name)
        and one.value.id == name
    }


@pytest.fixture(scope="module")
def backend_source():
    return ast.parse((INTEGRATIONS / "vllm_backend.py").read_text(encoding="utf-8"))


def test_vllm_has_the_modules_that_we_import_from(backend_source):
    registering = ast.parse((INTEGRATIONS / "vllm.py").read_text(encoding="utf-8"))
    imported = []
    for node in [*ast.walk(backend_source), *ast.walk(registering)]:
        if isinstance(node, ast.ImportFrom) and node.module.startswith("vllm"):
            path = node.module.replace(".", "/")
            for alias in node.names:
                if f"{path}/{alias.name}.py" not in VLLM:  # a module
                    file = f"{path}.py" if f"{path}.py" in VLLM else f"{path}/__init__.py"
                    assert alias.name in VLLM[file], f"{file}: {alias.name}"
                imported.append(alias.name)
    assert "AttentionBackendEnum" in imported and "flash_attn" in imported
    assert {"CUSTOM"} <= members("AttentionBackendEnum")
    assert names(call_of(VLLM["vllm/v1/attention/backends/registry.py"], "register_backend"))[1] == "class_path"
    assert names(call_of(VLLM["vllm/config/vllm.py"], "get_layers_from_vllm_config"))[2] == "layer_names"


def test_vllm_has_what_the_backend_reads(backend_source):
    assert read_of(backend_source, "theirs") <= set(THEIRS)
    for name, variables in INSTANCES.items():
        read = set().union(*(read_of(backend_source, variable) for variable in variables))
        assert read, f"{variables}: not in vllm_backend any more"
        assert read <= members(name), f"{name} of vLLM has no {', '.join(sorted(read - members(name)))}"
    assert THEIRS["logger"]["assigned"] == "init_logger(__name__)" and "info_once" in members("_VllmLogger")


def test_the_backend_is_a_subclass_as_vllm_expects(backend_source):
    classes = [node for node in backend_source.body if isinstance(node, ast.ClassDef)]
    assert len(classes) == 3
    for node in classes:
        (base,) = (base.attr for base in node.bases)
        methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
        set_here = {
            one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)
        }
        assert read_of(node, "self") - set(methods) - set_here <= members(base)
        their_methods = vllm_class(base)["methods"]
        for name, method in methods.items():
            if name not in their_methods:
                assert name == "_why_not" and name not in members(base), f"{base} has no {name}"
            elif method.args.vararg is None:
                ours = method.args
                kinds = [(one.arg, "POSITIONAL_OR_KEYWORD") for one in ours.args]
                kinds += [(one.arg, "KEYWORD_ONLY") for one in ours.kwonlyargs]
                assert kinds == [(one["name"], one["kind"]) for one in their_methods[name]], name
                assert len(ours.defaults) == sum(
                    one["default"] is not None for one in their_methods[name] if one["kind"] != "KEYWORD_ONLY"
                )


def test_the_stand_ins_are_like_what_they_stand_for():
    real = vllm_class("FlashAttentionMetadata")["body"]
    assert {field.name for field in dataclasses.fields(Metadata)} <= set(real)
    for stand_in, name in [
        (TheirImpl(4, 16, 0.25, 2, None, None, "auto"), "FlashAttentionImpl"),
        (TheirBuilder(None, [], None, None), "FlashAttentionMetadataBuilder"),
    ]:
        assert set(vars(stand_in)) <= members(name)
        for method in {"__init__", "forward"} & set(vars(type(stand_in))):
            found = inspect.signature(getattr(type(stand_in), method)).parameters
            assert list(found) == names(vllm_class(name)["methods"][method])


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
    **dict.fromkeys(FA4_ONLY[vllm.flash_attn_varlen_func], object()),
    **{"dropout_p": 0.1, "alibi_slopes": object(), "fa_version": 4},
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
    [("ver", 4), ("only_qv", True), *((name, print) for name in FA4_ONLY[sglang.flash_attn_with_kvcache])],
    ids=lambda x: x if isinstance(x, str) else "",
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


def test_vllm_layers_under_decode_context_parallelism_fall_back(backend, monkeypatch):
    monkeypatch.setattr(TheirImpl, "dcp_world_size", 2)
    assert impl(backend).why_not == "decode context parallelism"


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
    [{"causal": torch.zeros(2)}, {"mm_prefix_query_range_tensor": 1}, {"rswa_prefix_lens": 1}],
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
    special = builder.build(step(p, scheduler_metadata=metadata, rswa_prefix_lens=1))
    layer = impl(backend)
    assert layer.forward(None, p["q"], None, None, cache, special, output) == "theirs"
    assert layer.step.scheduler_metadata is None, "our schedule in their kernels"
    assert special.scheduler_metadata is metadata
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
