"""Which processes of this host hold which TCP ports."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["holders"]

SHOWN = 8  # ports


def holders(ports: Sequence[int], root: Path = Path("/")) -> str:
    """Say which of these ports are in use in this network namespace, and by whom, as far as /proc shows that."""
    sockets = _sockets(root)
    used = sorted({*sockets.values()} & {*ports})
    who = dict.fromkeys(used[:SHOWN], "")
    for link in root.glob("proc/[0-9]*/fd/*"):
        with suppress(OSError):  # it is closed, or the process has ended
            port = sockets.get(os.readlink(link), 0)
            if port in who:
                process = link.parent.parent
                who[port] = f" by process {process.name} ({(process / 'comm').read_text().strip()})"
    rest = f" and {len(used) - SHOWN} more" if len(used) > SHOWN else ""
    return ", ".join(f"{port}{holder}" for port, holder in who.items()) + rest


def _sockets(root: Path) -> dict[str, int]:
    """Return the local port of each TCP socket, by the name that /proc gives the socket."""
    found = {}
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (root / "proc/net" / name).read_text().splitlines()[1:]:
                fields = line.split()
                port = int(fields[1].rpartition(":")[2], 16)
                number = fields[9] if fields[9] != "0" else f"none of {port}"  # the process has closed it: TIME_WAIT
                found[f"socket:[{number}]"] = port
    return found
