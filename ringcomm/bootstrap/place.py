"""The place of this process in a job, from the environment that its launcher set."""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ringcomm.config import LAUNCHER
from ringcomm.errors import ArgumentError, refuse

__all__ = [
    "LAUNCHERS",
    "RANK",
    "RESTARTS",
    "SECRET",
    "UNIX",
    "Place",
    "environment_of",
    "find_place",
    "host_id",
    "is_between_hosts",
    "master_address",
]

log = logging.getLogger("ringcomm")

UNIX = "unix:"  # begins a store that is served to the processes of one host; else it is address:port
MAX_SIZE = 1 << 16  # more is a typo, and would keep rank 0 busy beyond every timeout


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank of which job this process is, and which launcher set it."""

    rank: int
    size: int
    job: str
    secret: str = ""
    launcher: str = "none"
    hosts: bool = False  # the ranks are on several hosts
    mpi: bool = False  # the launcher starts MPI programs
    store: str = ""  # where the launcher serves the sessions of the job: unix:name, or address:port
    max_restarts: int | None = None  # how often the launcher restarts a lost rank; None: it ends the job
    restarts: int = 0  # how often it has restarted this one
    first: int = 0  # the first rank of the same launcher
    members: Sequence[int] = ()  # the rank in the job of each rank here, where they may be a part of it; all: a range
    tls: str | None = None  # see Config

    def environment(self) -> dict[str, str]:
        """Return this process's environment with the variables that put a child process at this place."""
        values = [str(self.rank), str(self.size), self.job, self.secret, self.store]
        if self.max_restarts is not None:
            values += [str(self.max_restarts), str(self.restarts), str(self.first)]
        around = {name: value for name, value in os.environ.items() if name not in LAUNCHER}  # of another job
        return {**around, **dict(zip(LAUNCHER, values, strict=False))}


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The variables of a launcher. Only this launcher sets `mark`.

    The values of `job` together identify the job among all jobs of this user on this host.
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


RANK, SIZE, JOB, SECRET, STORE, MAX_RESTARTS, RESTARTS, FIRST = LAUNCHER

# The first launcher whose variables are all set wins: on clusters, launchers nest from the bottom of this table to the
# top. Many programs set RANK and WORLD_SIZE themselves, so these do not mark torchrun.
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
    # srun may set PMI_RANK and PMI_SIZE too, but not this mark. MPICH has no job variable: see _hydra_job.
    _Launcher("MPICH", "MPI_LOCALNRANKS", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", ()),
    # A batch script has SLURM_PROCID but is no rank of a step. On one host TASKS_PER_NODE is one number, the size.
    _Launcher(
        *("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
)


def find_place(environ: Mapping[str, str] = os.environ) -> Place:
    """Return the place that a launcher gave this process; without a launcher, rank 0 of 1."""
    found = [launcher for launcher in LAUNCHERS if launcher.mark in environ]
    for launcher in found:
        if not launcher.missing(environ):
            return _place(launcher, environ)
    if found:
        names = " and ".join(found[0].missing(environ))
        raise ArgumentError(f"{found[0].mark} is set without {names}; {found[0].name} sets them all")
    if environ.get("WORLD_SIZE", "1") != "1":  # set by hand, for torch alone or by mistake
        log.warning("ignored WORLD_SIZE, which no known launcher set: this rank is alone; see ringcomm run, torchrun")
    return Place(0, 1, job=f"alone/{os.getpid()}")


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started; raise OSError if it has ended or is of another user."""
    lines = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


def host_id(root: Path = Path("/")) -> str:
    """Return an id that is equal for processes that can share memory: the same boot and network namespace.

    Without /proc it is the name of the host.
    """
    try:
        boot = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(root / 'proc/self/ns/net')}"
    except OSError:
        return os.uname().nodename


def master_address() -> str:
    """Return where the launcher's store is served to several hosts, as address:port; "" if no launcher has said."""
    master, store = os.environ.get("MASTER_ADDR"), os.environ.get(STORE, "")
    return (store if is_between_hosts(store) else "") or (
        f"{master}:{os.environ.get('MASTER_PORT', '1')}" if master else ""
    )


def is_between_hosts(store: str) -> bool:
    """Return whether a launcher serves the store of a job to several hosts."""
    return bool(store) and not store.startswith(UNIX)


def _place(launcher: _Launcher, environ: Mapping[str, str]) -> Place:
    given = f"{launcher.rank}={environ[launcher.rank]}, {launcher.size}={environ[launcher.size]}"
    try:
        rank, size = int(environ[launcher.rank]), int(environ[launcher.size])
    except ValueError:
        raise refuse(f"the environment of {launcher.name}", "integers", given) from None
    if not 0 <= rank < size:
        raise refuse(f"the environment of {launcher.name}", "0 <= rank < size", given)
    if size > MAX_SIZE:
        raise refuse(f"the environment of {launcher.name}", f"at most {MAX_SIZE} ranks", f"{launcher.size}={size}")
    ours = launcher.mark == RANK
    store = environ.get(STORE, "") if ours else ""
    max_restarts = int(environ[MAX_RESTARTS]) if ours and environ.get(MAX_RESTARTS) else None
    restarts, first = (int(environ.get(name) or 0) if ours else 0 for name in (RESTARTS, FIRST))
    hosts = is_between_hosts(store) or environ[launcher.local_size] != environ[launcher.size]
    job = [environ[name] for name in launcher.job] or [_hydra_job()]
    name, secret = "/".join((launcher.name, *job)), environ.get(SECRET, "") if ours else ""
    return Place(rank, size, name, secret, launcher.name, hosts, launcher.mpi, store, max_restarts, restarts, first)


def _hydra_job() -> str:
    """Return an id that only the ranks of this mpiexec share: the pid and start time of hydra, their ancestor.

    MPICH puts no job id into the environment. The start time distinguishes reused process ids.
    """
    pid = os.getppid()
    with suppress(OSError):  # another user's processes may be hidden
        while pid > 0:
            with open(f"/proc/{pid}/stat", errors="surrogateescape") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
            parent, start = rest.split()[1:20:18]
            if "hydra" in name:
                return f"{pid}/{start}"
            pid = int(parent)
    raise ArgumentError("MPI_LOCALNRANKS is set, but no ancestor of this process is MPICH's hydra, which sets it")
