"""Under torchrun, a rank that fails because another one has failed ends after that one.

torchrun takes the first process that ends for the cause, and kills the others. A rank that raises closes its groups
before its process ends, so its peers could raise PeerLost, and end, before it.
"""

import atexit
import sys
import time
from functools import cache

import torch.distributed as dist

from ringcomm.communicator import open_transports
from ringcomm.errors import Aborted, PeerLost, RingcommError
from ringcomm.transports.contract import Transport

__all__ = ["let_the_cause_end_first"]

# Seconds for the process of the cause to end, and for torchrun to notice: it looks ten times a second. Then torchrun
# ends this process, so the time passes in full only where the cause runs on, or on another machine.
GRACE = 3.0
CAUSED_BY_ANOTHER = PeerLost, Aborted


@cache  # once
def let_the_cause_end_first() -> None:
    """Delay the end of this process if an exception ends it because another rank has failed."""
    if dist.is_torchelastic_launched():
        atexit.register(_await_the_end)  # runs when the exception is printed, and before the groups are closed


def _await_the_end() -> None:
    error = getattr(sys, "last_value", None)  # that ends this process
    if error is not None and _caused_by_another(error):
        sys.stdout.flush()
        time.sleep(GRACE)


def _caused_by_another(error: BaseException | None) -> bool:
    """Return whether the error, or one that it was raised from, or an open group says that another rank has failed."""
    seen: list[BaseException] = []
    left = [error]
    while left:
        error = left.pop()
        if isinstance(error, CAUSED_BY_ANOTHER):
            return True
        if error is not None and not any(error is other for other in seen):
            seen.append(error)
            left += [error.__cause__, error.__context__]
    return any(map(_is_broken_by_another, tuple(open_transports)))  # a future raises RuntimeError instead


def _is_broken_by_another(transport: Transport) -> bool:
    try:
        transport.check()
    except CAUSED_BY_ANOTHER as failure:
        return failure.rank != transport.rank
    except RingcommError:  # a timeout, say: all ranks end with it
        pass
    return False
