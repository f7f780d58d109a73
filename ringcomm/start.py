"""How a communicator is made: the ranks that were started together find each other and connect.

What only some starts need is imported there: with 64 ranks on two cores, an import of 10 ms takes 0.5 s.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from ringcomm.bootstrap.place import Place, find_place
from ringcomm.bootstrap.store import Store, open_store
from ringcomm.communicator import Communicator, open_transports
from ringcomm.config import Config, start_logging
from ringcomm.errors import ArgumentError, refuse
from ringcomm.native import check, ffi, lib
from ringcomm.trace.recorder import check_folder_if_asked
from ringcomm.transports.choice import choose_transport

__all__ = ["connect", "init"]


def init(timeout: float | None = None, config: Config | None = None, mpi_comm: Any = None) -> Communicator:
    """Connect the ranks that a launcher has started together.

    `ringcomm run`, torchrun, mpirun and srun start ranks on any number of machines: docs/starting.md has a table of
    launchers. Without one the communicator has one rank.

    Args:
        timeout: Seconds for the start (unless the settings have a `start_timeout`) and, unless a call overrides it, for
            every call; default 300.
        config: The settings; None takes them from the environment.
        mpi_comm: A communicator of mpi4py whose ranks to connect instead. It stays usable.

    Raises:
        CollectiveTimeout: Some ranks did not join; the message names them.
        PeerLost: A rank joined and died; the message names it.
        Aborted: Another rank failed; the message has its error.
        MemoryShortage: The shared memory cannot be allocated.
        ArgumentError: The ranks run different versions of ringcomm, or a setting or the environment is wrong, as where
            RINGCOMM_TRACE names a folder that cannot be written, or RANK is set without WORLD_SIZE.
        SystemExit: `ringcomm run --respawn` has restarted this rank, but no rank is left that it could join, or
            none has called `grow` for `timeout` seconds.
    """
    if isinstance(timeout, Config):
        raise refuse("timeout", "seconds; a Config is passed as config=…", "a Config")
    if config is None:
        config = Config()
    elif not isinstance(config, Config):
        raise refuse("config", "a ringcomm.Config", repr(config))
    if timeout is not None:
        config = replace(config, timeout=timeout)
    if mpi_comm is not None:
        from ringcomm.transports.mpi.start import aborting_on_interrupt, join

        if config.transport not in (None, "mpi"):
            raise refuse("transport", "'mpi', since mpi_comm is given", repr(config.transport))
        _prepare(config)
        check_folder_if_asked()
        with aborting_on_interrupt():
            return Communicator(join(mpi_comm, config))
    place = replace(find_place(), tls=config.tls)
    if not place.restarts:  # a rank that comes back joins a job that goes on, also where the disk is full by now
        check_folder_if_asked()
    if place.hosts and place.torch:
        return _connect_through_torch(place, config)
    transport = choose_transport(place, config)
    _prepare(config)  # before it joins: every rank refuses its own settings, and waits for none
    if place.max_restarts is not None:
        from ringcomm.elastic import ElasticRank

        return ElasticRank(place, config).start()
    with open_store(place, config.start_limit) if transport.NEEDS_STORE else nullcontext() as store:
        return Communicator(transport.connect(place.rank, place.size, store, config))


def connect(rank: int, size: int, store: Store, config: Config, hosts: bool = False) -> Communicator:
    """Connect as `rank` of `size` with the ranks that share `store`; `hosts`: they are on several hosts."""
    transport = choose_transport(Place(rank, size, job="", launcher="a store", hosts=hosts), config)
    _prepare(config)
    return Communicator(transport.connect(rank, size, store, config))


def _connect_through_torch(place: Place, config: Config) -> Communicator:
    # Only torch can open its store; nothing else of ringcomm.init imports torch.
    try:
        from ringcomm.bootstrap.torch_start import start_in_environment
    except ModuleNotFoundError:
        text = f"ranks that {place.launcher} has started on several hosts need torch, through whose store they start"
        raise ArgumentError(f"{text}: pip install 'ringcomm[torch]', or start them with ringcomm run") from None
    with start_in_environment(config) as start:
        return connect(start.rank, start.size, start.store, config, start.hosts)


def _prepare(config: Config) -> None:
    start_logging(config.log)
    if config.algorithm:
        from ringcomm.algorithms.select import check_name

        check_name(config.algorithm)
    _select_kernels(config.kernels)


def _select_kernels(level: str | None) -> None:
    """Choose the kernels of this process: all its communicators share them, so an open one keeps them."""
    chosen = str(ffi.string(lib.rc_kernels_name()), "ascii")
    if not open_transports:
        check(lib.rc_kernels_select((level or "").encode()))
    elif level not in (None, chosen):
        raise refuse("kernels", f"{chosen}, which other communicators of this process use", level)
