"""How a communicator is made: the ranks that were started together find each other and connect."""

import socket
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, cast

from ringcomm import transports
from ringcomm.algorithms.select import check_name
from ringcomm.bootstrap.joining import Joiners, join_group, mark_present, new_plan, place_in
from ringcomm.bootstrap.place import Place, find_place
from ringcomm.bootstrap.store import Store, job_store, open_store
from ringcomm.communicator import Communicator, open_transports
from ringcomm.config import Config, start_logging
from ringcomm.errors import (
    Aborted,
    ArgumentError,
    CollectiveTimeout,
    PeerLost,
    RingcommError,
    decode_error,
    encode_error,
    refuse,
    unknown,
)
from ringcomm.native import check, ffi, lib
from ringcomm.transports.contract import TransportModule
from ringcomm.transports.mpi.start import aborting_on_interrupt, join

__all__ = ["connect", "find_transports", "init"]

JOIN_TIMEOUT = 10.0  # seconds for ranks that all run to connect anew: one may die meanwhile


def init(timeout: float | None = None, config: Config | None = None, mpi_comm: Any = None) -> Communicator:
    """Connect the ranks that a launcher has started together.

    `ringcomm run`, torchrun, mpirun and srun start ranks on any number of machines. Without a launcher the communicator
    has one rank.

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
        ArgumentError: The ranks run different versions of ringcomm, or a setting or the environment is wrong.
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
        if config.transport not in (None, "mpi"):
            raise refuse("transport", "'mpi', since mpi_comm is given", repr(config.transport))
        _prepare(config)
        with aborting_on_interrupt():
            return Communicator(join(mpi_comm, config))
    place = find_place()
    if place.hosts and place.launcher == "torchrun":
        # torchrun serves a store that only torch can open; nothing else of ringcomm.init imports torch.
        communicator: Communicator = import_module("ringcomm.torch.start").connect_job(config)
        return communicator
    transport = _choose_transport(place, config)
    _prepare(config)  # before it joins: every rank refuses its own settings, and waits for none
    if place.restarts is not None:
        return _Job(place, config).start()
    with open_store(place, config.start_limit) if transport.NEEDS_STORE else nullcontext() as store:
        return Communicator(transport.connect(place.rank, place.size, store, config))


class _Job:
    """What a rank was started with whose job starts lost ranks again: those that are left connect with them anew."""

    def __init__(self, place: Place, config: Config) -> None:
        self.place, self.config = place, config
        self._present: socket.socket | None = None

    def start(self) -> Communicator:
        """Connect for the first time, or, in a rank that was started again, once the others call `grow`."""
        if self.place.restarts:
            comm = self._join()
        else:
            plan = {"ranks": [*range(self.place.size)], "job": self.place.job, "nonce": self.place.nonce}
            comm = self._connect(plan, self.config.start_limit)
        self._present = mark_present(self.place)
        return comm

    def _join(self) -> Communicator:
        """Join as soon as the others call `grow`, and again if another rank is lost meanwhile."""
        deadline = time.monotonic() + self.config.start_limit
        while True:
            plan = join_group(self.place, max(0.0, deadline - time.monotonic()))
            try:
                return self._connect(plan, JOIN_TIMEOUT)
            except (PeerLost, CollectiveTimeout, Aborted):
                if time.monotonic() >= deadline:
                    raise

    def grow(self, comm: Communicator, timeout: float) -> Communicator:
        """See Communicator.grow."""
        present = comm.all_gather_object(self.place.rank)
        missing = {*range(self.place.size)} - {*present}
        if not missing:
            return comm
        if comm.rank:
            plan = comm.broadcast_object(timeout=timeout + comm.timeout)
            if isinstance(plan, str):
                raise decode_error(plan)
        else:
            try:
                with Joiners(self.place) as joiners:
                    plan = new_plan(self.place, [*present, *joiners.wait(missing, timeout)])
                    comm.broadcast_object(plan)
                    joiners.send(plan)
            except RingcommError as error:  # as where a stranger has taken the address
                with suppress(RingcommError):  # or the communicator itself has failed
                    comm.broadcast_object(encode_error(error))
                raise
        if len(plan["ranks"]) == comm.size:
            return comm
        grown = self._connect(plan, JOIN_TIMEOUT)
        comm.close()
        return grown

    def _connect(self, plan: dict[str, Any], timeout: float) -> Communicator:
        place, config = place_in(plan, self.place), replace(self.config, start_timeout=timeout)
        transport = _choose_transport(place, config)
        with job_store(place, timeout) as store:
            return Communicator(transport.connect(place.rank, place.size, store, config), self.grow)


def connect(rank: int, size: int, store: Store, config: Config, hosts: bool = False) -> Communicator:
    """Connect as `rank` of `size` with the ranks that share `store`; `hosts`: they are on several hosts."""
    transport = _choose_transport(Place(rank, size, job="", launcher="a store", hosts=hosts), config)
    _prepare(config)
    return Communicator(transport.connect(rank, size, store, config))


def find_transports() -> dict[str, TransportModule]:
    """Return by name the modules and packages of ringcomm.transports that Config(transport=…) can name."""
    names = [module.name for module in iter_modules(transports.__path__)]
    modules = {name: import_module(f"{transports.__name__}.{name}") for name in names}
    return {name: cast(TransportModule, module) for name, module in modules.items() if hasattr(module, "connect")}


def _choose_transport(place: Place, config: Config) -> TransportModule:
    known, name = find_transports(), config.transport
    serving = [each for each, module in known.items() if module.serves(place)]
    where = f"launcher: {place.launcher}, {'several hosts' if place.hosts else 'one host'}"
    if name not in (None, *known):
        raise unknown("transport", name, known)
    if not serving:
        raise ArgumentError(
            f"no transport connects the ranks of this job ({where}); start them with ringcomm run, mpirun or srun"
        )
    if name is None:
        between_hosts = place.hosts or (config.host_id and place.mpi)
        name = next(each for each in serving if each != "shm") if between_hosts else "shm"
    elif name not in serving:
        raise refuse("transport", f"{' or '.join(map(repr, serving))} ({where})", repr(name))
    return known[name]


def _prepare(config: Config) -> None:
    start_logging(config.log)
    check_name(config.algorithm)
    _select_kernels(config.kernels)


def _select_kernels(level: str | None) -> None:
    """Choose the kernels of this process: all its communicators share them, so an open one keeps them."""
    chosen = str(ffi.string(lib.rc_kernels_name()), "ascii")
    if not open_transports:
        check(lib.rc_kernels_select((level or "").encode()))
    elif level not in (None, chosen):
        raise refuse("kernels", f"{chosen}, which other communicators of this process use", level)
