"""ringcomm/bench/kernels/fresh.py: a kernel that is broken in one of five ways is found, on the emulated device."""

import pytest

from cases.broken_kernels import BROKEN, beyond, break_launches
from ringcomm.bench.kernels.device_arrays import DeviceArrays
from ringcomm.bench.kernels.fresh import FreshCheck, VirtualCase
from ringcomm.transports.cuda.virtual import VirtualCall, VirtualRanks

SIZE, COUNT, LAUNCHES, ROOT = 3, 700, 3, 1
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all")


def check(collective, count=COUNT, *facts, **more):
    arrays = DeviceArrays("emulated", 1)
    return FreshCheck(arrays, VirtualRanks(arrays.device, SIZE), VirtualCase(collective, SIZE, count, *facts, **more))


def found(checked):
    for _ in range(LAUNCHES):
        checked.launch()
    it = checked.found()
    return it.wrong, it.edge


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("facts", [{}, {"offset": 1}, {"symmetric": True}], ids=["aligned", "displaced", "symmetric"])
def test_a_right_kernel_has_no_wrong_elements(collective, facts):
    assert found(check(collective, root=ROOT, **facts)) == (0, 0)


@pytest.mark.parametrize("kernel", ["ll", "one_shot", "two_shot", "ring_all_reduce"])
@pytest.mark.parametrize("dtype", ["bool", "int8", "float8_e5m2", "bfloat16", "complex128"])
def test_every_dtype_is_compared_bit_by_bit(kernel, dtype):
    assert found(check("all_reduce", 15, dtype, kernel=kernel)) == (0, 0)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("broken", BROKEN, ids=lambda it: it.__name__)
def test_a_broken_kernel_is_found(monkeypatch, collective, broken):
    break_launches(monkeypatch, broken)
    wrong, edge = found(check(collective, root=ROOT))
    assert (edge if broken is beyond else wrong) > 0


def test_constant_inputs_would_hide_a_kernel_that_does_nothing_the_second_time(monkeypatch):
    """What the check guards against: without new inputs the stale result is the right one."""
    checked = check("broadcast")
    checked.launch()
    monkeypatch.setattr(VirtualCall, "launch", lambda *_: None)
    checked.launch()
    assert checked.found().wrong > 0
