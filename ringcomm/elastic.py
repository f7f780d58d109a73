"""A rank of an elastic job: `ringcomm run --respawn` restarts lost ranks, and the survivors admit them."""

import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import Any

from ringcomm.bootstrap.joining import attributed_to_grow, job_membership, join_group, new_plan, place_in
from ringcomm.bootstrap.membership import RECONNECT_TIMEOUT, Member, Registration
from ringcomm.bootstrap.notices import Notice, notify
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.process_watch import process_id
from ringcomm.bootstrap.store import Store, job_store
from ringcomm.bootstrap.watchedstore import watched_store
from ringcomm.communicator import Communicator
from ringcomm.config import Config
from ringcomm.errors import (
    Aborted,
    ArgumentError,
    CollectiveTimeout,
    PeerLost,
    RingcommError,
    decode_error,
    describe_error,
    encode_error,
)
from ringcomm.transports.choice import choose_transport

__all__ = ["ElasticRank"]


class ElasticRank:
    """See ElasticJob. It connects its communicators, and keeps this rank registered while it can call `grow`."""

    def __init__(self, place: Place, config: Config) -> None:
        self.place, self.config = replace(place, members=tuple(range(place.size))), config
        self._membership = job_membership(place)
        self._registration: Registration | None = None
        self._current: weakref.ref[Communicator] | None = None  # that can call `grow`

    def start(self) -> Communicator:
        """Connect for the first time, or, in a restarted rank, once the others call `grow`."""
        if self.place.restarts:
            return self._join()
        with job_store(self.place, self.config.start_limit) as store:
            return self._connect(self.place, store, self.config)

    def _join(self) -> Communicator:
        """Join as soon as the others call `grow`, and again if another rank is lost or stopped meanwhile."""
        with closing(self._membership):
            while True:
                # Each time as long as at first: a `grow` that has failed may have taken longer than that.
                plan = join_group(self._membership, self.place, self.config.start_limit)
                with suppress(PeerLost, CollectiveTimeout, Aborted):
                    return self._connect_as_planned(plan)

    def grow(self, comm: Communicator, timeout: float) -> Communicator:
        """See Communicator.grow."""
        if not self.place.respawn:
            raise ArgumentError(
                "grow: nothing starts a lost rank again; use ringcomm run --respawn N, with N of 1 or more"
            )
        comm.check()  # what has failed before keeps its words
        with attributed_to_grow():
            each: list[tuple[int, str, float]] = comm.all_gather_object((self.place.rank, process_id(), timeout))
            members = [(rank, process) for rank, process, _ in each]
            missing = {*range(self.place.size)} - {rank for rank, _ in members}
            if not missing:
                return comm
            if comm.rank == 0:
                return self._lead(comm, members, missing, timeout)
            _, _, timeout_of_first = each[0]
            plan = comm.broadcast_object(timeout=timeout_of_first + comm.timeout)
            if isinstance(plan, str):
                raise decode_error(plan)
            return self._follow(comm, plan)

    def _lead(self, comm: Communicator, members: list[Member], missing: set[int], timeout: float) -> Communicator:
        """Rank 0's part of `grow`: find out who has come, and tell all."""
        with ExitStack() as stack:
            try:
                joiners = stack.enter_context(self._membership.joiners())
                # If a member is lost the others leave `grow`, and this rank must not stay in it.
                plan = new_plan(self.place, [*members, *joiners.wait(missing, timeout, comm.check)])
                joiners.send(plan)
            except BaseException as error:  # an interrupt, say, or another process has taken the address
                shared = (
                    error if isinstance(error, RingcommError) else Aborted(f"rank 0: {describe_error(error)}", rank=0)
                )
                with suppress(RingcommError):  # or the communicator itself has failed
                    comm.broadcast_object(encode_error(shared))
                raise
            comm.broadcast_object(plan)
            return self._follow(comm, plan)

    def _follow(self, comm: Communicator, plan: dict[str, Any]) -> Communicator:
        return comm if len(plan["ranks"]) == comm.size else self._connect_as_planned(plan)

    def resume(self, comm: Communicator, left_out: Sequence[int]) -> None:
        """See ElasticJob: the launcher ends what was left out, and starts it again."""
        self._current = weakref.ref(comm)
        for pid in left_out:
            notify(self.place, Notice(pid))

    def leave(self, comm: Communicator) -> None:
        """See ElasticJob."""
        if self._registration and self._current and self._current() is comm:
            self._registration.close()
            self._registration = None

    def _connect_as_planned(self, plan: dict[str, Any]) -> Communicator:
        place, config = place_in(plan, self.place), replace(self.config, start_timeout=RECONNECT_TIMEOUT)
        limit = config.start_limit
        opened = job_store(place, limit) if place.store else watched_store(place, plan["processes"], limit)
        with opened as store:
            return self._connect(place, store, config)

    def _connect(self, place: Place, store: Store, config: Config) -> Communicator:
        transport = choose_transport(place, config)
        with ExitStack() as failed:
            comm = Communicator(transport.connect(place.rank, place.size, store, config), self, self.place)
            failed.callback(comm.close)
            registration = self._registration or failed.enter_context(closing(self._membership.register()))
            self._confirm(comm, place.job, config.start_limit)
            failed.pop_all()
        notify(self.place, Notice(os.getpid(), joined=self.place.rank))
        self._registration, self._current = registration, weakref.ref(comm)
        return comm

    def _confirm(self, comm: Communicator, job: str, timeout: float) -> None:
        """Return on all ranks, once all are connected and registered; or raise on all."""
        failure: RingcommError | None = None
        try:
            comm.barrier(timeout=timeout)
        except RingcommError as error:  # a rank may be lost when some have left the barrier, and others have not
            failure = error
        if not self._membership.confirm(job, connected=failure is None):
            raise failure or PeerLost("a rank was lost before all had connected")
