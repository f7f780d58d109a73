"""Up to how many bytes the kernels for small arrays do a collective: measured by `ringcomm tune --device cuda`, or
estimated.
"""

from typing import NamedTuple

from ringcomm.config import tuning_file
from ringcomm.machine import tuning

__all__ = ["LADDERS", "Limits", "estimated", "limits"]


class Limits(NamedTuple):
    """The most bytes of an array, or of a block, that a kernel takes; what is larger goes along the ring."""

    ll: int
    one_shot: int
    two_shot: int
    one_shot_reduce: int
    one_shot_reduce_scatter: int
    all_gather: int
    broadcast: int


# The kernels of a collective, for the smallest arrays first; the last one has no limit.
LADDERS = {
    "all_reduce": ("ll", "one_shot", "two_shot", "ring_all_reduce"),
    "reduce": ("one_shot_reduce", "ring_reduce"),
    "reduce_scatter": ("one_shot_reduce_scatter", "ring_reduce_scatter"),
    "all_gather": ("all_gather", "ring_all_gather"),
    "broadcast": ("broadcast", "ring_broadcast"),
}


def estimated(line_bytes: int, staged_bytes: int, ranks: int) -> Limits:
    """Return the limits of a GPU that has not been measured, whose blocks stage so many bytes at once."""
    return Limits(
        ll=line_bytes,
        one_shot=staged_bytes // ranks,
        two_shot=4 * staged_bytes,
        one_shot_reduce=2 * staged_bytes,
        one_shot_reduce_scatter=staged_bytes,
        all_gather=staged_bytes,
        broadcast=4 * staged_bytes,
    )


def limits(gpu: str, ranks: int, estimate: Limits) -> Limits:
    """Return the measured limits of a GPU for the next larger number of ranks, or for the largest."""
    path = tuning_file()
    measured = tuning.gpu_limits(path, gpu, Limits._fields) if path else {}
    if not measured:
        return estimate
    counts = sorted(measured)
    nearest = next((count for count in counts if count >= ranks), counts[-1])
    return estimate._replace(**measured[nearest])
