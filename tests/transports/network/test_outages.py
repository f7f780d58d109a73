"""Outages of the network between two hosts: one shorter than `keepalive` loses nothing; after that a host is lost.

Rank 0 of one host and rank 2 of the other exchange data all the time. Rank 1 waits for a message of rank 3, which makes
no call. So connections are busy, idle and watched, and idle; those of the launchers are idle.
"""

import itertools
import time
from contextlib import closing

import pytest

from harness.failures import until
from harness.hosts import ADDRESSES, two_hosts, why_no_hosts
from harness.nodes import Job, finish

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))]

PROGRAM = """
import time
from pathlib import Path
import numpy as np
import ringcomm

turns, over = (Path(__file__).with_name(name) for name in ("turns", "over"))
with ringcomm.init(timeout=800) as comm:
    rank = comm.rank
    pair = comm.split(rank % 2)
    print("ready", flush=True)
    try:
        if rank % 2 == 0:
            x, turn, done = np.empty(20_000), 0, np.zeros(1)
            while not done[0]:
                x[:] = rank + turn
                pair.all_reduce(x)
                assert (x == 2 * turn + 2).all()
                turn += 1
                if rank == 0:
                    turns.write_text(str(turn))
                    done[0] = over.exists()
                pair.broadcast(done)
                time.sleep(0.005)
        elif rank == 1:
            pair.recv(np.empty(3), 1)
        else:
            while not over.exists():
                time.sleep(0.05)
            pair.send(np.empty(3), 0)
        comm.barrier()
        print("done", flush=True)
    except ringcomm.PeerLost:
        when = time.monotonic()
        try:
            comm.barrier()
        except ringcomm.PeerLost as error:  # by its number in this communicator
            print("lost", error.rank, when, flush=True)
        time.sleep(60)  # until the launchers have noticed, too
"""


# Scripts on host A; "$@" enters host B. Without the cable both see that the link is down. Else neither does: both send
# their frames to an address that nobody has.
CUTS = {
    "cable": ("ip link set eth0 down", "ip link set eth0 up"),
    "packets": (
        """
        nowhere="lladdr 02:00:00:00:00:01 dev eth0 nud permanent"
        "$@" ip neigh replace 10.0.0.1 $nowhere
        ip neigh replace 10.0.0.2 $nowhere
        """,
        """
        ip neigh del 10.0.0.2 dev eth0
        "$@" ip neigh del 10.0.0.1 dev eth0
        """,
    ),
}


def run(hosts, script):
    hosts.a.run(f"set -- {' '.join(hosts.b.entry)}\n{script}")


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start two ranks on each host, and wait until they exchange data; return the launchers."""

    def start(hosts, of_launchers, of_ranks):
        monkeypatch.setenv("RINGCOMM_KEEPALIVE", str(of_ranks))
        program, option = job.program(PROGRAM), f"--keepalive={of_launchers}"
        launchers = [
            job.start(node, 2, program, option, enter=host.enter, address=(ADDRESSES[0], 29500))
            for node, host in enumerate(hosts)
        ]
        for launcher in launchers:
            assert [launcher.stdout.readline().split()[-1] for _ in range(2)] == ["ready"] * 2
        await_more_turns(tmp_path)
        return launchers

    with closing(Job(tmp_path, 2)) as job:
        yield start


def await_more_turns(folder):
    def turns():
        file = folder / "turns"
        return int(file.read_text() or 0) if file.exists() else 0

    before = turns()
    until(lambda: turns() > before + 10, f"ranks that exchange data, after {before} turns")


@pytest.mark.parametrize(
    ("keepalive", "shares"),
    [
        (3, [0.2, 0.5, 0.8]),
        pytest.param(
            15, [0.2 + 0.7 * i / 29 for i in range(30)], marks=[pytest.mark.exhaustive, pytest.mark.timeout(900)]
        ),
    ],
    ids=["3 s", "15 s"],
)
def test_outages_shorter_than_keepalive_lose_nothing(start, keepalive, shares, tmp_path):
    with two_hosts() as hosts:
        launchers = start(hosts, keepalive, keepalive)
        for share, (cut, mend) in zip(shares, itertools.cycle(CUTS.values())):
            run(hosts, f"{cut}\nsleep {share * keepalive}\n{mend}")
            await_more_turns(tmp_path)
            time.sleep(1.5)  # until idle connections have answered, too: they are probed once a second
        (tmp_path / "over").touch()
        ended = [finish(launcher) for launcher in launchers]
    assert ended == [(0, [f"[{2 * node}] done", f"[{2 * node + 1}] done"], "") for node in range(2)]


@pytest.mark.parametrize("how", CUTS)
@pytest.mark.parametrize(
    ("keepalive", "late"),
    [(3, 2.75), pytest.param(15, 1.1, marks=pytest.mark.exhaustive)],  # docs/network.md, and a moment to say so
)
def test_ranks_and_launchers_lose_a_host_that_does_not_answer_after_their_keepalive(start, keepalive, late, how):
    with two_hosts() as hosts:
        launchers = start(hosts, keepalive + 2, keepalive)
        begin = time.monotonic()
        run(hosts, CUTS[how][0])
        for node, launcher in enumerate(launchers):
            for _ in range(2 - node):  # rank 3 makes no call
                _, word, lost, when = launcher.stdout.readline().split()
                assert (word, int(lost) // 2) == ("lost", 1 - node)
                assert 0.9 * keepalive < float(when) - begin < keepalive + late
        for launcher in launchers:
            assert "does not answer" in launcher.stderr.readline()
            assert 0.9 * (keepalive + 2) < time.monotonic() - begin < keepalive + 2 + late
