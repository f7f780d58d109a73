"""The link over UCX: finds libucp, chooses it where all ranks have RDMA, and connects its workers through the store."""

import importlib.util
import logging
import time
from pathlib import Path
from typing import Any

from ringcomm.bootstrap.start_errors import format_ranks, missing_connections, rank_in_job
from ringcomm.bootstrap.store import Store, all_gather_facts
from ringcomm.bootstrap.wire.addresses import listen
from ringcomm.config import Config
from ringcomm.errors import ArgumentError, RingcommError
from ringcomm.machine.interfaces import interface_of
from ringcomm.native import check, ffi, lib

__all__ = ["Ucx", "connect_ucx", "open_ucx"]

log = logging.getLogger("ringcomm")

SYSTEM = "libucp.so.0"
DEVICES = Path("/sys/class/infiniband")
RDMA = ("rc_", "dc_", "ud_", "srd")  # how the names of its transports begin
CHOICES, ADDRESSES = "ucx/choice", "ucx/address"  # in the store
SLICE = 0.05  # seconds between looks at the store
LOCAL = "127.0.0.1"


class Ucx:
    """A UCX worker of this process.

    Attributes:
        handle: rc_ucx.
        library: The libucp that was opened.
        version: Of that library.
        transports: What it may use between hosts and inside one, with the devices: "rc_mlx5/mlx5_0:1", "tcp/eth0".
    """

    def __init__(self, library: str, devices: str, ports: str, keepalive: float) -> None:
        slot = ffi.new("rc_ucx **")
        check(lib.rc_ucx_open(library.encode(), devices.encode(), ports.encode(), keepalive, slot))
        self.handle = ffi.gc(slot[0], lib.rc_ucx_free)
        found = [ffi.new("char const **") for _ in range(3)]
        check(lib.rc_ucx_describe(self.handle, *found))
        self.library, self.version, transports = (ffi.string(each[0]).decode() for each in found)
        self.transports = transports.split()

    @property
    def has_rdma(self) -> bool:
        return any(each.startswith(RDMA) for each in self.transports)

    def address(self) -> bytes:
        address, size = ffi.new("void const **"), ffi.new("uint64_t *")
        check(lib.rc_ucx_address(self.handle, address, size))
        return bytes(ffi.buffer(address[0], size[0]))


def open_ucx(config: Config, address: str = "") -> Ucx:
    """Open the libucp of the setting `ucx`, else that of the system, else that of the extra `ringcomm[ucx]`.

    Without RDMA, UCX uses the interface that has this address; the variable UCX_NET_DEVICES comes first.

    Raises RingcommError with the reasons if there is none, and ArgumentError if it has no RDMA, and no port is free
    that it may take.
    """
    ports, full = config.port_range or "", None
    if config.ucx_ports:
        try:
            listen(address or LOCAL, config.ucx_ports, "UCX", any_address=True).close()
        except ArgumentError as error:  # where none is free, UCX tries for ever; RDMA needs none
            ports, full = "", error
    if has_rdma_devices():
        found = _open(config, "", ports)
        if found.has_rdma:
            return found
        del found  # it holds a port
    if full:
        raise full
    return _open(config, interface_of(address), ports)


def _open(config: Config, devices: str, ports: str) -> Ucx:
    reasons = []
    for library in [config.ucx] if config.ucx else [SYSTEM, *_of_wheel()]:
        try:
            return Ucx(library, devices, ports, config.keepalive)
        except ArgumentError as error:  # it is not there, or too old
            reasons.append(str(error))
        except RingcommError as error:  # it is there, but uses nothing of this host
            raise RingcommError(f"cannot open UCX: {error}: check UCX_TLS and UCX_NET_DEVICES") from None
    hint = "pip install 'ringcomm[ucx]', or name a libucp with RINGCOMM_UCX"
    raise RingcommError(f"cannot open UCX: {'; '.join(reasons)}: {hint}")


def _of_wheel() -> list[str]:
    spec = importlib.util.find_spec("libucx")
    folders = spec.submodule_search_locations if spec else None
    return [str(Path(folder, "lib", SYSTEM)) for folder in folders or []]


def has_rdma_devices() -> bool:
    """Return whether UCX may find RDMA on this host: to open it takes longer than the rest of a start."""
    return any(DEVICES.glob("*"))


def connect_ucx(rank: int, size: int, store: Store, config: Config, address: str) -> Any:
    """Return an rc_network over UCX, or None if the link is to be sockets.

    UCX takes over where the setting `link` says so, or, if it says nothing, where all ranks have RDMA: over TCP alone
    plain sockets are faster.

    Raises ArgumentError naming the ranks without UCX if `link` asks for it, and CollectiveTimeout naming those that do
    not connect.
    """
    if config.link == "sockets":
        return None
    ucx, reason = None, ""
    try:
        if config.tls:
            reason = "with RINGCOMM_TLS the link is sockets, since UCX encrypts nothing"
        elif config.link == "ucx" or has_rdma_devices():
            ucx = open_ucx(config, address)
    except RingcommError as error:
        reason = str(error)
    fits = ucx is not None and (config.link == "ucx" or ucx.has_rdma)
    ranks = all_gather_facts(store, CHOICES, rank, size, {"fits": fits, "reason": reason}, config.start_limit)
    unfit = [other for other in range(size) if not ranks[other]["fits"]]
    if unfit and config.link == "ucx":
        numbers = [rank_in_job(store.members, other) for other in unfit]
        text = f"link='ucx' needs UCX on all ranks; {format_ranks(numbers)}: {ranks[unfit[0]]['reason']}"
        raise ArgumentError(text, rank=numbers[0])
    if unfit or ucx is None:
        refused = [other for other in unfit if ranks[other]["reason"]]
        if refused and rank == 0:
            number, reason = rank_in_job(store.members, refused[0]), ranks[refused[0]]["reason"]
            log.warning("sockets take the place of UCX: rank %d: %s", number, reason)
        return None
    _connect(ucx, rank, size, store, config.start_limit)
    slot = ffi.new("rc_network **")
    check(lib.rc_network_open_ucx(ucx.handle, slot))
    return ffi.gc(slot[0], lib.rc_network_free)


def _connect(ucx: Ucx, rank: int, size: int, store: Store, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    found = all_gather_facts(store, ADDRESSES, rank, size, ucx.address().hex(), timeout)
    addresses = [ffi.from_buffer(bytes.fromhex(each)) for each in found]
    try:
        check(lib.rc_ucx_connect(ucx.handle, rank, size, [ffi.cast("void const *", each) for each in addresses]))
    except RingcommError as error:
        number = rank_in_job(store.members, rank)
        text = f"rank {number}: UCX cannot connect to the other ranks ({error}): check UCX_TLS and UCX_NET_DEVICES"
        raise RingcommError(text, rank=number) from None
    connected = ffi.new("int[]", size)
    while not all(connected):
        if time.monotonic() > deadline:
            missing = [other for other in range(size) if not connected[other]]
            raise missing_connections(missing, rank, size, timeout, store.members)
        store.check()
        check(lib.rc_ucx_await(ucx.handle, SLICE, connected))
