"""ringcomm tune --device: the limits of kernels that follow from timings, and the kernels that follow from those."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from ringcomm import ArgumentError, Communicator
from ringcomm.bench.tuning import gpu as tune_gpu
from ringcomm.bench.tuning.crossover import cuts
from ringcomm.commands.cli import main
from ringcomm.devices import emulated
from ringcomm.devices.limits import LADDERS, Limits
from ringcomm.machine import tuning
from ringcomm.testing import connect_threads, run_threads
from ringcomm.transports import shm
from ringcomm.transports.cuda.virtual import VirtualRanks
from ringcomm.types import DTYPES, KERNELS

# Seconds at 64, 256, 1024 and 4096 bytes.
TIMES = {
    "ll": [1, 2, 9, 9],
    "one_shot": [2, 3, 3, 9],
    "two_shot": [4, 4, 4, 8],
    "ring_all_reduce": [9, 9, 9, 5],
    "one_shot_reduce": [9, 9, 9, 9],
}
LIMITS = {"ll": 256, "one_shot": 1024, "two_shot": 0, "one_shot_reduce": 0, "all_gather": 4096}


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "tuning.json"
    monkeypatch.setenv("RINGCOMM_TUNING", str(path))
    return path


@pytest.fixture
def tuned(file, monkeypatch):
    """A file of the command, whose clock the test sets."""

    def measured(_arrays, _group, case, _copy):
        usual = [5, 5, 5, 5] if case.kernel.startswith("ring_") else [1, 1, 1, 1]
        size = tune_gpu.SIZES["emulated"].index(case.count * 4)
        return SimpleNamespace(wrong=0, seconds=TIMES.get(case.kernel, usual)[size])

    monkeypatch.setattr(tune_gpu, "measure", measured)
    assert main(["tune", "--device", "emulated", "-n", "3"]) == 0
    return file


@pytest.mark.parametrize(
    ("times", "ends"),
    [
        ([[1, 1, 9, 9], [5, 5, 5, 5]], [2]),
        ([[1, 9, 9, 9], [5, 5, 8, 8], [6, 6, 6, 6]], [1, 2]),
        ([[1, 9, 9, 9], [7, 7, 7, 7], [6, 6, 6, 6]], [1, 1]),  # the second one is the fastest nowhere
        ([[1, 6, 1, 9], [5, 5, 5, 5]], [3]),  # one noisy size does not decide
    ],
)
def test_the_paths_end_where_all_times_together_are_shortest(times, ends):
    assert cuts(times) == ends


def test_the_command_writes_the_limits_by_the_number_of_ranks(capsys, tuned):
    written = json.loads(tuned.read_text())
    assert set(written) == {f"emulated, {ranks} ranks" for ranks in (2, 4, 8)}
    for entry in written.values():
        assert entry["settings"].keys() == {*Limits._fields}
        assert LIMITS.items() <= entry["settings"].items()
    assert "all_reduce, 8 ranks: ll = 256, one_shot = 1024, two_shot = 0" in capsys.readouterr().out


@pytest.mark.usefixtures("tuned")
def test_calls_take_the_kernels_of_the_file(monkeypatch):
    loaded = []
    load = emulated.EmulatedDevice.kernel

    def kernel(device, variant):
        loaded.append([*KERNELS][variant.kernel])
        return load(device, variant)

    def calls(comm):
        for size in (256, 260, 1024, 1028):
            x = emulated.array(np.ones(size // 4, np.float32))
            comm.all_reduce(x)
            assert (x == 2).all()

    monkeypatch.setattr(emulated.EmulatedDevice, "kernel", kernel)
    run_threads(calls, [Communicator(end) for end in connect_threads(shm.connect, 2)])
    assert {*loaded} == {"barrier", "ll", "one_shot", "ring_all_reduce"}

    virtual = VirtualRanks(emulated.device, 2)
    arrays = [emulated.array(np.zeros(1024, np.float32)) for _ in range(2)]
    addresses = [array.ctypes.data for array in arrays]
    for size, name in {256: "ll", 260: "one_shot", 1028: "ring_all_reduce"}.items():
        assert virtual.call("all_reduce", addresses, addresses, size // 4, DTYPES["float32"]).kernel == name


def test_without_a_file_the_limits_are_estimates():
    assert emulated.device.limits(4) == Limits(256, 512, 8192, 4096, 2048, 2048, 8192)


def test_the_next_larger_number_of_ranks_counts(file):
    for ranks, limit in {2: 20, 4: 40, 8: 80}.items():
        tuning.write(file, {"ll": limit}, {}, tuning.gpu_name("emulated", ranks))
    tuning.write(file, {"ll": 1}, {}, tuning.gpu_name("another", 3))
    assert [emulated.device.limits(ranks).ll for ranks in (1, 2, 3, 5, 16)] == [20, 20, 40, 80, 80]
    assert emulated.device.limits(2).two_shot == 8192  # of which the file has nothing


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"one_shoot": 1}, "unknown limit of emulated, 2 ranks 'one_shoot'; did you mean 'one_shot'"),
        ({"ll": -1}, "ll of emulated, 2 ranks: expected an integer from 0 .*, got -1"),
        ({"ll": 1.5}, "ll of emulated, 2 ranks: expected an integer.*, got 1.5"),
        ({"ll": 2**64}, "ll of emulated, 2 ranks: expected an integer.*, got one of 65 bits"),
    ],
)
def test_a_bad_limit_is_refused_with_the_name_of_the_file(file, settings, reason):
    file.write_text(json.dumps({"emulated, 2 ranks": {"settings": settings}}))
    with pytest.raises(ArgumentError, match=rf"tuning\.json cannot be read \({reason}"):
        emulated.device.limits(2)


def test_all_ranks_use_the_limits_of_rank_0(monkeypatch):
    # Of which rank these are is not known; but a kernel of its own would be a mismatch.
    given = [emulated.device.limits(2)._replace(ll=limit) for limit in (0, 10**6)]
    monkeypatch.setattr(emulated.EmulatedDevice, "limits", lambda _device, _ranks: given.pop())

    def call(comm):
        x = emulated.array(np.ones(1000, np.float32))
        comm.all_reduce(x)
        assert (x == 2).all()

    run_threads(call, [Communicator(end) for end in connect_threads(shm.connect, 2)])


def test_every_kernel_but_the_last_of_a_ladder_has_a_limit():
    limited = [kernel for ladder in LADDERS.values() for kernel in ladder[:-1]]
    assert sorted(limited) == sorted(Limits._fields)


def test_a_wrong_kernel_is_not_chosen(file, monkeypatch, capsys):
    monkeypatch.setattr(tune_gpu, "measure", lambda *_: SimpleNamespace(wrong=1, seconds=1.0))
    assert main(["tune", "--device", "emulated", "-n", "3"]) != 0
    assert "ll: 4 elements of 2 ranks are wrong" in capsys.readouterr().err
    assert not file.exists()


def test_more_ranks_than_a_launch_takes_are_refused(file, capsys):
    assert main(["tune", "--device", "emulated", "--ranks", "9"]) == 2
    assert "virtual ranks: expected at most 8, got 9" in capsys.readouterr().err
    assert not file.exists()


@pytest.mark.slow
def test_the_command_measures_the_emulated_device(file, capsys):
    assert main(["tune", "--device", "emulated", "--ranks", "2", "-n", "3"]) == 0
    assert json.loads(file.read_text())["emulated, 2 ranks"]["settings"].keys() == {*Limits._fields}
    assert capsys.readouterr().out.count("ranks: ") == len(LADDERS)
