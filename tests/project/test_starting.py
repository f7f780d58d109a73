"""The lines of the table in docs/starting.md run, where their launcher is installed, and the variables are those read.

`.ci/run` runs those that need nothing in a fresh environment, too.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import harness
from harness import mpi_world
from harness.hosts import two_hosts, why_no_hosts
from harness.nodes import SECRET
from ringcomm.bootstrap.place import LAUNCHERS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "starting.md").read_text()
_, _, *ROWS = re.search(r"^\| launcher \|.*?(?=\n\n)", PAGE, re.DOTALL | re.MULTILINE)[0].splitlines()
TABLE = [re.split(r" *\| *", row)[1:-1] for row in ROWS]
LINES = {re.sub(r"\[(.*?)\]\(.*?\)", r"\1", name): re.match(r"`(.*)`$", line)[1] for name, line, *_ in TABLE}
# Open MPI starts nothing for root, and no more ranks than cores, unless it is told.
FOR_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
# In place of SLURM's: starts the tasks of `srun -N 2 -n SIZE COMMAND` on two hosts.
SRUN = """#!{python}
import os, subprocess, sys

_, nodes, _, size, *command = sys.argv[1:]
step = dict(
    SLURM_STEP_NUM_TASKS=size,
    SLURM_STEP_TASKS_PER_NODE=f"{{int(size) // 2}}(x{{nodes}})",
    SLURM_STEP_NODELIST="10.0.0.[1-2]",
    SLURM_JOB_ID="7",
    SLURM_STEP_ID="0",
)
tasks = []
for rank in range(int(size)):
    place = dict(step, SLURM_PROCID=str(rank))
    enter = {enter}[2 * rank // int(size)]
    in_this_folder = ["sh", "-c", 'cd "$0"; exec "$@"', os.getcwd()]
    tasks.append(subprocess.Popen([*enter, *in_this_folder, *command], env={{**os.environ, **place}}))
sys.exit(max(task.wait() for task in tasks))
"""


def test_the_table_names_what_each_launcher_is_read_from():
    named = [set(re.findall(r"`([A-Z][A-Z_]+)`", read)) for _, _, read, _ in TABLE]
    for launcher in LAUNCHERS:
        read = {launcher.rank, launcher.size, *filter(None, [launcher.local_size]), *launcher.job}
        assert any(read <= variables for variables in named), launcher.name


def test_the_lines_of_kubernetes_name_its_manifests():
    files = {ROOT / line.split()[-1] for line in LINES.values() if line.startswith("kubectl")}
    assert files == {*(ROOT / "examples" / "kubernetes").glob("*.yaml")}


@pytest.fixture
def folder(tmp_path):
    """A folder with the program of the README."""
    program = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)[1]
    (tmp_path / "sum.py").write_text(program)
    return tmp_path


def run(folder, lines, *first, **environment):
    """Run lines side by side, each after the prefix of its host, with this Python; return which ranks have printed."""
    path = os.pathsep.join([*map(str, first), str(Path(sys.executable).parent), os.environ["PATH"]])
    started = [
        subprocess.Popen(
            [*enter, "sh", "-c", f"cd {folder}; {line}"],
            env={**os.environ, "PATH": path, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for enter, line in lines
    ]
    try:
        ended = [each.communicate(timeout=2 * harness.JOB) for each in started]
    finally:
        for each in started:
            each.kill()
    assert [each.returncode for each in started] == [0] * len(started), ended
    return sorted(re.findall(r"rank \d of \d", "".join(out for out, _ in ended)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "size"), [("none", 1), ("ringcomm run", 2), ("torchrun", 2), ("Open MPI 5", 2), ("MPICH 5", 2)]
)
def test_the_line_of_a_launcher_on_one_host_runs(launcher, size, folder):
    line, settings = LINES[launcher], {}
    if launcher == "torchrun":
        pytest.importorskip("torch")
    if library := {"Open MPI 5": "openmpi", "MPICH 5": "mpich"}.get(launcher):
        mpi_world.skip_without(library)
        (mpirun, *_), settings = mpi_world.LIBRARIES[library]()
        line = f"{Path(mpirun).parent}/{line}"
    assert run(folder, [((), line)], **settings, **FOR_ROOT) == [f"rank {rank} of {size}" for rank in range(size)]


@pytest.fixture
def hosts():
    if reason := why_no_hosts():
        pytest.skip(reason)
    with two_hosts() as hosts:
        yield hosts


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["ringcomm run, several hosts", "torchrun, several hosts"])
def test_the_line_of_a_launcher_on_several_hosts_runs(launcher, hosts, folder):
    """On node 1 with its number."""
    if launcher.startswith("torchrun"):
        pytest.importorskip("torch")
    line = LINES[launcher]
    assert "--node-rank 0" in line
    nodes = [(host.enter, line.replace("--node-rank 0", f"--node-rank {node}")) for node, host in enumerate(hosts)]
    assert run(folder, nodes, RINGCOMM_JOB_SECRET=SECRET) == [f"rank {rank} of 4" for rank in range(4)]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl")
def test_the_line_of_srun_runs_without_mpi(hosts, folder):
    srun = folder / "srun"
    srun.write_text(SRUN.format(python=sys.executable, enter=[host.enter for host in hosts]))
    srun.chmod(0o755)
    assert run(folder, [((), LINES["srun, without MPI"])], folder) == [f"rank {rank} of 4" for rank in range(4)]
