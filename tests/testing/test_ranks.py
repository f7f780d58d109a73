"""Warm ranks serve one call after another; those that a call has broken are replaced."""

import os
import signal

import numpy as np
import pytest

from cases.no_fast_path import NO_FAST_PATH
from harness.failures import until
from ringcomm import Aborted, ArgumentError, PeerLost
from ringcomm.testing import run
from ringcomm.testing.ranks import _failed, call, first_error


def process(comm):
    return comm.all_gather_object(os.getpid())


def fail(comm, who):
    comm.barrier()
    if comm.rank == who:
        raise KeyError("the cause")
    comm.barrier()


def close(comm):
    comm.close()


def leave_the_fast_path(comm):
    comm.fast_path = NO_FAST_PATH


def setting(_, name):
    return os.environ.get(name)


def end(comm):
    if comm.rank == 1:
        os._exit(3)
    comm.barrier()


def test_results_are_in_rank_order_and_processes_serve_every_call():
    first, second = run(process, 2)
    assert first == second
    assert run(process, 2) == [first, first]
    assert len({*first, os.getpid()}) == 3
    assert run(process, 2, world="threads") == [[os.getpid()] * 2] * 2


@pytest.mark.parametrize("who", [0, 1])
def test_the_error_that_caused_the_others_is_raised_with_its_rank_and_traceback(who):
    before = run(process, 2)
    with pytest.raises(KeyError, match="the cause") as caught:
        run(fail, 2, who)
    (note,) = caught.value.__notes__
    assert note.startswith(f"on rank {who}:\nTraceback")
    assert 'raise KeyError("the cause")' in note
    assert not {*before[0]} & {*run(process, 2)[0]}


@pytest.mark.parametrize("leave", [close, leave_the_fast_path])
def test_ranks_that_a_call_has_changed_are_replaced(leave):
    before = run(process, 2)
    run(leave, 2)
    assert run(process, 2) != before


def test_errors_that_another_rank_has_caused_come_last():
    raised_from = ValueError()
    raised_from.__cause__ = Aborted("by rank 1")
    errors = [Aborted("by rank 1"), PeerLost("rank 1 died", rank=1), raised_from, KeyError("the cause")]
    outcomes = [_failed(error, repr) for error in errors]
    assert [outcome.consequence for outcome in outcomes] == [True, True, True, False]
    assert first_error(outcomes) is outcomes[-1]


def test_a_rank_that_ends_is_named_with_its_status():
    with pytest.raises(ConnectionError, match="rank 1 of 2 exited with status 3"):
        run(end, 2)


def test_ranks_with_other_variables_are_others():
    assert run(setting, 2, "RINGCOMM_LOG", env={"RINGCOMM_LOG": "error"}) == ["error"] * 2
    assert run(setting, 2, "RINGCOMM_LOG") == [os.environ.get("RINGCOMM_LOG")] * 2


def test_a_start_that_fails_is_raised():
    with pytest.raises(ArgumentError, match="RINGCOMM_KERNELS"):
        run(process, 2, env={"RINGCOMM_KERNELS": "none"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 0}, "size: expected 1 to 1024 ranks, got 0"),
        ({"size": 2.5}, "size: expected an integer, got 2.5"),
        ({"size": 2, "world": "fork"}, "world"),
        ({"size": 2, "world": "threads", "env": {"A": "1"}}, "env: expected none with threads"),
    ],
)
def test_ranks_that_cannot_be_are_refused(options, words):
    with pytest.raises(ArgumentError, match=words):
        run(process, **options)


@pytest.mark.ranks(3)
def test_a_marked_test_is_called_on_every_rank(comm):
    assert comm.size == 3
    assert comm.all_reduce(np.array(1)) == 3


def test_fresh_ranks_serve_one_call():
    before = run(process, 2)
    fresh = [outcome.value for outcome in call(process, (), 2, fresh=True)]
    assert not {*fresh[0]} & {*before[0]}
    assert run(process, 2) == before


def test_a_rank_that_has_died_since_is_replaced():
    rank = run(process, 2)[0][1]
    os.kill(rank, signal.SIGKILL)
    until(lambda: not os.path.exists(f"/proc/{rank}"), "the rank ends")
    assert len({*run(process, 2)[0]}) == 2
