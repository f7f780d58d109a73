"""What the ranks of several hosts tell each other at the start, and what follows: the settings and hosts of all."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ringcomm.algorithms.link_parameters import flows_per_address, link_facts, selector
from ringcomm.algorithms.select import AlgorithmSelector, check_name
from ringcomm.bootstrap.place import host_id
from ringcomm.config import Config
from ringcomm.machine import topology
from ringcomm.native import NULL
from ringcomm.transports.network.host_layout import layout_of
from ringcomm.transports.network.transport import Network, NetworkTransport, new_group_id
from ringcomm.transports.shm import ShmTransport, check_versions
from ringcomm.version import VERSION

__all__ = ["Facts", "JobFacts", "facts_by_rank", "facts_of"]

log = logging.getLogger("ringcomm")

# Settings of each process; rank 0 decides all others.
OWN = ("kernels", "log", "host_id", "host_address", "bind_address", "port_range", "tls", "ucx")

Facts = Mapping[str, Any]


def facts_of(rank: int, config: Config, addresses: Sequence[str] = ()) -> Facts:
    """Return what this rank tells the others, as JSON: all but the cores is the same for the ranks of a host.

    `addresses`: those at which other hosts reach this one over sockets.
    """
    facts = {
        "version": VERSION,
        "host": [host_id(), config.host_id],
        "cores": sorted(topology.cores()),
        "link": link_facts(addresses),
    }
    return facts if rank else facts | {"config": asdict(config), "group_id": new_group_id()}


def facts_by_rank(facts: Sequence[Facts | None]) -> list[Facts]:
    """Return the facts of every rank, given those of the first rank of each host, which name the `ranks` there."""
    of = {rank: each for each in facts if each for rank in each["ranks"]}
    return [of[rank] for rank in range(len(of))]


class JobFacts:
    """The facts of all ranks, seen from one of them.

    Attributes:
        config: The settings of rank 0, with those that each process has for itself.
        layout: The hosts. Ranks are on one host if they are in one kernel, network namespace, and `host_id`.
        machines: Their number; labels in `host_id` may divide one into several hosts.

    Raises ArgumentError if the ranks run different versions of ringcomm.
    """

    def __init__(self, rank: int, ranks: Sequence[Facts], config: Config, members: Sequence[int] = ()) -> None:
        """`members`: the rank in the job of each rank: see start_errors.py."""
        check_versions([facts["version"] for facts in ranks], members=members)
        self._ranks, self._group_id = ranks, ranks[0]["group_id"]
        config = Config(**ranks[0]["config"] | {name: getattr(config, name) for name in OWN})
        check_name(config.algorithm)
        self.layout = layout_of(rank, [tuple(facts["host"]) for facts in ranks])
        machines = [facts["host"][0] for facts in ranks]
        self.machines = len({*machines})
        if config.oversubscribed is None and len(self.layout.ranks) > 1:  # else shared memory decides
            here = [facts["cores"] for facts, machine in zip(ranks, machines, strict=True) if machine == machines[rank]]
            config = replace(config, oversubscribed=self.layout.yields_early(here))
        self.config = config

    def selector(self, link: str) -> AlgorithmSelector:
        return selector(self.config, [facts["link"] for facts in self._ranks], link)

    @property
    def flows(self) -> int:
        """How many connections carry the large data of two ranks at each address."""
        return flows_per_address(self.config, [facts["link"] for facts in self._ranks])

    def make_transport(self, network: Network, local: ShmTransport) -> NetworkTransport:
        """Return the transport of all ranks, of which those of this host are `local`."""
        log.info("%d ranks on %d hosts, by %s", len(self._ranks), len(self.layout.ranks), network.name)
        network.reserve_ids([self._group_id])
        return NetworkTransport(network, self._group_id, [*range(len(self._ranks))], self.layout, local, NULL)
