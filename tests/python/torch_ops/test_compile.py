"""torch.compile and torch.export of a model that uses every public function; caches that are views of one tensor."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
from torch_ops.samples import EveryFunction, int32, model_inputs, values  # noqa: E402

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}  # the model's matrix product may be compiled differently


@pytest.fixture(scope="module", autouse=True)
def own_compile_cache(tmp_path_factory):
    """Inductor's cache on disk does not see that the schema of an operator has changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def called_operators(graph_module):
    """Names of this package's operators in a graph, which may contain others."""
    return {
        node.target._schema.name.removeprefix("hopper_attention::")
        for module in graph_module.modules()
        if hasattr(module, "graph")
        for node in module.graph.nodes
        if node.op == "call_function" and getattr(node.target, "namespace", "") == "hopper_attention"
    }


def clones(inputs):
    return tuple(x.clone() for x in inputs)


ALL = {"fwd", "varlen_fwd", "kvcache_append", "get_scheduler_metadata", "kvcache_out", "merge_states", "combine"}


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "aot_eager"},
        {"backend": "aot_eager", "dynamic": True},
        {"backend": "inductor"},
        {"backend": "inductor", "mode": "reduce-overhead"},
    ],
    ids=str,
)
@torch.inference_mode()
def test_compiled_model(options):
    model = EveryFunction().eval()
    inputs, same = model_inputs(), model_inputs()
    expected = model(*inputs)
    compiled = torch.compile(model, fullgraph=True, **options)
    torch.testing.assert_close(compiled(*same), expected, **TOLERANCE)
    torch.testing.assert_close(same[1], inputs[1], **TOLERANCE)
    assert not torch.equal(same[1], model_inputs()[1]), "nothing was appended"
    torch.testing.assert_close(compiled(*model_inputs()), expected, **TOLERANCE)


def test_the_graph_holds_the_operators():
    found = set()

    def backend(graph_module, inputs):
        found.update(called_operators(graph_module))
        return graph_module

    with torch.inference_mode():
        torch.compile(EveryFunction(), fullgraph=True, backend=backend)(*model_inputs())
    assert found == ALL


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_exported_model(strict, tmp_path):
    model = EveryFunction().eval().requires_grad_(False)
    with torch.no_grad():
        inputs, same = model_inputs(), model_inputs()
        expected = model(*inputs)
        program = torch.export.export(model, model_inputs(), strict=strict)
        assert called_operators(program.graph_module) == ALL
        torch.export.save(program, tmp_path / "model.pt2")
        loaded = torch.export.load(tmp_path / "model.pt2").module()
        torch.testing.assert_close(loaded(*same), expected, **TOLERANCE)
        torch.testing.assert_close(same[1], inputs[1], **TOLERANCE)


def test_exported_model_with_a_free_length():
    model = EveryFunction().eval().requires_grad_(False)
    length = torch.export.Dim("length", min=2, max=6)
    shapes = ({1: length}, None, None, None, None, None)
    with torch.no_grad():
        program = torch.export.export(model, model_inputs(), dynamic_shapes=shapes).module()
        x, *others = model_inputs()
        longer = (torch.cat([x, x[:, :2]], dim=1), *others[:4], int32(0, 5, 10))
        torch.testing.assert_close(program(*clones(longer)), model(*clones(longer)), **TOLERANCE)


def append(q, k_cache, v_cache, k, v, lengths):
    return hopper_attention.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)


def append_to_halves(q, cache, k, v, lengths):
    """Both caches are views of one argument."""
    out = append(q, cache[:, :, 0], cache[:, :, 1], k, v, lengths)
    return out, cache.sum()


def append_twice(q, cache, k, v, lengths):
    """The second call reads what the first one wrote."""
    append(q, cache[:, :, 0], cache[:, :, 1], k, v, lengths)
    return append(q, cache[:, :, 0], cache[:, :, 1], k, v, lengths + 1), cache.sum()


def append_to_a_new_cache(q, cache, k, v, lengths):
    """The cache is made in the graph: no argument is written."""
    cache = cache * 2
    k_cache, v_cache = cache.unbind(2)
    return append(q, k_cache, v_cache, k, v, lengths), cache


def append_inputs():
    cache = values(2, 12, 2, 2, 16, seed=3)  # (B, S, K or V, Hk, D)
    return values(2, 1, 4, 16), cache, values(2, 1, 2, 16, seed=1), values(2, 1, 2, 16, seed=2), int32(4, 7)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("function", [append_to_halves, append_twice, append_to_a_new_cache], ids=lambda f: f.__name__)
@torch.inference_mode()
def test_caches_that_are_views_of_one_tensor(function, backend):
    inputs, same = append_inputs(), append_inputs()
    expected = function(*inputs)
    result = torch.compile(function, fullgraph=True, backend=backend)(*same)
    for got, want in zip((*result, *same), (*expected, *inputs), strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)
    written = inputs[1] if function is not append_to_a_new_cache else expected[1] / 2
    assert not torch.equal(written, append_inputs()[1])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@torch.inference_mode()
def test_caches_that_come_as_two_views_of_one_tensor(backend):
    q, cache, k, v, lengths = append_inputs()
    same = cache.clone()
    expected = append(q, *cache.unbind(2), k, v, lengths)
    out = torch.compile(append, fullgraph=True, backend=backend)(q, *same.unbind(2), k, v, lengths)
    torch.testing.assert_close(out, expected, **TOLERANCE)
    assert torch.equal(same, cache) and not torch.equal(same, append_inputs()[1])


@torch.inference_mode()
def test_given_results_are_written_by_compiled_code():
    q, k, v = values(1, 5, 4, 16), values(1, 9, 2, 16, seed=1), values(1, 9, 2, 16, seed=2)
    out, lse = torch.zeros(1, 5, 4, 16), torch.zeros(1, 4, 5)

    def into(q, k, v, out, lse):
        hopper_attention.flash_attn_func(q, k, v, causal=True, out=out, softmax_lse=lse, num_splits=0)
        return out * 2

    twice = torch.compile(into, fullgraph=True, backend="inductor")(q, k, v, out, lse)
    expected, expected_lse = hopper_attention.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse) and torch.equal(twice, expected * 2)


@torch.inference_mode()
def test_merging_in_place():
    def merge(out_a, lse_a, out_b, lse_b):
        hopper_attention.merge_states(out_a, lse_a, out_b, lse_b, out=out_a, lse=lse_a)
        return out_a + 1

    def inputs():
        return values(2, 5, 4, 16), values(2, 4, 5, seed=1), values(2, 5, 4, 16, seed=2), values(2, 4, 5, seed=3)

    expected, same = inputs(), inputs()
    want = merge(*expected)
    got = torch.compile(merge, fullgraph=True, backend="inductor")(*same)
    for a, b in zip((got, *same), (want, *expected), strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)


@torch.inference_mode()
def test_strides_arrive_as_they_were_made():
    """Inductor must hand over q with the last stride 1 that the function needs, whatever made it."""
    strides = []

    def attend(x):
        q = (x + 1).view(1, 5, 16, 4).transpose(2, 3).contiguous()
        return hopper_attention.flash_attn_func(q, q, q)

    original = hopper_attention.interface.flash_attn_func

    def spy(q, *args, **kwargs):
        strides.append(q.stride())
        return original(q, *args, **kwargs)

    compiled = torch.compile(attend, fullgraph=True, backend="inductor")
    x = values(1, 5, 64)
    compiled(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_attention.interface, "flash_attn_func", spy)
        compiled(x)
    assert strides == [(320, 64, 16, 1)]


@pytest.mark.parametrize("function", [append_to_halves, append_twice], ids=lambda f: f.__name__)
@torch.inference_mode()
def test_inductor_copies_no_cache(function, monkeypatch):
    """The compiled code appends to the caller's memory."""
    q, cache, k, v, lengths = append_inputs()
    compiled = torch.compile(function, fullgraph=True, backend="inductor")
    compiled(q, cache, k, v, lengths)
    addresses = []
    original = hopper_attention.interface.flash_attn_with_kvcache

    def spy(q, k_cache, v_cache, *args, **kwargs):
        addresses.append((k_cache.data_ptr(), v_cache.data_ptr()))
        return original(q, k_cache, v_cache, *args, **kwargs)

    monkeypatch.setattr(hopper_attention.interface, "flash_attn_with_kvcache", spy)
    compiled(q, cache, k, v, lengths)
    expected = (cache[:, :, 0].data_ptr(), cache[:, :, 1].data_ptr())
    assert addresses and all(found == expected for found in addresses)
