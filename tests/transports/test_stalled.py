"""Ranks that hang or die in the middle of a call, after others have done their part."""

import os
import re
import signal
import threading

import numpy as np
import pytest
from stalling import need_stalling, stalling_array

import harness
from harness.failures import (
    PROMPT,
    check_usable,
    lines_of,
    outcomes,
    raised,
    survivors_of,
    until,
    until_broken,
    until_waiting,
)
from ringcomm import CollectiveTimeout, PeerLost, launch

CHUNK = 1 << 17  # float32 of a chunk, as segment_bytes has them
STALLED = 2  # the rank that hangs

pytestmark = pytest.mark.usefixtures("stalling")


@pytest.fixture
def stalling(monkeypatch):
    need_stalling()
    # Otherwise threads would read the missing pages of each other's arrays, and all would hang.
    monkeypatch.setenv("RINGCOMM_DIRECT_BYTES", str(1 << 60))


def until_in_the_middle(comm):
    """Return when a rank has waited long enough to check its peers more than once."""

    def waited():
        running = re.search(r"running for (\S+) s", lines_of(comm._transport.report(1))[0])
        return running and float(running[1]) > 0.3

    until(waited, "rank 0 in the middle")


def gather_while_one_hangs(comm, leave):
    """Rank 2 hangs before its second and last chunk. Rank 1 has staged all of its own, and leaves."""
    counts = [0] + [2 * CHUNK] * (comm.size - 1)
    if comm.rank == STALLED:
        with stalling_array(2 * CHUNK, CHUNK) as (x, filling):

            def watch():
                with filling:
                    until(lambda: re.match("closed|dead", lines_of(comm._transport.report(1))[1]), "the end of rank 1")
                    until_in_the_middle(comm)

            watcher = threading.Thread(target=watch)
            watcher.start()
            comm.gather(x, counts=counts)
            watcher.join()
    else:
        x = np.full(counts[comm.rank], comm.rank, np.float32)
        gathered = comm.gather(x, counts=counts)
        if comm.rank == 1:
            leave(comm)
            return
        assert (gathered[: 2 * CHUNK] == 1).all()
        assert (gathered[2 * CHUNK :] == 0).all()
    assert raised(PeerLost, comm.barrier).rank == 1


def close(comm):
    comm.close()


def end(comm):  # noqa: ARG001
    os._exit(0)


def test_a_thread_that_has_done_its_part_may_close_while_others_hang():
    launch(gather_while_one_hangs, 3, world="threads", args=(close,), timeout=harness.OPERATION)


@pytest.mark.slow
@pytest.mark.parametrize("leave", [close, end])
def test_a_process_that_has_done_its_part_may_leave_while_others_hang(leave):
    found, _ = survivors_of(gather_while_one_hangs, 3, leave)
    assert found == dict.fromkeys(range(3) if leave is close else (0, 2))


def time_out_in_the_middle(comm):
    group = comm.split(0)
    if group.rank == STALLED:
        with stalling_array(5 * CHUNK, CHUNK) as (x, filling):

            def watch():
                with filling:
                    until_broken(group)

            watcher = threading.Thread(target=watch)
            watcher.start()
            error = raised(CollectiveTimeout, lambda: group.all_reduce(x))
            watcher.join()
    else:
        if group.rank == 1:
            until_waiting(group, STALLED)  # returns when it hangs
        error = raised(CollectiveTimeout, lambda: group.all_reduce(np.zeros(5 * CHUNK, np.float32), timeout=0.5))
    assert error.rank == STALLED
    assert f": rank {STALLED} made no progress\n" in str(error)
    assert re.fullmatch(r"all_reduce\(.*\) epoch 1, running for \S+ s", lines_of(str(error))[STALLED])
    check_usable(comm)
    return str(error)


def test_a_stalled_rank_is_named(world):
    assert len(set(harness.run(time_out_in_the_middle, 3, world=world))) == 1


def die_in_the_middle(comm):
    if comm.rank == STALLED:
        with stalling_array(5 * CHUNK, CHUNK) as (x, _):

            def watch():
                until_in_the_middle(comm)
                os.kill(os.getpid(), signal.SIGKILL)

            threading.Thread(target=watch).start()
            comm.all_reduce(x)
    error = raised(PeerLost, lambda: comm.all_reduce(np.zeros(5 * CHUNK, np.float32)))
    return error.rank, re.sub(r"while rank \d", "while rank N", str(error))


@pytest.mark.slow
def test_a_rank_killed_in_the_middle_of_a_call_is_named():
    with harness.world(4) as pool:
        pid = pool.processes[STALLED].pid
        answers, ends = {}, {}
        for rank, answer, when in outcomes(pool, die_in_the_middle):
            answers[rank], ends[rank] = answer, when
    assert isinstance(answers.pop(STALLED), ConnectionError)
    for rank, (lost, text) in answers.items():
        assert lost == STALLED
        assert text.startswith(f"rank {STALLED} (process {pid}) died while rank N needed it for all_reduce(")
        assert ends[rank] - ends[STALLED] < PROMPT
