"""Every dtype with every operation, bit for bit equal to the loop over the ranks, with every instruction set."""

import os
import zlib

import numpy as np
import pytest

import harness
import ringcomm
from cases.reference import COMBINATIONS, COMPLEX, FLOATS, REFUSED, assert_same, filled, reduced, special
from ringcomm import ArgumentError
from ringcomm.native import ffi, lib

LENGTH = 1003  # odd, and not divisible by any vector


def matrix(comm, combinations, length):
    """Reduce with each of the three collectives; return checksums that must be equal on all ranks."""
    everywhere = []
    for name, op in combinations:
        what = f"rank {comm.rank} of {comm.size}, {op} of {length} {name}"
        inputs = [filled(rank, comm.size * length, name) for rank in range(comm.size)]
        expected = reduced(inputs, op)
        x = inputs[comm.rank].copy()
        assert_same(comm.reduce_scatter(x, op), np.split(expected, comm.size)[comm.rank], what)
        on_root = comm.reduce(x, op, root=comm.size - 1, out=np.empty_like(x))
        if on_root is not None:
            assert_same(on_root, expected, what)
        assert_same(comm.all_reduce(x, op), expected, what)
        everywhere.append(zlib.crc32(x))
    return everywhere


@pytest.mark.parametrize("size", [1, 2])
def test_every_operation_of_every_dtype_is_the_loop_over_the_ranks(size, world):
    results = harness.run(matrix, size, COMBINATIONS, LENGTH, world=world)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("size", [3, 4])
def test_large_arrays_are_summed_in_rank_order_too(size):
    chosen = [(name, op) for name, op in COMBINATIONS if op == "sum" or name in ("float16", "bfloat16", "float32")]
    results = harness.run(matrix, size, chosen, 80_001)
    assert all(result == results[0] for result in results)


@pytest.mark.ranks(2, 3)
def test_every_byte_but_0_is_true(comm):
    """Every byte but 0 is true, as in NumPy: an array that C code has filled may hold others than 1."""
    values = np.array([0, 1, 2, 3, 128, 255], np.uint8)
    chosen = np.arange(len(values) ** 3)
    inputs = [values[chosen // len(values) ** rank % len(values)].view(bool) for rank in range(comm.size)]
    combined = {"band": np.logical_and, "bor": np.logical_or, "bxor": np.logical_xor, "sum": np.logical_or}
    combined |= {"prod": np.logical_and, "min": np.logical_and, "max": np.logical_or}
    for op, combine in combined.items():
        x = inputs[comm.rank].copy()
        expected = combine.reduce([each.view(np.uint8) != 0 for each in inputs])
        assert_same(comm.all_reduce(x, op), expected, op)


def special_values(comm):
    everywhere = []
    for name, op in COMBINATIONS:
        if name not in FLOATS + COMPLEX:
            continue
        inputs = [special(rank, name) for rank in range(comm.size)]
        x = inputs[comm.rank].copy()
        assert_same(comm.all_reduce(x, op), reduced(inputs, op), f"{op} of {name}")
        everywhere.append(zlib.crc32(x))
    return everywhere


@pytest.mark.parametrize("size", [2, 3])
def test_special_values_are_those_of_ieee_754(size, world):
    results = harness.run(special_values, size, world=world)
    assert all(result == results[0] for result in results)


def test_a_sum_in_rank_order_differs_from_other_orders():
    inputs = [filled(rank, LENGTH, "float32") for rank in range(3)]
    assert (reduced(inputs, "sum") != reduced(inputs[::-1], "sum")).any()


@pytest.mark.ranks(2)
def test_unsupported_combinations_are_refused(comm):
    for name, op in REFUSED:
        x = filled(comm.rank, 4 * comm.size, name)
        for call in (comm.all_reduce, comm.reduce, comm.reduce_scatter):
            with pytest.raises(ArgumentError, match=name):
                call(x, op)
        assert_same(x, filled(comm.rank, 4 * comm.size, name))
    for op in ("SUM", "mean", "premul_sum", None, 3):
        with pytest.raises(ArgumentError, match="op"):
            comm.all_reduce(np.ones(3), op)
    assert_same(comm.all_reduce(np.ones(3)), np.full(3, float(comm.size)))


# --- Instruction sets -------------------------------------------------------------------------------------------------


def at_level(comm):
    """Return the level in use and the results. The lengths cover full vectors, half vectors and the remainder."""
    matrix(comm, COMBINATIONS, LENGTH)
    everywhere = special_values(comm)
    for length in range(68):
        everywhere += matrix(comm, [("int8", "sum"), ("float16", "avg"), ("complex64", "prod")], length)
    return ffi.string(lib.rc_kernels_name()).decode(), os.getpid(), everywhere


@pytest.fixture(params=["portable", "avx2", "avx512", "neon"])
def level(request, monkeypatch):
    missing = lib.rc_kernels_select(request.param.encode())
    lib.rc_kernels_select(b"")
    if missing:
        pytest.skip(f"this CPU has no {request.param}")
    monkeypatch.setenv("RINGCOMM_KERNELS", request.param)
    return request.param


@pytest.mark.slow
def test_every_instruction_set_gives_the_bits_of_the_loop(level):
    results = ringcomm.launch(at_level, 2, timeout=harness.OPERATION)
    names, pids, everywhere = zip(*results, strict=True)
    assert names == (level, level)
    assert len({*pids, os.getpid()}) == 3
    assert everywhere[0] == everywhere[1]


def test_an_unknown_instruction_set_is_refused(monkeypatch):
    monkeypatch.setenv("RINGCOMM_KERNELS", "avx1024")
    with pytest.raises(ArgumentError, match="avx1024"):
        ringcomm.launch(at_level, 1, world="threads")
