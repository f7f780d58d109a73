"""All methods to start a torch.distributed job on the backend."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import harness

BIN = Path(sys.executable).parent

CHECK = """
import sys
import torch, torch.distributed as dist

assert not [name for name in sys.modules if name.startswith("ringcomm.")], "import torch must register the name only"

def check(how, **options):
    dist.init_process_group("ringcomm", **options)
    x = torch.full((1000,), float(dist.get_rank() + 1))
    dist.all_reduce(x)
    n = dist.get_world_size()
    assert (x == n * (n + 1) / 2).all()
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        dist.barrier(group)
    dist.barrier()
    sys.stdout.write(f"{how} rank {dist.get_rank()} of {n}\\n")
    sys.stdout.flush()
    dist.destroy_process_group()
"""


def start(command, *, status=0, **environment):
    ended = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * harness.OPERATION,
    )
    assert ended.returncode == status, ended.stdout
    return ended.stdout


def program(folder, text):
    path = folder / "program.py"
    path.write_text(CHECK + text)
    return path


SPAWN = """
import socket
import torch.multiprocessing as mp

def main(rank, folder, ports, size):
    for method in (f"file://{folder}/store", f"tcp://localhost:{ports[0]}"):
        check(method.partition(":")[0], init_method=method, rank=rank, world_size=size)
    dist.init_process_group("ringcomm", init_method=f"tcp://localhost:{ports[1]}", rank=rank, world_size=size)
    dist.destroy_process_group()  # without a barrier: rank 0, which has the store, must leave last

if __name__ == "__main__":
    servers = [socket.create_server(("localhost", 0)) for _ in range(2)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    mp.spawn(main, args=(sys.argv[1], ports, 2), nprocs=2)
"""


@pytest.mark.slow
def test_spawned_processes_connect_through_a_file_or_an_address(tmp_path):
    printed = start([sys.executable, program(tmp_path, SPAWN), tmp_path])
    for rank in range(2):
        assert f"file rank {rank} of 2" in printed
        assert f"tcp rank {rank} of 2" in printed


MPI = """
import os
from mpi4py import MPI
comm = MPI.COMM_WORLD
store = dist.TCPStore("localhost", 0, comm.size, is_master=True, wait_for_workers=False) if comm.rank == 0 else None
port = comm.bcast(store and store.port)
store = store or dist.TCPStore("localhost", port, comm.size)
check("mpirun", store=store, rank=comm.rank, world_size=comm.size)
comm.Barrier()
"""


@pytest.mark.slow
@pytest.mark.mpi
def test_mpirun_with_a_store_of_the_program(tmp_path):
    mpirun = BIN / "mpirun"
    if not mpirun.exists():
        pytest.skip("no mpirun beside this Python")
    command = [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", 2, sys.executable, program(tmp_path, MPI)]
    printed = start(command)
    for rank in range(2):
        assert f"mpirun rank {rank} of 2" in printed


RESTART = """
import os, signal
check("first")
check("second", init_method="env://")
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("ringcomm")
dist.barrier()
if attempt == 0 and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.barrier()
except Exception as error:
    sys.stdout.write(f"rank {dist.get_rank()} saw {type(error).__name__}\\n")
    sys.stdout.flush()
    raise
dist.destroy_process_group()
sys.stdout.write(f"attempt {attempt}\\n")
"""


@pytest.mark.slow
def test_torchrun_starts_ranks_again_in_the_same_processes_and_in_new_ones_after_one_was_killed(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    printed = start([*torchrun, "--max-restarts=1", program(tmp_path, RESTART)])
    for how in ("first", "second"):
        for rank in range(2):
            assert printed.count(f"{how} rank {rank} of 2") == 2  # attempts
    assert printed.count("attempt 1") == 2
    assert "attempt 0" not in printed


def test_registration_never_raises(monkeypatch):
    import ringcomm_torch_backend

    ringcomm_torch_backend.register()  # twice is harmless
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    ringcomm_torch_backend.register()


def wait_for_a_third(comm, path):
    options = {"store": dist.FileStore(path, 3), "rank": comm.rank, "world_size": 3, "timeout": timedelta(seconds=1)}
    with pytest.raises(TimeoutError, match="rank 2 of 3 did not arrive within 1 s"):
        dist.init_process_group("ringcomm", **options)
    assert not dist.is_initialized()


def test_a_rank_that_does_not_join_is_named_on_every_other(tmp_path):
    harness.run(wait_for_a_third, 2, str(tmp_path / "store"))


@pytest.mark.ranks(1, world="processes")
def test_where_torch_serves_its_store_is_known(comm):  # noqa: ARG001
    from ringcomm.bootstrap.torch_start import _address_of

    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    for inner in (store, dist.PrefixStore("a group", dist.PrefixStore("a job", store))):
        assert _address_of(inner) == f"127.0.0.1:{store.port}"
    assert _address_of(dist.PrefixStore("a job", dist.HashStore())) == ""


@pytest.mark.parametrize(("value", "backend"), [("1", "ringcomm"), ("yes", "gloo")])
def test_a_program_that_names_no_backend_takes_it_if_a_variable_says_so(tmp_path, value, backend):
    path = tmp_path / "program.py"
    path.write_text(
        "import torch, torch.distributed as dist\n"
        f"dist.init_process_group(store=dist.FileStore({str(tmp_path / 'store')!r}, 1), rank=0, world_size=1)\n"
        "print(dist.get_default_backend_for_device('cpu'))\n"
        "print(dist.group.WORLD._get_backend(torch.device('cpu')).name())\n"
    )
    printed = start([sys.executable, path], RINGCOMM_TORCH_DEFAULT=value)
    assert printed.splitlines()[-2:] == [backend, backend]
    assert ("RINGCOMM_TORCH_DEFAULT: expected 0 or 1, got 'yes'" in printed) == (value == "yes")
