"""The cores this process may use, and how ranks share them. A core is what the kernel counts as a CPU."""

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from ringcomm.machine.cgroup import groups, words

__all__ = ["binding_denied", "cores", "cpu_quota", "describe", "domain", "outnumbered", "shares", "simulated_domain"]


def cores() -> set[int]:
    """Return the cores this process may run on; all that there are if a sandbox denies the question."""
    try:
        return os.sched_getaffinity(0)
    except OSError:
        return set(range(os.cpu_count() or 1))


def binding_denied() -> str:
    """Return why this process may not choose its cores; an empty string if it may."""
    call = "sched_getaffinity"
    try:
        mask = os.sched_getaffinity(0)
        call = "sched_setaffinity"
        os.sched_setaffinity(0, mask)
    except OSError as error:
        return f"{call}: {error.strerror}"
    return ""


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the CPU quota of this process's control groups, in cores; None without a quota."""
    limits = []
    for folder, unified in groups("cpu", root):
        files = ["cpu.max"] if unified else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        match [word for file in files for word in words(folder / file)]:
            case [limit, period] if limit.isdecimal():  # otherwise "max" or -1
                limits.append(int(limit) / int(period))
    return min(limits, default=None)


def describe() -> str:
    """Describe the cores and the quota of this process."""
    quota = cpu_quota()
    return f"{len(cores())} by affinity, {'no quota' if quota is None else f'a quota of {quota:g}'}"


def outnumbered(ranks: Collection[Iterable[int]]) -> bool:
    """Return whether ranks on this machine, each given by its cores, outnumber the cores and the quota."""
    all_cores = len(set().union(*ranks))
    return len(ranks) > min(all_cores, cpu_quota() or all_cores)


def shares(
    available: Collection[int], ranks: int, threads: int | None = None, root: Path = Path("/")
) -> list[set[int]]:
    """Divide cores among as many ranks or fewer: equal shares, of neighbors in a cache.

    Hardware threads of one physical core go to one rank, if there is a physical core for each. With `threads`, a rank
    gets so many cores of its share, physical ones if there are enough.
    """
    ordered = sorted(available, key=lambda core: (*_neighbors(root / f"sys/devices/system/cpu/cpu{core}"), core))
    physical: dict[int, list[int]] = {}
    for core in ordered:
        _, first = _neighbors(root / f"sys/devices/system/cpu/cpu{core}")
        physical.setdefault(core if first < 0 else first, []).append(core)
    units = list(physical.values()) if len(physical) >= ranks * (threads or 1) else [[core] for core in ordered]
    bounds = [rank * len(units) // ranks for rank in range(ranks + 1)]
    of_ranks = [units[bounds[rank] : bounds[rank + 1]][:threads] for rank in range(ranks)]
    return [{core for unit in mine for core in unit} for mine in of_ranks]


def domain(available: Collection[int], root: Path = Path("/")) -> tuple[int, int]:
    """Return the NUMA node and the last-level cache of these cores, each by a number; -1: unknown, or several."""
    folders = [root / f"sys/devices/system/cpu/cpu{core}" for core in available]
    nodes = {int(node.name[4:]) for folder in folders for node in folder.glob("node[0-9]*")}
    caches = {_neighbors(folder)[0] for folder in folders}
    return (nodes.pop() if len(nodes) == 1 else -1), (caches.pop() if len(caches) == 1 else -1)


def simulated_domain(shape: str, rank: int) -> tuple[int, int]:
    """Return the same for a rank of a machine of NUMA nodes x caches x ranks, such as 2x4x8, filled in order."""
    _, caches, ranks = map(int, shape.split("x"))
    return rank // (caches * ranks), rank // ranks


def _neighbors(folder: Path) -> tuple[int, int]:
    """Return the first core that shares the last-level cache, and the first on the same physical core; -1: unknown."""
    caches = max(folder.glob("cache/index*"), key=lambda index: words(index / "level"), default=folder)
    return _first(caches / "shared_cpu_list"), _first(folder / "topology/core_cpus_list")


def _first(file: Path) -> int:
    """Return the first number in a list such as 0-3,8-11."""
    found = re.match(r"\d+", "".join(words(file)))
    return int(found[0]) if found else -1
