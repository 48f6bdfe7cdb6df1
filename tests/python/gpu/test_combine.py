"""flash_attn_combine and merge_states on the GPU: against float64, and bitwise where nothing may matter.

Wrong arguments, on made-up tensors, are in tests/python/test_combine.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

import hopper_attention  # noqa: E402
from gpu import support  # noqa: E402
from gpu.support import DTYPES, same_bits  # noqa: E402
from hopper_attention import flash_attn_combine, merge_states  # noqa: E402

pytestmark = pytest.mark.gpu

INF, NAN = float("inf"), float("nan")
ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SUMS = 3e-6  # what float32 sums, weights and fast exponentials may add, relative to the sum of absolute values
RERUNS = 50


@dataclass(frozen=True)
class Case:
    """`parts` results for (batch, queries, heads) rows of `columns`."""

    why: str
    parts: int
    batch: int = 2
    queries: int = 37
    heads: int = 6
    columns: int = 128
    level: float = 0.0  # mean of the LSEs
    spread: float = 3.0
    keys: str = "all"  # which parts have keys: all, some, none, first, last

    @property
    def rows(self) -> tuple[int, int, int]:
        return self.batch, self.queries, self.heads


COMBINE = [
    Case("one part", 1),
    Case("two parts: the kernel that keeps all parts in registers", 2),
    Case("three parts, where that kernel has a place for four", 3),
    Case("the most parts of that kernel", 4),
    Case("the fewest parts of the kernel that looks at LSEs first", 5),
    Case("one pass of parts", 8),
    Case("one part more than a pass: two slices", 9),
    Case("prime, and not a multiple of the slices", 61),
    Case("a part for each SM", 132),
    Case("the most splits", 256),
    Case("more parts than any plan makes", 1000, batch=1, queries=3, heads=2, columns=64),
    Case("one vector for each row", 7, columns=8),
    Case("one vector for each row, two parts", 2, columns=8),
    Case("vectors of a row do not divide a block", 12, columns=72),
    Case("vectors of a row do not divide a block, two parts", 2, columns=72),
    Case("slices do not divide a block", 64, columns=96),
    Case("wide rows", 40, columns=512),
    Case("wide rows, two parts", 2, columns=512),
    Case("odd vectors of a row", 3, columns=40),
    Case("one row", 132, batch=1, queries=1, heads=1),
    Case("one row, two parts", 2, batch=1, queries=1, heads=1),
    Case("a decode step", 17, batch=8, queries=1, heads=32),
    Case("many blocks", 2, batch=3, queries=1001, heads=7, columns=64),
    Case("many blocks, many parts", 20, batch=3, queries=501, heads=7, columns=64),
    Case("large LSEs, whose own rounding must not reach the weights", 6, level=3000.0),
    Case("large LSEs, two parts", 2, level=-3000.0),
    Case("one part outweighs the others by more than float32 holds", 11, spread=200.0),
    Case("some parts without keys", 4, keys="some"),
    Case("some parts without keys, slices", 100, keys="some"),
    Case("only the first part has keys", 64, keys="first"),
    Case("only the last part has keys", 64, keys="last"),
    Case("only the last of two parts has keys", 2, keys="last"),
    Case("no part has keys", 3, keys="none"),
    Case("no part of many has keys", 77, keys="none"),
]
MERGE = [
    Case("a batch", 2),
    Case("one row", 2, batch=1, queries=1, heads=1),
    Case("one vector for each row", 2, columns=8),
    Case("odd vectors of a row", 2, columns=40),
    Case("wide rows", 2, columns=512),
    Case("vectors of a row do not divide a block", 2, columns=72),
    Case("many blocks", 2, batch=3, queries=1001, heads=7, columns=128),
    Case("large LSEs", 2, level=3000.0),
    Case("one side outweighs the other", 2, spread=300.0),
    Case("some sides without keys", 2, keys="some"),
    Case("only b has keys", 2, keys="last"),
    Case("neither has keys", 2, keys="none"),
]


def by_why(case: Case) -> str:
    return case.why


def make_parts(case: Case, dtype=torch.float32, seed=0):
    """out (S, B, M, H, D) of `dtype` and lse (S, B, M, H). Parts without keys hold NaN, infinity and garbage, and say
    so by -inf and +inf in turn.
    """
    generator = torch.Generator(support.DEVICE).manual_seed(seed)
    shape = (case.parts, *case.rows)
    out = torch.randn((*shape, case.columns), generator=generator, device=support.DEVICE).to(dtype)
    lse = torch.randn(shape, generator=generator, device=support.DEVICE) * case.spread + case.level
    empty = torch.zeros(shape, dtype=torch.bool, device=support.DEVICE)
    if case.keys == "some":
        empty = torch.rand(shape, generator=generator, device=support.DEVICE) < 0.4
    elif case.keys != "all":
        empty[:] = True
        if case.keys != "none":
            empty[0 if case.keys == "first" else -1] = False
    turn = torch.rand(shape, generator=generator, device=support.DEVICE)
    lse = torch.where(empty, torch.where(turn < 0.5, -INF, INF), lse)
    poison = torch.where(turn < 0.33, NAN, torch.where(turn < 0.66, INF, 6e4))[..., None].to(dtype)
    return torch.where(empty[..., None], poison, out), lse


def expected(out, lse):
    """(out, lse, sum of weight * abs(out)) in float64."""
    out, lse = out.double(), lse.double()
    lse = torch.where(lse == INF, -INF, lse)
    if lse.shape[0] == 0:
        return out.sum(0), torch.full(lse.shape[1:], -INF, dtype=torch.float64, device=lse.device), out.sum(0)
    maximum = lse.amax(0)
    weight = torch.exp(lse - torch.where(maximum == -INF, 0.0, maximum))
    total = weight.sum(0)
    weight = weight / torch.where(total == 0, 1.0, total)
    used = torch.where(weight[..., None] == 0, 0.0, out)
    return (weight[..., None] * used).sum(0), maximum + torch.log(total), (weight[..., None] * used.abs()).sum(0)


def require_right(found, parts, logs):
    """`found` = (out, lse (B, M, H)) against float64."""
    out, lse = found
    want, want_lse, magnitude = expected(parts, logs)
    allowed = ROUNDING[out.dtype] * 1.01 * want.abs() + SUMS * magnitude + 1e-7
    wrong = ~((out.double() - want).abs() <= allowed)  # NaN is wrong
    assert not bool(wrong.any()), (
        f"out: {int(wrong.sum())} of {wrong.numel()} elements are wrong, first at {wrong.nonzero()[0].tolist()}"
    )
    assert bool(torch.equal(lse == -INF, want_lse == -INF)), "the pattern of -inf in lse"
    seen = want_lse > -INF
    errors = (lse.double() - want_lse)[seen].abs()
    assert bool((errors <= 2e-6 + 3e-7 * want_lse[seen].abs()).all()), f"lse: off by {float(errors.max())}"


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("case", COMBINE, ids=by_why)
def test_combine(case, dtype):
    parts, logs = make_parts(case)
    out, lse = flash_attn_combine(parts, logs, out_dtype=DTYPES[dtype])
    assert out.dtype == DTYPES[dtype] and out.is_contiguous() and lse.transpose(1, 2).is_contiguous()
    require_right((out, lse), parts, logs)
    if case.parts == 1 and dtype == "fp32":
        assert bool(torch.equal(out, parts[0])) and same_bits(lse, logs[0])


def halves(case, dtype, seed=0):
    """out_a, lse_a (B, H, M), out_b, lse_b."""
    parts, logs = make_parts(case, dtype, seed)
    logs = logs.transpose(2, 3).contiguous()
    return parts[0].clone(), logs[0].clone(), parts[1].clone(), logs[1].clone()


def require_merged(found, a, lse_a, b, lse_b):
    out, lse = found
    require_right((out, lse.transpose(-1, -2)), torch.stack([a, b]), torch.stack([lse_a, lse_b]).transpose(-1, -2))


@pytest.mark.parametrize("packed", [False, True], ids=["batched", "packed"])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("case", MERGE, ids=by_why)
def test_merge_states(case, dtype, packed):
    tensors = halves(case, DTYPES[dtype])
    if packed:
        tensors = tuple(x[0] for x in tensors)
    found = merge_states(*tensors)
    assert found[0].dtype == DTYPES[dtype] and found[0].is_contiguous() and found[1].is_contiguous()
    require_merged(found, *tensors)


@pytest.mark.parametrize("where", ["a", "b", "both"])
def test_a_part_without_keys_leaves_the_other_as_it_is(where):
    a, lse_a, b, lse_b = halves(Case("", 2), torch.bfloat16)
    if where != "b":
        a[:], lse_a[:] = NAN, -INF
    if where != "a":
        b[:], lse_b[:] = NAN, INF
    out, lse = merge_states(a, lse_a, b, lse_b)
    if where == "both":
        assert bool((out == 0).all()) and bool((lse == -INF).all())
    else:
        assert same_bits(out, b if where == "a" else a) and same_bits(lse, lse_b if where == "a" else lse_a)


@pytest.mark.parametrize("parts", [2, 30])
def test_a_nan_log_sum_exp_stays_in_its_row(parts):
    x, logs = make_parts(Case("", parts, keys="some"))
    clean = flash_attn_combine(x, logs)
    logs[parts // 2, 1, 3, 2] = NAN
    out, lse = flash_attn_combine(x, logs)
    assert bool(out[1, 3, 2].isnan().all()) and bool(lse[1, 3, 2].isnan())
    out[1, 3, 2], lse[1, 3, 2] = clean[0][1, 3, 2], clean[1][1, 3, 2]
    assert same_bits(out, clean[0]) and same_bits(lse, clean[1])


def test_no_parts():
    out, lse = flash_attn_combine(torch.empty(0, 2, 3, 4, 64, device="cuda"), torch.empty(0, 2, 3, 4, device="cuda"))
    assert bool((out == 0).all()) and bool((lse == -INF).all())


@pytest.mark.parametrize("shape", [(3, 0, 5, 4, 64), (3, 2, 0, 4, 64), (3, 2, 5, 0, 64)])
def test_no_rows(shape):
    parts, logs = torch.empty(shape, device="cuda"), torch.empty(shape[:-1], device="cuda")
    out, lse = flash_attn_combine(parts, logs)
    assert out.shape == shape[1:] and lse.shape == shape[1:-1]
    logs = logs[0].transpose(1, 2)
    out, lse = merge_states(parts[0], logs, parts[0], logs)
    assert out.shape == shape[1:] and lse.shape == logs.shape


@pytest.mark.parametrize("case", [MERGE[0], MERGE[3], MERGE[9]], ids=by_why)
def test_the_gpu_does_what_the_reference_does(case):
    tensors = halves(case, torch.float32)
    for a, b in zip(merge_states(*tensors), merge_states(*(x.cpu() for x in tensors)), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=3e-6, atol=3e-6)
    parts, logs = make_parts(Case("", 20, keys="some"))
    found, reference = flash_attn_combine(parts, logs), flash_attn_combine(parts.cpu(), logs.cpu())
    for a, b in zip(found, reference, strict=True):
        assert a.shape == b.shape and a.stride() == b.stride()
        torch.testing.assert_close(a.cpu(), b, rtol=3e-6, atol=3e-6)


def with_gaps(x, order, gap):
    """A copy of `x` whose dims lie in memory in `order`, with `gap` NaN elements behind each row."""
    sizes = [x.shape[dim] for dim in order]
    memory = torch.full((*sizes[:-1], sizes[-1] + gap), NAN, dtype=x.dtype, device=x.device)
    view = memory[..., : sizes[-1]].permute(*(order.index(dim) for dim in range(x.dim())))
    return view.copy_(x)


@pytest.mark.parametrize("parts", [2, 4, 23])
def test_combine_of_strided_parts_equals_the_contiguous_copy(parts):
    x, logs = make_parts(Case("", parts, keys="some"))
    clean = flash_attn_combine(x, logs)
    for order in ([3, 2, 1, 0, 4], [1, 0, 3, 2, 4], [0, 1, 3, 2, 4]):
        found = flash_attn_combine(with_gaps(x, order, 4), with_gaps(logs, order[:-1], 1))
        assert same_bits(found[0], clean[0]) and same_bits(found[1], clean[1]), order
    memory = torch.full((2, 37, 6, 128 + 4), 7.0, device="cuda")
    flash_attn_combine(x, logs, out=memory[..., 4:])
    assert same_bits(memory[..., 4:], clean[0]) and bool((memory[..., :4] == 7).all())
    once = flash_attn_combine(x[:1].expand(parts, -1, -1, -1, -1), logs)
    assert same_bits(once[0], flash_attn_combine(x[:1].repeat(parts, 1, 1, 1, 1), logs)[0])


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_merge_of_strided_tensors_equals_the_contiguous_copy(dtype):
    a, lse_a, b, lse_b = halves(Case("", 2, keys="some"), DTYPES[dtype])
    clean = merge_states(a, lse_a, b, lse_b)
    for order in ([2, 0, 1, 3], [1, 2, 0, 3]):
        out, lse = torch.full_like(with_gaps(a, order, 8), 7.0), with_gaps(lse_a, [2, 0, 1], 3)
        found = merge_states(
            with_gaps(a, order, 8),
            with_gaps(lse_a, order[:-1], 2),
            with_gaps(b, order[::-1][1:] + [3], 16),
            with_gaps(lse_b, [1, 2, 0], 1),
            out=out,
            lse=lse,
        )
        assert found[0] is out and found[1] is lse
        assert same_bits(out, clean[0]) and same_bits(lse, clean[1]), order
    same = merge_states(a, lse_a[:1, :1, :1].expand_as(lse_a), b, lse_b)
    assert same_bits(same[0], merge_states(a, lse_a[:1, :1, :1].expand_as(lse_a).contiguous(), b, lse_b)[0])


@pytest.mark.parametrize("columns", [8, 72, 128, 512])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_merging_into_a(dtype, columns):
    """Every thread of a row needs the LSE that one of them overwrites."""
    case = Case("", 2, batch=3, queries=701, heads=7, columns=columns, keys="some")
    a, lse_a, b, lse_b = halves(case, DTYPES[dtype])
    clean = merge_states(a, lse_a, b, lse_b)
    for _ in range(10):
        mine, mine_lse = a.clone(), lse_a.clone()
        found = merge_states(mine, mine_lse, b, lse_b, out=mine, lse=mine_lse)
        assert found[0] is mine and found[1] is mine_lse
        assert same_bits(mine, clean[0]) and same_bits(mine_lse, clean[1])


def test_nothing_around_the_results_is_written():
    case = Case("", 2, queries=33, columns=72)
    a, lse_a, b, lse_b = halves(case, torch.bfloat16)
    before = [x.clone() for x in (a, lse_a, b, lse_b)]
    memory = torch.full((4, 33, 6, 72), 7.0, dtype=torch.bfloat16, device="cuda")
    lse_memory = torch.full((4, 6, 33), 7.0, device="cuda")
    merge_states(a, lse_a, b, lse_b, out=memory[1:3], lse=lse_memory[1:3])
    for x in (memory, lse_memory):
        assert bool((x[0] == 7).all()) and bool((x[3] == 7).all())
    assert all(same_bits(x, y) for x, y in zip(before, (a, lse_a, b, lse_b), strict=True))


@pytest.mark.parametrize("parts", [2, 3, 40, 132])
def test_reruns_graphs_and_side_streams_give_the_same_bits(parts):
    x, logs = make_parts(Case("", parts, batch=4, queries=300, keys="some"))
    clean = flash_attn_combine(x, logs, out_dtype=torch.bfloat16)
    for _ in range(RERUNS):
        found = flash_attn_combine(x, logs, out_dtype=torch.bfloat16)
        assert same_bits(found[0], clean[0]) and same_bits(found[1], clean[1])

    buffer, buffer_logs = torch.zeros_like(x), torch.zeros_like(logs)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = flash_attn_combine(buffer, buffer_logs, out_dtype=torch.bfloat16)
    buffer.copy_(x)
    buffer_logs.copy_(logs)
    graph.replay()
    assert same_bits(captured[0], clean[0]) and same_bits(captured[1], clean[1])

    late = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(x)
        found = flash_attn_combine(late, logs, out_dtype=torch.bfloat16)
    torch.cuda.current_stream().wait_stream(stream)
    assert same_bits(found[0], clean[0]) and same_bits(found[1], clean[1])


def test_parts_may_be_merged_one_after_the_other():
    """The result of ten merges is that of one combine, up to the rounding of each step."""
    parts, logs = make_parts(Case("", 10))
    out, lse = parts[0].clone(), logs[0].transpose(1, 2).contiguous()
    for part, log in zip(parts[1:], logs[1:], strict=True):
        merge_states(out, lse, part, log.transpose(1, 2), out=out, lse=lse)
    want, want_lse = flash_attn_combine(parts, logs)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.transpose(1, 2), want_lse, rtol=1e-5, atol=1e-5)


def test_attention_over_halves_of_the_keys_is_attention_over_all():
    if not any(k.tile.head_dim == 128 and k.dtype == "bfloat16" for k in hopper_attention.built_kernels()):
        pytest.skip("this build has no bf16 kernel for head dim 128")
    q = torch.randn(2, 300, 4, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 500, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    attend = hopper_attention.flash_attn_func
    first = attend(q, k[:, :190], v[:, :190], return_attn_probs=True)
    rest = attend(q, k[:, 190:], v[:, 190:], return_attn_probs=True)
    whole, whole_lse = attend(q, k, v, return_attn_probs=True)
    out, lse = merge_states(*first, *rest)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(out, whole, rtol=2e-2, atol=2e-3)


def needs_free(gigabytes):
    free, _ = torch.cuda.mem_get_info()
    if free < gigabytes * 2**30:
        pytest.skip(f"{gigabytes} GiB of free GPU memory are needed, found {free / 2**30:.0f}")


def test_merge_of_more_than_2_to_the_31_elements():
    needs_free(20)
    queries = 2**21 + 3  # x 8 heads x 128 columns: 2^31 + 3072 elements
    a = torch.empty(queries, 8, 128, device="cuda", dtype=torch.bfloat16).normal_()
    lse_a = torch.randn(8, queries, device="cuda")
    b = torch.empty_like(a).normal_()
    lse_b = torch.randn(8, queries, device="cuda")
    out, lse = merge_states(a, lse_a, b, lse_b)
    for part in (slice(0, 100), slice(2**20 - 50, 2**20 + 50), slice(queries - 100, queries)):
        want, want_lse = merge_states(a[part], lse_a[:, part], b[part], lse_b[:, part])
        assert same_bits(out[part], want) and same_bits(lse[:, part], want_lse), part
        require_merged((want, want_lse), a[part], lse_a[:, part], b[part], lse_b[:, part])


@pytest.mark.parametrize("parts", [2, 5])
def test_combine_of_more_than_2_to_the_31_elements(parts):
    needs_free(40)
    queries = 2**31 // (parts * 4 * 128) + 5  # elements of all parts; the last part lies beyond 2^31 * (1 - 1 / parts)
    wide = torch.empty(parts + 2, 1, queries, 4, 128, device="cuda")
    x = wide[::2] if parts == 2 else wide[:parts]  # at 2 parts an offset of more than 2^31 to the second
    x.normal_()
    logs = torch.randn(x.shape[:-1], device="cuda")
    assert (x.shape[0] - 1) * x.stride(0) + x[0].numel() > 2**31
    out, lse = flash_attn_combine(x, logs, out_dtype=torch.bfloat16)
    for part in (slice(0, 100), slice(queries - 100, queries)):
        want, want_lse = flash_attn_combine(x[:, :, part], logs[:, :, part], out_dtype=torch.bfloat16)
        assert same_bits(out[:, part], want) and same_bits(lse[:, part], want_lse), part
        require_right((want, want_lse), x[:, :, part], logs[:, :, part])


WRONG = {
    "bf16 parts": (TypeError, "^out_partial: dtype", lambda x, logs: flash_attn_combine(x.bfloat16(), logs)),
    "LSE on the CPU": (ValueError, "^lse_partial: .*CPU", lambda x, logs: flash_attn_combine(x, logs.cpu())),
    "head dim 60": (ValueError, "^out_partial: .*multiple of 8", lambda x, logs: flash_attn_combine(x[..., :60], logs)),
    "a view from element 1": (
        ValueError,
        "^out_partial: the address",
        lambda x, logs: flash_attn_combine(x[..., 1:65], logs),
    ),
    "out in the parts": (ValueError, "^out: shares memory", lambda x, logs: flash_attn_combine(x, logs, out=x[0])),
    "LSEs of another shape": (ValueError, "^lse_a: dim 1", lambda x, logs: merge_states(x[0], logs[0], x[1], logs[1])),
}


@pytest.mark.parametrize("why", WRONG)
def test_wrong_arguments_change_nothing(why):
    error, message, call = WRONG[why]
    x, logs = make_parts(Case("", 3))
    clean = flash_attn_combine(x, logs)
    before = x.clone(), logs.clone()
    with pytest.raises(error, match=message):
        call(x, logs)
    torch.cuda.synchronize()
    assert same_bits(x, before[0]) and same_bits(logs, before[1])
    found = flash_attn_combine(x, logs)
    assert same_bits(found[0], clean[0]) and same_bits(found[1], clean[1])
