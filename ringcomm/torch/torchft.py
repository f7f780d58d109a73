"""torchft's process group on ringcomm: replicas fail and come back, and the others continue with the next step.

torchft (`pip install torchft-nightly`) decides before each step which replicas take part, and has its group made anew
when these change. ::

    manager = Manager(pg=ProcessGroupRingcomm(timeout=timedelta(seconds=30)), min_replica_size=1, …)
    model = torchft.DistributedDataParallel(manager, model)
"""

from types import SimpleNamespace
from typing import Any

from torchft.process_group import ProcessGroupWrapper

from ringcomm.torch.process_group import RingcommProcessGroup, create

__all__ = ["ProcessGroupRingcomm"]


class ProcessGroupRingcomm(ProcessGroupWrapper):  # type: ignore[misc]  # torchft is optional
    """A process group of torchft's Manager whose groups are ringcomm's, on one host or several.

    Args:
        timeout: limit of making a group, and of each operation
    """

    def _create_pg(self, store: Any, rank: int, world_size: int) -> RingcommProcessGroup:
        options = SimpleNamespace(  # of a default group
            store=store,
            group_rank=rank,
            group_size=world_size,
            timeout=self._timeout,
            group_id=f"torchft_{self._uuid}",
            global_ranks_in_group=(),
        )
        group: RingcommProcessGroup = create(options)
        return group

    def getBackendName(self) -> str:
        return "torchft-ringcomm"
