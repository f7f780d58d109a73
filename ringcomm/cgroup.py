"""The control groups of this process: where containers and batch systems write what it may use."""

from collections.abc import Iterator
from pathlib import Path

__all__ = ["groups", "words"]


def groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """Yield the folders that may limit `controller`, this process's own group first; True with those of cgroup v2.

    A mount may show only a part of the hierarchy, as in a container; what is above it cannot be seen.
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
    """Return the words of `file`; none where there is no such file."""
    return " ".join(_lines(file)).split()


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _upwards(path: Path, mounted: Path, top: Path) -> list[Path]:
    """Return the folder of the group `path` and those above it, where `top` shows the hierarchy from `mounted` on."""
    folder = top / path.relative_to(mounted) if path.is_relative_to(mounted) else top
    return [level for level in (folder, *folder.parents) if level.is_relative_to(top)]
