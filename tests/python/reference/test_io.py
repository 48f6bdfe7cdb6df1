"""The IO formulas against a count of every load and store of the loops, and what the printed tables claim."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hopper_attention.reference import io

SETTINGS = settings(max_examples=100, deadline=None, derandomize=True)
SIZE = st.integers(1, 300)


@st.composite
def shapes(draw):
    head_dims = draw(st.sampled_from([1, 8, 64])), draw(st.sampled_from([1, 8, 64]))
    return io.Shape(draw(SIZE), draw(SIZE), *head_dims, dtype=draw(st.sampled_from(sorted(io.ELEMENT_BYTES))))


def rows_of(length, block):
    return [min(block, length - first) for first in range(0, length, block)]


@SETTINGS
@given(shapes(), st.sampled_from([64, 2048, 100_000]))
def test_flash_1_counts_what_its_loops_move(shape, shared):
    block, moved = io.paper_block(shape, shared), 0
    for keys in rows_of(shape.keys, block):
        moved += keys * (shape.head_dim + shape.dv) * shape.element  # K_j, V_j
        for rows in rows_of(shape.queries, min(block, shape.head_dim)):
            moved += rows * shape.head_dim * shape.element  # Q_i
            moved += 2 * rows * (shape.dv * shape.element + 2 * io.STATISTIC_BYTES)  # O_i, l_i, m_i: read and written
    assert io.flash_1(shape, shared).bytes == moved


@SETTINGS
@given(shapes(), st.sampled_from([64, 2048, 100_000]))
def test_flash_2_counts_what_its_loops_move(shape, shared):
    block, moved = io.paper_block(shape, shared), 0
    for rows in rows_of(shape.queries, block):
        moved += rows * ((shape.head_dim + shape.dv) * shape.element + io.STATISTIC_BYTES)  # Q_i, O_i, L_i
        for keys in rows_of(shape.keys, block):
            moved += keys * (shape.head_dim + shape.dv) * shape.element  # K_j, V_j
    assert io.flash_2(shape, shared).bytes == moved


def test_standard_attention_writes_and_reads_two_matrices():
    shape = io.Shape(100, 50, 8, 4)
    loads_and_stores = [100 * 8, 50 * 8, 5000, 5000, 5000, 5000, 50 * 4, 100 * 4]  # Q K S | S P | P V O
    assert io.standard(shape).bytes == 2 * sum(loads_and_stores)
    assert io.standard(shape).matmul == 2 * 5000 * 12


def test_flash_traffic_grows_with_the_square_of_d_over_m():
    n = 1 << 14
    base = io.flash_2(io.Shape(n, n, 64), 1 << 17).bytes
    assert io.flash_2(io.Shape(n, n, 128), 1 << 17).bytes / base == pytest.approx(4, rel=0.1)
    assert io.flash_2(io.Shape(n, n, 64), 1 << 16).bytes / base == pytest.approx(2, rel=0.1)
    assert io.flash_2(io.Shape(2 * n, 2 * n, 64), 1 << 17).bytes / base == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("algorithm", [io.flash_1, io.flash_2])
def test_flash_moves_more_below_the_crossover_and_less_above(head_dim, algorithm):
    shape = io.Shape(4096, 4096, head_dim)
    limit = io.crossover_shared_bytes(shape, algorithm)
    assert algorithm(shape, limit // 2).bytes > io.standard(shape).bytes
    assert algorithm(shape, 2 * limit).bytes < io.standard(shape).bytes


def test_kernel_reads_everything_once_when_a_pass_fits_in_l2():
    shape = io.Shape(4096, 4096, 128)
    traffic = io.kernel_dram_bytes(4, 16, 16, shape, heads_per_pass=8)
    tensors = 4 * 4 * 16 * 4096 * 128 * 2
    assert traffic == io.Traffic(tensors + 4 * 16 * 4096 * 4, 0)


def test_kernel_reads_keys_again_when_a_pass_does_not_fit():
    shape = io.Shape(1 << 17, 1 << 17, 128)
    full = io.kernel_dram_bytes(1, 1, 1, shape)
    causal = io.kernel_dram_bytes(1, 1, 1, shape, causal=True)
    one_read = (1 << 17) * 256 * 2
    waves = (1 << 17) / 128 / 132
    assert full.rereads == pytest.approx((waves - 1) * one_read, rel=1e-6)
    assert 0 < causal.rereads < full.rereads
    assert io.kernel_dram_bytes(1, 1, 1, shape, l2_bytes=1 << 30).rereads == 0


def test_grouped_heads_read_keys_once_for_the_group():
    shape = io.Shape(2048, 2048, 128)
    traffic = io.kernel_dram_bytes(1, 32, 8, shape, heads_per_pass=32)
    assert traffic.total == 2048 * 2 * 128 * 2 * (32 + 8) + 32 * 2048 * 4


def test_no_queries_move_nothing():
    assert io.kernel_dram_bytes(1, 2, 2, io.Shape(0, 100, 64)) == io.Traffic(0, 0)


def test_command_prints_every_algorithm_and_the_crossovers():
    command = [sys.executable, "-m", "hopper_attention.reference.io", "--seqlen", "2048", "--head-dim", "256"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.split()[5] for line in lines[2:5]] == ["standard", "FlashAttention-1", "FlashAttention-2/3"]
    assert float(lines[4].split()[8]) > 1  # at d 256 a Hopper SM's shared memory is too small
    assert lines[-1].split()[0] == "256"


def test_plot_writes_a_figure(tmp_path):
    pytest.importorskip("matplotlib")
    io.plot(str(tmp_path / "io.png"), 1024, "bfloat16")
    assert (tmp_path / "io.png").stat().st_size > 10_000
