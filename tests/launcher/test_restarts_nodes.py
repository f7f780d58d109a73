"""`ringcomm run --respawn` on several nodes: lost ranks come back, and the others go on without lost nodes."""

import json
import re
import signal
from contextlib import closing
from pathlib import Path

import pytest
from elastic_programs import ELASTIC
from test_restarts import JOINS, PROGRAM
from test_stopped import NEVER_JOINS, STOPPED_JOINER, STOPPED_MEMBER
from test_stopped import PROGRAM as LEAVES_RANK_1_OUT

from harness.failures import until
from harness.nodes import Job, finish

pytestmark = pytest.mark.slow


SOON = "from ringcomm.launcher import restarts; restarts.EXIT_TIMEOUT = 1.0"


def start(job, program, respawn, *arguments, ranks=(2, 2), patch=""):
    """Start the ranks of each node as on a host of its own; return the launchers."""
    return [
        job.start(
            node,
            number,
            program,
            *([] if respawn is None else [f"--respawn={respawn}"]),
            host_id=str(node),
            arguments=arguments,
            patch=patch,
        )
        for node, number in enumerate(ranks)
    ]


def run(job, kills, respawn, wait=10.0, ranks=(2, 2)):
    """Return what each rank printed, by rank; the status of each node; and what they wrote."""
    program = job.folder / "program.py"
    program.write_text(PROGRAM)
    ended = [finish(each) for each in start(job, str(program), respawn, json.dumps(kills), str(wait), ranks=ranks)]
    lines = [json.loads(line.partition(" ")[2]) for _, out, _ in ended for line in out]
    return {rank: rest for rank, *rest in lines}, [status for status, _, _ in ended], "".join(err for *_, err in ended)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_lost_rank_comes_back_in_its_place(job, victim):
    found, statuses, text = run(job, [[victim, 0, 10]], 1)
    assert statuses == [0, 0], text
    assert {rank: rest[:3] for rank, rest in found.items()} == {r: [int(r == victim), r, 4] for r in range(4)}
    assert {rest[3] for rank, rest in found.items() if rank != victim} == {30}
    assert found[victim][3] == 20
    assert re.search(rf"rank {victim} on \S+ was killed by SIGKILL; restarted \(1 of 1\)", text)


def test_grow_does_not_wait_for_a_rank_that_is_never_started_again(job):
    found, statuses, text = run(job, [[1, 0, 5], [1, 1, 8]], 1, wait=50, ranks=(1, 2))
    assert statuses == [0, 0], text
    assert found == {0: [0, 0, 2, 30, 2], 2: [0, 1, 2, 30, 2]}
    assert "the others continue without it" in text


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_while_it_joins_leaves_the_communicator_usable(job, victim):
    launchers = start(job, str(write(job, JOINS)), 3, str(victim), ranks=(2, 1))
    ended = [finish(each) for each in launchers]
    assert [status for status, _, _ in ended] == [0, 0], ended
    assert sorted(line for _, out, _ in ended for line in out) == [
        f"[{rank}] {rank} 2 []" if rank == victim else f"[{rank}] {rank} 0 [{victim}]" for rank in range(3)
    ]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_without_ranks_waits_for_the_others(job, lost):
    found, statuses, _ = run(job, [[2 * lost, 0, 5], [2 * lost + 1, 0, 5]], 0, wait=0.2)
    left = [2 - 2 * lost, 3 - 2 * lost]
    assert found == {rank: [0, left.index(rank), 2, 30, 2] for rank in left}
    assert statuses[lost] == 128 + signal.SIGKILL
    assert statuses[1 - lost] == 0


@pytest.mark.parametrize("node", [0, 1])  # of rank 1
def test_a_rank_that_never_joins_is_ended_when_those_of_all_nodes_have_ended(job, node):
    launchers = start(job, str(write(job, NEVER_JOINS)), 1, "busy", ranks=(2 - node, 1), patch=SOON)
    ended = [finish(each) for each in launchers]
    assert [status for status, _, _ in ended] == [0, 0], ended
    assert "rank 1 was restarted, but no rank is left that it could join" in ended[node][2]


def test_a_rank_that_is_stopped_while_it_joins_is_ended_and_started_again(job):
    patch = "from ringcomm.launcher import restarts; restarts.CHECK_INTERVAL = 0.1"
    program = str(write(job, STOPPED_JOINER))
    launchers = start(job, program, 2, "when it has connected", ranks=(1, 2), patch=patch)
    ended = [finish(each) for each in launchers]
    assert [status for status, _, _ in ended] == [0, 0], ended
    assert sorted(line.split(" ", 1)[1] for _, out, _ in ended for line in out) == ["0 0", "1 2", "2 0"]


@pytest.mark.parametrize("ranks", [(1, 1), (1, 2)], ids=["the last one", "beside another"])
def test_a_stopped_rank_that_one_of_another_node_waits_too_long_for_is_ended(job, ranks):
    patch = "from ringcomm.launcher import restarts; restarts.CHECK_INTERVAL = 0.1"
    ended = [finish(each) for each in start(job, str(write(job, STOPPED_MEMBER)), 3, ranks=ranks, patch=patch)]
    last = sum(ranks) == 2
    what = "those on other nodes, if any are left, continue without it" if last else "restarted (1 of 3)"
    assert f" was stopped while another rank waited for it, and was ended; {what}" in ended[0][2], ended
    assert ended[0][0] == (128 + signal.SIGTERM if last else 0), ended


# First rank 0 is lost, so that rank 2 of the job is rank 1 of those that leave it out.
LEAVES_RANK_2_OUT = f"""{ELASTIC}
comm = ringcomm.init(timeout=30)
if restarts == 0:
    if rank == 0:
        die()
    comm = shrunk(comm)
    if rank == 2:
        stop()
    try:
        comm.barrier(timeout=0.3)
    except ringcomm.CollectiveTimeout:
        comm = comm.shrink(timeout=0.3)
    comm = comm.grow(timeout=20)
complete(comm)
"""


@pytest.mark.parametrize(
    ("program", "ranks", "restarts"),
    [
        (LEAVES_RANK_1_OUT, (1, 1), [0, 1]),
        (LEAVES_RANK_1_OUT, (1, 2), [0, 1, 0]),
        (LEAVES_RANK_1_OUT, (2, 1), [0, 1, 0]),
        (LEAVES_RANK_2_OUT, (2, 1), [1, 0, 1]),
    ],
    ids=["alone on its host", "beside another", "on node 0", "in a group that has shrunk"],
)
def test_a_rank_that_was_left_out_is_ended_and_started_again(job, program, ranks, restarts):
    launchers = start(job, str(write(job, program)), 1, "stopped", ranks=ranks)
    ended = [finish(each) for each in launchers]
    assert [status for status, _, _ in ended] == [0, 0], ended
    found = sorted(line.split(" ", 1)[1] for _, out, _ in ended for line in out)
    assert found == [f"{rank} {count}" for rank, count in enumerate(restarts)]
    text = "was stopped, was left out by the others and ended; restarted (1 of 1)"
    assert [err.count(text) for _, _, err in ended].count(1) == 1, ended


LOST_NODE = """
import sys, time
import numpy as np
import ringcomm

comm = ringcomm.init()
if comm.rank == comm.size - 1:
    print("ready", flush=True)
try:
    while True:
        comm.barrier()
except (ringcomm.PeerLost, ringcomm.Aborted):
    comm = comm.shrink(timeout=10)
x = comm.all_reduce(np.ones(1000))
print("left", comm.rank, int(x[0]))
"""


def test_the_others_go_on_without_a_lost_node(job):
    launchers = start(job, str(write(job, LOST_NODE)), 0, ranks=(2, 1))
    until(lambda: "ready" in launchers[1].stdout.readline(), "the ranks")
    launchers[1].kill()
    status, out, err = finish(launchers[0])
    assert (status, out) == (0, ["[0] left 0 2", "[1] left 1 2"]), err
    assert re.search(r"the launcher of node 1 \(\S+\) has ended; the others continue without it", err)


CONNECTS = f"""{ELASTIC}
comm = ringcomm.init()
comm.barrier()
time.sleep(1)
comm.barrier()
"""
FAILS_LATE = f"""{ELASTIC}
if ringcomm.init().rank:
    time.sleep(1.5)  # the other one has ended well
    sys.exit(3)
"""


def test_a_rank_that_fails_when_others_have_ended_well_does_not_fail_them(job):
    launchers = start(job, str(write(job, FAILS_LATE)), 0, ranks=(1, 1))
    assert [finish(each)[0] for each in launchers] == [0, 3]


def test_a_launcher_that_is_lost_before_the_first_start_ends_the_job(tmp_path):
    with closing(Job(tmp_path, 3)) as job:
        program = str(write(job, "import ringcomm\nringcomm.init()\n"))
        options = {"patch": "nodes.LATE = 20.0"}  # until node 2 has come
        launchers = [
            job.start(n, 1, program, "--respawn=1", *["--verbose"][n:], host_id=str(n), **options) for n in range(2)
        ]
        assert "node 1 (" in launchers[0].stderr.readline()
        launchers[1].kill()
        ended = [finish(each) for each in (launchers[0], job.start(2, 1, program, "--respawn=1", host_id="2"))]
    for status, _, err in ended:
        assert status == 2
        assert re.search(r"the launcher of node 1 \(\S+\) has ended", err)


def test_two_jobs_may_have_one_secret(tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    with closing(Job(folders[0], 2)) as first, closing(Job(folders[1], 2)) as second:
        both = [start(job, str(write(job, CONNECTS)), 1, ranks=(1, 1)) for job in (first, second)]
        for launcher in (*both[0], *both[1]):
            status, _, err = finish(launcher)
            assert status == 0, err


def test_respawn_is_for_all_nodes_or_none(job):
    program = str(write(job, "import ringcomm\nringcomm.init()\n"))
    launchers = [*start(job, program, 1, ranks=(1,)), job.start(1, 1, program)]
    for launcher in launchers:
        status, _, err = finish(launcher)
        assert status == 2
        assert "--respawn: expected it on all nodes or on none, got it, but not on node 1" in err


@pytest.mark.parametrize("kills", [8, pytest.param(400, marks=[pytest.mark.exhaustive, pytest.mark.timeout(3600)])])
def test_random_kills_lose_nothing(job, kills, tmp_path):
    program = Path(__file__).with_name("mortal.py")
    launchers = start(job, str(program), kills, str(kills), "1", str(tmp_path))
    ended = [launcher.communicate(timeout=60 + 5 * kills) for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], "".join(err for _, err in ended)[-4000:]
    assert sum(err.count("restarted") for _, err in ended) == kills
    assert sum(len(out.splitlines()) for out, _ in ended) == 4


def write(job, text):
    path = job.folder / "program.py"
    path.write_text(text)
    return path
