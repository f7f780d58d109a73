"""Containers and sandboxes without /proc, or with less in it."""

import os
import subprocess
import sys

import pytest

import harness
from ringcomm import MemoryShortage
from ringcomm.bootstrap.place import host_id
from ringcomm.commands import doctor
from ringcomm.machine import memory


def test_without_figures_there_is_no_known_limit(tmp_path, monkeypatch):
    found = memory.available(tmp_path)
    assert found.bytes == sys.maxsize
    monkeypatch.setattr(memory, "available", lambda: found)
    assert doctor.headroom() == "no limit is known, since /proc shows no figures"
    memory.require(1 << 60, "an array")
    with pytest.raises(MemoryShortage, match=r"an array needs .* MiB are available: no limit is known, since /proc "):
        memory.require(1 << 63, "an array")


@pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_FSIZE"])
def test_a_limit_of_the_process_counts_where_it_can(tmp_path, name):
    code = (
        "import pathlib, resource, sys; from ringcomm.machine import memory; "
        "resource.setrlimit(getattr(resource, sys.argv[1]), (1 << 40, 1 << 40)); "
        "print(memory.available(pathlib.Path(sys.argv[2])).limit)"
    )
    found = subprocess.run([sys.executable, "-c", code, name, tmp_path], capture_output=True, text=True, check=True)
    assert found.stdout.startswith("no limit is known" if name == "RLIMIT_AS" else "RLIMIT_FSIZE")


def test_a_host_without_ids_is_known_by_its_name(tmp_path):
    assert host_id(tmp_path) == os.uname().nodename
    assert host_id() != os.uname().nodename


PROGRAM = """
import os
import numpy as np, ringcomm

with ringcomm.init(timeout=20) as comm:
    assert not os.path.exists("/proc/self")
    x = comm.empty(1000, "float32")
    x[:] = 1
    comm.all_reduce(x, async_op=True).wait()
    comm.split(0).close()
    if comm.rank == 0:
        print(x[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("covered", ["/proc", "/proc/sys"])
def test_ranks_connect(tmp_path, covered):
    hide = f"mount -t tmpfs none {covered}"
    if covered != "/proc":
        hide += " && mount --bind /dev/null /proc/meminfo"
    for own in ([], ["--user", "--map-root-user"]):
        command = ["unshare", "--mount", *own, "sh", "-c"]
        if subprocess.run([*command, hide], capture_output=True, check=False).returncode == 0:
            break
    else:
        pytest.skip("no file systems may be mounted here")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM if covered == "/proc" else PROGRAM.replace("/proc/self", "/proc/sys/kernel"))
    text = f"{hide} && exec {sys.executable} -m ringcomm run -n 2 {program}"
    ended = subprocess.run([*command, text], capture_output=True, text=True, timeout=harness.JOB, check=False)
    assert ended.stderr == ""
    assert ended.stdout == "[0] 2.0\n"
