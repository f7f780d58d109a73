"""A GPU through the emulated driver."""

import ctypes
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from cases.on_device import mappings
from ringcomm.devices import driver as driver_module
from ringcomm.devices.device import channels
from ringcomm.devices.driver import EMULATED, CudaError, Driver
from ringcomm.devices.gpu import DeviceMemory, Gpu, Kernels
from ringcomm.errors import ArgumentError, MemoryShortage

HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@pytest.fixture(scope="module")
def driver():
    return Driver(EMULATED)


@pytest.fixture(scope="module")
def gpu(driver):
    return Gpu(driver, 0)


class Gate:
    """Blocks a stream until it is opened."""

    def __init__(self, gpu, stream):
        self._opened = threading.Event()
        self._callback = HOST_FUNCTION(lambda _: self._opened.wait())
        with gpu.current():
            library = ctypes.CDLL(str(EMULATED))
            assert library.cuLaunchHostFunc(ctypes.c_void_p(stream), self._callback, None) == 0

    def open(self):
        self._opened.set()


def test_a_gpu_has_the_facts_that_its_driver_tells(gpu):
    assert (gpu.name, gpu.architecture) == ("emulated", "sm_90")
    assert gpu.multiprocessors > 1


def test_a_missing_gpu_and_a_missing_library_are_errors(driver):
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_DEVICE: invalid device ordinal") as raised:
        Gpu(driver, 1)
    assert (raised.value.code, raised.value.name) == (101, "CUDA_ERROR_INVALID_DEVICE")
    with pytest.raises(OSError, match="no_such_driver"):
        Driver("libno_such_driver.so")


def test_a_driver_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(driver_module, "OLDEST", (14, 1))
    with pytest.raises(RuntimeError, match=r"supports CUDA 13\.0, and ringcomm needs 14\.1"):
        Driver(EMULATED)


def test_a_call_restores_the_current_context(driver, gpu):
    gpu.free(gpu.allocate(1, "memory"))
    with pytest.raises(CudaError, match="INVALID_CONTEXT"):
        driver("cuMemFree_v2", 1)


def test_memory_is_zeroed_and_freed(gpu):
    before = mappings()
    address, stream = gpu.allocate(1000, "memory"), gpu.create_stream()
    data, back = np.arange(1000, dtype=np.uint8), np.ones(1000, np.uint8)
    gpu.copy(back.ctypes.data, address, 1000, stream)
    assert not back.any()
    gpu.copy(address, data.ctypes.data, 1000, stream)
    gpu.copy(back.ctypes.data, address, 1000, stream)
    assert (back == data).all()
    gpu.clear(address, 500)
    gpu.copy(back.ctypes.data, address, 1000, stream)
    assert not back[:500].any()
    assert back[500:].any()
    assert mappings() == before + 1
    gpu.free(address)
    assert mappings() == before
    with pytest.raises(CudaError, match="cuMemFree_v2: CUDA_ERROR_INVALID_VALUE"):
        gpu.free(address)
    gpu.destroy_stream(stream)


def test_a_shortage_names_what_was_to_be_allocated(gpu):
    with pytest.raises(MemoryShortage, match=r"an arena on emulated: .*OUT_OF_MEMORY"):
        gpu.allocate(1 << 60, "an arena")


def test_memory_is_freed_with_its_owner_except_when_the_context_is_broken(gpu):
    before = mappings()
    memory = DeviceMemory(gpu.allocate(100, "memory"), gpu.free)
    again = DeviceMemory(memory.address, gpu.free)
    del memory
    assert mappings() == before
    del again  # an error that nobody could handle


def test_pinned_memory_is_zeroed(gpu):
    address = gpu.allocate_pinned(100)
    assert not any(ctypes.string_at(address, 100))
    gpu.free_pinned(address)


OPENER = """
import ctypes, sys
from ringcomm.devices.driver import EMULATED, Driver
from ringcomm.devices.gpu import Gpu
gpu = Gpu(Driver(EMULATED), 0)
addresses = [gpu.open(sys.argv[1]) for _ in range(2)]
print(ctypes.string_at(addresses[0], 4).decode())
ctypes.memmove(addresses[1], b"back", 4)
for address in addresses:
    gpu.close(address)
"""


def test_another_process_opens_memory(gpu):
    address = gpu.allocate(100, "memory")
    ctypes.memmove(address, b"text", 4)
    handle = gpu.export(address)
    assert gpu.open(handle) == address  # in this process
    gpu.close(address)
    done = subprocess.run([sys.executable, "-c", OPENER, handle], capture_output=True, text=True, check=True)
    assert done.stdout == "text\n"
    assert ctypes.string_at(address, 4) == b"back"
    gpu.free(address)


def test_memory_that_was_freed_does_not_open(gpu):
    address = gpu.allocate(100, "memory")
    handle = gpu.export(address).split()
    gpu.free(address)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        gpu.open(" ".join(["other", *handle[1:]]))


def test_events_are_reached_in_the_order_of_their_stream(gpu):
    stream = gpu.create_stream()
    begin, end = gpu.create_event(timed=True), gpu.create_event(timed=True)
    gate = Gate(gpu, stream)
    gpu.record(begin, stream)
    gpu.record(end, stream)
    assert not gpu.reached(begin)
    assert not gpu.reached(end)
    gate.open()
    gpu.synchronize_event(end)
    assert gpu.reached(begin)
    assert gpu.elapsed_ms(begin, end) >= 0
    gpu.synchronize(stream)
    for event in (begin, end):
        gpu.destroy_event(event)
    with pytest.raises(CudaError, match="INVALID_HANDLE"):
        gpu.reached(end)
    gpu.destroy_stream(stream)


def test_a_stream_says_whether_it_captures(gpu):
    stream, graph = gpu.create_stream(), ctypes.c_void_p()
    library = ctypes.CDLL(str(EMULATED))
    assert not gpu.capturing(stream)
    with gpu.current():
        assert library.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), 0) == 0
    event = gpu.create_event()
    assert gpu.capturing(stream)
    assert not gpu.capturing(0)
    assert gpu.reached(event)  # which breaks no capture
    with gpu.current():
        assert library.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph)) == 0
    gpu.destroy_event(event)
    gpu.destroy_stream(stream)


@pytest.mark.parametrize(
    ("multiprocessors", "ranks", "blocks"),
    [(132, 2, 64), (132, 3, 32), (132, 4, 32), (132, 8, 16), (14, 3, 4), (2, 3, 1)],
)
def test_the_blocks_of_ranks_that_share_a_gpu_run_at_once(multiprocessors, ranks, blocks):
    assert channels(multiprocessors, ranks) == blocks


def test_too_many_virtual_ranks_are_refused(gpu):
    kernels = gpu.load(b"image")
    assert isinstance(kernels, Kernels)
    with pytest.raises(ArgumentError, match=f"at most {gpu.multiprocessors} blocks in all, got 100 x 2"):
        gpu.launch_virtual(kernels, b"", 100, 2, 2, 0)


def test_the_process_ends_with_memory_and_work_left():
    code = OPENER.split("addresses")[0] + "kept = gpu.allocate(100, 'memory'), gpu.create_stream(), gpu.create_event()"
    subprocess.run([sys.executable, "-c", code, str(os.getpid())], check=True)
