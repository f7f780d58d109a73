"""The network interfaces of this host: which one has an address, and how fast it says that it is."""

import fcntl
import socket
import struct
from contextlib import suppress
from pathlib import Path

from ringcomm.machine.cgroup import words

__all__ = ["bandwidth", "interface_of"]

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def interface_of(address: str) -> str:
    """Return the interface that has an IPv4 address; "" if none has."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        wanted = socket.inet_aton(socket.gethostbyname(address))
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if found[20:24] == wanted:
                    return name
    return ""


def bandwidth(interface: str, root: Path = Path("/")) -> float | None:
    """Return the GB/s of an interface; None if it is unknown, as in many virtual machines.

    A virtual interface on no other, such as that of a container, says 10 Gbit/s whatever carries its data.
    """
    folder = root / "sys/class/net" / interface
    if not interface or not ((folder / "device").exists() or any(folder.glob("lower_*"))):
        return None
    match words(folder / "speed"):  # Mbit/s; -1, or unreadable, where it is unknown or the interface is down
        case [speed] if speed.isdecimal() and int(speed):
            return int(speed) / 8e3
    return None
