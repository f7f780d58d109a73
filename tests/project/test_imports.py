"""What a program imports with ringcomm: many ranks that start on a few cores take as long as their imports."""

import json
import subprocess
import sys

import pytest

from harness.jobs import run_job

# What is imported where it is used first, each with what it brings.
BY_FIRST_USE = (
    *("ringcomm.launcher", "multiprocessing", "subprocess"),
    *("ringcomm.bootstrap.server", "ringcomm.bootstrap.wire.tcp", "hmac", "secrets"),
    *("ringcomm.algorithms", "ringcomm.elastic", "ringcomm.transports.mpi", "ringcomm.transports.network"),
    *("importlib.metadata", "pkgutil"),
    *("ringcomm.devices.device", "ringcomm.transports.cuda", "ringcomm.transports.staged.staging"),
    *("ringcomm.trace.dump", "ringcomm.machine.files", "tempfile", "shutil", "difflib"),
)
# What NumPy imports is free.
PROGRAM = """
import sys, numpy
before = {*sys.modules}
import ringcomm
"""
START = """
with ringcomm.init() as comm:
    comm.barrier()
"""
SHOW = """
import json
print(json.dumps(sorted({*sys.modules} - before)))
"""


def imported_early(found):
    return [name for name in found if any(f"{name}.".startswith(f"{each}.") for each in BY_FIRST_USE)]


def test_importing_ringcomm_imports_no_module_of_special_starts():
    command = [sys.executable, "-P", "-c", PROGRAM + SHOW]
    found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert "ringcomm.communicator" in found
    assert imported_early(found) == []


def test_a_rank_on_one_host_imports_no_module_of_special_starts(tmp_path):
    lines = run_job(tmp_path, 3, PROGRAM + START + SHOW).stdout.splitlines()
    found = {line[:3]: json.loads(line[3:]) for line in lines}
    assert {*found} == {"[0]", "[1]", "[2]"}
    del found["[0]"]  # which compares secrets of the others
    for names in found.values():
        assert "ringcomm.transports.shm" in names
        assert imported_early([*names]) == []


@pytest.mark.parametrize("name", ["launch", "init", "Communicator"])
def test_a_public_name_is_there_at_its_first_use(name):
    code = f"import ringcomm; assert '{name}' in dir(ringcomm); from ringcomm import {name}; {name}.__doc__[0]"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
