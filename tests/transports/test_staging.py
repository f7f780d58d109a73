"""Collectives of GPUs between hosts, on the emulated device: values, copies, pinned memory."""

import gc
from collections import defaultdict
from itertools import product

import numpy as np
import pytest

import harness
from cases.between_hosts import AXES, CHUNK, ROUNDED, connect_on, on_layouts, run_on
from cases.collectives import PLANS, start
from cases.collectives import pairwise as pairs_of
from cases.on_device import OnDevice
from cases.reference import assert_same, filled, legal, numpy_dtype, reduced
from harness.failures import raised
from ringcomm import ArgumentError, premul_sum
from ringcomm.arrays.adapters import ADAPTERS, NumPyAdapter
from ringcomm.devices import emulated
from ringcomm.devices.contract import Pointer
from ringcomm.testing import run_threads
from ringcomm.transports.staged import staging
from ringcomm.types import REDUCING

LAYOUTS = ("01", "0011", "001", "0101")
layouts = pytest.mark.parametrize("layout", LAYOUTS)
pytestmark = pytest.mark.usefixtures("small_chunks")


# --- Values -----------------------------------------------------------------------------------------------------------


def check_values(comm, segment, seed):
    """Make calls of each collective; reductions have operations whose result does not depend on the order."""
    dtypes = [*AXES["dtype"], "float8_e4m3fn", "float64"]
    axes = {**AXES, "collective": [*PLANS], "op": ["sum", "max", "prod", "band"], "dtype": dtypes}
    for case in pairs_of(axes, seed):
        exact = legal(case.dtype, case.op) and (case.dtype, case.op) not in ROUNDED
        if case.collective not in REDUCING or exact:
            start(comm, case, segment, OnDevice(case.offset))()


@layouts
def test_values_of_several_hosts_are_those_of_numpy(layout):
    run_on(layout, check_values, CHUNK, LAYOUTS.index(layout))


@pytest.mark.usefixtures("no_peer_access")
def test_values_of_gpus_that_do_not_reach_each_other_are_those_of_numpy():
    run_on("001", check_values, CHUNK, 5)
    harness.run(check_values, 3, CHUNK, 6, world="threads")


class SecondArray(emulated.Array):
    """An array on the second GPU of a rank."""


class SecondAdapter(NumPyAdapter):
    def __init__(self):
        self._device = emulated.EmulatedDevice()
        self._device.name = "emulated:1"

    def memory(self, x, writable):
        _, count, code = super().memory(x, writable)
        return Pointer(self._device, x.ctypes.data), count, code


def check_one_gpu(comm):
    x = emulated.array(np.ones(5))
    comm.all_reduce(x)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"expected one on emulated, as the first .*, got emulated:1"):
            comm.all_reduce(x.view(SecondArray))
    assert_same(comm.all_reduce(x), np.full(5, float(comm.size**2)))


@pytest.mark.parametrize("layout", ["0011", "000"])
def test_a_second_gpu_of_a_rank_is_refused(layout, monkeypatch):
    monkeypatch.setitem(ADAPTERS, SecondArray, SecondAdapter())
    run_on(layout, check_one_gpu)


@on_layouts(*LAYOUTS)
def test_sizes_around_a_chunk(comm):
    """Make calls with arrays whose sizes lie around whole chunks."""
    me, size, total = comm.rank + 1, comm.size, sum(range(1, comm.size + 1))
    for more in (-1, 0, 1):
        x = np.arange(2 * CHUNK // 8 + more, dtype=float)
        assert_same(comm.all_reduce(emulated.array(x * me)), x * total)
        assert_same(comm.broadcast(emulated.array(x * me), root=1), x * 2)
        x = x[: CHUNK // 8 + more]
        blocks = np.concatenate([x * rank for rank in range(size)])
        assert_same(comm.all_gather(emulated.array(x * comm.rank)), blocks.reshape(size, -1))
        assert_same(comm.reduce_scatter(emulated.array(blocks * me)), x * comm.rank * total)
        assert_same(
            comm.all_to_all(emulated.array(blocks * me)), np.concatenate([x * comm.rank * (r + 1) for r in range(size)])
        )


@on_layouts("01", "0011")
def test_averages_and_rounded_sums(comm):
    for dtype, op in product(("bfloat16", "float32", "complex64"), ("sum", "avg", premul_sum(0.5))):
        inputs = [filled(rank, (1001,), dtype) for rank in range(comm.size)]
        wide = np.complex128 if dtype == "complex64" else np.float64
        whole = reduced([x.astype(wide) for x in inputs], op)
        x = emulated.array(inputs[comm.rank])
        got = comm.all_reduce(x, op, out=emulated.empty(1001, numpy_dtype(dtype)))
        tolerance = 0.05 if dtype == "bfloat16" else 1e-5
        np.testing.assert_allclose(np.asarray(got).astype(wide), whole, tolerance, tolerance, err_msg=f"{dtype} {op}")
        root = comm.reduce(x, op, out=None if comm.rank else emulated.empty(1001, x.dtype), root=0)
        if comm.rank == 0:
            np.testing.assert_allclose(np.asarray(root).astype(wide), whole, tolerance, tolerance)


@on_layouts("01", "0011")
def test_sums_that_no_cpu_computes_are_refused(comm):
    for count in (10, 10 * CHUNK):
        x = emulated.array(np.ones(count, numpy_dtype("float8_e5m2")))
        assert "float8_e5m2" in str(raised(ArgumentError, lambda x=x: comm.all_reduce(x)))
        assert_same(comm.all_gather(x), np.ones((comm.size, count), x.dtype))


# --- What is copied, and when -----------------------------------------------------------------------------------------


@pytest.fixture
def steps(monkeypatch):
    """Note, by rank, what happens to the chunks: "down", "wire" or "up", and the bytes that are copied."""
    found = defaultdict(list)
    download, upload = staging.Staging._download, staging.Staging._upload

    def downloading(self, *arguments):
        chunk, slot, event = download(self, *arguments)
        found[self._rank].append(("down", sum(size for *_, size in chunk.given)))
        return chunk, slot, event

    def uploading(self, chunk, slot):
        found[self._rank] += [("wire", 0), ("up", sum(size for *_, size in chunk.got))]
        upload(self, chunk, slot)

    monkeypatch.setattr(staging.Staging, "_download", downloading)
    monkeypatch.setattr(staging.Staging, "_upload", uploading)
    return found


def call_once(comm, name, steps):
    """Make a call whose larger array has 8 chunks; return how many this rank copied, and the order of its steps."""
    whole = emulated.array(np.ones(8 * CHUNK // 8))
    part = whole[: whole.size // comm.size]
    if name == "scatter":
        comm.scatter(whole if comm.rank == 0 else None, out=part.copy())
    else:
        getattr(comm, name)(part if name in ("all_gather", "gather") else whole)
    done = [(kind, size / CHUNK) for kind, size in steps[comm.rank]]
    copied = [sum(size for kind, size in done if kind == way) for way in ("down", "up")]
    return tuple(copied), "".join(kind[0] for kind, _ in done)


@pytest.mark.parametrize(
    ("name", "flat", "hierarchy"),
    [
        ("all_reduce", [(8, 8)] * 2, [(4, 4)] * 4),
        ("broadcast", [(8, 0), (0, 8)], [(4, 0)] * 2 + [(0, 4)] * 2),
        ("reduce", [(8, 8), (8, 0)], [(4, 4)] * 2 + [(4, 0)] * 2),
        ("all_gather", [(4, 8)] * 2, [(2, 4)] * 4),
        ("gather", [(4, 8), (4, 0)], [(2, 4)] * 2 + [(2, 0)] * 2),
        ("scatter", [(8, 4), (0, 4)], [(4, 2)] * 2 + [(0, 2)] * 2),
        ("reduce_scatter", [(8, 4)] * 2, [(4, 2)] * 4),
        ("all_to_all", [(8, 8)] * 2, [(8, 8)] * 4),
    ],
)
def test_a_rank_copies_what_its_host_needs_divided_by_the_gpus_of_the_host(name, flat, hierarchy, steps):
    for layout, expected in ("01", flat), ("0011", hierarchy):
        steps.clear()
        assert [copied for copied, _ in run_on(layout, call_once, name, steps)] == expected, layout


@pytest.mark.parametrize("name", ["all_reduce", "all_to_all", "broadcast"])
def test_a_chunk_is_on_the_wire_while_the_next_one_is_copied_down(name, steps):
    assert {order for _, order in run_on("01", call_once, name, steps)} == {"dd" + "wud" * 6 + "wuwu"}


def use_pinned(comm):
    comm.all_reduce(emulated.array(np.ones(1)))  # connects the GPUs
    comm.barrier()
    before = emulated.pinned_bytes()
    comm.barrier()
    works = [comm.all_to_all(emulated.array(np.ones(100 * CHUNK)), async_op=True) for _ in range(5)]
    works.append(comm.all_reduce(emulated.array(np.ones(100 * CHUNK)), async_op=True))
    for work in works:
        work.wait()
    comm.barrier()
    used = emulated.pinned_bytes() - before
    comm.barrier()
    return used


@pytest.mark.parametrize("layout", ["01", "0011"])
def test_pinned_memory_is_bounded_and_freed(layout):
    gc.collect()
    before = emulated.pinned_bytes()
    comms = connect_on(layout)
    most = len(layout) * staging.SLOTS * 2 * (CHUNK + 8 * len(layout))
    for used in run_threads(use_pinned, comms):
        assert 0 < used <= most
    run_threads(lambda comm: comm.close(), comms)
    gc.collect()
    assert emulated.pinned_bytes() == before
