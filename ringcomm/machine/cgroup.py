"""The control groups of this process, through which containers and batch systems limit it."""

from collections.abc import Iterator
from pathlib import Path

__all__ = ["groups", "words"]


def groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """Yield (folder, is cgroup v2) of each group that may limit `controller`, from this process's own group upwards.

    In a container a mount may show only a part of the hierarchy; the groups above it are not visible.
    """
    mounts = [line.split() for line in _lines(root / "proc/self/mountinfo")]
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        unified = not controllers
        if unified or controller in controllers.split(","):
            for mount in mounts:
                kind, options = mount[mount.index("-") + 1], mount[-1].split(",")
                if kind == "cgroup2" if unified else kind == "cgroup" and controller in options:
                    for folder in _upwards(Path(path), Path(mount[3]), root / mount[4].lstrip("/")):
                        yield folder, unified


def words(file: Path) -> list[str]:
    """Return the words of `file`; none if it does not exist."""
    return " ".join(_lines(file)).split()


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="surrogateescape").splitlines()  # the names of folders may be any bytes
    except OSError:
        return []


def _upwards(path: Path, mounted: Path, top: Path) -> list[Path]:
    """Return the folders of the group `path` and of its ancestors up to `top`, where the group `mounted` is mounted."""
    folder = top / path.relative_to(mounted) if path.is_relative_to(mounted) else top
    return [level for level in (folder, *folder.parents) if level.is_relative_to(top)]
