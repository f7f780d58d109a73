"""Time ray.util.collective on ringcomm and on Gloo: four actors on this machine, in groups of both, in turns.

    python benchmarks/ray_actors.py [--size 4] [--rounds 15]

Needs Ray and PyTorch, whose Gloo Ray uses. Prints medians over the rounds of the slowest actor's time of a call, in µs.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

BACKENDS = ("RINGCOMM", "GLOO")
SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20]  # bytes of the largest array
CALLS = ("allreduce", "allgather", "reducescatter", "broadcast")


class Actor:
    def __init__(self, rank: int, size: int) -> None:
        from ray.util import collective

        import ringcomm.ray

        ringcomm.ray.register()
        self.size = size
        for backend in BACKENDS:
            collective.init_collective_group(size, rank, backend=backend, group_name=backend)

    def seconds(self, call: str, nbytes: int, group: str) -> float:
        """Return the time of one of the calls that take a tenth of a second together."""
        from ray.util import collective

        whole = np.ones(nbytes // 4, np.float32)
        parts = [part.copy() for part in np.split(whole, self.size)]
        largest = collective.types.ReduceOp.MAX
        run: Callable[[], Any] = {
            "allreduce": lambda: collective.allreduce(whole, group, largest),
            "allgather": lambda: collective.allgather(parts, parts[0], group),
            "reducescatter": lambda: collective.reducescatter(parts[0].copy(), parts, group, largest),
            "broadcast": lambda: collective.broadcast(whole, 0, group),
        }[call]
        count = max(3, min(200, (8 << 20) // nbytes))
        run()
        collective.barrier(group)
        begin = time.perf_counter()
        for _ in range(count):
            run()
        return (time.perf_counter() - begin) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4, help="actors (4)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds in which the backends take turns (15)")
    options = parser.parse_args()
    import ray  # not for --help

    ray.init(num_cpus=options.size, log_to_driver=False, include_dashboard=False)
    kind: Any = ray.remote(num_cpus=1, runtime_env={"env_vars": {"GLOO_SOCKET_IFNAME": "lo"}})(Actor)
    actors = [kind.remote(rank, options.size) for rank in range(options.size)]
    print(f"{'call':<14}{'bytes':>10}{'ringcomm':>12}{'Gloo':>12}{'Gloo / ringcomm':>18}")
    for call in CALLS:
        for nbytes in SIZES:
            found: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
            for _ in range(options.rounds):
                for backend in BACKENDS:
                    found[backend].append(max(ray.get([each.seconds.remote(call, nbytes, backend) for each in actors])))
            ours, theirs = (statistics.median(found[backend]) * 1e6 for backend in BACKENDS)
            print(f"{call:<14}{nbytes:>10}{ours:>12.1f}{theirs:>12.1f}{theirs / ours:>18.2f}", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
