"""Which job the files of a trace are of, and which rank of the job each process is."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ringcomm.errors import refuse
from ringcomm.trace.recorder import SUFFIX

__all__ = ["JobRank", "check_one_job", "job_ranks_of"]

Facts = Mapping[str, Any]  # of the header of a file


class JobRank(NamedTuple):
    """A rank of the job; `process` is another one after a restart."""

    process: str
    rank: int
    size: int


def check_one_job(folder: Path, files: Sequence[Facts]) -> None:
    """Raise ArgumentError if the files are of several jobs."""
    jobs = _jobs(files)
    if len(jobs) > 1:
        lines = [f"those of {len(jobs)} in {folder}; move each to a folder of its own:"]
        for job in jobs:
            groups = dict.fromkeys(facts["group"] for facts in job)
            size = max(facts["job_size"] for facts in job)
            lines.append(f"  a job of size {size}: {' '.join(f'{group}-*{SUFFIX}' for group in groups)}")
        raise refuse("folder", "the traces of one job", "\n".join(lines))


def job_ranks_of(files: Sequence[Facts]) -> list[JobRank]:
    """Return which rank of the job has written each file.

    The ranks may be threads of one process. A process may have begun several jobs, as where torch.distributed connects
    the ranks of a group anew: the largest tells its rank.
    """
    ranks: dict[tuple[str, ...], set[int]] = defaultdict(set)
    for facts in files:
        ranks[*_process(facts), facts["job"]].add(facts["job_rank"])
    threads = {(host, process) for (host, process, _), found in ranks.items() if len(found) > 1}
    names, largest = [], dict[str, Facts]()
    for facts in files:
        process = _process(facts)
        names.append(" ".join(process) + (f" {facts['job_rank']}" if process in threads else ""))
        if facts["job_size"] > largest.setdefault(names[-1], facts)["job_size"]:
            largest[names[-1]] = facts
    return [JobRank(name, largest[name]["job_rank"], largest[name]["job_size"]) for name in names]


def _jobs(files: Sequence[Facts]) -> list[list[Facts]]:
    """Return the files of each job: files with a job, a group or a process in common, directly or through others."""
    jobs: list[tuple[set[tuple[str, ...]], list[Facts]]] = []
    for facts in files:
        marks, job = {("job", facts["job"]), ("group", facts["group"]), ("process", *_process(facts))}, [facts]
        joined = [each for each in jobs if not marks.isdisjoint(each[0])]
        jobs = [each for each in jobs if marks.isdisjoint(each[0])]
        for other, theirs in joined:
            marks |= other
            job = theirs + job
        jobs.append((marks, job))
    return [job for _, job in jobs]


def _process(facts: Facts) -> tuple[str, str]:
    return facts["host"], facts["process"]
