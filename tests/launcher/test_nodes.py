"""`ringcomm run --nnodes` as a user sees it: how the ranks of several nodes start and end."""

import os
import re
import signal
from contextlib import closing
from pathlib import Path

import pytest

from harness.failures import until
from harness.hosts import ADDRESSES, two_hosts, why_no_hosts
from harness.nodes import Job, finish

pytestmark = pytest.mark.slow

HOST = os.uname().nodename
WAITING = """
    exchange()
    print("ready", os.getpid())
    time.sleep(100)
"""


def start_ranks(job, text, *options, **more):
    """Start a rank on node 0 and two on node 1."""
    program = job.program(text)
    return [job.start(node, ranks, program, *options, **more) for node, ranks in enumerate((1, 2))]


def until_ready(launchers):
    """Wait until all three ranks are; return their process ids."""
    lines = [
        launcher.stdout.readline() for launcher, ranks in zip(launchers, (1, 2), strict=True) for _ in range(ranks)
    ]
    return [int(line.split()[-1]) for line in lines]


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1, 3)])
def test_ranks_are_numbered_by_node_and_find_each_other_through_the_store(tmp_path, ranks):
    with closing(Job(tmp_path, len(ranks))) as job:
        program = job.program(
            """
            assert place.hosts and place.launcher == "ringcomm run"
            for _ in range(2):  # a second start, which a fast rank may have begun already
                assert exchange() == [f"from {other}" for other in range(size)]
            print(f"rank {rank} of {size}", sys.argv[1:])
            print("err", file=sys.stderr)
            """
        )
        backwards = [job.start(node, ranks[node], program) for node in reversed(range(len(ranks)))]
        first = 0
        for count, launcher in zip(ranks, reversed(backwards), strict=True):
            mine = range(first, first + count)
            status, out, err = finish(launcher)
            assert (status, sorted(err.splitlines())) == (0, [f"[{rank}] err" for rank in mine])
            assert out == [f"[{rank}] rank {rank} of {sum(ranks)} []" for rank in mine]
            first += count


def test_verbose_names_the_ranks_of_each_node(job):
    finished = [finish(launcher) for launcher in start_ranks(job, "", "--verbose")]
    assert [status for status, _, _ in finished] == [0, 0]
    *nodes, cores = finished[0][2].splitlines()
    assert nodes == [
        f"ringcomm INFO: node 1 ({HOST}) has come",
        f"ringcomm INFO: node 0 ({HOST}) has rank 0",
        f"ringcomm INFO: node 1 ({HOST}) has ranks 1 and 2",
    ]
    assert cores.startswith("ringcomm INFO: rank 0 runs on the cores ")


@pytest.mark.parametrize(
    ("failing", "failure", "status", "words"),
    [(0, "sys.exit(3)", 3, "exited with status 3"), (2, "os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL")],
)
def test_a_rank_that_fails_is_named_on_all_nodes(job, failing, failure, status, words):
    text = f"""
        exchange()
        if rank == {failing}:
            {failure}
        time.sleep(100)
    """
    for launcher in start_ranks(job, text):
        assert finish(launcher) == (status, [], f"ringcomm run: rank {failing} on {HOST} {words}\n")


def test_a_rank_that_chose_its_status_is_named_although_those_that_fail_because_of_it_exit_first(job):
    text = """
        import atexit
        import ringcomm

        def outlive_the_others():
            while any(os.path.exists(f"/proc/{pids[other]}") for other in (0, 2)):
                time.sleep(0.01)

        pids = exchange(os.getpid())
        with ringcomm.init(timeout=20) as comm:
            if rank == 1:
                atexit.register(outlive_the_others)
                sys.exit(3)
            comm.barrier()
    """
    for launcher in start_ranks(job, text, patch="supervisor.CAUSE_TIMEOUT = 20.0"):
        ended, _, err = finish(launcher)
        assert ended == 3
        named = [line for line in err.splitlines() if line.startswith("ringcomm run: ")]
        assert named == [f"ringcomm run: rank 1 on {HOST} exited with status 3"]


def test_a_node_whose_ranks_have_ended_waits_for_the_others(job):
    text = """
        pids = exchange(os.getpid())
        if rank > 0:
            while os.path.exists(f"/proc/{pids[0]}"):  # its launcher has noticed
                time.sleep(0.01)
            sys.exit(3)
    """
    for launcher in start_ranks(job, text):
        status, _, err = finish(launcher)
        assert status == 3
        assert re.fullmatch(rf"ringcomm run: rank [12] on {HOST} exited with status 3\n", err)


@pytest.mark.parametrize(("number", "node"), [(signal.SIGINT, 0), (signal.SIGINT, 1), (signal.SIGTERM, 1)])
def test_a_signal_to_one_launcher_ends_all_nodes(job, node, number):
    launchers = start_ranks(job, WAITING, patch="supervisor.ESCALATION = ((20.0, signal.SIGKILL),)")
    until_ready(launchers)
    launchers[node].send_signal(number)
    for which, launcher in enumerate(launchers):
        status, _, err = finish(launcher)
        assert status == 128 + number
        assert "ringcomm run: rank" not in err
        assert (f"ringcomm run: sent {number.name} to the ranks\n" in err) == (which == node)
        assert (f"ringcomm run: node {node} ({HOST}) was sent {number.name}\n" in err) == (which != node)


@pytest.mark.parametrize("node", [0, 1])
def test_a_launcher_that_is_killed_ends_all_nodes(job, node):
    launchers = start_ranks(job, WAITING)
    pids = until_ready(launchers)
    launchers[node].kill()
    status, _, err = finish(launchers[1 - node])
    assert status == 1
    name = job_address(job) if node == 0 else HOST
    assert err == f"ringcomm run: the launcher of node {node} ({name}) has ended\n"
    assert until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the ranks to end")


def job_address(job):
    return "{}:{}".format(*job.address)


def test_a_launcher_that_fails_tells_the_others_why(job):
    launchers = [job.start(0, 1, job.program("time.sleep(100)")), job.start(1, 2, "no-such-program")]
    reason = "'no-such-program' is not an executable"
    status, _, err = finish(launchers[1])
    assert status == 2
    assert err.startswith(f"ringcomm run: {reason}")
    status, _, err = finish(launchers[0])
    assert status != 0
    assert f"ringcomm run: node 1 ({HOST}): {reason}" in err


def test_only_the_given_address_listens_and_only_while_the_job_runs(job):
    launchers = start_ranks(job, WAITING)
    until_ready(launchers)
    listening = {line.split()[1] for line in sockets() if line.split()[3] == "0A"}
    port = f"{job.address[1]:04X}"
    assert {address for address in listening if address.endswith(f":{port}")} == {f"0100007F:{port}"}
    inodes = {line.split()[9] for line in sockets() if line.split()[3] == "0A"}
    assert len(inodes & own_inodes(launchers[0].pid)) == 1
    assert not inodes & own_inodes(launchers[1].pid)
    launchers[0].terminate()
    for launcher in launchers:
        finish(launcher)
    assert not any(line.split()[1].endswith(port) and line.split()[3] == "0A" for line in sockets())


def sockets():
    """Return the lines of /proc for the TCP sockets of this network namespace."""
    return [line for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]


def own_inodes(pid):
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def test_a_host_that_vanishes_is_noticed_on_both_sides(job):
    if reason := why_no_hosts():
        pytest.skip(reason)
    with two_hosts() as hosts:
        program = job.program(WAITING)
        address = (ADDRESSES[0], 29500)
        launchers = [
            job.start(node, ranks, program, "--keepalive=3", enter=host.enter, address=address)
            for node, (ranks, host) in enumerate(zip((1, 2), hosts, strict=True))
        ]
        until_ready(launchers)
        hosts.cut_link()
        for node, launcher in zip((1, 0), launchers, strict=True):
            status, _, err = finish(launcher)
            assert status == 1
            name = f"node {node} ({'host-b' if node else f'{ADDRESSES[0]}:29500'})"
            assert err == f"ringcomm run: the launcher of {name} does not answer\n"
