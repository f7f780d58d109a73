"""Programs of arrays on GPUs: those of programs.py, but a stage between hosts is one step.

Inside a host a stage is a kernel; between hosts it is a collective of data that is staged in host memory, in chunks.
"""

from collections.abc import Iterator

from ringcomm.algorithms.schedule import Block
from ringcomm.transports.network.program_recorder import Counts
from ringcomm.transports.network.programs import CollectivePrograms
from ringcomm.transports.network.steps import RailCollective

__all__ = ["OnGpus"]


class OnGpus(CollectivePrograms):
    """Each method of the name of a collective records that collective."""

    def _between(
        self, collective: str, source: Block, target: Block, counts: Counts | None = None, root: int = 0
    ) -> None:
        if self._hosts.rail:
            arguments = self._arguments(collective, source, target, counts)
            self.steps.append(RailCollective(*arguments, root))

    def _chunks(self, *arrays: Block) -> Iterator[tuple[Block, ...]]:
        yield arrays
