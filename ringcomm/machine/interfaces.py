"""The network interfaces of this host: which one has an address, and how fast it says that it is."""

import ctypes
import fcntl
import socket
import struct
from contextlib import suppress
from pathlib import Path

from ringcomm.machine.cgroup import words

__all__ = ["bandwidth", "interface_of"]

SIOCGIFCONF = 0x8912  # Linux: the IPv4 addresses of all interfaces
ADDRESS = struct.Struct("16s 4x 4s 16x")  # of ifreq: the name, and the address in a sockaddr_in
MOST_ADDRESSES = 1024


def interface_of(address: str) -> str:
    """Return the interface that has an address; "" if none has."""
    return _of_ipv4(address) or _of_ipv6(address)


def _of_ipv6(address: str) -> str:
    host, _, interface = address.partition("%")
    with suppress(OSError):
        resolved = socket.getaddrinfo(host, 0, socket.AF_INET6, socket.SOCK_STREAM)[0][4][0]
        wanted = socket.inet_pton(socket.AF_INET6, str(resolved)).hex()
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            held, *_, name = line.split()
            if held == wanted and interface in ("", name):  # several may have one link-local address
                return name
    return ""


def _of_ipv4(address: str) -> str:
    found = bytearray(ADDRESS.size * MOST_ADDRESSES)
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        wanted = socket.inet_aton(socket.gethostbyname(address))
        room = (ctypes.c_char * len(found)).from_buffer(found)
        answer = fcntl.ioctl(probe, SIOCGIFCONF, struct.pack("iP", len(found), ctypes.addressof(room)))
        for name, held in ADDRESS.iter_unpack(found[: struct.unpack_from("i", answer)[0]]):
            if held == wanted:
                return str(name.rstrip(b"\0").partition(b":")[0], "ascii")
    return ""


def bandwidth(interface: str, root: Path = Path("/")) -> float | None:
    """Return the GB/s of an interface; None if it is unknown, as in many virtual machines.

    A virtual interface on no other, such as that of a container, says 10 Gbit/s whatever carries its data. The card of
    a virtual machine may say more than the machine is allowed.
    """
    folder = root / "sys/class/net" / interface
    if not interface or not ((folder / "device").exists() or any(folder.glob("lower_*"))):
        return None
    match words(folder / "speed"):  # Mbit/s; -1, or unreadable, where it is unknown or the interface is down
        case [speed] if speed.isdecimal() and int(speed):
            return int(speed) / 8e3
    return None
