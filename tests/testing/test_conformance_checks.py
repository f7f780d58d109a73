"""The checks of the contract notice a transport that breaks it; transports/test_conformance.py runs them on all."""

import pytest

import ringcomm
from cases.no_fast_path import NO_FAST_PATH
from ringcomm import Communicator
from ringcomm.testing import check_rank, check_transport, connect_threads, run_threads
from ringcomm.transports import shm


def test_check_transport_runs_every_check_at_every_size(monkeypatch):
    seen = []
    monkeypatch.setattr("ringcomm.testing.conformance.CHECKS", [lambda comm: seen.append(comm.size)] * 2)
    check_transport(lambda size: connect_threads(shm.connect, size), sizes=(1, 2))
    assert sorted(seen) == [1, 1, 2, 2, 2, 2]


def test_a_transport_that_computes_wrongly_is_named_with_its_check():
    def forgetful(size):
        ends = connect_threads(shm.connect, size)
        for end in ends:
            end.fused = {**end.fused, "all_reduce": end.fused["broadcast"]}
            end.fast_path = NO_FAST_PATH  # it would take the plain calls
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


def test_the_first_failure_is_raised():
    def fail(comm):
        if comm.rank == 1:
            raise KeyError("the cause")
        comm.barrier()

    with pytest.raises(KeyError, match="the cause"):
        run_threads(fail, [Communicator(end) for end in connect_threads(shm.connect, 3)])
