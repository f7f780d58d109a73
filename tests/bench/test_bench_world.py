"""`ringcomm bench` as the program of a launcher: its ranks are measured, and rank 0 speaks for all."""

import json
import os
import re
import signal
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest
from quick_bench import BENCH

import harness
from harness import mpi_world
from harness.nodes import Job, finish

pytestmark = pytest.mark.slow

RINGCOMM = [sys.executable, "-m", "ringcomm"]
FEW, SIZES = ["-e", "1K", "-f", "16", "-n", "2"], ("4", "64", "1024")
RUN = [*RINGCOMM, "run", "-n", "2", "--"]
# -m as a user would: torchrun starts Python itself.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def finished(command, **variables):
    """Return the exit status, the output, and the errors of a command."""
    run = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=harness.JOB, check=False
    )
    return run.returncode, run.stdout, run.stderr


def libraries(out):
    """Return by size the libraries in a table."""
    found = {}
    for words in (line.split() for line in out.splitlines() if line and not line.startswith("#")):
        found.setdefault(words[0], []).append(words[5])
    return found


def test_the_ranks_of_a_launcher_are_measured_and_rank_0_prints(tmp_path):
    options = ["all_reduce", "--op", "max", "--dtype", "int32", *FEW, "--json", f"{tmp_path}/out.json"]
    status, out, err = finished([*RUN, *RINGCOMM, "bench", *options])
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert {line[:4] for line in lines} == {"[0] "}
    assert libraries("\n".join(line[4:] for line in lines)) == {size: ["ringcomm"] for size in SIZES}
    assert "all_reduce; 2 ranks on 1 host, started by ringcomm run; in place" in out
    assert re.search(r"memcpy of 256 MiB.* GB/s per rank", out)
    assert "RINGCOMM_JOB_SECRET" not in out, "which only the job may know"
    document = json.loads((tmp_path / "out.json").read_text())
    assert {(row["ranks"], row["op"], row["dtype"], row["wrong"]) for row in document["rows"]} == {
        (2, "max", "int32", 0)
    }
    assert document["placement"] == {"2": "on 1 host, started by ringcomm run"}
    assert document["machine"]["cores"] == os.cpu_count(), "though rank 0 is bound"


def test_every_collective_is_correct_on_ranks_of_a_launcher():
    status, out, err = finished([*RINGCOMM, "run", "-n", "3", "--", *BENCH, "all", "-b", "20K", "-e", "20K", "-n", "1"])
    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if not re.match(r"\[0\] (#|$)", line)]
    assert len(rows) == 10
    assert {words[13] for words in rows} == {"0"}


def test_mpi_is_measured_beside_in_a_world_of_mpirun():
    mpi_world.skip_without("openmpi")
    mpirun, settings = mpi_world.LIBRARIES["openmpi"]()
    status, out, err = finished([*mpirun, "-n", "2", *BENCH, "all_reduce", *FEW], **settings)
    assert status == 0, err
    assert libraries(out) == {size: ["ringcomm", "openmpi"] for size in SIZES}
    assert "# openmpi: MPI Open MPI" in out
    assert "started by Open MPI" in out


def test_gloo_is_measured_beside_in_a_world_of_torchrun():
    pytest.importorskip("torch")
    command = [*TORCHRUN, "-m", "ringcomm", "bench", "all_reduce", *FEW]
    status, out, err = finished(command, GLOO_SOCKET_IFNAME="lo")
    assert status == 0, err
    assert libraries(out) == {size: ["ringcomm", "gloo"] for size in SIZES}
    assert "started by torchrun" in out


def test_a_rank_that_waits_inside_gloo_does_not_hold_up_the_bench():
    pytest.importorskip("torch")
    bench = " ".join([*BENCH, "all_reduce", "-e", "4", "-n", "1", "--timeout", "6"])
    one_refuses = f"[ $RANK = 1 ] && export GLOO_SOCKET_IFNAME=absent; exec {bench}"
    command = [*TORCHRUN, "--no-python", "sh", "-c", one_refuses]
    status, out, err = finished(command, GLOO_SOCKET_IFNAME="lo")
    assert status == 0, err
    assert libraries(out) == {"4": ["ringcomm"]}
    assert "ringcomm bench: gloo: rank " in err


def test_ranks_on_several_hosts_are_measured(tmp_path):
    job = Job(tmp_path, 2)
    program = job.program(f"""
        sys.path.append({str(Path(__file__).parent)!r})
        from quick_bench import main, shorten
        os.environ["RINGCOMM_HOST_ID"] = f"host {{rank // 2}}"
        shorten()
        sys.exit(main({["bench", "all_reduce", "send_recv", *FEW]}))
        """)
    try:
        launchers = [job.start(node, 2, program) for node in range(2)]
        (status, out, err), *others = [finish(launcher) for launcher in launchers]
    finally:
        job.close()
    assert (status, err) == (0, "")
    assert others == [(0, [], "")]
    assert any("4 ranks on 2 hosts, started by ringcomm run" in line for line in out)
    assert len([line for line in out if " ringcomm " in line and " float32 " in line]) == 6


REFUSED = {
    "all_reduce --ranks 4": "--ranks: for ranks that bench starts itself, without a launcher; ringcomm run has",
    "all_reduce --vs gloo": "--vs: for ranks that bench starts itself, without a launcher; ringcomm run has",
    "all_reduce --unbound": "--unbound: for ranks that bench starts itself",
    "all_reduce --noise": "--noise: for ranks that bench starts itself",
    "--setup-peers": "--setup-peers: for ranks that bench starts itself",
    "": "which collective? all_reduce, ",
    "all_reduce --dtype bool --op avg": "--op: avg is not defined for bool",
    "all_reduce --json /": "Is a directory",
    "all_reduce --op": "expected one argument",
    "all_reduse": "unknown collective 'all_reduse'; did you mean 'all_reduce'?",
}
# One job for all: to start one takes longer than all refusals.
REFUSALS = f"""
import sys
from ringcomm.commands.cli import main
for options in {[*REFUSED]}:
    try:
        status = main(["bench", *options.split()])
    except SystemExit as end:
        status = end.code
    print(options, "gives", status, file=sys.stderr)
"""


def test_rank_0_refuses_for_all(tmp_path):
    (tmp_path / "refusals.py").write_text(REFUSALS)
    status, out, err = finished([*RUN, f"{tmp_path}/refusals.py"])
    assert (status, out) == (0, "")
    for rank in range(2):
        lines = iter(line[4:] for line in err.splitlines() if line.startswith(f"[{rank}] "))
        for options, message in REFUSED.items():
            said = [*takewhile(f"{options} gives 2".__ne__, lines)]
            assert sum(message in line for line in said) == (rank == 0), err
            assert rank == 0 or not said


def test_a_refusal_is_the_exit_status():
    status, out, err = finished([*RUN, *BENCH, "all_reduce", "--ranks", "4"])
    assert (status, out) == (2, "")
    assert "[1]" not in err


def test_one_rank_of_a_launcher_starts_its_own():
    command = [*RINGCOMM, "run", "-n", "1", "--", *BENCH, "broadcast", "-e", "4", "-n", "1", "--ranks", "3"]
    status, out, err = finished(command)
    assert (status, err) == (0, "")
    assert "3 ranks bound to " in out


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_dies_is_named(lost):
    with subprocess.Popen(
        [*RUN, *BENCH, "all_reduce"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        while " float32 " not in job.stdout.readline():
            assert job.poll() is None
        os.kill(rank_of(job.pid, lost), signal.SIGKILL)
        _, err = job.communicate(timeout=harness.OPERATION)
    assert job.returncode == 128 + signal.SIGKILL
    assert err.startswith(f"ringcomm run: rank {lost} was killed by SIGKILL\n")
    assert re.search(rf"^\[{1 - lost}\] ringcomm bench: rank {lost} ", err, re.MULTILINE), err


def rank_of(launcher, rank):
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and f"RINGCOMM_RANK={rank}\0".encode() in (path / "environ").read_bytes():
                return int(path.name)
        except OSError:
            continue
    raise AssertionError(f"no rank {rank}")


def test_an_interrupted_world_keeps_what_it_has_measured(tmp_path):
    command = [*RUN, *BENCH, "all_reduce", "--json", f"{tmp_path}/out.json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        while " float32 " not in job.stdout.readline():
            assert job.poll() is None
        job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=harness.OPERATION)
    assert job.returncode == 128 + signal.SIGINT, err
    lines = [line for line in err.splitlines() if line.startswith("[")]
    assert lines == ["[0] ringcomm bench: interrupted; completed measurements are kept"]
    assert json.loads((tmp_path / "out.json").read_text())["rows"][0]["bytes"] == 4
