"""`ringcomm bench --device`: buffers outside host memory, on the emulated device."""

import os
import subprocess
import threading
import time
from itertools import count

import pytest
from quick_bench import BENCH
from test_bench import OPTIONS

import harness
from ringcomm import ArgumentError
from ringcomm.bench import peers, report
from ringcomm.bench.comparison import Comparison
from ringcomm.bench.kernels.device_arrays import DeviceArrays
from ringcomm.bench.machine import Machine
from ringcomm.bench.rank import measure
from ringcomm.bench.rank.library import HostBuffers
from ringcomm.bench.rank.measure import RankBench
from ringcomm.bench.rank.ringcomm import RingcommLibrary
from ringcomm.bench.sweep import Sweep


def test_queued_work_finishes_before_an_interrupt_frees_its_memory():
    arrays = DeviceArrays("emulated", rounds=1)
    stream = arrays.device.stream()
    done = threading.Event()

    def interrupt():
        stream.add(lambda: time.sleep(0.2))
        stream.add(done.set)
        raise KeyboardInterrupt

    calls = iter([lambda: None, interrupt])
    with pytest.raises(KeyboardInterrupt):
        arrays.time(lambda: next(calls)())
    assert done.is_set()


def test_the_clock_stops_when_all_queued_work_is_done(monkeypatch):
    happened, ticks = [], count(step=1000)

    class Queued(HostBuffers):
        def finish(self):
            happened.append("finished")

    def library(comm):
        it = RingcommLibrary(comm)
        it.buffers = Queued()
        it.barrier = lambda: happened.append("met")
        it.call = lambda *_: (lambda: happened.append("called"), None)
        return it

    def clock():
        happened.append("clock")
        return next(ticks)

    monkeypatch.setattr(measure, "perf_counter_ns", clock)

    def rank(comm):
        it = RankBench(library(comm))
        it.prepare("all_reduce", OPTIONS | {"count": 1})
        happened.clear()
        return it.round(False, 1, 2)

    assert harness.run(rank, 1, world="threads") == [500e-9]
    assert happened == ["met", "called", "finished", "met", "clock", "called", "called", "finished", "clock"]


def test_buffers_that_the_host_cannot_write_are_filled_by_copies():
    class Far(HostBuffers):
        """What is read is a copy."""

        def read(self, array):
            return array.copy()

        def write(self, array, values):
            array[...] = values

    def rank(comm):
        library = RingcommLibrary(comm)
        library.buffers = Far()
        it = RankBench(library)
        it.prepare("all_gather", OPTIONS | {"count": 1000})
        return it.check()

    assert harness.run(rank, 2, world="threads") == [0, 0]


@pytest.mark.slow
def test_the_command_measures_on_the_emulated_device():
    words = "all_reduce send_recv --device emulated -e 1K -f 16 -n 2"
    run = subprocess.run(
        [*BENCH, *words.split()],
        env={**os.environ, "RINGCOMM_TUNING": ""},
        capture_output=True,
        text=True,
        timeout=harness.OPERATION,
    )
    assert run.returncode == 0, run.stderr
    assert "# buffers on the emulated device, which runs on the CPU" in run.stdout
    rows = [line.split() for line in run.stdout.splitlines() if line and not line.startswith("#")]
    assert [row[0] for row in rows] == ["4", "64", "1024"] * 2
    assert {row[12] for row in rows} == {"0"}, "wrong elements"


def test_a_missing_gpu_is_reported_before_anything_starts(monkeypatch):
    monkeypatch.setattr(peers, "gpus", list)
    with pytest.raises(ArgumentError, match="--device cuda: no CUDA device"):
        peers.libraries(["nccl"], "cuda")
    assert peers.libraries(["nccl"])[1] == ["nccl: no CUDA device"]


def test_nccl_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(peers, "gpus", lambda: ["a GPU"])
    found, missing = peers.libraries(["nccl", "openmpi"], "cuda")
    assert [(it.name, it.module, it.device) for it in found] == [(name, name, "cuda") for name in ("ringcomm", "nccl")]
    assert missing == ["openmpi: supports host buffers only"]
    assert peers.libraries(["nccl"])[1] == ["nccl: supports CUDA buffers only: --device cuda"]


def test_the_header_tells_the_noise_and_its_longer_rounds():
    sweep = Sweep(collectives=["all_reduce"], ranks=[2], begin=4, dtypes=["float32"], ops=["sum"], noise=True)
    header = report.header(Machine.here(), Comparison(sweep, 2, "bound to one core each", None))
    assert "20 rounds each; with noise: 4 ms of work in every 16 ms on each core" in header
    assert "the calls that fit into 64 ms" in header


@pytest.mark.parametrize(("gpus", "warned"), [(1, True), (2, False)])
def test_the_header_names_ranks_that_share_a_gpu(gpus, warned):
    machine = Machine("", 2, 1 << 20, ["NVIDIA H200"] * gpus, "", "", None, "", {})
    sweep = Sweep(collectives=["all_reduce"], ranks=[2], begin=4, dtypes=["float32"], ops=["sum"], device="cuda")
    header = report.header(machine, Comparison(sweep, 2, "bound to one core each", None))
    assert f"# buffers on {gpus} x NVIDIA H200" in header
    assert ("# same GPU: measures memory and scheduling, not NVLink" in header) == warned
