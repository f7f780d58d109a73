"""The time of messages between the GPUs of a cluster: inside a node, and between nodes."""

from ringcomm.algorithms.cost import Cluster, LinkCost, algorithm_cost
from ringcomm.algorithms.select import select
from ringcomm.plan.model.devices import Accelerator

__all__ = ["Interconnect"]


class Interconnect:
    """Prices what groups of ranks send. Ranks fill node after node; a group has every `stride`-th rank."""

    def __init__(self, device: Accelerator, gpus: int) -> None:
        shares = device.calibration
        self.node = min(device.node, gpus)
        self.element = device.element
        self.inside = LinkCost(device.inside_latency, 1 / (device.inside * shares.inside))
        self.between = LinkCost(device.between_latency, 1 / (device.between * shares.between))
        self._collectives: dict[tuple[object, ...], float] = {}

    def collective(self, name: str, size: int, ranks: int, stride: int) -> float:
        """Return the seconds of a collective of `ringcomm.algorithms` by its cheapest algorithm.

        Args:
            name: the collective
            size: bytes of the larger array
            ranks: ranks of the group
            stride: distance between neighbors of the group
        """
        if ranks == 1:
            return 0.0
        key = name, size, ranks, stride
        if key not in self._collectives:
            # GPUs reduce while they receive, so reducing costs nothing beside.
            cluster = Cluster(self.inside, self.link(ranks, stride), 0, self._in_node(ranks, stride))
            algorithm = select(name, ranks, size // self.element, self.element, cluster)
            self._collectives[key] = algorithm_cost(algorithm, ranks, size, 1, cluster)
        return self._collectives[key]

    def link(self, ranks: int, stride: int) -> LinkCost:
        """Return the link that carries a group's collectives, shared with the groups of other ranks of the node."""
        if ranks * stride <= self.node:
            return self.inside
        latency, byte_time = self.between
        return LinkCost(latency, max(self.inside.byte_time, byte_time / self._in_node(ranks, stride)))

    def hop(self, ranks: int, stride: int) -> LinkCost:
        """Return the slowest link between neighbors of a group. Between nodes one GPU sends by its own adapter."""
        return self.inside if ranks * stride <= self.node else self.between

    def _in_node(self, ranks: int, stride: int) -> int:
        return min(ranks, max(1, self.node // stride))
