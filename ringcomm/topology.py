"""The cores this process may use."""

import os
from pathlib import Path

from ringcomm.cgroup import groups, words

__all__ = ["cores", "quota"]


def cores() -> set[int]:
    """Return the cores this process may run on."""
    return os.sched_getaffinity(0)


def quota(root: Path = Path("/")) -> float | None:
    """Return how many cores' worth of time the control groups of this process may use; None where they do not say."""
    limits = []
    for folder, unified in groups("cpu", root):
        files = ["cpu.max"] if unified else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        match [word for file in files for word in words(folder / file)]:
            case [limit, period] if limit.isdecimal():  # otherwise "max" or -1
                limits.append(int(limit) / int(period))
    return min(limits, default=None)
