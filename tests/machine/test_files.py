"""Atomic file writes."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringcomm.machine import files


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"before")
    return path


def test_a_file_is_replaced_atomically(file):
    with file.open("rb") as reader:
        files.write_atomic(file, b"after")
        assert reader.read() == b"before"
    assert file.read_bytes() == b"after"
    assert list(file.parent.iterdir()) == [file]


def test_a_failed_write_leaves_the_file_unchanged(file):
    with pytest.raises(TypeError):
        files.write_atomic(file, "no bytes")
    assert file.read_bytes() == b"before"
    assert list(file.parent.iterdir()) == [file]


def test_folders_are_created_and_a_link_is_kept(tmp_path):
    files.write_atomic(tmp_path / "folder/file", b"x")
    link = tmp_path / "link"
    link.symlink_to("folder/file")
    files.write_atomic(link, b"y")
    assert link.is_symlink()
    assert (tmp_path / "folder/file").read_bytes() == b"y"


@pytest.mark.parametrize("links", [True, False])
def test_a_file_is_created_once(tmp_path, links, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    file = tmp_path / "folder/file"
    assert files.create_atomic(file, b"first")
    assert not files.create_atomic(file, b"second")
    assert file.read_bytes() == b"first"
    assert list(file.parent.iterdir()) == [file]


def test_a_file_keeps_its_mode(file):
    file.chmod(0o600)
    files.write_atomic(file, b"x")
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_mounted_file_is_written_in_place(file, monkeypatch):
    def busy(*_):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(Path, "replace", busy)
    files.write_atomic(file, b"after")
    assert file.read_bytes() == b"after"
    assert list(file.parent.iterdir()) == [file]


def test_a_file_that_a_shell_has_opened_is_not_replaced(file):
    code = "import sys; from pathlib import Path; from ringcomm.machine import files; print('table', flush=True); "
    code += "files.write_atomic(Path('/dev/stdout'), b'rows'); print('end')"
    with file.open("a") as shell:
        subprocess.run([sys.executable, "-c", code], stdout=shell, check=True)
        assert os.path.samestat(os.stat(shell.fileno()), file.stat())
    assert "rows" in file.read_text()


def test_a_pipe_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        files.write_atomic(pipe, b"x")
        assert os.read(reader, 2) == b"x"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_check_writable_changes_nothing(file):
    files.check_writable(file)
    assert file.read_bytes() == b"before"
    files.check_writable(file.with_name("other"))
    link = file.with_name("link")
    link.symlink_to("missing")
    files.check_writable(link)
    assert {*file.parent.iterdir()} == {file, link}


@pytest.mark.parametrize(
    ("name", "words"),
    [("nowhere/file", "No such file or directory: '.*/nowhere/file'"), ("", "Is a directory"), ("x" * 300, "too long")],
)
def test_check_writable_raises_before_a_write_would(tmp_path, name, words):
    with pytest.raises(OSError, match=words):
        files.check_writable(tmp_path / name)
