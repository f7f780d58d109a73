"""What becomes of a rank that may be restarted, as a table of transitions."""

import math
from dataclasses import dataclass
from enum import Enum, auto

__all__ = ["LaunchedRank", "State"]


class State(Enum):
    RUNNING = auto()
    ENDING = auto()  # it was sent SIGTERM; at the deadline SIGKILL
    PENDING = auto()  # it is restarted at the deadline
    LOST = auto()  # for good


# What happens to a rank: in which states, and what it then is. Otherwise it is news of a process that has ended.
TRANSITIONS = {
    "is ended": ((State.RUNNING,), State.ENDING),
    "is to be restarted": ((State.RUNNING, State.ENDING), State.PENDING),
    "is started": ((State.PENDING,), State.RUNNING),
    "is cancelled": ((State.PENDING,), State.LOST),
    "is lost": ((State.RUNNING, State.ENDING), State.LOST),
}


@dataclass
class LaunchedRank:
    """A rank of this launcher."""

    state: State = State.RUNNING
    joined: bool = False  # the job
    process: int = 0  # that has joined, or is ended; it may be the child of a script that was started
    deadline: float = math.inf  # of what the state says
    reason: str = ""  # why it was ended
    restarts: int = 0
    early: int = 0  # deaths in a row before it had joined
    stopped: int = 0  # how many looks in a row have found it stopped
    blocks_joiner: bool = False  # it has joined, and was stopped when one gave up waiting for `grow`

    @property
    def alive(self) -> bool:
        return self.state in (State.RUNNING, State.ENDING)

    def move(self, event: str, deadline: float = math.inf) -> bool:
        """Return whether the event has changed the state."""
        before, after = TRANSITIONS[event]
        if self.state not in before:
            return False
        self.state, self.deadline = after, deadline
        self.joined = self.joined and self.alive
        return True
