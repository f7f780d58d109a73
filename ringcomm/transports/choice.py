"""Which transport connects the ranks of a job."""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, cast

from ringcomm import transports
from ringcomm.bootstrap.place import Place
from ringcomm.config import Config
from ringcomm.errors import ArgumentError, refuse, unknown
from ringcomm.transports import shm
from ringcomm.transports.contract import TransportModule

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["choose_transport", "find_transports"]

ENTRY_POINTS = "ringcomm.transports"  # the group in which other packages name theirs


@cache
def find_transports() -> dict[str, TransportModule]:
    """Return by name the modules and packages of ringcomm.transports that Config(transport=…) can name."""
    from pkgutil import iter_modules

    names = [module.name for module in iter_modules(transports.__path__)]
    modules = {name: import_module(f"{transports.__name__}.{name}") for name in names}
    return {name: cast(TransportModule, module) for name, module in modules.items() if hasattr(module, "connect")}


def choose_transport(place: Place, config: Config) -> TransportModule:
    """Return the transport of the settings, or else the usual one; refuse one that does not serve this place."""
    name, between_hosts = config.transport, place.hosts or (config.host_id and place.mpi)
    if (name or (None if between_hosts else "shm")) == "shm" and shm.serves(place):
        return shm  # most jobs are on one host, and import no other transport
    known = find_transports()
    others: list[EntryPoint] = []
    if name not in (None, *known):  # else nothing pays for this import
        from importlib.metadata import entry_points

        others += entry_points(group=ENTRY_POINTS)
    known = known | {each.name: each.load() for each in others if each.name == name}
    serving = [each for each, module in known.items() if module.serves(place)]
    where = f"launcher: {place.launcher}, {'several hosts' if place.hosts else 'one host'}"
    if name not in (None, *known):
        raise unknown("transport", name, [*known, *(each.name for each in others)])
    if not serving:
        raise ArgumentError(
            f"no transport connects the ranks of this job ({where}); start them with ringcomm run, mpirun or srun"
        )
    if name is None:
        name = next(each for each in serving if each != "shm")
    elif name not in serving:
        raise refuse("transport", f"{' or '.join(map(repr, serving))} ({where})", repr(name))
    return known[name]
