"""Shared arrays: NumPy's arrays in memory that all ranks access, valid in every collective and as long as they live."""

import contextvars
import sys
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from test_symmetric import AXES
from test_symmetric import MIXTURES as BUFFERS

import harness
from cases.collectives import Arrays, Symmetric, pairwise, start
from ringcomm import Config
from ringcomm.testing import check_rank

KIB, MIB = 1 << 10, 1 << 20
LEAST = 64 * KIB
MIXTURES = {name: place for name, place in BUFFERS.items() if name != "in different buffers"}

get_handler_name = (np.core if np.__version__ < "2" else np._core).multiarray.get_handler_name


def is_shared(array):
    while isinstance(array.base, np.ndarray):
        array = array.base
    address = array.ctypes.data
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= address < end:
                return "/memfd:ringcomm" in line
    return False


# --- Values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.ranks(1, 2, 3, 4)
def test_collectives_on_shared_arrays_are_exact(comm, mixture):
    segment, place = Config().segment_bytes, MIXTURES[mixture](comm.rank)
    with comm.shared_arrays():
        buffer = np.empty(64 * segment, np.uint8)
    assert is_shared(buffer)
    for case in pairwise(AXES, seed=comm.size):
        arrays = Arrays(case.offset) if place is None else Symmetric(buffer, case.offset + place)
        start(comm, case, segment, arrays)()


@pytest.mark.ranks(1, 2, 3, 4)
def test_the_contract_holds_inside_the_block(comm):
    @contextmanager
    def in_the_block():
        with comm.split(0, key=-comm.rank) as group, group.shared_arrays():
            yield group

    check_rank(in_the_block)


@pytest.mark.ranks(2, 3)
def test_peers_access_shared_arrays_wherever_they_lie(comm):
    with comm.shared_arrays():
        x = np.full(MIB, comm.rank + 1.0)
        skipped = np.empty(100 * KIB * comm.rank + LEAST, np.uint8)  # arrays lie elsewhere on each rank
        y = np.full(MIB, comm.rank + 1.0)
        gathered = comm.all_gather(y)
    assert is_shared(skipped)
    for array in (x, y[5:-5], gathered[comm.rank]):
        comm.all_reduce(array, "max")
        assert comm._transport.path()[0] == "symmetric"
        assert (array == comm.size).all()
    comm.all_reduce(gathered)
    assert comm._transport.path()[0] == "symmetric"
    assert is_shared(gathered)
    private = np.ones(MIB) if comm.rank == 0 else x
    comm.all_gather(private)
    assert comm._transport.path()[0] != "symmetric"


@pytest.mark.ranks(4)
def test_all_groups_of_a_world_reach_an_array(comm):
    group = comm.split(comm.rank % 2)
    with group.shared_arrays():
        x = np.full(MIB, comm.rank)
    for used in (comm, group):
        x[:] = 1
        used.all_reduce(x)
        assert (x == used.size).all()
        assert used._transport.path()[0] == "symmetric"
    group.close()
    with comm.shared_arrays():
        y = np.ones(MIB)
    comm.all_reduce(y)
    comm.all_reduce(x)


# --- What is shared ---------------------------------------------------------------------------------------------------


def in_the_block(comm):
    before = get_handler_name()
    with comm.shared_arrays():
        assert get_handler_name() == "ringcomm.shared_arrays"
        assert is_shared(np.empty(LEAST, np.uint8))
        assert not is_shared(np.empty(LEAST - 1, np.uint8))
        assert is_shared(np.zeros((300, 300)).T + 1)
        assert is_shared(np.ones(LEAST).astype("int32"))
        assert is_shared(np.empty(40 * MIB + 1, np.uint8))  # more than a step of the heap, and no whole pages
    assert get_handler_name() == before
    assert not is_shared(np.empty(LEAST, np.uint8))
    with pytest.raises(ZeroDivisionError), comm.shared_arrays():
        1 / 0  # noqa: B018
    assert get_handler_name() == before


def test_large_arrays_made_in_the_block_are_shared(world):
    harness.run(in_the_block, 2, world=world)


@pytest.mark.ranks(2)
def test_blocks_may_be_nested_and_end_in_any_order(comm):
    group = comm.split(0)
    before = get_handler_name()
    first, second, third = comm.shared_arrays(), group.shared_arrays(), comm.shared_arrays()
    for enter, leave in (("123", "321"), ("123", "123"), ("123", "213"), ("121", "121"), ("11", "11")):
        blocks = {"1": first, "2": second, "3": third}
        for name in enter:
            blocks[name].__enter__()
        for name in leave:
            assert is_shared(np.empty(LEAST, np.uint8))
            blocks[name].__exit__(None, None, None)
        assert get_handler_name() == before
        assert not is_shared(np.empty(LEAST, np.uint8))


@pytest.mark.ranks(1)
def test_a_block_is_that_of_its_context(comm):
    names = []

    def look():
        names.append(get_handler_name())

    with comm.shared_arrays():
        thread = threading.Thread(target=look, context=None) if sys.version_info >= (3, 14) else None
        thread = thread or threading.Thread(target=look)
        thread.start()
        thread.join()
        contextvars.Context().run(look)
        contextvars.copy_context().run(look)
    look()
    assert names[1:] == ["default_allocator", "ringcomm.shared_arrays", "default_allocator"]
    block = comm.shared_arrays()
    contextvars.copy_context().run(block.__enter__)
    block.__exit__(None, None, None)  # it began in another context
    assert get_handler_name() == "default_allocator"
