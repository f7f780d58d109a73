"""The control groups of this process, through which containers and batch systems limit it."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

__all__ = ["groups", "words"]


def groups(controller: str, root: Path = Path("/")) -> Sequence[tuple[Path, bool]]:
    """Return (folder, is cgroup v2) of each group that may limit `controller`, from this process's own group upwards.

    In a container a mount may show only a part of the hierarchy; the groups above it are not visible.
    """
    return _groups(controller, root, *(_text(root / "proc/self" / name) for name in ("mountinfo", "cgroup")))


@lru_cache(maxsize=8)  # asked at each split, and the same as long as the process stays in its groups
def _groups(controller: str, root: Path, mountinfo: str, cgroup: str) -> Sequence[tuple[Path, bool]]:
    mounts = [line.split() for line in mountinfo.splitlines()]
    found = []
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        unified = not controllers
        if unified or controller in controllers.split(","):
            for mount in mounts:
                kind, options = mount[mount.index("-") + 1], mount[-1].split(",")
                if kind == "cgroup2" if unified else kind == "cgroup" and controller in options:
                    folders = _upwards(Path(path), Path(mount[3]), root / mount[4].lstrip("/"))
                    found += [(folder, unified) for folder in folders]
    return found


def words(file: Path) -> list[str]:
    """Return the words of `file`; none if it does not exist."""
    return _text(file).split()


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="surrogateescape")  # the names of folders may be any bytes
    except OSError:
        return ""


def _upwards(path: Path, mounted: Path, top: Path) -> list[Path]:
    """Return the folders of the group `path` and of its ancestors up to `top`, where the group `mounted` is mounted."""
    folder = top / path.relative_to(mounted) if path.is_relative_to(mounted) else top
    return [level for level in (folder, *folder.parents) if level.is_relative_to(top)]
