"""How ranks that were started again join those that have continued.

In `grow`, rank 0 of these collects those that wait to join, and sends each the plan: which ranks of the job are in the
grown group, their processes, and the name of its startup. Every other member gets the plan in a broadcast.
"""

import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from ringcomm.bootstrap.local_membership import LocalMembership
from ringcomm.bootstrap.membership import Member, Membership
from ringcomm.bootstrap.notices import TOO_LATE, Notice, notify
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.sockets import Message
from ringcomm.bootstrap.store_membership import StoreMembership
from ringcomm.errors import CollectiveTimeout, MismatchError, PeerLost

__all__ = ["attributed_to_grow", "job_membership", "join_group", "new_plan", "place_in"]

# A call that `grow` makes, in the message of an error.
CALL = re.compile(r"\b(all_gather|broadcast|barrier)\([^)]*\)( \(epoch \d+\))?")


def job_membership(place: Place, patience: float | None = None) -> Membership:
    """Return the membership of an elastic job; `patience`: seconds for an answer of the launcher of node 0."""
    return StoreMembership(place, patience) if place.store else LocalMembership(place)


def join_group(membership: Membership, place: Place, timeout: float) -> Message:
    """Return the plan of the group that the rank at this place joins, once the others call `grow`.

    Raises SystemExit, which the launcher reports in a line: after `timeout` seconds, and if no rank is left that could
    call it, because the job is over.
    """
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        if not membership.any_registered():
            raise SystemExit(TOO_LATE)
        if plan := membership.request_plan(left):
            return plan
    notify(place, Notice(os.getpid(), grow_timed_out=True))
    raise SystemExit(f"ringcomm: rank {place.rank} ends: no rank has called grow within {timeout:g} s")


def new_plan(place: Place, members: Iterable[Member]) -> Message:
    """Return the plan of a group of these ranks of the job."""
    ranks, processes = zip(*sorted(members), strict=True)
    job = f"{place.job}+{secrets.token_hex(8)}"
    if place.store:  # the launcher's store has one secret, and notices lost connections instead of lost processes
        return {"ranks": ranks, "job": job, "nonce": place.nonce}
    return {"ranks": ranks, "processes": processes, "job": job, "nonce": secrets.token_hex(16)}


def place_in(plan: Message, place: Place) -> Place:
    """Return where a rank of the job is in the grown group."""
    ranks = plan["ranks"]
    place = replace(place, rank=ranks.index(place.rank), size=len(ranks), members=tuple(ranks))
    return replace(place, job=plan["job"], nonce=plan["nonce"])


@contextmanager
def attributed_to_grow() -> Iterator[None]:
    """Name `grow` in errors of the calls that it makes, which the user has not called; these are their causes."""
    try:
        yield
    except (CollectiveTimeout, PeerLost, MismatchError) as error:
        text = str(error) if isinstance(error, MismatchError) else str(error).partition("\n")[0]
        text = CALL.sub("grow", text)
        words = text if "grow" in text else f"grow: {text}"
        facts = {"rank": error.rank, "collective": "grow", "group": error.group, "got": error.got}
        raise type(error)(words, **facts) from error
