"""The settings: argument › Config › RINGCOMM_* › `ringcomm tune` › default. place.py reads the environment too."""

import logging
import math
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from ringcomm.errors import ArgumentError, integer, refuse, unknown
from ringcomm.machine import tuning

__all__ = [
    "Config",
    "cache_folder",
    "dump_folder",
    "is_torch_default",
    "job_secret",
    "trace_folder",
    "tuning_file",
]

T = TypeVar("T")
PREFIX = "RINGCOMM_"
JOB_SECRET = "RINGCOMM_JOB_SECRET"  # the launchers of several hosts read it too
# Set by `ringcomm run` for its ranks, read by place.py: rank, size, job, its secret, the address of the store; with
# --respawn, how often it restarts a rank at most, how often it has restarted this one, and its first rank.
LAUNCHER = (
    *("RINGCOMM_RANK", "RINGCOMM_SIZE", "RINGCOMM_JOB", JOB_SECRET, "RINGCOMM_STORE"),
    *("RINGCOMM_MAX_RESTARTS", "RINGCOMM_RESTARTS", "RINGCOMM_FIRST"),
)

TUNING = "RINGCOMM_TUNING"
TRACE = "RINGCOMM_TRACE"
DUMP = "RINGCOMM_DUMP"
TORCH_DEFAULT = "RINGCOMM_TORCH_DEFAULT"
MAX_KEEPALIVE = 86400.0  # seconds; TCP takes more: 100 probes, at most 32,767 s apart
LOG_LEVELS = ("debug", "info", "warning", "error")

# Raises ArgumentError, which says what has the value, unless the value is valid. A check of integers returns an int.
Check = Callable[[str, Any], object]


def _positive(unit: str, most: float = math.inf) -> Check:
    limits = f"> 0, at most {most:g}" if most < math.inf else "> 0"

    def check(what: str, value: Any) -> None:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf or value > most:
            raise refuse(what, f"a finite number of {unit} {limits}", repr(value))

    return check


def _whole(least: int, most: int = 2**63 - 1) -> Check:
    return lambda what, value: integer(what, value, least, most)


_arena = _whole(1, 512 << 30)  # more than a rank of any job can use


def _flag(what: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise refuse(what, "True or False (in the environment 1 or 0)", repr(value))


def _name(what: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise refuse(what, "a name, or None", repr(value))


def _split(value: str | None) -> list[str]:
    return [each.strip().removeprefix("[").removesuffix("]") for each in value.split(",")] if value else []


def _addresses(what: str, value: Any) -> None:
    each = _split(value) if isinstance(value, str) else [""]
    if not all(each) or len({*each}) < len(each):
        raise refuse(what, "an address, or several different ones with commas between them, or None", repr(value))
    if any(address.count(":") == 1 or "]" in address for address in each):  # IPv6 has more colons
        raise refuse(what, "addresses without a port (the setting port_range has those)", repr(value))


def _three_files(what: str, value: Any) -> None:
    each = value.split(",") if isinstance(value, str) else []
    if len(each) != 3 or not all(each):
        raise refuse(what, "the files CERTIFICATE,KEY,AUTHORITY, with commas between them, or None", repr(value))


def _ports(text: str) -> range:
    first, dash, last = text.partition("-")
    return range(int(first), int(last if dash else first) + 1)


def _port_range(what: str, value: Any) -> None:
    text = "a port, or a range such as 29500-29510, from 1024 to 65535"
    if not isinstance(value, str) or not re.fullmatch(r"\d{1,5}(-\d{1,5})?", value, re.ASCII):
        raise refuse(what, text, repr(value))
    ports = _ports(value)
    if not ports or ports[0] < 1024 or ports[-1] > 65535:
        raise refuse(what, text, repr(value))


def _one_of(*known: str) -> Check:
    def check(what: str, value: Any) -> None:
        if value not in known:
            raise unknown(f"value of {what}", value, known)

    return check


def _topology(what: str, value: Any) -> None:
    if not isinstance(value, str) or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){2}", value, re.ASCII):
        raise refuse(what, "NUMA nodes x caches x ranks, such as '2x4x8', or None", repr(value))


def _log_level(what: str, value: Any) -> None:
    if not isinstance(value, str) or value.upper() not in logging.getLevelNamesMapping():
        raise unknown(f"value of {what}", value, LOG_LEVELS)


def _setting(name: str, default: T, parse: Callable[[str], Any], check: Check) -> T:
    """Declare the field `name`. An empty environment variable counts as unset."""
    variable = PREFIX + name.upper()

    def value() -> T:
        text = os.environ.get(variable)
        if not text:
            return _tuned(name, default, check)
        try:
            value = parse(text)
        except (ValueError, KeyError):
            value = text  # which no check accepts
        check(variable, value)
        return cast(T, value)

    return field(default_factory=value, metadata={"check": check, "optional": default is None})


def tuning_file() -> Path | None:
    """Return the file of `ringcomm tune`: the one that RINGCOMM_TUNING names (None if empty), else one in ~/.config."""
    chosen = os.environ.get(TUNING)
    if chosen is not None:
        return Path(chosen) if chosen else None
    try:
        folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    except RuntimeError:  # this user has no home
        return None
    return Path(folder, "ringcomm", "tuning.json")


def trace_folder() -> str:
    """Return the folder in which every communicator of this process records its calls; "" for none."""
    return os.environ.get(TRACE, "")


def dump_folder() -> str:
    """Return the folder in which a failure leaves the flight record of all ranks; "" for none."""
    return os.environ.get(DUMP, "")


def is_torch_default() -> bool:
    """Return whether torch.distributed takes ringcomm where a program names no backend for tensors on the CPU."""
    text = os.environ.get(TORCH_DEFAULT, "")
    if text not in ("", "0", "1"):
        raise refuse(TORCH_DEFAULT, "0 or 1", repr(text))
    return text == "1"


def job_secret() -> tuple[str, bool]:
    """Return the secret in the environment, and whether it is that of a job of which this process is a rank."""
    return os.environ.get(JOB_SECRET, ""), LAUNCHER[0] in os.environ


def cache_folder() -> Path:
    """Return the folder for files that can be made again, some of which are run; nobody else may write there."""
    from ringcomm.machine import files

    above = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    try:
        return files.private_folder(above / "ringcomm")
    except ArgumentError as error:
        reason = f"refused the cache folder {error}"
    except OSError as error:
        reason = f"cannot make the cache folder {above / 'ringcomm'}: {error.strerror}"
    raise ArgumentError(f"{reason}; set XDG_CACHE_HOME to a folder of your own")


def _tuned(name: str, default: T, check: Check) -> T:
    path = tuning_file() if name in tuning.TUNABLE else None
    if path and TUNING in os.environ and not os.path.exists(path):
        text = f"{path}, which does not exist, or not in a folder that may be read"
        raise refuse(TUNING, "a file that ringcomm tune has written, or nothing", text)
    found = tuning.read(path) if path else {}
    if name in found:
        check(f"{name} in {path}", found[name])
    return cast(T, found.get(name, default))


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of a communicator.

    A field that is not given is read from the environment variable `RINGCOMM_<FIELD>`, else from the file of
    `ringcomm tune`, else it has its default. All ranks of a job use the values of rank 0, except `start_timeout`,
    `kernels`, `log`, `host_id`, `host_address`, `bind_address`, `port_range`, `tls` and `ucx`, which each process sets
    for itself.

    Attributes:
        timeout: Seconds a call may take, unless the call has a timeout of its own. Default: 300.
        start_timeout: Seconds the start may take. None, the default: as a call.
        arena_bytes: The most shared memory of one rank, in bytes, for its staging buffers and its channels to the other
            ranks. From 4.2 MiB times the number of ranks on these have their full size, and more has no effect. The
            smallest channels between very many ranks may take more than is given here. Default: 8 MiB.
        sub_arena_bytes: The same for a communicator made by `split`. Default: 1 MiB.
        segment_bytes: The most bytes of a block in a chunk of a staged collective; all of a chunk together take at most
            twice this between two ranks, less among more, and once from four ranks on. Default: 512 KiB.
        one_shot_bytes: An all_reduce up to this size takes one synchronization: every rank, or the root of the tree
            through which many ranks pass small data, reduces the whole array.
            Default: 16 KiB.
        nontemporal_bytes: Blocks of at least this size are staged with non-temporal stores. None, the default: each
            rank measures while it works, as it always does for its outputs.
        direct_bytes: Symmetric buffers of at least this size are accessed directly. If the ranks are threads of one
            process, so are all arrays, except in point-to-point messages up to 128 KiB. Default: 16 KiB.
        cma_bytes: In gather, scatter, all_gather, all_to_all, broadcast between two ranks and point-to-point (above the
            128 KiB of eager messages), the kernel copies blocks of at least this size directly from the memory of the
            sending process (cross-memory attach). None, the default: only blocks of at least 2 MiB in huge pages
            (messages: 8 MiB, or 256 KiB where ranks share cores), since otherwise two copies are faster.
        copy_engine_bytes: The copy engines of the GPUs do an all_gather, all_to_all or broadcast of at least this size
            (of the larger array), and no multiprocessor is taken from the program. What they read must lie at one place
            of a buffer from `Communicator.empty` on all ranks, else MismatchError; calls on an array in none, or in a
            CUDA graph, take kernels. None, the default: never. Not measured yet.
        oversubscribed: Whether ranks outnumber cores: then waiting ranks yield early. None, the default: detected at
            connect.
        topology: A machine to simulate, as NUMA nodes x caches in each x ranks in each, such as "2x4x8", for the tree
            through which many ranks pass small data: to try that tree on fewer cores. None, the default: the real
            machine, and no tree where ranks outnumber cores.
        transport: The transport that connects the ranks, the same on all of them: "shm" on one machine, "mpi" or
            (without MPI) "network" between hosts, with shared memory inside each. None, the default: chosen from how
            the ranks were launched.
        algorithm: Between hosts: the algorithm for the collectives that have it (`ringcomm algorithms` lists them).
            None, the default: the fastest for each call, by the cost model.
        link_latency: Microseconds that the shortest message between hosts takes. Parameter of the cost model. None, the
            default: what `ringcomm tune --network` has measured between such hosts, else 20.
        link_bandwidth: GB/s of a host's link to the others. `ringcomm simulate --latency --bandwidth` shows the effect
            of both. None, the default: as measured, else (sockets) as the interfaces of the hosts say, else 10.
        host_id: Under MPI, ranks with different ids count as ranks of different hosts. All ranks must set one, or none.
            Default: None.
        host_address: Between hosts: the address at which the other hosts reach this one. Over sockets there may be
            several, such as "10.0.0.1,10.1.0.1": large data goes over all of them, everything else over the first.
            None, the default: that of the interface that leads to the store of the job (--master-addr, MASTER_ADDR).
        bind_address: Between hosts: the address at which this process listens, where others reach it at another one, as
            in a container whose ports are mapped, each to the same; several for as many of `host_address`. "0.0.0.0"
            stands for all IPv4 addresses of this host, "::" for all addresses. None, the default: `host_address`.
        port_range: Between hosts: the ports at which this process may listen, such as "29500-29510". It takes one of
            them at each address, and each rank of a host its own. None, the default: any port.
        flows: Between hosts, over sockets: the number of connections that carry the large data of two ranks, at each
            address. None, the default: as `ringcomm tune --network` has measured, else 1.
        keepalive: Between hosts: seconds after which a host that does not answer is lost, at most a day. Default: 15.
        tls: Between hosts, over sockets: three PEM files with commas between them, such as
            "rank.pem,rank.key,ca.pem": the certificate of this process, its key, which nobody else may read, and the
            authority that has signed the certificates of all. With it everything between hosts goes through TLS 1.3,
            and both ends of a connection show a certificate; all ranks need it, or none. None, the default: no TLS.
        link: Between hosts, without MPI: "sockets" or "ucx". None, the default: UCX where all ranks have RDMA, else
            sockets, which are faster than UCX over TCP.
        ucx: The libucp to open, a path or a name. None, the default: that of the system, else that of the extra
            `ringcomm[ucx]`.
        kernels: "portable", "avx2", "avx512" or "neon". None, the default: the best of this CPU. All open communicators
            of a process share it.
        log: The level of the logger "ringcomm": debug, info, warning or error. None, the default: leave the program's
            setting (without one, warning).
    """

    timeout: float = _setting("timeout", 300.0, float, _positive("seconds"))
    start_timeout: float | None = _setting("start_timeout", None, float, _positive("seconds"))
    arena_bytes: int = _setting("arena_bytes", 8 << 20, int, _arena)
    sub_arena_bytes: int = _setting("sub_arena_bytes", 1 << 20, int, _arena)
    segment_bytes: int = _setting("segment_bytes", 512 << 10, int, _whole(64))  # whole cache lines
    one_shot_bytes: int = _setting("one_shot_bytes", 16 << 10, int, _whole(0))
    nontemporal_bytes: int | None = _setting("nontemporal_bytes", None, int, _whole(1))
    direct_bytes: int = _setting("direct_bytes", 16 << 10, int, _whole(1))
    cma_bytes: int | None = _setting("cma_bytes", None, int, _whole(1))
    copy_engine_bytes: int | None = _setting("copy_engine_bytes", None, int, _whole(1))
    oversubscribed: bool | None = _setting("oversubscribed", None, {"0": False, "1": True}.__getitem__, _flag)
    topology: str | None = _setting("topology", None, str, _topology)
    transport: str | None = _setting("transport", None, str, _name)
    algorithm: str | None = _setting("algorithm", None, str, _name)
    link_latency: float | None = _setting("link_latency", None, float, _positive("microseconds"))
    link_bandwidth: float | None = _setting("link_bandwidth", None, float, _positive("GB/s"))
    host_id: str | None = _setting("host_id", None, str, _name)
    host_address: str | None = _setting("host_address", None, str, _addresses)
    bind_address: str | None = _setting("bind_address", None, str, _addresses)
    port_range: str | None = _setting("port_range", None, str, _port_range)
    flows: int | None = _setting("flows", None, int, _whole(1, tuning.MOST_FLOWS))
    keepalive: float = _setting("keepalive", 15.0, float, _positive("seconds", MAX_KEEPALIVE))
    tls: str | None = _setting("tls", None, str, _three_files)
    link: str | None = _setting("link", None, str, _one_of("sockets", "ucx"))
    ucx: str | None = _setting("ucx", None, str, _name)
    kernels: str | None = _setting("kernels", None, str, _one_of("portable", "avx2", "avx512", "neon"))
    log: str | None = _setting("log", None, str, _log_level)

    # Not in __init__: that of a dataclass refuses an unknown name without the nearest known one.
    def __new__(cls, *_: Any, **given: Any) -> Self:
        known = [f.name for f in fields(cls)]
        variables = [TUNING, TRACE, DUMP, TORCH_DEFAULT, *(PREFIX + name.upper() for name in known)]
        for name in given:
            if name not in known:
                raise unknown("setting", name, known)
        for name in os.environ:
            if name.startswith(PREFIX) and name not in (*LAUNCHER, *variables):
                raise unknown("environment variable", name, variables)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None or not each.metadata["optional"]:
                checked = each.metadata["check"](each.name, value)
                if isinstance(checked, int):  # of NumPy, perhaps, which json cannot encode
                    object.__setattr__(self, each.name, checked)

        bound = len(self.bind_addresses)
        if bound > 1 and self.host_addresses and bound != len(self.host_addresses):
            text = f"one address, or as many as in host_address ({self.host_address!r})"
            raise refuse("bind_address", text, repr(self.bind_address))

    @property
    def host_addresses(self) -> list[str]:
        return _split(self.host_address)

    @property
    def bind_addresses(self) -> list[str]:
        return _split(self.bind_address)

    @property
    def ports(self) -> range | None:
        """The ports at which this process may listen; None: any."""
        return _ports(self.port_range) if self.port_range else None

    @property
    def ucx_ports(self) -> range | None:
        """Those at which UCX may listen; None: any, or those of its own variable."""
        return None if "UCX_TCP_PORT_RANGE" in os.environ else self.ports

    @property
    def start_limit(self) -> float:
        """Seconds the start may take."""
        return self.timeout if self.start_timeout is None else self.start_timeout


_logging = threading.Lock()  # ranks may be threads


def start_logging(level: str | None) -> None:
    """Set the level of the logger "ringcomm"; add a handler for stderr if the program has none."""
    logger = logging.getLogger("ringcomm")
    with _logging:
        if level:
            logger.setLevel(level.upper())
        if not logger.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("ringcomm %(levelname)s: %(message)s"))
            logger.addHandler(handler)
