"""Files that are there whole, or as they were before."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringcomm import files


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"before")
    return path


def test_a_file_is_replaced_whole(file):
    with file.open("rb") as reader:
        files.replace(file, b"after")
        assert reader.read() == b"before"
    assert file.read_bytes() == b"after"
    assert list(file.parent.iterdir()) == [file]


def test_a_file_that_cannot_be_written_stays_as_it_was(file):
    with pytest.raises(TypeError):
        files.replace(file, "no bytes")
    assert file.read_bytes() == b"before"
    assert list(file.parent.iterdir()) == [file]


def test_folders_are_made_and_a_link_stays_one(tmp_path):
    files.replace(tmp_path / "folder/file", b"x")
    link = tmp_path / "link"
    link.symlink_to("folder/file")
    files.replace(link, b"y")
    assert link.is_symlink()
    assert (tmp_path / "folder/file").read_bytes() == b"y"


def test_a_file_keeps_its_mode(file):
    file.chmod(0o600)
    files.replace(file, b"x")
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_a_mount_of_its_own_is_written_where_it_is(file, monkeypatch):
    def busy(*_):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(Path, "replace", busy)
    files.replace(file, b"after")
    assert file.read_bytes() == b"after"
    assert list(file.parent.iterdir()) == [file]


def test_what_a_shell_has_opened_is_not_replaced(file):
    code = "import sys; from pathlib import Path; from ringcomm import files; print('table', flush=True); "
    code += "files.replace(Path('/dev/stdout'), b'rows'); print('end')"
    with file.open("a") as shell:
        subprocess.run([sys.executable, "-c", code], stdout=shell, check=True)
        assert os.path.samestat(os.stat(shell.fileno()), file.stat())
    assert "rows" in file.read_text()


def test_what_is_no_file_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        files.replace(pipe, b"x")
        assert os.read(reader, 2) == b"x"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_to_look_whether_a_file_can_be_written_changes_nothing(file):
    files.check_writable(file)
    assert file.read_bytes() == b"before"
    files.check_writable(file.with_name("other"))
    link = file.with_name("link")
    link.symlink_to("nobody")
    files.check_writable(link)
    assert {*file.parent.iterdir()} == {file, link}


@pytest.mark.parametrize(
    ("name", "words"),
    [("nowhere/file", "No such file or directory: '.*/nowhere/file'"), ("", "Is a directory"), ("x" * 300, "too long")],
)
def test_what_cannot_be_written_is_told_before(tmp_path, name, words):
    with pytest.raises(OSError, match=words):
        files.check_writable(tmp_path / name)
