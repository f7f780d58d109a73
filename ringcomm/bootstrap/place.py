"""The place of this process in a job, from the environment that its launcher set."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ringcomm.bootstrap.secret import MAKE_ONE, check_length
from ringcomm.bootstrap.slurm import expand_hosts, step_port
from ringcomm.config import LAUNCHER
from ringcomm.errors import ArgumentError, refuse

__all__ = [
    "LAUNCHERS",
    "RANK",
    "RESTARTS",
    "SECRET",
    "SRUN",
    "SRUN_WITHOUT_MPI",
    "UNIX",
    "Place",
    "environment_of",
    "find_place",
    "host_id",
    "is_between_hosts",
    "master_address",
]

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
    hosts: bool = False  # the ranks are on several hosts, or may be
    mpi: bool = False  # MPI connects the ranks of several hosts
    torch: bool = False  # a store of torch.distributed does
    store: str = ""  # where the launcher serves the sessions of the job: unix:name, or address:port
    rank_0: str = ""  # where rank 0 serves the starts of several hosts instead: address:port
    last_host: str = ""  # of the job, if `rank_0` names the first one
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
    local_size: str  # "": the ranks may be on several hosts
    job: tuple[str, ...]
    mpi: bool = False
    torch: bool = False

    def missing(self, environ: Mapping[str, str]) -> list[str]:
        names = dict.fromkeys(filter(None, (self.rank, self.size, self.local_size, *self.job)))
        return [name for name in names if name not in environ]


RANK, SIZE, JOB, SECRET, STORE, MAX_RESTARTS, RESTARTS, FIRST = LAUNCHER
SRUN = "srun"
SRUN_WITHOUT_MPI = f"to connect them without MPI, add `export {SECRET}=$({MAKE_ONE})` to the batch script, before srun"

# The first launcher whose variables are all set wins: on clusters, launchers nest from the bottom of this table to the
# top. Many programs set RANK and WORLD_SIZE themselves, so these do not mark torchrun.
LAUNCHERS = (
    _Launcher("ringcomm run", RANK, RANK, SIZE, SIZE, (JOB,)),
    _Launcher(
        *("torchrun", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
        torch=True,
    ),
    _Launcher(
        *("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE",)),
        mpi=True,
    ),
    # srun may set PMI_RANK and PMI_SIZE too, but not this mark. MPICH has no job variable: see _hydra_job.
    _Launcher("MPICH", "MPI_LOCALNRANKS", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", (), mpi=True),
    # What init_process_group("env://") reads: Ray Train, DeepSpeed, programs that spawn their ranks. Above srun, since
    # the actors of Ray have the variables of the step in which Ray was started.
    _Launcher(
        *("a launcher of torch.distributed", "RANK", "RANK", "WORLD_SIZE", "", ("MASTER_ADDR", "MASTER_PORT")),
        torch=True,
    ),
    # A batch script has SLURM_PROCID but is no rank of a step. On one host TASKS_PER_NODE is one number, the size.
    _Launcher(
        *(SRUN, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        mpi=True,
    ),
)
# What launchers set that are not in this table: PMI's of several, Open MPI's prterun, Flux, Cray's, IBM's, MVAPICH.
UNKNOWN = (
    *("PMI_RANK", "PMIX_RANK", "FLUX_TASK_RANK", "PALS_RANKID", "ALPS_APP_PE", "JSM_NAMESPACE_RANK"),
    "MV2_COMM_WORLD_RANK",
)


def find_place(environ: Mapping[str, str] = os.environ) -> Place:
    """Return the place that a launcher gave this process; without a launcher, rank 0 of 1."""
    found = [launcher for launcher in LAUNCHERS if launcher.mark in environ]
    for launcher in found:
        if not launcher.missing(environ):
            return _place(launcher, environ)
    if found and environ.get("WORLD_SIZE") != "1":
        names = " and ".join(found[0].missing(environ))
        raise ArgumentError(f"{found[0].mark} is set without {names}; {found[0].name} sets them all")
    if environ.get("WORLD_SIZE", "1") != "1":  # alone, this process would compute something else than it was asked for
        given = f"WORLD_SIZE={environ['WORLD_SIZE']}"
        raise ArgumentError(f"{given} is set without RANK, MASTER_ADDR and MASTER_PORT; torchrun sets them all")
    if unknown := next((name for name in UNKNOWN if name in environ), None):
        text = f"{unknown}={environ[unknown]} is of a launcher that ringcomm does not know"
        known = "start the ranks with ringcomm run, torchrun, mpirun or srun"
        raise ArgumentError(f"{text}: {known}, or give init an mpi_comm")
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
    hosts = size > 1 and environ.get(launcher.local_size) != environ[launcher.size]
    job = "/".join((launcher.name, *([environ[name] for name in launcher.job] or [_hydra_job()])))
    place = Place(rank, size, job, "", launcher.name, hosts, launcher.mpi, launcher.torch)
    if launcher.mark == RANK:
        return _started_by_ringcomm_run(place, environ)
    if hosts and launcher.name == SRUN and environ.get(SECRET):
        return _served_by_rank_0(place, environ)
    return place


def _started_by_ringcomm_run(place: Place, environ: Mapping[str, str]) -> Place:
    secret, store, restarts = (environ.get(name, "") for name in (SECRET, STORE, MAX_RESTARTS))
    return replace(
        place,
        hosts=is_between_hosts(store),
        secret=secret,
        store=store,
        max_restarts=int(restarts) if restarts else None,
        restarts=int(environ.get(RESTARTS) or 0),
        first=int(environ.get(FIRST) or 0),
    )


def _served_by_rank_0(place: Place, environ: Mapping[str, str]) -> Place:
    """Return the place of a task of srun in a job whose secret the user has set: it needs no MPI."""
    check_length(environ[SECRET], SECRET, f"make one, for example by `{MAKE_ONE}`")
    if "SLURM_STEP_NODELIST" not in environ:
        raise ArgumentError("SLURM_STEP_NUM_TASKS is set without SLURM_STEP_NODELIST; srun sets them all")
    hosts = expand_hosts(environ["SLURM_STEP_NODELIST"])
    first, last = hosts[0], hosts[-1]
    if given := environ.get("MASTER_ADDR", ""):
        first, last = given, ""
    port = step_port(environ["SLURM_JOB_ID"], environ["SLURM_STEP_ID"])
    return replace(place, secret=environ[SECRET], mpi=False, rank_0=f"{first}:{port}", last_host=last)


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
