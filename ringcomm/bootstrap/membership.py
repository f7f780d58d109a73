"""The membership of an elastic job: keys in the session of the members, which its launcher serves until the job ends.

    member/N        rank N can call `grow`, or is about to: a Member
    removed/N       rank N is never restarted: `grow` does not wait for it
    join/N/K        rank N was restarted, and waits to join with request K
    plan/K          the plan of the grown group, for request K; also for its members, with its job as K
    waited/N        rank N has waited too long for `grow`
    left_out/N      `shrink` has left rank N out, between hosts
    left_out/F/P    the same of process P, of the launcher whose first rank is F

A key goes with the connection of the process that has set it, except removed, which is kept. The launchers of the job
watch all keys.
"""

import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from ringcomm.bootstrap.client import Client
from ringcomm.bootstrap.endpoint import find_endpoint
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.session import MEMBERS
from ringcomm.errors import CollectiveTimeout

__all__ = [
    "RECONNECT_TIMEOUT",
    "TOO_LATE",
    "Member",
    "Membership",
    "Plan",
    "reconnect_timeout",
    "removed",
]

# Seconds for survivors, or for members and joiners, to connect anew. All of them run, but one may be stopped meanwhile.
# The least leaves a busy machine some time: between two hosts survivors took up to 0.25 s.
RECONNECT_TIMEOUT, LEAST_RECONNECT_TIMEOUT = 10.0, 2.0
# The status with which a rank exits that was restarted when no rank was left that it could join: the launcher says
# so. EX_TEMPFAIL of sysexits.h.
TOO_LATE = 75
POLL_INTERVAL = 0.1  # seconds between two looks of rank 0 at who has come or is removed, and at the members
JOINER_POLL_INTERVAL = 0.5  # and of a joiner, of which there may be many, at whether there is any member

Plan = dict[str, Any]


class Member(NamedTuple):
    """The value of member/N."""

    first: int
    process: int
    restarts: int  # of the rank
    joined: bool


def reconnect_timeout(timeout: float) -> float:
    """Return the seconds for survivors to connect whose `shrink` waits for `timeout` seconds: as long."""
    return max(LEAST_RECONNECT_TIMEOUT, min(timeout, RECONNECT_TIMEOUT))


def removed(rank: int) -> str:
    return f"removed/{rank}"


def place_in(plan: Plan, place: Place) -> Place:
    """Return where a rank of the job is in the grown group."""
    ranks = plan["ranks"]
    return replace(place, rank=ranks.index(place.rank), size=len(ranks), members=tuple(ranks), job=plan["job"])


class Membership:
    """The connection of a rank to the membership of its job."""

    def __init__(self, place: Place, timeout: float, keepalive: float) -> None:
        self._place = place
        self._store = Client(find_endpoint(place, keepalive), MEMBERS, place, timeout)
        self._plans: list[str] = []  # the keys of plans that this rank has published

    def close(self) -> None:
        self._store.close()

    def register(self, process: int, joined: bool) -> None:
        """Tell all that this rank can call `grow`; once this returns, the launchers know."""
        fact = Member(self._place.first, process, self._place.restarts, joined)
        key = f"member/{self._place.rank}"
        self._store.set(key, json.dumps(fact).encode())
        self._store.find(key)

    def unregister(self) -> None:
        self._store.tell("delete", key=f"member/{self._place.rank}")

    def leave_out(self, processes: Sequence[int]) -> None:
        """Have the launcher of this rank end these processes, which run but did not call `shrink`."""
        for process in processes:
            self._store.set(f"left_out/{self._place.first}/{process}", b"")

    # --- of a rank that was restarted

    def join(self, timeout: float) -> Plan:
        """Return the plan of the group that this rank joins, once the others call `grow`.

        Raises SystemExit, which the launcher reports in a line: after `timeout` seconds, and if no rank is left that
        could call it, because the job is over.
        """
        deadline, request = time.monotonic() + timeout, secrets.token_hex(8)
        key = f"join/{self._place.rank}/{request}"
        self._store.set(key, b"")
        while (left := deadline - time.monotonic()) > 0:
            with suppress(CollectiveTimeout):  # the launcher is slow
                if not self._store.keys("member/"):
                    raise SystemExit(TOO_LATE)
                if plan := self._store.find(f"plan/{request}", min(left, JOINER_POLL_INTERVAL)):
                    self._store.tell("delete", key=key)
                    return dict(json.loads(plan))
        with suppress(CollectiveTimeout):
            key = f"waited/{self._place.rank}"
            self._store.set(key, b"")
            self._store.find(key)  # the launchers know
        raise SystemExit(f"ringcomm: rank {self._place.rank} ends: no rank has called grow within {timeout:g} s")

    # --- of the ranks that call `grow`

    def find_plan(self, job: str, check: Callable[[], object]) -> Plan:
        """Return the plan of this job that rank 0 has published. `check` may raise what ends the wait for it."""
        plan = self._store.find(f"plan/{job}", RECONNECT_TIMEOUT, check)
        if plan is None:
            text = f"grow: no plan of the grown group came within {RECONNECT_TIMEOUT:g} s; rank 0 may have withdrawn it"
            raise CollectiveTimeout(text, rank=0)
        return dict(json.loads(plan))

    # --- of rank 0 among them

    def plan(self, members: Iterable[int], missing: set[int], timeout: float, check: Callable[[], object]) -> Plan:
        """Wait for the missing ranks, at most `timeout` seconds; publish the plan if any has joined, and return it.

        Waits for none that was removed. `check` is called meanwhile, and may raise what ends the wait.
        """
        for key in self._plans:  # of earlier calls: whoever was to read them has come again, or is lost
            self._store.tell("delete", key=key)
        joiners = self._wait_for(missing, timeout, check)
        plan = {"ranks": sorted([*members, *joiners]), "job": f"{self._place.job}+{secrets.token_hex(8)}"}
        self._plans = [f"plan/{reader}" for reader in (plan["job"], *joiners.values()) if joiners]
        for key in self._plans:
            self._store.set(key, json.dumps(plan).encode())
        return plan

    def _wait_for(self, ranks: set[int], timeout: float, check: Callable[[], object]) -> dict[int, str]:
        """Return the requests of the ranks that have come."""
        deadline = time.monotonic() + timeout
        while True:
            # Anew each time: one that has come may have died, and come again with another request.
            requests = [key.split("/")[1:] for key in self._store.keys("join/")]
            found = {int(rank): request for rank, request in requests if int(rank) in ranks}
            absent = ranks - found.keys() - {int(key.split("/")[1]) for key in self._store.keys("removed/")}
            left = deadline - time.monotonic()
            if not absent or left <= 0:
                return found
            time.sleep(min(left, POLL_INTERVAL))
            check()
