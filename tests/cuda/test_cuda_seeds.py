"""Random calls on the emulated device, whose threads yield at flags. A seed decides everything."""

import random
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cases.collectives import PLANS, Arrays, Case, elements, start
from cases.no_fast_path import NO_FAST_PATH
from cases.reference import COMBINATIONS, numpy_dtype
from ringcomm import Communicator
from ringcomm.arrays.adapters import ADAPTERS, EmulatedAdapter
from ringcomm.devices import emulated
from ringcomm.devices.contract import Shape
from ringcomm.testing import connect_threads, run_threads
from ringcomm.transports import shm
from ringcomm.types import ON_GPUS, REDUCING

BINDINGS = Path(__file__).parents[2] / "bindings"
CALLS = 8  # of a seed
# Independent of the order of the reduction, as the ring needs.
ANY_ORDER = [(dtype, op) for dtype, op in COMBINATIONS if numpy_dtype(dtype).kind in "biu" or op in ("min", "max")]


class Untouched:
    """A type of no array: the fast path reads none of this device."""


def device_of(draw, seed, size):
    """Return a device with small staging buffers and slots, which little data fills many times."""
    emulated.configure(seed)
    device = emulated.EmulatedDevice()
    device.shape = Shape(
        channels=draw.randint(1, 3),
        slots=draw.choice([3, 4, 8]),
        slot_bytes=16 * size * draw.choice([1, 3, 16]),
        stage_bytes=draw.choice([16, 256, 1024]),
        line_bytes=draw.choice([16, 64, 256]),
    )
    return device


def case_of(draw, device, size):
    case = Case(
        draw.choice([name for name in PLANS if name in ON_GPUS]),
        length=(0, draw.choice([0, 1, 3, 16, 17, 100, 255, 500])),
        place=draw.choice(["default", "out", "in place"]),
        async_op=draw.random() < 0.5,
        root=draw.randrange(size),
        counts=draw.choice(["none", "even", "uneven", "zeros"]),
        offset=draw.choice([0, 1, 8]),
        salt=draw.randrange(1000),
    )
    dtype, op = draw.choice(COMBINATIONS)
    case = case._replace(dtype=dtype, op=op)
    in_order = 4 * device.shape.channels * device.shape.stage_bytes  # bytes; larger arrays use the ring
    small = elements(case, 0) * numpy_dtype(dtype).itemsize <= in_order
    if case.collective in REDUCING and not (case.collective == "all_reduce" and small):
        dtype, op = draw.choice(ANY_ORDER)
    return case._replace(dtype=dtype, op=op)


def run_seed(seed, monkeypatch):
    draw = random.Random(seed)
    size = draw.randint(1, 8)
    device = device_of(draw, seed, size)
    cases = [case_of(draw, device, size) for _ in range(CALLS)]
    monkeypatch.setattr(emulated.EmulatedDevice, "threads", draw.randint(1, 3))
    module = SimpleNamespace(device=device, empty=np.empty, Array=Untouched)
    monkeypatch.setitem(ADAPTERS, np.ndarray, EmulatedAdapter(module))

    def calls(comm):
        for case in cases:
            start(comm, case, 0, Arrays(case.offset))()

    ends = connect_threads(shm.connect, size)
    for end in ends:
        end.fast_path = NO_FAST_PATH
    run_threads(calls, [Communicator(end) for end in ends])


@pytest.mark.parametrize("seed", range(1, 13))
def test_calls_of_a_few_seeds_are_exact(seed, monkeypatch):
    run_seed(seed, monkeypatch)


# About 2 minutes.
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_calls_of_a_thousand_seeds_are_exact(monkeypatch):
    for seed in range(13, 1001):
        try:
            run_seed(seed, monkeypatch)
        except BaseException as error:
            error.add_note(f"with seed {seed}")
            raise


# About 5 minutes each: a build, and 1,000 seeds with every kernel, dtype and operation, below the transport.
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_kernels_of_a_thousand_seeds_are_exact_and_free_of_races(sanitizer, tmp_path):
    for command in (
        ["cmake", "-G", "Ninja", "-S", BINDINGS, "-B", tmp_path, f"-DSANITIZE={sanitizer}"],
        ["cmake", "--build", tmp_path, "--target", "test_cuda"],
        ["ctest", "--test-dir", tmp_path, "-C", "exhaustive", "-R", "seeds_of_test_cuda", "--no-tests=error", "-V"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
