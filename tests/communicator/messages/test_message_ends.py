"""How pending messages end with their communicator: each by an error that names its own call."""

import numpy as np
import pytest
from test_messages import LARGE, message, room

from harness.failures import raised, until_waiting
from ringcomm import PeerLost
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
    "bytes": "probe(from 1) with any tag",
    "probe": "probe(from 1) with tag 3",
    "take": "during probe(from any) with tag 3",
}


def wait_for_a_rank_that_is_about_to_close(comm, name, late):
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


@pytest.mark.parametrize(("name", "late"), [*((name, False) for name in WAITS), ("recv", True), ("take", True)])
def test_a_wait_for_a_rank_that_is_about_to_close_fails(name, late, run):
    run(wait_for_a_rank_that_is_about_to_close, name, late)
