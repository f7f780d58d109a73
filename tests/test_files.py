"""Files that are there whole, or as they were before."""

import os

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
    other = file.with_name("other")
    files.check_writable(other)
    assert not other.exists()
    with pytest.raises(FileNotFoundError):
        files.check_writable(file.parent / "nowhere/file")
