"""The three gates on a grid in which every case has a reason."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from gpu.support import INPUT_KINDS, MAIN, Case, built_dims, judge, judge_all, main_dims, small_masks  # noqa: E402

pytestmark = pytest.mark.gpu

AROUND_TILES = (0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193)
SOME_PAIRS = [(q, AROUND_TILES[(i * 4 + j) % 11]) for i, q in enumerate(AROUND_TILES) for j in (0, 5, 8)]
SOME_PAIRS += [(193, 700), (700, 193), (1, 1000), (383, 385)]
MASKS = small_masks()
RATIOS = (1, 2, 3, 5, 8, 16)


def name_of(kernel) -> str:
    return f"{kernel[0]} d{kernel[1][0]}" + (f"/{kernel[1][1]}" if kernel[1][0] != kernel[1][1] else "")


def on(kernel, **changes) -> dict:
    dtype, (head_dim, head_dim_v) = kernel
    return {"dtype": dtype, "head_dim": head_dim, "head_dim_v": head_dim_v, **changes}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_lengths_around_tiles(kernel, mask):
    pairs = [(q, k) for q in AROUND_TILES for k in AROUND_TILES] if mask in ("full", "causal") else SOME_PAIRS
    judge_all(
        Case(f"lengths {q} and {k}, {mask}", q, k, seed=i, **on(kernel, **MASKS[mask])).with_enough_rows()
        for i, (q, k) in enumerate(pairs)
    )


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
def test_head_ratios(kernel, ratio):
    lengths = [(1, 300), (5, 129), (33, 200), (64, 64), (129, 257), (300, 100), (700, 900)]
    judge_all(
        Case(
            f"{ratio} heads of q for each of k, {mask}",
            q,
            k,
            heads_q=2 * ratio,
            heads_k=2,
            **on(kernel, **MASKS[mask]),
        ).with_enough_rows()
        for q, k in lengths
        for mask in ("full", "causal", "window", "chunk", "everything")
    )


SKIPPING = {  # masks that hide the last blocks of a tile from its upper slabs
    "causal": {"causal": True},
    "one block": {"window": (-1, 40)},
    "chunks end inside a tile": {"chunk": 1000, "causal": False},
    "chunks as long as a slab": {"chunk": 64, "causal": True},
}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_slabs_skip_blocks(dtype):
    """Warpgroups of a tile that visit different blocks, or none, through several tiles of each thread block."""
    dims = [pair for pair in built_dims(dtype) if pair in ((64, 64), (96, 96), (192, 192), (256, 256))]
    if not dims:
        pytest.skip(f"no {dtype} kernels with such tiles were built")
    judge_all(
        Case(f"{why}, head dims {d} and {dv}, {q} and {k}", q, k, dtype=dtype, head_dim=d, head_dim_v=dv, batch=batch,
             heads_q=8, heads_k=8, **mask)
        for d, dv in dims
        for why, mask in SKIPPING.items()
        for q, k, batch in ((449, 449, 20), (193, 1400, 20), (1100, 1090, 6), (1500, 1500, 6))
    )  # fmt: skip


def test_more_heads_than_a_slab_has_rows():
    judge_all(
        main_dims(Case(f"{hq} heads on {hk}", q, 300, heads_q=hq, heads_k=hk, causal=True, sinks="fp32"))
        for hq, hk in ((64, 1), (65, 1), (128, 1), (63, 1), (130, 2))
        for q in (1, 70)
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_head_dims(dtype):
    dims = built_dims(dtype)
    if not dims:
        pytest.skip(f"no {dtype} kernels were built")
    judge_all(
        Case(f"head dims {d} and {dv}, {mask}", q, k, dtype=dtype, head_dim=d, head_dim_v=dv, **MASKS[mask])
        for d, dv in dims
        for mask in ("full", "causal", "everything")
        for q, k in ((200, 333), (129, 128), (260, 130))
    )


THOUSANDS = [
    Case("square", 4096, 4096),
    Case("square causal", 4096, 4096, causal=True),
    Case("ragged causal", 2100, 3001, causal=True),
    Case("more queries than keys", 5000, 1003, causal=True),
    Case("one query on many keys", 1, 20000, batch=8, heads_q=16),
    Case("a few queries on many keys", 17, 20001, batch=4, heads_q=16, causal=True),
    Case("long window", 4000, 4000, window=(1024, 0)),
    Case("short window", 8192, 8192, batch=1, window=(127, 0), sinks="bf16"),
    Case("window to both sides", 3000, 5000, window=(600, 200)),
    Case("chunks", 4096, 4096, chunk=1024, causal=True),
    Case("chunks that no tile divides", 3000, 3333, chunk=1000),
    Case("softcap", 2048, 2048, softcap=50.0, causal=True),
    Case("many heads on one", 1024, 2048, heads_q=32, heads_k=1, causal=True),
    Case("everything", 3000, 3500, causal=True, window=(900, 0), chunk=2048, softcap=10.0, sinks="fp32"),
]


@pytest.mark.parametrize("kernel", MAIN, ids=name_of)
@pytest.mark.parametrize("case", THOUSANDS, ids=lambda c: c.why)
def test_thousands(case, kernel):
    judge(dataclasses.replace(case, **on(kernel)))


NO_KEYS = [
    Case("causal with more queries than keys", 300, 100, causal=True),
    Case("a whole tile sees no key", 600, 65, causal=True),
    Case("every tile but the last sees no key", 1000, 1, causal=True, batch=64),
    Case("no keys at all", 200, 0),
    Case("no keys at all, causal", 200, 0, causal=True),
    Case("no keys at all, sinks", 200, 0, sinks="fp32"),
    Case("sinks where no key is seen", 300, 100, causal=True, sinks="bf16"),
    Case("window before the first key", 400, 50, window=(10, 5), batch=4),
    Case("chunk before the first key", 400, 50, chunk=64, batch=4),
    Case("packed heads where no key is seen", 90, 20, causal=True, heads_q=16, batch=2),
    Case("no queries", 0, 100),
    Case("no queries and no keys", 0, 0),
    Case("no batch", 100, 100, batch=0),
    Case("no heads of q", 100, 100, heads_q=0),
]


@pytest.mark.parametrize("case", NO_KEYS, ids=lambda c: c.why)
def test_nothing_to_see(case):
    judge(main_dims(case))


@pytest.mark.parametrize("batch", [1, 31, 32, 33, 255, 256, 257, 992, 993, 4096])
def test_batches(batch):
    judge_all(
        main_dims(Case(f"batch {batch}", q, k, batch=batch, heads_q=h, heads_k=1, causal=c))
        for q, k, h, c in ((8, 65, 1, False), (9, 5, 3, True), (130, 20, 1, True))
    )


def test_more_tiles_than_a_grid_dimension():
    judge(main_dims(Case("69,632 tiles", 1, 33, batch=4096, heads_q=17, heads_k=17)))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("inputs", INPUT_KINDS)
def test_inputs_other_than_randn(inputs, dtype):
    judge_all(
        main_dims(Case(f"{inputs}, {mask}", 300, 700, dtype=dtype, head_dim=d, inputs=inputs, **MASKS[mask]))
        for d in (64, 128)
        for mask in ("full", "causal", "window", "sinks")
    )


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-6, 0.01, 1.0, 4.0])
@pytest.mark.parametrize("softcap", [0.0, 1.0, 30.0, 50.0])
def test_scales(scale, softcap):
    judge_all(
        main_dims(
            Case(f"scale {scale}, softcap {softcap}", 200, 300, scale=scale, softcap=softcap, causal=causal, dtype=t)
        )
        for causal in (False, True)
        for t in (("bf16", "fp16") if scale < 1 else ("bf16",))  # fp16: see "spread logits" in support.py
    )
