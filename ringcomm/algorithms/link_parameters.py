"""The cost of the link between hosts, for choosing algorithms: as set, measured, said by interfaces, or by default."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations_with_replacement
from typing import Any

from ringcomm.algorithms.cost import CLUSTER, LinkCost
from ringcomm.algorithms.select import AlgorithmSelector, is_slow
from ringcomm.config import Config, tuning_file
from ringcomm.machine import interfaces, tuning

__all__ = ["LINKS", "flows_per_address", "link_facts", "link_parameters", "selector"]

LINKS = ("sockets", "ucx", "mpi")  # in the names of transports
log = logging.getLogger("ringcomm")

DEFAULTS = (CLUSTER.inter_node.latency * 1e6, 1e-9 / CLUSTER.inter_node.byte_time)  # µs, GB/s

Facts = Mapping[str, Any]


def link_facts(addresses: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a rank tells the others: its kind of machine, the links that its file has, and its interfaces' GB/s.

    The latter is that of all addresses together, None if any is unknown.
    """
    path = tuning_file()
    found = [interfaces.bandwidth(interfaces.interface_of(address)) for address in addresses]
    return {
        "machine": tuning.machine_name(),
        "links": tuning.links(path) if path else {},
        "bandwidth": sum(filter(None, found)) if found and all(found) else None,
    }


def link_parameters(config: Config, ranks: Sequence[Facts], link: str) -> Iterator[tuple[float, str]]:
    """Yield latency (µs) and bandwidth (GB/s) of a link, each with its source, given the facts of all ranks.

    Of the links that were measured between their kinds of machines the slowest counts. Rank 0's file holds for all, as
    its settings do: ranks that choose different algorithms would wait for ever. Sockets that were not measured have the
    bandwidth that the interfaces of the slowest host say.
    """
    found = _measured(ranks, link)
    of_interfaces = [facts["bandwidth"] for facts in ranks if facts["bandwidth"]] if link == "sockets" else []
    for name, default, slowest in zip(tuning.LINK, DEFAULTS, (max, min), strict=True):
        if value := getattr(config, name):
            yield value, "set"
        elif found:
            yield slowest(each[name] for each in found), f"measured over {link}"
        elif of_interfaces and name == "link_bandwidth":
            yield min(of_interfaces), "of the interfaces"
        else:
            yield default, "default"


def flows_per_address(config: Config, ranks: Sequence[Facts]) -> int:
    """Return how many connections carry the large data of two ranks at each address, given the facts of all ranks."""
    return config.flows or int(max((each.get(tuning.FLOWS, 1) for each in _measured(ranks, "sockets")), default=1))


def _measured(ranks: Sequence[Facts], link: str) -> list[Mapping[str, float]]:
    pairs = combinations_with_replacement(sorted({facts["machine"] for facts in ranks}), 2)
    links = ranks[0]["links"]
    return [links[name] for pair in pairs if (name := tuning.link_name(pair, link)) in links]


def selector(config: Config, ranks: Sequence[Facts], link: str) -> AlgorithmSelector:
    """Return what chooses the algorithms of a job between hosts."""
    (latency, of_latency), (bandwidth, of_bandwidth) = link_parameters(config, ranks, link)
    text = "the link between hosts: %g µs (%s), %g GB/s (%s), by which algorithms are chosen"
    log.info(text, latency, of_latency, bandwidth, of_bandwidth)
    cost = LinkCost(latency * 1e-6, 1e-9 / bandwidth)
    return AlgorithmSelector(config.algorithm, CLUSTER._replace(inter_node=cost), is_slow(cost))
