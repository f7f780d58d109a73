"""The cache folder holds programs that are run: only this user may be able to write to it."""

import errno
import grp
import os
import pwd
from pathlib import Path

import pytest

from ringcomm import ArgumentError
from ringcomm.bench import peers
from ringcomm.config import cache_folder
from ringcomm.machine import files


@pytest.fixture
def above(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_private_group", lambda _: False)
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
    return rf"other users can write to it \(mode 770: look .* chmod go-w {folder}\)"


def linked(folder, _):
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")
    return "it is no folder"


def replaceable(folder, _):
    folder.parent.chmod(0o777)
    return rf"other users can replace it: they can write to {folder.parent} \(mode 777: look .* chmod go-w"


def replaceable_by_a_group_from_above(folder, _):
    folder.parent.parent.chmod(0o770)
    return rf"other users can replace it: they can write to {folder.parent.parent} \(mode 770"


def owned_above(folder, monkeypatch):
    foreign_owner(monkeypatch, folder.parent.parent)
    return f"user 4242 can replace it, as the owner of {folder.parent.parent}"


def reached_through_a_link(folder, monkeypatch):
    link = folder.parent.with_name("link")
    link.symlink_to(folder.parent.name)
    foreign_owner(monkeypatch, link)
    monkeypatch.setenv("XDG_CACHE_HOME", str(link))
    return f"user 4242 can replace it, as the owner of {link}"


def reached_through_a_shared_folder(folder, monkeypatch):
    shared = folder.parent.with_name("shared")
    shared.mkdir()
    (shared / "link").symlink_to(folder.parent)
    folder.parent.with_name("link").symlink_to("shared/link")
    shared.chmod(0o775)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent.with_name("link")))
    return f"they can write to {shared} "


def foreign_owner(monkeypatch, path):
    lstat = Path.lstat

    def changed(self):
        facts = lstat(self)
        return os.stat_result((*facts[:4], 4242, *facts[5:])) if self == path else facts

    monkeypatch.setattr(Path, "lstat", changed)


EXPOSED = [
    *(foreign, writable, linked, replaceable, replaceable_by_a_group_from_above, owned_above),
    *(reached_through_a_link, reached_through_a_shared_folder),
]


@pytest.mark.parametrize("expose", EXPOSED)
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


@pytest.mark.skipif(os.getgid() != 0, reason="the group of another user may be a common one")
def test_a_folder_that_only_the_group_of_its_user_can_write_to_is_accepted(above, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(above))
    cache_folder().chmod(0o770)
    above.chmod(0o770)
    assert cache_folder() == above / "ringcomm"


def test_a_sticky_folder_such_as_tmp_may_hold_the_cache(above):
    above.chmod(0o1777)
    assert cache_folder() == above / "ringcomm"


def test_a_sticky_folder_of_another_user_may_not(above, monkeypatch):
    above.chmod(0o1777)
    foreign_owner(monkeypatch, above)
    with pytest.raises(ArgumentError, match="user 4242 can replace it"):
        cache_folder()


def test_missing_folders_above_are_made_for_this_user_alone(above, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(above / "a/b"))
    before = os.umask(0o002)
    try:
        assert cache_folder() == above / "a/b/ringcomm"
    finally:
        os.umask(before)
    assert (above / "a").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("place", ["file", "link", "file/below", "/proc"])
def test_a_folder_that_cannot_be_made_is_named_with_the_variable(place, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / place))
    with pytest.raises(ArgumentError, match=rf"cache folder {tmp_path / place}/ringcomm: .*; set XDG_CACHE_HOME to"):
        cache_folder()


WRITES = [lambda path: files.write_atomic(path, b"x"), files.check_writable]


@pytest.mark.parametrize("write", WRITES)
def test_a_loop_of_links_is_an_error(tmp_path, write):
    (tmp_path / "file").symlink_to("other")
    (tmp_path / "other").symlink_to("file")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        write(tmp_path / "file")


@pytest.mark.parametrize("write", WRITES)
def test_a_link_of_another_user_is_not_followed(tmp_path, monkeypatch, write):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "file").symlink_to("planted")
    (tmp_path / "planted").symlink_to(victim)
    foreign_owner(monkeypatch, tmp_path / "planted")
    with pytest.raises(PermissionError, match="link of user 4242"):
        write(tmp_path / "file")
    assert victim.read_bytes() == b"precious"


def test_a_planted_link_is_never_written_through(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "guessed")
    (tmp_path / ".ringcomm-guessed").symlink_to(victim)
    with pytest.raises(FileExistsError):
        files.write_atomic(tmp_path / "file", b"x")
    assert victim.read_bytes() == b"precious"


def test_a_group_is_private_if_it_is_that_of_the_user_and_has_no_other_members(monkeypatch):
    user = pwd.getpwuid(os.geteuid())
    number = user.pw_gid or 4242  # of root's group no more is asked than that root alone is in it
    monkeypatch.setattr(pwd, "getpwuid", lambda _: pwd.struct_passwd((user[0], "x", user[2], number, *user[4:])))

    def private(name, number, members):
        monkeypatch.setattr(grp, "getgrgid", lambda _: grp.struct_group((name, "x", number, members)))
        return files._private_group(number)

    assert private(user.pw_name, number, [])
    assert private(user.pw_name, number, [user.pw_name])
    assert private("root", 0, ["root"])
    assert not private(user.pw_name, number, [user.pw_name, "eve"])
    assert not private("root", 0, ["eve"])
    assert not private("staff", number, [])
    assert not private(user.pw_name, number + 1, [])
