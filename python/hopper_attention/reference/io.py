"""Memory traffic and operations of attention algorithms, and the DRAM bytes to expect of the kernel.

    python -m hopper_attention.reference.io [--seqlen N] [--head-dim D] [--dtype bfloat16] [--plot FILE.png]

The model has two levels: M elements of fast memory (shared memory) and slow memory (HBM) without a cache between
them, as in Dao et al., FlashAttention (2022), section 3.2. For N queries and keys of head dim d: standard attention
moves Theta(N d + N^2) elements, FlashAttention Theta(N^2 d^2 / M), so it moves less only while d^2 is well below M.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

ELEMENT_BYTES = {"float8_e4m3fn": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
STATISTIC_BYTES = 4  # maxima, sums and LSE are float32
HOPPER_SHARED_BYTES = 227 * 1024  # one thread block's share of an SM
H200_L2_BYTES = 60 << 20


@dataclass(frozen=True)
class Shape:
    """One head: queries, keys, head dim of q and k, of v and out (default head_dim)."""

    queries: int
    keys: int
    head_dim: int
    head_dim_v: int = 0
    dtype: str = "bfloat16"

    @property
    def dv(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def element(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def operands(self) -> int:
        """Bytes of Q, K, V and O, each once: what no algorithm can avoid."""
        rows = self.queries * (self.head_dim + self.dv)
        return (rows + self.keys * (self.head_dim + self.dv)) * self.element


@dataclass(frozen=True)
class Cost:
    """bytes: moved to and from slow memory; matmul: floating-point operations of the two products; exps: exponentials;
    other: the remaining floating-point operations (scale, maximum, subtraction, sum, rescale, division).
    """

    bytes: int
    matmul: int
    exps: int
    other: int


def products(shape: Shape) -> int:
    """Q K^T and P V: two operations for each multiply-add."""
    return 2 * shape.queries * shape.keys * (shape.head_dim + shape.dv)


def standard(shape: Shape, shared_bytes: int = HOPPER_SHARED_BYTES) -> Cost:
    """S = Q K^T, P = softmax(S), O = P V as three kernels: S and P are each written and read once, in the dtype.

    Bytes: (N d + M d + M d_v + N d_v + 4 N M) e.
    Source: FlashAttention (2022), Algorithm 0 and Theorem 2.
    """
    scores = shape.queries * shape.keys
    return Cost(shape.operands + 4 * scores * shape.element, products(shape), scores, 5 * scores)


def flash_1(shape: Shape, shared_bytes: int = HOPPER_SHARED_BYTES) -> Cost:
    """Keys outside: K and V once; Q and the statistics once, O twice (read, write), for each of ceil(M / B_c) key
    blocks.

    B_c = shared / (4 d) as in the paper's Algorithm 1, line 1.
    Source: FlashAttention (2022), Theorem 2.
    """
    blocks = ceil_div(shape.keys, paper_block(shape, shared_bytes))
    once = shape.keys * (shape.head_dim + shape.dv) * shape.element
    again = shape.queries * ((shape.head_dim + 2 * shape.dv) * shape.element + 4 * STATISTIC_BYTES)
    scores = shape.queries * shape.keys
    rescales = blocks * shape.queries * (4 * shape.dv + 6)
    return Cost(once + blocks * again, products(shape), scores + 2 * blocks * shape.queries, 4 * scores + rescales)


def flash_2(shape: Shape, shared_bytes: int = HOPPER_SHARED_BYTES, rows: int = 0, keys: int = 0) -> Cost:
    """Queries outside (FlashAttention-2 and -3): Q, O and LSE once, K and V once for each of ceil(N / B_r) query
    blocks.

    B_r = B_c = shared / (4 d) unless `rows` and `keys` say otherwise.
    Source: FlashAttention-2 (2023), section 3.1.
    """
    rows = rows or paper_block(shape, shared_bytes)
    keys = keys or rows
    once = shape.queries * ((shape.head_dim + shape.dv) * shape.element + STATISTIC_BYTES)
    again = shape.keys * (shape.head_dim + shape.dv) * shape.element
    scores = shape.queries * shape.keys
    blocks = ceil_div(shape.keys, keys)
    rescales = blocks * shape.queries * (shape.dv + 2) + shape.queries * shape.dv
    moved = once + ceil_div(shape.queries, rows) * again
    return Cost(moved, products(shape), scores + blocks * shape.queries, 4 * scores + rescales)


ALGORITHMS: dict[str, Callable[..., Cost]] = {
    "standard": standard,
    "FlashAttention-1": flash_1,
    "FlashAttention-2/3": flash_2,
}


def paper_block(shape: Shape, shared_bytes: int) -> int:
    """M / (4 d): blocks of Q, K, V and O share the fast memory evenly. At least 1."""
    return max(1, shared_bytes // (4 * max(shape.head_dim, shape.dv) * shape.element))


def crossover_shared_bytes(shape: Shape, algorithm: Callable[..., Cost] = flash_2) -> int:
    """The smallest shared memory, to 256 bytes, with which `algorithm` moves no more than standard attention."""
    limit = standard(shape).bytes
    low, high = 0, 1 << 20  # in units of 256 bytes
    while low < high:
        middle = (low + high) // 2
        if algorithm(shape, middle * 256).bytes <= limit:
            high = middle
        else:
            low = middle + 1
    return low * 256


@dataclass(frozen=True)
class Traffic:
    """DRAM bytes of one launch. compulsory: Q, K, V, O, LSE once; rereads: K and V again where a pass does not fit in
    L2.
    """

    compulsory: int
    rereads: int

    @property
    def total(self) -> int:
        return self.compulsory + self.rereads


def kernel_dram_bytes(
    batch: int,
    heads_q: int,
    heads_k: int,
    shape: Shape,
    *,
    tile_rows: int = 128,
    packed_heads: int = 1,
    heads_per_pass: int = 0,
    ctas: int = 132,
    l2_bytes: int = H200_L2_BYTES,
    l2_share: float = 0.4,
    causal: bool = False,
) -> Traffic:
    """What the prefill kernel should move between DRAM and L2; the arguments are fields of `plan(...)`.

    Tiles of `heads_per_pass` head groups (0: all batch * heads_q / packed_heads) run together, query block by query
    block (src/kernels/tile_scheduler.h); `packed_heads` query heads share a tile. If K and V of a pass fit in
    l2_share of L2, they are read once. If not, each wave of `ctas` tiles reads again what its heads see, all tiles of
    a head in a wave sharing one read. Of the keys, a causal wave sees on average (M - N / 2) / M. Sinks, tensor maps
    and scheduling are left out: kilobytes.
    """
    query_bytes = shape.queries * (shape.head_dim + shape.dv) * shape.element
    kv_bytes = shape.keys * (shape.head_dim + shape.dv) * shape.element
    compulsory = batch * (heads_q * (query_bytes + shape.queries * STATISTIC_BYTES) + heads_k * kv_bytes)
    groups = batch * heads_q // packed_heads
    per_pass = min(heads_per_pass or groups, groups)
    if not per_pass or not shape.queries:
        return Traffic(compulsory if shape.queries else 0, 0)
    sharing = max(1, heads_q // heads_k // packed_heads)  # groups that read the same K and V
    kv_heads = ceil_div(per_pass, sharing)
    if kv_heads * kv_bytes <= l2_share * l2_bytes:
        return Traffic(compulsory, 0)
    m_blocks = ceil_div(shape.queries * packed_heads, tile_rows)
    waves = max(1, m_blocks * per_pass / ctas)
    heads_in_wave = min(kv_heads, max(1, ceil_div(ctas, sharing)))
    seen = max(0.0, 1 - min(shape.queries, shape.keys) / (2 * shape.keys)) if causal else 1.0
    read_in_pass = waves * heads_in_wave * kv_bytes * seen
    passes = ceil_div(groups, per_pass)
    return Traffic(compulsory, max(0, round(passes * (read_in_pass - kv_heads * kv_bytes))))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def size(count: float) -> str:
    """1234567 -> "1.23 M"."""
    if count < 1000:
        return f"{count:.0f}"
    power = min(5, int(math.log10(count) // 3))
    return f"{count / 1000**power:.3g} {' kMGTP'[power]}"


def table(shapes: list[Shape], shared_bytes: int) -> str:
    """Bytes and operations of each algorithm for each shape, FlashAttention's bytes beside standard attention's."""
    names = f"{'shape (N x M x d)':>22} {'algorithm':>20} {'bytes':>8} {'/ standard':>11}"
    lines = [f"{names} {'matmul':>8} {'exp':>8} {'other':>8}"]
    for shape in shapes:
        for name, algorithm in ALGORITHMS.items():
            cost = algorithm(shape, shared_bytes)
            ratio = cost.bytes / standard(shape).bytes
            label = f"{shape.queries} x {shape.keys} x {shape.head_dim}"
            moved = f"{label:>22} {name:>20} {size(cost.bytes):>8} {ratio:>11.3f}"
            lines.append(f"{moved} {size(cost.matmul):>8} {size(cost.exps):>8} {size(cost.other):>8}")
    return "\n".join(lines)


def crossovers(head_dims: list[int], seqlen: int, dtype: str) -> str:
    """Below which shared memory FlashAttention moves more than standard attention."""
    lines = [f"{'head dim':>9} {'FA1 moves more below':>22} {'FA2/3 moves more below':>24}"]
    for d in head_dims:
        shape = Shape(seqlen, seqlen, d, dtype=dtype)
        limits = [crossover_shared_bytes(shape, algorithm) / 1024 for algorithm in (flash_1, flash_2)]
        lines.append(f"{d:>9} {limits[0]:>18.1f} KiB {limits[1]:>20.1f} KiB")
    return "\n".join(lines)


def plot(path: str, seqlen: int, dtype: str) -> None:
    """Bytes over shared memory for three head dims, to `path`. Needs matplotlib, which is imported here."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 4), sharey=True)
    memory = [2**n * 1024 for n in range(2, 11)]
    for axis, d in zip(axes, (64, 128, 256), strict=True):
        shape = Shape(seqlen, seqlen, d, dtype=dtype)
        for name, algorithm in ALGORITHMS.items():
            axis.plot([m / 1024 for m in memory], [algorithm(shape, m).bytes / 1e6 for m in memory], label=name)
        axis.axvline(HOPPER_SHARED_BYTES / 1024, color="gray", linestyle=":", label="Hopper, 227 KiB")
        axis.set(title=f"head dim {d}", xlabel="shared memory (KiB)", xscale="log", yscale="log")
    axes[0].set_ylabel("bytes moved (MB)")
    figure.suptitle(f"{seqlen} queries and keys, one head, {dtype}")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Memory traffic of attention algorithms, one head, without a cache.")
    parser.add_argument("--seqlen", type=int, default=0, help="queries and keys; default: 1k, 4k and 16k")
    parser.add_argument("--head-dim", type=int, default=0, help="default: 64, 128 and 256")
    parser.add_argument("--dtype", choices=sorted(ELEMENT_BYTES), default="bfloat16")
    parser.add_argument("--shared-bytes", type=int, default=HOPPER_SHARED_BYTES, help="fast memory of one tile")
    parser.add_argument("--plot", metavar="FILE", help="write a figure (needs matplotlib)")
    options = parser.parse_args(arguments)
    head_dims = [options.head_dim] if options.head_dim else [64, 128, 256]
    lengths = [options.seqlen] if options.seqlen else [1024, 4096, 16384]
    print(f"{options.shared_bytes / 1024:.0f} KiB of shared memory, {options.dtype}, one head")
    print(table([Shape(n, n, d, dtype=options.dtype) for d in head_dims for n in lengths], options.shared_bytes))
    print()
    print(crossovers(head_dims, lengths[-1], options.dtype))
    if options.plot:
        plot(options.plot, lengths[-1], options.dtype)
        print(f"figure: {options.plot}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
