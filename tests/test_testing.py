"""Every transport keeps the contract, and the checks of the contract notice one that does not."""

import importlib
import pkgutil

import pytest

import ringcomm
from ringcomm import Communicator, transports
from ringcomm.testing import CHECKS, check_rank, check_transport, connect_threads, run_threads
from ringcomm.transports import shm

NAMES = [module.name for module in pkgutil.iter_modules(transports.__path__)]
MODULES = {name: importlib.import_module(f"ringcomm.transports.{name}") for name in NAMES}
CONNECTS = {name: module.connect for name, module in MODULES.items() if hasattr(module, "connect")}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("transport", CONNECTS)
def test_a_transport_keeps_the_contract(transport, check, size):
    run_threads(check, [Communicator(end) for end in connect_threads(CONNECTS[transport], size)])


def test_check_transport_runs_every_check_at_every_size(monkeypatch):
    seen = []
    monkeypatch.setattr("ringcomm.testing.CHECKS", [lambda comm: seen.append(comm.size)] * 2)
    check_transport(lambda size: connect_threads(shm.connect, size), sizes=(1, 2))
    assert sorted(seen) == [1, 1, 2, 2, 2, 2]


def test_a_transport_that_computes_wrongly_is_named_with_its_check():
    def forgetful(size):
        ends = connect_threads(shm.connect, size)
        for end in ends:
            end.fused = {**end.fused, "all_reduce": end.fused["broadcast"]}
            del end.quick  # which would do the plain calls
        return ends

    with pytest.raises(AssertionError) as caught:
        check_transport(forgetful, sizes=(2,))
    assert caught.value.__notes__ == ["in the check all_reduce_combines_all_ranks_in_place_and_out_of_place, 2 ranks"]


def test_a_rank_runs_every_check_with_a_communicator_of_its_own_and_names_the_one_that_fails():
    seen = []

    def fail(comm):
        raise KeyError(comm.rank)

    with pytest.raises(KeyError) as caught:
        check_rank(ringcomm.init, [seen.append, seen.append, fail, seen.append])
    assert caught.value.__notes__ == ["in the check fail, rank 0 of 1"]
    assert len({*seen}) == 2
    assert all("closed" in repr(comm) for comm in seen)
    check_rank(ringcomm.init)


def test_the_failure_that_came_first_is_raised():
    def fail(comm):
        if comm.rank == 1:
            raise KeyError("the cause")
        comm.barrier()

    with pytest.raises(KeyError, match="the cause"):
        run_threads(fail, [Communicator(end) for end in connect_threads(shm.connect, 3)])
