"""The cache folder holds programs that are run: only this user may be able to write to it."""

import os

import pytest

from ringcomm import ArgumentError
from ringcomm.bench import peers
from ringcomm.config import cache_folder
from ringcomm.machine import files


@pytest.fixture
def above(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def test_the_folder_is_created_for_this_user_alone(above):
    before = os.umask(0)
    try:
        assert cache_folder() == above / "ringcomm"
    finally:
        os.umask(before)
    assert (above / "ringcomm").stat().st_mode & 0o777 == 0o700
    assert cache_folder() == above / "ringcomm"


def foreign(_, monkeypatch):
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    return f"belongs to user {owner}, not to user {owner + 1}"


def writable(folder, _):
    folder.chmod(0o770)
    return r"other users can write to it \(mode 770\)"


def linked(folder, _):
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")
    return "it is no folder"


def replaceable(folder, _):
    folder.parent.chmod(0o777)
    return "writable for all and has no sticky bit"


@pytest.mark.parametrize("expose", [foreign, writable, linked, replaceable])
@pytest.mark.usefixtures("above")
def test_a_folder_that_another_user_could_fill_is_refused(expose, monkeypatch):
    folder = cache_folder()
    planted = peers.folder("openmpi")
    planted.mkdir(parents=True)
    (planted / peers.MARK).write_text("{}")
    reason = expose(folder, monkeypatch)
    for use in (cache_folder, lambda: peers.libraries(["openmpi"]), lambda: peers.set_up(["openmpi"])):
        with pytest.raises(ArgumentError, match=rf"refused the cache folder .*{reason}.*XDG_CACHE_HOME"):
            use()


def test_a_sticky_folder_such_as_tmp_may_hold_the_cache(above):
    above.chmod(0o1777)
    assert cache_folder() == above / "ringcomm"


def test_a_planted_link_is_never_written_through(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "guessed")
    (tmp_path / ".ringcomm-guessed").symlink_to(victim)
    with pytest.raises(FileExistsError):
        files.write_atomic(tmp_path / "file", b"x")
    assert victim.read_bytes() == b"precious"
