"""A rank of an elastic job: `ringcomm run --respawn` restarts lost ranks, and the survivors admit them."""

import os
import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

from ringcomm.bootstrap.membership import RECONNECT_TIMEOUT, TOO_LATE, Membership, Plan, place_in
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.store import Store, job_store
from ringcomm.communicator import Communicator
from ringcomm.config import Config
from ringcomm.errors import (
    Aborted,
    ArgumentError,
    CollectiveTimeout,
    MismatchError,
    PeerLost,
    RingcommError,
    decode_error,
    describe_error,
    encode_error,
)
from ringcomm.transports.choice import choose_transport

__all__ = ["ElasticRank"]

# A call that `grow` makes, in the message of an error.
CALL = re.compile(r"\b(all_gather|broadcast|barrier)\([^)]*\)( \(epoch \d+\))?")


class ElasticRank:
    """See ElasticJob. It connects its communicators, and keeps this rank registered while it can call `grow`."""

    def __init__(self, place: Place, config: Config) -> None:
        self.place, self.config = replace(place, members=tuple(range(place.size))), config
        self._membership = Membership(self.place, config.start_limit, config.keepalive)
        self._registered = False
        self._current: weakref.ref[Communicator] | None = None  # that can call `grow`

    def start(self) -> Communicator:
        """Connect for the first time, or, in a restarted rank, once the others call `grow`."""
        with ExitStack() as failed:
            failed.callback(self._membership.close)
            comm = self._join() if self.place.restarts else self._start()
            failed.pop_all()
        return comm

    def _start(self) -> Communicator:
        with job_store(self.place, self.config.start_limit) as store:
            return self._connect(self.place, store, self.config)

    def _join(self) -> Communicator:
        """Join as soon as the others call `grow`, and again if another rank is lost or stopped meanwhile."""
        while True:
            try:
                # Each time as long as at first: a `grow` that has failed may have taken longer than that.
                plan = self._membership.join(self.config.start_limit)
            except PeerLost:  # the launcher is lost, and with it the job
                raise SystemExit(TOO_LATE) from None
            with suppress(PeerLost, CollectiveTimeout, Aborted):
                return self._connect_as_planned(plan)

    def grow(self, comm: Communicator, timeout: float) -> Communicator:
        """See Communicator.grow."""
        if not self.place.respawn:
            raise ArgumentError(
                "grow: nothing starts a lost rank again; use ringcomm run --respawn N, with N of 1 or more"
            )
        comm.check()  # what has failed before keeps its words
        with _attributed_to_grow():
            each: list[tuple[int, float]] = comm.all_gather_object((self.place.rank, timeout))
            members = [rank for rank, _ in each]
            missing = {*range(self.place.size)} - {*members}
            if not missing:
                return comm
            if comm.rank == 0:
                plan = self._lead(comm, members, missing, timeout)
            else:
                _, timeout_of_first = each[0]
                plan = self._follow(comm, timeout_of_first + comm.timeout)
            return comm if len(plan["ranks"]) == comm.size else self._connect_as_planned(plan)

    def _lead(self, comm: Communicator, members: list[int], missing: set[int], timeout: float) -> Plan:
        """Rank 0's part of `grow`: find out who has come, and tell all."""
        try:
            # If a member is lost the others leave `grow`, and this rank must not stay in it.
            plan = self._membership.plan(members, missing, timeout, comm.check)
        except BaseException as error:  # an interrupt, say
            shared = error if isinstance(error, RingcommError) else Aborted(f"rank 0: {describe_error(error)}", rank=0)
            with suppress(RingcommError):  # or the communicator itself has failed
                comm.broadcast_object(encode_error(shared))
            raise
        comm.broadcast_object(plan)
        return plan

    def _follow(self, comm: Communicator, timeout: float) -> Plan:
        told: Any = comm.broadcast_object(timeout=timeout)
        if isinstance(told, str):
            raise decode_error(told)
        return dict(told)

    def resume(self, comm: Communicator, left_out: Sequence[int]) -> None:
        """See ElasticJob: the launcher ends what was left out, and starts it again."""
        self._current = weakref.ref(comm)
        self._membership.leave_out(left_out)

    def leave(self, comm: Communicator) -> None:
        """See ElasticJob."""
        if self._registered and self._current and self._current() is comm:
            self._registered = False
            self._membership.close()

    def _connect_as_planned(self, plan: Plan) -> Communicator:
        place, config = place_in(plan, self.place), replace(self.config, start_timeout=RECONNECT_TIMEOUT)
        with job_store(place, config.start_limit) as store:
            return self._connect(place, store, config)

    def _connect(self, place: Place, store: Store, config: Config) -> Communicator:
        transport = choose_transport(place, config)
        with ExitStack() as failed:
            comm = Communicator(transport.connect(place.rank, place.size, store, config), self, self.place)
            failed.callback(comm.close)
            if not self._registered:
                failed.callback(self._membership.unregister)
                self._membership.register(os.getpid(), joined=False)
            self._confirm(comm, place.job, config.start_limit)
            failed.pop_all()
        self._membership.register(os.getpid(), joined=True)
        self._registered, self._current = True, weakref.ref(comm)
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


@contextmanager
def _attributed_to_grow() -> Iterator[None]:
    """Name `grow` in errors of the calls that it makes, which the user has not called; these are their causes."""
    try:
        yield
    except (CollectiveTimeout, PeerLost, MismatchError) as error:
        text = str(error) if isinstance(error, MismatchError) else str(error).partition("\n")[0]
        text = CALL.sub("grow", text)
        words = text if "grow" in text else f"grow: {text}"
        facts = {"rank": error.rank, "collective": "grow", "group": error.group, "got": error.got}
        raise type(error)(words, **facts) from error
