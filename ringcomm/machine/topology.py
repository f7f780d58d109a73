"""The cores this process may use."""

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from ringcomm.machine.cgroup import groups, words

__all__ = ["cores", "cpu_quota", "outnumbered"]


def cores() -> set[int]:
    """Return the cores this process may run on."""
    return os.sched_getaffinity(0)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the CPU quota of this process's control groups, in cores; None without a quota."""
    limits = []
    for folder, unified in groups("cpu", root):
        files = ["cpu.max"] if unified else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        match [word for file in files for word in words(folder / file)]:
            case [limit, period] if limit.isdecimal():  # otherwise "max" or -1
                limits.append(int(limit) / int(period))
    return min(limits, default=None)


def outnumbered(ranks: Collection[Iterable[int]]) -> bool:
    """Return whether ranks on this machine, each given by its cores, outnumber the cores and the quota."""
    all_cores = len(set().union(*ranks))
    return len(ranks) > min(all_cores, cpu_quota() or all_cores)
