"""A rank of an elastic job: `ringcomm run --respawn` restarts lost ranks, and the survivors admit them."""

import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

from ringcomm.bootstrap.membership import RECONNECT_TIMEOUT, TOO_LATE, Membership, Plan, place_in
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.store import Store, await_connected, job_store
from ringcomm.communicator import Communicator
from ringcomm.config import Config
from ringcomm.errors import Aborted, ArgumentError, CollectiveTimeout, PeerLost, RingcommError
from ringcomm.transports.choice import choose_transport

__all__ = ["ElasticRank"]


class ElasticRank:
    """See ElasticJob. It connects its communicators, and keeps this rank registered while it can call `grow`."""

    def __init__(self, place: Place, config: Config) -> None:
        self.place, self.config = replace(place, members=range(place.size)), config
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

    def grow(self, comm: Communicator, timeout: float) -> Communicator | None:
        """See Communicator.grow."""
        if not self.place.max_restarts:
            raise ArgumentError("grow: nothing restarts a lost rank; use ringcomm run --respawn N, with N of 1 or more")
        router = comm._router
        router.check()  # an earlier failure keeps its description
        facts: list[tuple[int, float]] = router.all_gather_facts("grow", [self.place.rank, timeout])
        members = [rank for rank, _ in facts]
        missing = {*range(self.place.size)} - {*members}
        if not missing:
            return None
        timeout = facts[0][1]  # rank 0's

        def publish() -> str | None:
            """Publish the plan, too long for a fact, if any rank has joined; return the job of the grown group."""
            if comm.rank:
                return None
            # If a member is lost the others leave `grow`, and this rank must not stay in it.
            plan = self._membership.plan(members, missing, timeout, router.check)
            return plan["job"] if len(plan["ranks"]) > len(members) else None

        patience = comm.timeout + (timeout if comm.rank else 0.0)
        job = router.run_on_all("grow", publish, patience)[0]
        if not job:
            return None
        plan = self._membership.find_plan(job, router.check)
        try:
            return self._connect_as_planned(plan)
        except RingcommError as error:
            error.collective = "grow"
            raise

    def resume(self, comm: Communicator, left_out_pids: Sequence[int]) -> None:
        """See ElasticJob: the launcher ends what was left out, and restarts it."""
        self._current = weakref.ref(comm)
        self._membership.leave_out(left_out_pids)

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
            opened = transport.connect(place.rank, place.size, store, config)
            comm = Communicator(opened, self, self.place)
            failed.callback(comm.close)
            if not self._registered:
                failed.callback(self._membership.unregister)
                self._membership.register(os.getpid(), joined=False)
            await_connected(store, place.rank, place.size, config.start_limit)
            failed.pop_all()
        self._membership.register(os.getpid(), joined=True)
        self._registered, self._current = True, weakref.ref(comm)
        return comm
