"""Ranks on two hosts that a launcher starts without a store of ringcomm's: tasks of srun, and of torch's launchers."""

import os
import subprocess
import sys
import textwrap

import pytest

import harness
from cases.certificates import certificates
from harness.hosts import two_hosts, why_no_hosts
from harness.nodes import SECRET

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
import numpy as np, ringcomm

def start(expected):
    with ringcomm.init(timeout=20) as comm:
        x = np.full(300_001, comm.rank + 1.0)
        comm.all_reduce(x)
        assert (x == comm.size * (comm.size + 1) / 2).all()
        assert comm._router.name == expected, comm._router.name
        return comm.rank
"""
TWICE = """
rank = start("shm+sockets")
start("shm+sockets")  # which a fast rank may have begun already
print(f"rank {rank}", "mpi4py" in sys.modules, "torch" in sys.modules)
"""
# A host calls itself by a loopback address, as Debian has it in /etc/hosts; the others know its address.
HOSTS_FILE = """
printf '127.0.1.1 %s\\n%s %s\\n' "$0" "$1" "$2" > /dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
"""


@pytest.fixture(scope="module")
def hosts():
    if reason := why_no_hosts():
        pytest.skip(reason)
    with two_hosts() as hosts:
        hosts.a.run(HOSTS_FILE, "host-a", "10.0.0.2", "host-b")
        hosts.b.run(HOSTS_FILE, "host-b", "10.0.0.1", "host-a")
        yield hosts


def srun(rank, size=4, **more):
    """Return what srun sets for a task in a step of two nodes."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": f"{size // 2}(x2)",
        "SLURM_STEP_NODELIST": "host-a,host-b",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        **more,
    }


def torch_launcher(rank, size=2):
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


class Job:
    """Ranks on both hosts, half of them on each."""

    def __init__(self, hosts, folder, text):
        self.hosts, self.program = hosts, folder / "program.py"
        self.program.write_text(PROGRAM + textwrap.dedent(text))
        self.ranks = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for rank in self.ranks:
            rank.kill()
            rank.communicate()

    def start(self, rank, environments):
        host = [self.hosts.a, self.hosts.b][2 * rank // len(environments)]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        process = subprocess.Popen(
            [*host.enter, sys.executable, "-u", str(self.program)],
            env={**inherited, **environments[rank]},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.ranks.append(process)
        return process


def run(hosts, folder, text, environments):
    """Return the output and status of each rank."""
    with Job(hosts, folder, text) as job:
        for rank in range(len(environments)):
            job.start(rank, environments)
        return [(*each.communicate(timeout=harness.JOB), each.returncode) for each in job.ranks]


def test_tasks_of_srun_connect_without_mpi_by_the_secret_of_the_job(hosts, tmp_path):
    """Also where each host calls itself by a loopback address."""
    ended = run(hosts, tmp_path, TWICE, [srun(rank, RINGCOMM_JOB_SECRET=SECRET) for rank in range(4)])
    assert [(out, status) for out, _, status in ended] == [(f"rank {rank} False False\n", 0) for rank in range(4)], (
        ended
    )
    assert not any(err for _, err, _ in ended), ended


def test_tasks_of_srun_connect_over_tls(hosts, tmp_path):
    """Rank 0 serves the start: one that has no certificate does not join it."""
    with_tls = {"RINGCOMM_JOB_SECRET": SECRET, "RINGCOMM_TLS": certificates(tmp_path)()}
    ended = run(hosts, tmp_path, TWICE, [srun(rank, **with_tls) for rank in range(4)])
    assert [status for _, _, status in ended] == [0] * 4, ended
    environments = [srun(0, 2, **with_tls, RINGCOMM_START_TIMEOUT="3"), srun(1, 2, RINGCOMM_JOB_SECRET=SECRET)]
    first, second = run(hosts, tmp_path, 'start("")', environments)
    assert "RINGCOMM_TLS is set there, and not here" in second[1]
    assert "it sent no valid TLS" in first[1]
    assert (first[2], second[2]) == (1, 1)


def test_tasks_of_srun_without_a_secret_say_the_line_that_is_missing(hosts, tmp_path):
    text = """
    sys.modules["mpi4py"] = None
    start("")
    """
    ended = run(hosts, tmp_path, text, [srun(rank, 2) for rank in range(2)])
    line = "add `export RINGCOMM_JOB_SECRET=$(openssl rand -hex 32)` to the batch script, before srun"
    assert all(status == 1 and line in err.splitlines()[-1] for _, err, status in ended), ended


def test_a_stranger_does_not_join_the_step(hosts, tmp_path):
    """Another secret is refused at once, by a rank of another host that has a wrong one."""
    secrets = [SECRET, 32 * "0f"]
    environments = [srun(rank, 2, RINGCOMM_JOB_SECRET=secrets[rank], RINGCOMM_START_TIMEOUT="3") for rank in range(2)]
    first, second = run(hosts, tmp_path, 'start("")', environments)
    assert "ArgumentError: the store at host-a:20007 has another secret than this process" in second[1]
    assert "CollectiveTimeout: timed out: rank 1 of 2 did not arrive within 3 s" in first[1]
    assert "it sent a wrong secret" in first[1]
    assert (first[2], second[2]) == (1, 1)


def test_a_loopback_address_of_rank_0_is_refused(hosts, tmp_path):
    environments = [srun(rank, 2, RINGCOMM_JOB_SECRET=SECRET, MASTER_ADDR="127.0.0.1") for rank in range(2)]
    ended = run(hosts, tmp_path, 'start("")', environments)
    text = "cannot reach rank 0 at 127.0.0.1, the address of '127.0.0.1': set MASTER_ADDR to one that they reach"
    assert all(status == 1 and text in err for _, err, status in ended), ended


def test_a_start_that_has_failed_can_be_repeated_at_the_same_address(hosts, tmp_path):
    """A rank that comes to the first start when rank 0 has left it learns of its failure, and both start again."""
    text = """
    from ringcomm.bootstrap.place import find_place
    try:
        ringcomm.init(config=ringcomm.Config(start_timeout=0.2 if find_place().rank == 0 else 20))
    except ringcomm.CollectiveTimeout as error:
        print(error)
    start("sockets")
    """
    environments = [srun(rank, 2, RINGCOMM_JOB_SECRET=SECRET) for rank in range(2)]
    failure = "timed out: rank 1 of 2 did not arrive within 0.2 s\n"
    with Job(hosts, tmp_path, text) as job:
        first = job.start(0, environments)
        assert first.stdout.readline() == failure
        second = job.start(1, environments)
        assert second.communicate(timeout=harness.JOB) == (f"this rank came too late: {failure}", "")
        assert first.communicate(timeout=harness.JOB) == ("", "")
        assert (first.returncode, second.returncode) == (0, 0)


def test_ranks_of_a_launcher_of_torch_connect_through_the_store_of_torch(hosts, tmp_path):
    """Before and after the program's own init_process_group, which shares that store."""
    pytest.importorskip("torch")
    text = """
    start("sockets")
    import torch.distributed as dist
    dist.init_process_group("ringcomm")
    rank = start("sockets")
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank}")
    """
    ended = run(hosts, tmp_path, text, [torch_launcher(rank) for rank in range(2)])
    assert [(out, status) for out, _, status in ended] == [(f"rank {rank}\n", 0) for rank in range(2)], ended


def test_ranks_of_a_launcher_of_torch_without_torch_say_so(hosts, tmp_path):
    text = """
    sys.modules["torch"] = None
    start("")
    """
    ended = run(hosts, tmp_path, text, [torch_launcher(rank) for rank in range(2)])
    assert all(status == 1 and "pip install 'ringcomm[torch]'" in err for _, err, status in ended), ended
