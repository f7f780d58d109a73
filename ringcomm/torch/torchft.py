"""torchft's process group on ringcomm: replicas fail and come back, and the others continue with the next step.

torchft (`pip install torchft-nightly`) decides before each step which replicas take part, and has its group made anew
when these change. ::

    manager = Manager(pg=ProcessGroupRingcomm(timeout=timedelta(seconds=30)), min_replica_size=1, …)
    model = torchft.DistributedDataParallel(manager, model)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torchft.process_group import ProcessGroupWrapper

from ringcomm.torch.process_group import RingcommProcessGroup, create

__all__ = ["ProcessGroupRingcomm"]


class ProcessGroupRingcomm(ProcessGroupWrapper):  # type: ignore[misc]
    """A process group of torchft's Manager whose groups are ringcomm's, on one host or several.

    Args:
        timeout: limit of making a group, and of each operation
    """

    def _create_pg(self, store: Any, rank: int, world_size: int) -> RingcommProcessGroup:
        group: RingcommProcessGroup = create(_Options(store, rank, world_size, self._timeout, f"torchft_{self._uuid}"))
        return group

    def getBackendName(self) -> str:  # noqa: N802
        return "torchft-ringcomm"


@dataclass
class _Options:
    """torch's DistributedBackendOptions of a default group."""

    store: Any
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: Sequence[int] = ()
