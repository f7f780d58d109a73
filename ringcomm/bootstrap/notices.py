"""What the ranks tell a launcher that starts lost ones again, by datagrams: the nonce of the job, and as JSON a Notice.

It hears that a rank has joined or has waited too long for that, and which processes of this host `shrink` has left out.
"""

import hashlib
import hmac
import json
import os
import socket
from contextlib import suppress
from typing import NamedTuple

from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.sockets import MESSAGE_BYTES

__all__ = ["TOO_LATE", "Notice", "Notices", "job_address", "notify"]

# The status with which a rank exits that was started again when no rank was left that it could join: the launcher says
# so. EX_TEMPFAIL of sysexits.h.
TOO_LATE = 75
MOST_AT_ONCE = 1000
NOTIFY_TIMEOUT = 5.0  # seconds: the launcher reads all the time


class Notice(NamedTuple):
    process: int  # its id
    joined: int | None = None  # the rank of the job that it is, which can now call `grow`
    grow_timed_out: bool = (
        False  # no other one has called `grow` while it waited; else, if it has not joined, it was left out
    )


class Notices:
    """The launcher's end. `fileno` is readable when a notice has come."""

    def __init__(self, place: Place) -> None:
        self._nonce = os.fsencode(place.nonce)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(job_address(place, f"launcher of {place.first}"))

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> list[Notice]:
        """Return the notices that have come."""
        notices = []
        with suppress(BlockingIOError):
            for _ in range(MOST_AT_ONCE):  # then the launcher looks at its ranks again
                nonce, _, data = self._socket.recv(MESSAGE_BYTES).partition(b"\0")
                if hmac.compare_digest(nonce, self._nonce):  # else from an untrusted peer
                    notices.append(Notice(**json.loads(data)))
        return notices

    def close(self) -> None:
        self._socket.close()


def notify(place: Place, notice: Notice) -> None:
    """Tell the launcher; without effect if it has gone."""
    data = os.fsencode(place.nonce) + b"\0" + json.dumps(notice._asdict()).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, suppress(OSError):
        sender.settimeout(NOTIFY_TIMEOUT)
        sender.sendto(data, job_address(place, f"launcher of {place.first}"))


def job_address(place: Place, name: str) -> str:
    """Return the abstract address of what has this name in the job."""
    job = place.job.rpartition("/")[2]  # without the name of the launcher, which its ranks add
    digest = hashlib.sha256(os.fsencode(f"{place.nonce}/{job}/{name}")).hexdigest()
    return f"\0ringcomm-{os.geteuid()}-{digest[:32]}"
