"""How pending messages end with their communicator: each by an error that names its own call."""

import os
import re
import signal

import numpy as np
import pytest
from test_messages import LARGE, message, room

from cases.between_hosts import everywhere
from harness.failures import check_usable, raised, survivors_of, until_waiting
from ringcomm import ArgumentError, PeerLost
from ringcomm.transports.messages import ANY_SOURCE, ANY_TAG

# --- Ranks that send no more ------------------------------------------------------------------------------------------

WAITS = {
    "recv": lambda group, x: group.recv(x, 1, 3),
    "a started recv": lambda group, x: group.recv(x, 1, 3, async_op=True).wait(),
    "sendrecv": lambda group, x: group.sendrecv(x, 0, x.copy(), 1, 3),
    "a recv of any length": lambda group, x: group.messages.recv(x, 1, 3),
    "bytes": lambda group, x: group.messages.recv_bytes(1, ANY_TAG),
    "probe": lambda group, x: group.messages.probe(1, 3),
    "take": lambda group, x: group.messages.take(ANY_SOURCE, 3),
}
CALLS = {
    "recv": "recv(float64 x 3, from 1) with tag 3",
    "a recv of any length": "recv(at most 24 bytes, from 1) with tag 3",
    "bytes": "recv(from 1) with any tag",
    "probe": "probe(from 1) with tag 3",
    "take": "during probe(from any) with tag 3",
}


@pytest.mark.parametrize(("name", "late"), [*((name, False) for name in WAITS), ("recv", True), ("take", True)])
@everywhere
def test_a_wait_for_a_rank_that_is_about_to_close_fails(comm, name, late):
    """What it has sent arrives, also if that takes long. `late`: it closes during the wait."""
    group = comm.split(0)
    if comm.rank == 1:
        works = [group.messages.isend(message(1, length), 0, tag) for tag, length in enumerate([5, LARGE, 5])]
        if not late:
            group.messages.announce_close()
        comm.barrier()
        for work in works:
            work.wait()
        if late:
            comm.barrier()
            until_waiting(group, 0)
            group.messages.announce_close()
        comm.barrier()
    else:
        pending = group.messages.irecv(room(5), 1, 9)
        comm.barrier()
        for tag, length in reversed([*enumerate([5, LARGE, 5])]):
            x = room(LARGE)
            assert group.messages.recv(x, 1, tag).size == length
            assert (x[:length] == message(1, length)).all()
        assert group.messages.iprobe(1, 3) is None
        assert not pending.done()
        assert pending.cancel()  # what nobody waits for is no failure
        if late:
            comm.barrier()
        error = raised(PeerLost, lambda: WAITS[name](group, np.zeros(3)))
        comm.barrier()
        call = CALLS.get(name, CALLS["recv"])
        assert call in str(error)
        if name != "take":
            assert f"rank 1 closed the communicator while rank 0 needed it for {call}" in str(error)
            assert error.rank == 1
    group.close()


# --- Pending messages -------------------------------------------------------------------------------------------------


@everywhere
def test_a_closed_communicator_names_the_calls_that_were_pending(comm):
    """The error of each names its call."""
    group = comm.split(0)
    if comm.rank == 1:
        works = [group.recv(np.zeros(3), 0, tag, async_op=True) for tag in (4, 5)]
        works.append(group.messages.irecv(np.zeros(3), ANY_SOURCE, ANY_TAG))
        group.close()
        texts = [str(raised(ArgumentError, work.wait)) for work in works]
        calls = [f"recv(float64 x 3, from 0) with tag {tag}" for tag in (4, 5)]
        for text, call in zip(texts, [*calls, "recv(at most 24 bytes, from any) with any tag"], strict=True):
            assert f"this communicator was closed during {call}" in text
    check_usable(comm)


def die_with_pending_messages(comm):
    if comm.rank == 2:
        for rank in (0, 1):
            until_waiting(comm, rank)
        os.kill(os.getpid(), signal.SIGKILL)
    sources = [2, 2, 1 - comm.rank]
    works = [comm.recv(np.zeros(3), source, tag, async_op=True) for tag, source in enumerate(sources)]
    works += [comm.recv(np.zeros(3), tag=tag, async_op=True) for tag in (11, 1)]
    return [(error.rank, str(error)) for error in (raised(PeerLost, work.wait) for work in works)]


def test_after_a_death_every_pending_message_names_its_own_call():
    found, _ = survivors_of(die_with_pending_messages, 3)
    assert {*found} == {0, 1}
    for rank, errors in found.items():
        assert [lost for lost, _ in errors] == [2] * 5
        for tag, (_, text) in enumerate(errors[:2]):
            assert f"died while rank {rank} needed it for recv(float64 x 3, from 2) with tag {tag}" in text
        assert errors[2][1].startswith(f"recv(float64 x 3, from {1 - rank}) with tag 2 ended: rank 2 (process ")
        for tag, (_, text) in zip((11, 1), errors[3:], strict=True):
            assert re.search(rf"recv\(float64 x 3, from any\) with tag {tag}\b", text)
