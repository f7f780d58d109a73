"""What becomes of a rank that may be restarted, as a table of transitions."""

import math
from dataclasses import dataclass
from enum import Enum, auto

__all__ = ["LaunchedRank", "State"]


class State(Enum):
    STARTED = auto()
    JOINED = auto()
    ENDING = auto()  # it was sent SIGTERM before it had joined; at the deadline SIGKILL
    LEAVING = auto()  # the same, once it had joined
    PENDING = auto()  # it is restarted at the deadline
    LOST = auto()  # for good


# What happens to a rank: what it then is. Anything else changes nothing, as news of a process that has ended meanwhile.
TRANSITIONS = {
    (State.STARTED, "joins"): State.JOINED,
    (State.STARTED, "is ended"): State.ENDING,
    (State.JOINED, "is ended"): State.LEAVING,
    (State.ENDING, "joins"): State.LEAVING,
    (State.STARTED, "is awaited again"): State.PENDING,
    (State.JOINED, "is awaited again"): State.PENDING,
    (State.ENDING, "is awaited again"): State.PENDING,
    (State.LEAVING, "is awaited again"): State.PENDING,
    (State.PENDING, "is started"): State.STARTED,
    (State.PENDING, "is cancelled"): State.LOST,
    (State.STARTED, "is lost"): State.LOST,
    (State.JOINED, "is lost"): State.LOST,
    (State.ENDING, "is lost"): State.LOST,
    (State.LEAVING, "is lost"): State.LOST,
}


@dataclass
class LaunchedRank:
    """A rank of this launcher."""

    state: State = State.STARTED
    process: int = 0  # that has joined, or is ended; it may be the child of a script that was started
    deadline: float = math.inf  # of what the state says
    reason: str = ""  # why it was ended
    restarts: int = 0
    early: int = 0  # deaths in a row before it had joined
    stopped: int = 0  # how many looks in a row have found it stopped
    awaited: bool = False  # it has joined, and was stopped when one gave up waiting for `grow`

    @property
    def joined(self) -> bool:
        return self.state in (State.JOINED, State.LEAVING)

    def move(self, event: str, deadline: float = math.inf) -> bool:
        """Return whether the event has changed the state."""
        after = TRANSITIONS.get((self.state, event))
        if after:
            self.state, self.deadline = after, deadline
        return after is not None
