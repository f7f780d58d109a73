"""`ringcomm run --respawn`: lost ranks are restarted, and join those that went on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_programs import ELASTIC, restarted

pytestmark = pytest.mark.slow

PROGRAM = f"""{ELASTIC}
kills = json.loads(sys.argv[1])  # [rank, restarts, step]
comm, step, sizes = ringcomm.init(), 0, []
while step < 30:
    try:
        step = int(comm.all_reduce(np.array([step]), "max")[0])
        x = comm.all_reduce(np.ones(100_000))
        assert (x == comm.size).all()
        if [rank, restarts, step] in kills:
            die()
        comm.barrier()
        step += 1
        sizes.append(comm.size)
    except (ringcomm.PeerLost, ringcomm.Aborted):
        comm = comm.shrink(timeout=10)
        if os.environ["RINGCOMM_MAX_RESTARTS"] != "0":
            comm = comm.grow(timeout=float(sys.argv[2]))
print(json.dumps([rank, restarts, comm.rank, comm.size, len(sizes), sizes[-1]]))
"""


def run(tmp_path, kills, respawn, wait=10.0):
    """Return what each rank printed, by rank; and what the launcher wrote."""
    ended = restarted(tmp_path, PROGRAM, respawn, json.dumps(kills), wait)
    lines = [json.loads(line.partition(" ")[2]) for line in ended.stdout.splitlines()]
    return {rank: rest for rank, *rest in lines}, ended.stderr


@pytest.mark.parametrize("victim", [0, 2])
def test_a_lost_rank_comes_back_in_its_place(tmp_path, victim):
    found, text = run(tmp_path, [[victim, 0, 10]], 1)
    assert {rank: rest[:3] for rank, rest in found.items()} == {r: [int(r == victim), r, 3] for r in range(3)}
    assert {rest[3] for rank, rest in found.items() if rank != victim} == {30}
    assert found[victim][3] == 20
    assert f"rank {victim} was killed by SIGKILL; restarted (1 of 1)" in text


def test_ranks_are_lost_again_and_again(tmp_path):
    kills = [[1, 0, 5], [2, 0, 5], [1, 1, 9], [0, 0, 12], [1, 2, 20]]
    found, text = run(tmp_path, kills, 3)
    assert {rank: rest[:3] for rank, rest in found.items()} == {0: [1, 0, 3], 1: [3, 1, 3], 2: [1, 2, 3]}
    assert text.count("restarted") == 5


def test_without_respawn_left_the_others_go_on_alone(tmp_path):
    found, text = run(tmp_path, [[1, 0, 5]], 0)
    assert found == {0: [0, 0, 2, 30, 2], 2: [0, 1, 2, 30, 2]}
    assert "rank 1 was killed by SIGKILL; the others continue without it" in text


DIES = "import os, time, ringcomm\nagain = os.environ['RINGCOMM_RESTARTS'] != '0'\n"


def test_a_rank_that_comes_back_when_the_job_is_over_says_so_in_one_line(tmp_path):
    text = DIES + f"path = {str(tmp_path / 'again')!r}\nif again: open(path, 'w').close(); time.sleep(0.5)\n"
    text += "comm = ringcomm.init()\nif comm.rank == 1: os.kill(os.getpid(), 9)\n"
    text += "while not os.path.exists(path): time.sleep(0.01)\n"
    ended = restarted(tmp_path, text, 3, ranks=2)
    assert ended.stderr.splitlines() == [
        "ringcomm run: rank 1 was killed by SIGKILL; restarted (1 of 3)",
        "ringcomm run: rank 1 was restarted, but no rank is left that it could join",
    ]


def test_the_death_of_the_last_connected_rank_ends_the_job_and_is_the_reason(tmp_path):
    text = DIES + "comm = ringcomm.init()\nif comm.rank == 0: time.sleep(1)\nos.kill(os.getpid(), 9)\n"
    ended = restarted(tmp_path, text, 3, ranks=2, status=128 + 9)
    assert ended.stderr.splitlines() == [
        "ringcomm run: rank 1 was killed by SIGKILL; restarted (1 of 3)",
        "ringcomm run: rank 0 was killed by SIGKILL, and no rank is left that could continue",
    ]


def test_a_rank_that_fails_when_the_others_have_closed_does_not_end_them(tmp_path):
    text = DIES + f"ringcomm.init().close()\npath = {str(tmp_path / 'ends')!r}\n"
    text += "if os.environ['RINGCOMM_RANK'] == '1': time.sleep(0.2); os._exit(3)\n"
    text += "while not os.path.exists(path): time.sleep(0.01)\n"
    (tmp_path / "program.py").write_text(text)
    command = [sys.executable, "-m", "ringcomm", "run", "-n", "2", "--respawn", "9", str(tmp_path / "program.py")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as job:
        line = job.stderr.readline()
        (tmp_path / "ends").touch()
        assert job.stderr.read() == ""
    assert line == "ringcomm run: rank 1 exited with status 3; the others continue without it\n"
    assert job.returncode == 0


def test_a_rank_that_dies_before_it_has_joined_is_started_again_after_a_pause(tmp_path):
    text = DIES + "starts = open('starts', 'a')\nprint(time.monotonic(), file=starts, flush=True)\n"
    text += "if again: os._exit(7)\ncomm = ringcomm.init()\nif comm.rank == 1: os.kill(os.getpid(), 9)\n"
    text += "while len(open('starts').readlines()) < 5: time.sleep(0.1)\n"
    ended = restarted(tmp_path, f"import os; os.chdir({str(tmp_path)!r})\n{text}", 100, ranks=2)
    early = "ringcomm run: rank 1 exited with status 7 before it had joined; restarted in {} s ({} of 100)"
    lines = ended.stderr.splitlines()
    assert lines[:3] == [
        "ringcomm run: rank 1 was killed by SIGKILL; restarted (1 of 100)",
        *(early.format(2**n, n + 2) for n in range(2)),
    ]
    starts = sorted(map(float, (tmp_path / "starts").read_text().split()))
    assert starts[3] - starts[2] >= 1
    assert starts[4] - starts[3] >= 2


def test_a_rank_is_not_started_again_once_the_job_is_over(tmp_path):
    text = DIES + "if again: os._exit(7)\ncomm = ringcomm.init()\nif comm.rank == 1: os.kill(os.getpid(), 9)\n"
    text += f"path = {str(tmp_path / 'ends')!r}\nwhile not os.path.exists(path): time.sleep(0.01)\n"
    (tmp_path / "program.py").write_text(text)
    command = [sys.executable, "-m", "ringcomm", "run", "-n", "2", "--respawn", "9", str(tmp_path / "program.py")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as job:
        for line in job.stderr:
            if "restarted in 1 s (2 of 9)" in line:
                (tmp_path / "ends").touch()
        assert line == "ringcomm run: rank 1 is not restarted: no rank is left that it could join\n"
    assert job.returncode == 0


def test_ranks_that_fail_before_they_are_connected_end_the_job(tmp_path):
    ended = restarted(tmp_path, "import ringcomm\nringcomm.init().close()\n1 / 0\n", 1000, ranks=2, status=1)
    assert "exited with status 1" in ended.stderr
    assert "restarted" not in ended.stderr


PATIENT = """
import signal, sys
from ringcomm.commands.cli import main
from ringcomm.launcher import supervisor
supervisor.ESCALATION = (600, signal.SIGTERM), (602, signal.SIGKILL)
sys.exit(main())
"""


def test_nobody_waits_for_a_rank_that_fails_before_any_has_joined(tmp_path):
    text = "import os\nif os.environ['RINGCOMM_RANK'] == '1':\n    import nowhere\nimport ringcomm\nringcomm.init()\n"
    (tmp_path / "program.py").write_text(text)
    command = [sys.executable, "-c", PATIENT, "run", "-n", "2", "--respawn", "1", str(tmp_path / "program.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-2:] == [
        "[1] ModuleNotFoundError: No module named 'nowhere'",
        "ringcomm run: rank 1 exited with status 1",
    ]


def test_grow_does_not_wait_for_a_rank_that_is_never_started_again(tmp_path):
    found, text = run(tmp_path, [[1, 0, 5], [1, 1, 8]], 1, wait=50)
    assert found == {0: [0, 0, 2, 30, 2], 2: [0, 1, 2, 30, 2]}
    assert "rank 1 was killed by SIGKILL; restarted (1 of 1)" in text
    assert "rank 1 was killed by SIGKILL; the others continue without it" in text


def test_a_rank_that_no_other_takes_in_says_so_in_one_line(tmp_path):
    text = DIES + f"import atexit\npath = {str(tmp_path / 'ended')!r}\nif again: atexit.register(open, path, 'w')\n"
    text += "comm = ringcomm.init(timeout=0.3 if again else 20)\nif comm.rank == 1: os.kill(os.getpid(), 9)\n"
    text += "while not os.path.exists(path): time.sleep(0.01)\nos._exit(0)\n"
    ended = restarted(tmp_path, text, 1, ranks=2)
    assert ended.stderr.splitlines()[:2] == [
        "ringcomm run: rank 1 was killed by SIGKILL; restarted (1 of 1)",
        "[1] ringcomm: rank 1 ends: no rank has called grow within 0.3 s",
    ]


JOINS = f"""{ELASTIC}
victim, errors = int(sys.argv[1]), []
if restarts == 1:  # it dies when it knows the group that it joins
    ringcomm.elastic.place_in = lambda *_: die()
comm = ringcomm.init(timeout=30)
if restarts == 0:
    try:
        if rank == victim:
            die()
        comm.barrier()
    except ringcomm.PeerLost:
        comm = comm.shrink(timeout=10)
while comm.size < 3:
    try:
        comm = comm.grow(timeout=30)
    except ringcomm.PeerLost as error:  # not CollectiveTimeout
        assert "exited during startup" in str(error)
        errors.append(error.rank)
        assert (comm.all_reduce(np.ones(100_000)) == 2).all()
        assert comm.split(0).all_reduce(np.ones(1))[0] == 2
assert (comm.all_reduce(np.ones(100_000)) == 3).all()
print(rank, restarts, errors)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_while_it_joins_leaves_the_communicator_usable(victim, tmp_path):
    ended = restarted(tmp_path, JOINS, 3, victim)
    assert sorted(ended.stdout.splitlines()) == [
        f"[{rank}] {rank} 2 []" if rank == victim else f"[{rank}] {rank} 0 [{victim}]" for rank in range(3)
    ]


@pytest.mark.parametrize("kills", [8, pytest.param(1000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(3600)])])
def test_random_kills_lose_nothing(kills, tmp_path):
    program = Path(__file__).with_name("mortal.py")
    command = [sys.executable, "-m", "ringcomm", "run", "-n", "4", "--respawn", str(kills), str(program)]
    ended = subprocess.run(
        [*command, str(kills), "1", str(tmp_path)], capture_output=True, text=True, timeout=60 + 5 * kills
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stderr.count("restarted") == kills
    assert len(ended.stdout.splitlines()) == 4


def test_a_forked_child_does_not_hold_the_place_of_a_dead_rank(tmp_path):
    text = """
        import os, time, ringcomm
        comm = ringcomm.init(timeout=20)
        if comm.rank == 1 and os.environ['RINGCOMM_RESTARTS'] == '0':
            if os.fork() == 0:
                time.sleep(60)
            os._exit(3)
        try:
            while comm.size == 2 and os.environ['RINGCOMM_RESTARTS'] == '0':
                comm.barrier()
        except ringcomm.RingcommError:
            comm = comm.shrink().grow(timeout=20)
        comm.barrier()
        print('size', comm.size, flush=True)
        """
    ended = restarted(tmp_path, text, 1, ranks=2)
    assert sorted(ended.stdout.splitlines()) == ["[0] size 2", "[1] size 2"], ended.stderr
