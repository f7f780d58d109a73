"""The membership of an elastic job: which ranks can call `grow`, wait to join, or are never started again."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from ringcomm.bootstrap.sockets import Message

__all__ = ["RECONNECT_TIMEOUT", "Joiners", "Member", "Membership", "Registration", "reconnect_timeout"]

# Seconds for survivors, or for members and joiners, to connect anew. All of them run, but one may be stopped meanwhile.
# The least leaves a busy machine some time: between two hosts survivors took up to 0.25 s.
RECONNECT_TIMEOUT, LEAST_RECONNECT_TIMEOUT = 10.0, 2.0

Member = tuple[int, str]  # its rank in the job, and its process_id


def reconnect_timeout(timeout: float) -> float:
    """Return the seconds for survivors to connect whose `shrink` waits for `timeout` seconds: as long."""
    return max(LEAST_RECONNECT_TIMEOUT, min(timeout, RECONNECT_TIMEOUT))


class Registration(Protocol):
    """Of one rank. It ends with `close`, or with the process."""

    def close(self) -> None: ...


class Joiners(Protocol):
    """Rank 0's side of `grow`: the ranks that wait to join."""

    def wait(self, ranks: Iterable[int], timeout: float, check: Callable[[], object]) -> list[Member]:
        """Wait until these ranks of the job have come, at most `timeout` seconds; return those that are still there.

        Waits for none that was removed. `check` is called meanwhile, and may raise what ends the wait.
        """
        ...

    def send(self, plan: Message) -> None:
        """Send the plan to those that are in it. They can read it until the end of `joiners`."""
        ...


class Membership(Protocol):
    """The membership of a job, seen from one of its ranks or launchers."""

    def register(self) -> Registration:
        """Register this rank as one that can call `grow`."""
        ...

    def any_registered(self) -> bool:
        """Return whether any rank of the job is registered, so that others can join it."""
        ...

    def remove(self, rank: int) -> None:
        """Remove a rank of the job, which is never started again."""
        ...

    def joiners(self) -> AbstractContextManager[Joiners]: ...

    def request_plan(self, timeout: float) -> Message | None:
        """Request the plan from rank 0, to join; None: it has not sent one, after `timeout` seconds or before."""
        ...

    def confirm(self, job: str, connected: bool) -> bool:
        """Return whether the ranks of a start are a group, for all alike.

        They are if the first to call this has found that all are `connected`. `job` is the name of the start.
        """
        ...

    def close(self) -> None:
        """End what this process holds, and on one host its removals; the membership can still be used."""
        ...
