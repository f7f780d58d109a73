"""Where a rank finds itself: its place in a job, told by the launcher's environment."""

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ringcomm.config import LAUNCHER
from ringcomm.errors import ArgumentError, refuse

__all__ = ["LAUNCHERS", "Place", "find_place", "host"]

log = logging.getLogger("ringcomm")


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank of which job this process is, and who said so."""

    rank: int
    size: int
    job: str
    nonce: str = ""
    launcher: str = "none"
    hosts: bool = False  # whether the ranks are on several
    mpi: bool = False  # whether the launcher starts programs of MPI

    def environment(self) -> dict[str, str]:
        """Return this process's environment, changed so that a process started with it finds itself at this place."""
        told = (str(self.rank), str(self.size), self.job, self.nonce)
        return {**os.environ, **dict(zip(LAUNCHER, told, strict=True))}


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The variables of a launcher: `mark` is only its own, the others say what and where a rank is.

    `job` are those which together no other job of this user on this host has.
    """

    name: str
    mark: str
    rank: str
    size: str
    local_size: str
    job: tuple[str, ...]
    mpi: bool = True

    def missing(self, environ: Mapping[str, str]) -> list[str]:
        names = dict.fromkeys((self.rank, self.size, self.local_size, *self.job))
        return [name for name in names if name not in environ]


RANK, SIZE, JOB, NONCE = LAUNCHER

# The first that left all its variables counts: on clusters, launchers start each other from the bottom of this table
# upwards. Many programs set RANK and WORLD_SIZE by themselves, so they are no mark of torchrun.
LAUNCHERS = (
    _Launcher("ringcomm run", RANK, RANK, SIZE, SIZE, (JOB,), mpi=False),
    _Launcher(
        *("torchrun", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
        mpi=False,
    ),
    _Launcher(
        *("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE",)),
    ),
    # srun may set PMI_RANK and PMI_SIZE too, but not this mark. The job is asked for in _hydra.
    _Launcher("MPICH", "MPI_LOCALNRANKS", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", ()),
    # A batch script has SLURM_PROCID, but is no rank of a step. On one host TASKS_PER_NODE is one number, the size.
    _Launcher(
        *("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
)


def find_place(environ: Mapping[str, str] = os.environ) -> Place:
    """Return the place a launcher gave this process; without a launcher, the only one of a world of one."""
    found = [launcher for launcher in LAUNCHERS if launcher.mark in environ]
    for launcher in found:
        if not launcher.missing(environ):
            return _place(launcher, environ)
    if found:
        names = " and ".join(found[0].missing(environ))
        raise ArgumentError(f"{found[0].mark} is set without {names}; {found[0].name} sets them all")
    if environ.get("WORLD_SIZE", "1") != "1":  # by hand: it may be meant for torch alone, but it may be a mistake
        log.warning("WORLD_SIZE is set, but by no launcher known here: this rank is alone; see ringcomm run, torchrun")
    return Place(0, 1, job=f"alone/{os.getpid()}")


def host() -> str:
    """Return what only processes have in common that can share memory: the running kernel, and its Unix sockets."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"


def _place(launcher: _Launcher, environ: Mapping[str, str]) -> Place:
    told = f"{launcher.rank}={environ[launcher.rank]}, {launcher.size}={environ[launcher.size]}"
    try:
        rank, size = int(environ[launcher.rank]), int(environ[launcher.size])
    except ValueError:
        raise refuse(f"the place told by {launcher.name}", "whole numbers", told) from None
    if not 0 <= rank < size:
        raise refuse(f"the place told by {launcher.name}", "0 <= rank < size", told)
    hosts = environ[launcher.local_size] != environ[launcher.size]
    if hosts and not launcher.mpi:
        counts = f"{launcher.size}={size}, {launcher.local_size}={environ[launcher.local_size]}"
        raise ArgumentError(
            f"the ranks of this job are on several hosts ({counts}); across hosts ringcomm needs mpirun or srun, or "
            "under torchrun ringcomm.torch"
        )
    job = [environ[name] for name in launcher.job] or [_hydra()]
    return Place(
        rank, size, "/".join((launcher.name, *job)), environ.get(NONCE, ""), launcher.name, hosts, launcher.mpi
    )


def _hydra() -> str:
    """Return what only the ranks of this mpiexec share. MPICH puts no job id into the environment; hydra, the parent of
    its ranks, stands for the job, and its start time tells it from an earlier one with the same process id.
    """
    pid = os.getppid()
    with suppress(OSError):  # another user's processes may be hidden
        while pid > 0:
            with open(f"/proc/{pid}/stat") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
            parent, start = rest.split()[1:20:18]
            if "hydra" in name:
                return f"{pid}/{start}"
            pid = int(parent)
    raise ArgumentError("MPI_LOCALNRANKS is set, but no process above this one is the hydra of MPICH, which sets it")
