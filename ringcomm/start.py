"""How a communicator is made: the ranks that were started together find each other."""

from dataclasses import replace
from typing import Any

from ringcomm.algorithms.select import check_name
from ringcomm.communicator import Communicator, open_transports
from ringcomm.config import Config, start_logging
from ringcomm.errors import refuse
from ringcomm.native import check, ffi, lib
from ringcomm.place import find_place
from ringcomm.store import Store, open_store
from ringcomm.transports import shm
from ringcomm.transports.mpi.start import ending_the_job, join, world

__all__ = ["connect", "init"]


def init(timeout: float | None = None, config: Config | None = None, mpi_comm: Any = None) -> Communicator:
    """Connect to the ranks that were started together: by `ringcomm run` or torchrun on one machine, by mpirun or srun
    on any.

    `mpi_comm`, a communicator of mpi4py, has the ranks to connect instead; it stays as it is. Without a launcher the
    communicator has one rank. `timeout` (seconds, default 300) also limits the start. Raises
        CollectiveTimeout: naming the ranks that did not come;
        PeerLost: naming a rank that came, and died;
        Aborted: another rank failed and says how;
        MemoryShortage: the shared memory cannot be had;
        ArgumentError: the versions of ringcomm differ, or the environment makes no sense.
    """
    if config is None:
        config = Config()
    elif not isinstance(config, Config):
        raise refuse("config", "a ringcomm.Config", repr(config))
    if timeout is not None:
        config = replace(config, timeout=timeout)
    if mpi_comm is None:
        place = find_place()
        if not place.hosts and not (config.host_label and place.mpi):
            with open_store(place, config.timeout) as store:
                return connect(place.rank, place.size, store, config)
    with ending_the_job():
        comm = world(place.size) if mpi_comm is None else mpi_comm
        _prepare(config)
        return Communicator(join(comm, config))


def connect(rank: int, size: int, store: Store, config: Config) -> Communicator:
    """Connect as `rank` of `size` with those who hold the same store."""
    _prepare(config)
    return Communicator(shm.connect(rank, size, store, config))


def _prepare(config: Config) -> None:
    start_logging(config.log)
    check_name(config.algorithm)
    _select_kernels(config.kernels)


def _select_kernels(level: str) -> None:
    """Choose the kernels of this process: all its communicators share them, so one that is open keeps them."""
    chosen = str(ffi.string(lib.rc_kernels_name()), "ascii")
    if not open_transports:
        check(lib.rc_kernels_select(level.encode()))
    elif level not in ("", chosen):
        raise refuse("kernels", f"{chosen}, which other communicators of this process use", level)
