"""One rank of benchmarks/mpi.py: measures a case; rank 0 prints the results as JSON.

    mpirun -n 4 python benchmarks/mpi_rank.py {alike,link,steps} LARGEST

Contenders take turns on the same array, since its location in memory changes the figures. A turn makes calls
for TURN seconds; its time is that of one call on the slowest rank.
"""

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
from mpi4py import MPI

import ringcomm
from ringcomm.algorithms.schedule import Block, Port, algorithm, even

SIZES = [4, 1 << 10, 64 << 10, 256 << 10, *(1 << 20 + shift for shift in range(0, 9, 2))]  # bytes, to 256 MiB
TURN = 0.02
MOST_CALLS = 500
SECONDS = 3.5  # of a size
ROUNDS = 5, 25
STEPS = 2, 20, 40

Array = np.ndarray[Any, Any]
Call = Callable[[], object]
Connect = Callable[..., ringcomm.Communicator]


def main(case: str, largest: int) -> None:
    world = MPI.COMM_WORLD
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    cases = {"alike": alike, "link": link, "steps": steps}
    with ExitStack() as stack:

        def connect(host: int, name: str | None = None) -> ringcomm.Communicator:
            """Connect the ranks; those with the same number act as ranks of one host."""
            config = ringcomm.Config(host_id=f"host {host}", algorithm=name, timeout=60)
            return stack.enter_context(ringcomm.init(config=config, mpi_comm=world))

        rows = list(cases[case](world, [size for size in SIZES if size <= largest], connect))
    if world.rank == 0:
        library = " ".join(MPI.Get_library_version().split(",")[0].splitlines()[0].split())
        versions = {"mpi": library, **{name: version(name) for name in ("ringcomm", "mpi4py", "numpy")}}
        print(json.dumps({"versions": versions, "rows": rows}))


def alike(world: MPI.Comm, sizes: list[int], connect: Connect) -> Iterator[dict[str, Any]]:
    """Every rank on its own host; four ranks also as two on each of two hosts, and all on one."""
    comms = {"ring": connect(world.rank, "ring"), "chosen": connect(world.rank)}
    symmetric = {}
    if world.size == 4:
        comms |= {"two hosts": connect(world.rank // 2), "one host": connect(0)}
        symmetric = {
            f"{name}, symmetric": (comms[name], comms[name].empty(sizes[-1] // 4, np.float32))
            for name in ("two hosts", "one host")
        }
    for size in sizes:
        x = np.zeros(size // 4, np.float32)
        calls = {"MPI": checked(world, partial(world.Allreduce, MPI.IN_PLACE, x), x)}
        paths = {}
        for name, comm in comms.items():
            calls[name] = checked(world, partial(comm.all_reduce, x), x)
            paths[name] = comm._transport.path()[0]
        for name, (comm, whole) in symmetric.items():
            shared = whole[: x.size]
            calls[name] = checked(world, partial(comm.all_reduce, shared), shared)
        calls["copy"] = partial(np.copyto, np.ones_like(x), x)
        yield from take_turns(world, size, calls, paths)


def link(world: MPI.Comm, sizes: list[int], connect: Connect) -> Iterator[dict[str, Any]]:
    """Each rank on its own host: two hosts joined by a link."""
    comm = connect(world.rank, "ring")
    for size in (size for size in sizes if size <= 64 << 20):
        x = np.zeros(size // 4, np.float32)
        calls: dict[str, Call] = {
            "MPI": checked(world, partial(world.Allreduce, MPI.IN_PLACE, x), x),
            "ring": checked(world, partial(comm.all_reduce, x), x),
            "copy": partial(np.copyto, np.ones_like(x), x),
        }
        yield from take_turns(world, size, calls, {})


def steps(world: MPI.Comm, _: list[int], connect: Connect) -> Iterator[dict[str, Any]]:
    """Exchanges of 4 B: schedules of several lengths, and the same number with mpi4py alone."""
    x, received = np.zeros(2, np.float32), np.zeros(1, np.float32)
    calls: dict[str, Call] = {}
    for count in STEPS:
        algorithm(f"{count} steps", "all_reduce", steps=str(count), sent=f"{count} * S / n")(
            partial(ring_of_two, count)
        )
        comm = connect(world.rank, f"{count} steps")
        calls[f"ringcomm {count}"] = partial(comm.all_reduce, x)
        calls[f"tests {count}"] = partial(exchange_and_test, world, count, x[:1], received)
        calls[f"Sendrecv {count}"] = partial(exchange_at_once, world, count, x[:1], received)
    yield from take_turns(world, 4, calls, {})


def ring_of_two(count: int, port: Port, data: Block) -> None:
    """The ring's steps on two ranks, repeated: half of them add the received block, half keep it."""
    blocks, peer = data.split(even(data.length, 2)), 1 - port.rank
    for step in range(count):
        own, other = blocks[port.rank], blocks[peer]
        port.exchange(other, peer, own, peer, operand=own if step % 2 else None)


def exchange_and_test(world: MPI.Comm, count: int, sent: Array, received: Array) -> None:
    peer = 1 - world.rank
    for _ in range(count):
        requests = world.Irecv(received, peer), world.Isend(sent, peer)
        for request in requests:
            while not request.Test():
                pass


def exchange_at_once(world: MPI.Comm, count: int, sent: Array, received: Array) -> None:
    peer = 1 - world.rank
    for _ in range(count):
        world.Sendrecv(sent, peer, recvbuf=received)


def checked(world: MPI.Comm, call: Call, x: Array) -> Call:
    """Check that the call adds the arrays of all ranks, set them to zero, and return it."""
    x[:] = world.rank + 1
    call()
    assert (x == world.size * (world.size + 1) / 2).all()
    x[:] = 0
    return call


def take_turns(world: MPI.Comm, size: int, calls: dict[str, Call], paths: dict[str, str]) -> Iterator[dict[str, Any]]:
    once = {name: min(timed(world, call, 1)["time"] for _ in range(2)) for name, call in calls.items()}
    repeat = {name: max(1, min(MOST_CALLS, int(TURN / seconds))) for name, seconds in once.items()}
    least, most = ROUNDS
    rounds = max(least, min(most, int(SECONDS / sum(repeat[name] * once[name] for name in calls))))
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(rounds):
        for name in order:
            turns[name].append(timed(world, calls[name], repeat[name]))
        order.append(order.pop(0))  # so that no contender alpaths follows the same one
    for name, each in turns.items():
        times = sorted(turn["time"] for turn in each)
        yield {
            "contender": name,
            "ranks": world.size,
            "bytes": size,
            "median": statistics.median(times),
            "p90": times[round(0.9 * (len(times) - 1))],
            "cpu": statistics.median(turn["cpu"] for turn in each),
            "switches": statistics.median(turn["switches"] for turn in each),
            "rounds": rounds,
            "calls": repeat[name],
            "path": paths.get(name, ""),
        }


def timed(world: MPI.Comm, call: Call, calls: int) -> dict[str, float]:
    """Return the seconds of one call on the slowest rank, and CPU seconds and context switches of all ranks."""
    if calls > 1:
        call()  # warms the caches
    world.Barrier()
    before = resource.getrusage(resource.RUSAGE_SELF)
    begin, worked = time.perf_counter(), time.process_time()
    for _ in range(calls):
        call()
    spent, worked = time.perf_counter() - begin, time.process_time() - worked
    after = resource.getrusage(resource.RUSAGE_SELF)
    switches = after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw
    return {
        "time": world.allreduce(spent, MPI.MAX) / calls,
        "cpu": world.allreduce(worked) / calls,
        "switches": world.allreduce(switches) / calls,
    }


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
