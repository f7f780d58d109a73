"""Folders for the files of a job: removed at the end, and those of a killed bench by the next one."""

import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from ringcomm.bench.scratch import FRESH, MARK, PREFIX, scratch_folder

HOLDING = """
from ringcomm.bench.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "log").touch()
    print(folder, flush=True)
    input()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def age(folder):
    then = time.time() - FRESH - 1
    os.utime(folder / MARK, (then, then))


def test_a_folder_is_removed_at_the_end_of_its_block(folder):
    with scratch_folder() as scratch:
        (scratch / "log").touch()
        assert list(folder.iterdir()) == [scratch]
    assert not list(folder.iterdir())


def test_a_folder_in_use_stays_and_one_of_a_killed_process_is_removed(folder):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLDING], **pipes) as holder:
        held = folder / holder.stdout.readline().strip()
        age(held)
        with scratch_folder():
            assert held.exists()
        holder.kill()
        holder.wait()
        assert holder.returncode == -signal.SIGKILL
        with scratch_folder():
            assert not held.exists()


def test_a_new_folder_that_is_not_locked_yet_stays(folder):
    new = folder / f"{PREFIX}new"
    new.mkdir()
    (new / MARK).touch()
    with scratch_folder():
        assert new.exists()
    age(new)
    with scratch_folder():
        assert not new.exists()


def test_other_folders_with_the_prefix_stay(folder):
    other = folder / f"{PREFIX}results"
    other.mkdir()
    (other / "out.json").touch()
    for path in (other / "out.json", other):
        os.utime(path, (0, 0))
    with scratch_folder():
        assert (other / "out.json").exists()
