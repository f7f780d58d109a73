"""The store of a start, served as `ringcomm run` does it, with thousands of ranks that a few processes play.

    python benchmarks/start.py [-n RANKS] [--per-host RANKS] [--processes N]

The ranks connect all at once over real sockets, with the library's messages and handshake. Over TCP they gather what
ranks on several hosts do until all are connected (ringcomm/transports/network/start.py), over a Unix socket what those
of one host do. The server is a process of its own, and needs a file descriptor for each rank (ulimit -Hn).
"""

import argparse
import errno
import json
import multiprocessing
import os
import resource
import secrets
import selectors
import socket
import time
import tracemalloc
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import takewhile
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from ringcomm import Config
from ringcomm.bootstrap.client import hello_of
from ringcomm.bootstrap.descriptor_exchange import HELLO, READY
from ringcomm.bootstrap.endpoint import find_endpoint
from ringcomm.bootstrap.place import UNIX, Place, is_between_hosts
from ringcomm.bootstrap.server import Server, serve_one_host, serving
from ringcomm.bootstrap.session import ALL, CONNECTED, FIRST
from ringcomm.bootstrap.wire.addresses import listen, split_address
from ringcomm.bootstrap.wire.framing import MESSAGE_BYTES, MessageSocket, decode, encode
from ringcomm.bootstrap.wire.handshake import HANDSHAKE_TIMEOUT, client_handshake
from ringcomm.bootstrap.wire.keepalive import KEEPALIVE
from ringcomm.bootstrap.wire.tcp import TcpGate
from ringcomm.bootstrap.wire.unix import user_address
from ringcomm.options import whole
from ringcomm.transports.network.facts import facts_of
from ringcomm.transports.network.sockets import ADDRESSES
from ringcomm.transports.network.start import FACTS
from ringcomm.transports.network.ucx import CHOICES
from ringcomm.version import VERSION

PAUSE = 0.01  # seconds before another attempt to connect

Steps = Generator[bytes, bytes, None]


# --- What a rank asks for --------------------------------------------------------------------------------------------


class Gather(NamedTuple):
    """A fact that a rank gives, one of `size`, and what it reads."""

    name: str
    rank: int
    size: int
    fact: object
    reads: str


def between_hosts(rank: int, size: int, per_host: int) -> Iterator[Gather]:
    """Yield what a rank gathers in a start on hosts of so many ranks."""
    host, local = divmod(rank, per_host)
    here = [*range(host * per_host, min(size, (host + 1) * per_host))]
    told = {"ranks": here, **facts_of(rank, Config()), "host": [f"boot of host {host:5} net:[4026531840]", None]}
    reads = FIRST if local else ALL
    yield Gather("host", rank, size, rank, json.dumps(told["host"]))
    yield Gather(FACTS, rank, size, None if local else told, reads)
    for each in on_one_host(local, len(here), per_host):
        yield each._replace(name=f"host {here[0]}/{each.name}")
    yield Gather(CHOICES, rank, size, {"fits": False, "reason": ""}, reads)
    yield Gather(ADDRESSES, rank, size, f"10.0.{host % 256}.1:{32768 + local}", reads)
    yield Gather(CONNECTED, rank, size, None, FIRST)


def on_one_host(rank: int, size: int, per_host: int) -> Iterator[Gather]:  # noqa: ARG001 (as on several)
    """Yield what a rank gathers in a start on one host."""
    hello = {"version": VERSION, "cores": [rank], "addresses": 1 << 46}
    mine = {"hello": hello} if rank else {"hello": hello, "address": 40 * "0", "secret": 32 * "0"}
    yield Gather(HELLO, rank, size, mine, FIRST if rank else ALL)
    yield Gather(READY, rank, size, None, FIRST)


# --- The ranks that a process plays -----------------------------------------------------------------------------------


class Rank:
    """A rank and its connection. Its steps yield messages for the server, and receive those of the server."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.peer: MessageSocket | None = None
        self.steps: Steps | None = None
        self.requests = self.sent = self.received = 0

    def connect(self) -> MessageSocket | None:
        """Begin to connect; return None if the server has no room for that."""
        store = self.place.store
        address = split_address(store) if is_between_hosts(store) else user_address(store.removeprefix(UNIX))
        connecting = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        connecting.setblocking(False)
        if connecting.connect_ex(address) == errno.EAGAIN:
            connecting.close()
            return None
        self.peer = MessageSocket(connecting)
        return self.peer

    def close(self) -> None:
        if self.peer:
            self.peer.close()
            self.peer = None

    def advance(self, message: bytes | None) -> bool:
        """Take the next step; return whether it was the last one."""
        assert self.peer
        assert self.steps
        try:
            data = next(self.steps) if message is None else self.steps.send(message)
        except StopIteration:
            return True
        if data:
            self.requests, self.sent = self.requests + 1, self.sent + len(data)
            self.peer.send(data)
        return False


def join(rank: Rank) -> Steps:
    if is_between_hosts(rank.place.store):
        assert rank.peer
        yield from client_handshake(rank.place.secret.encode(), rank.peer, None)
    expect("joined", (yield hello_of(find_endpoint(rank.place), rank.place.job, rank.place)))


def expect(kind: str, message: bytes) -> None:
    if decode(message).kind != kind:
        raise SystemExit(f"expected {kind!r}, got {message[:200]!r}")


def drive(ranks: list[Rank], steps: Callable[[Rank], Steps]) -> None:
    """Take these steps with all ranks, connecting those that are not: again if they have not joined in time."""
    again, due = [rank for rank in ranks if not rank.peer], dict[Rank, float]()
    left = {rank for rank in ranks if rank.peer}
    with selectors.DefaultSelector() as selector:

        def begin(rank: Rank) -> bool:
            rank.steps = steps(rank)
            if not (peer := rank.connect()):
                return False
            selector.register(peer, selectors.EVENT_WRITE, rank)
            due[rank] = time.monotonic() + HANDSHAKE_TIMEOUT
            left.add(rank)
            return True

        def drop(rank: Rank) -> None:
            assert rank.peer
            selector.unregister(rank.peer)
            rank.close()
            if due.pop(rank, None) is None:
                raise SystemExit("the server has closed the connection of a rank that had joined")
            left.remove(rank)
            again.append(rank)

        def advance(rank: Rank, message: bytes | None) -> None:
            if rank.advance(message):
                left.remove(rank)
                due.pop(rank, None)

        for rank in [*left]:
            rank.steps = steps(rank)
            assert rank.peer
            selector.register(rank.peer, selectors.EVENT_READ, rank)
            advance(rank, None)
        while left or again:
            again = [rank for rank in again if not begin(rank)]
            for key, events in selector.select(PAUSE if again else 1.0):
                rank = key.data
                if events & selectors.EVENT_WRITE:  # it is connected
                    selector.modify(rank.peer, selectors.EVENT_READ, rank)
                    advance(rank, None)
                    continue
                try:
                    message = rank.peer.recv(MESSAGE_BYTES)
                except BlockingIOError:
                    continue
                except OSError:
                    message = b""
                if message:
                    rank.received += len(message)
                    advance(rank, message)
                else:  # the server has too many that have not joined
                    drop(rank)
            for rank in [*takewhile(lambda rank: due[rank] < time.monotonic(), due)]:  # the kernel has dropped it
                drop(rank)


def play(pipe: Connection, places: list[Place], gathers: Callable[..., Iterator[Gather]], per_host: int) -> None:
    """Play the ranks at these places; after the steps that are asked for, tell when each ended and what it took."""
    provide_descriptors()
    ranks, ended = [Rank(place) for place in places], dict[str, float]()

    def all_gather(rank: Rank) -> Steps:
        place = rank.place
        for number, (name, *who, fact, reads) in enumerate(gathers(place.rank, place.size, per_host)):
            fields = {"id": number, "key": name, "rank": who[0], "size": who[1], "reads": reads}
            expect("value", (yield encode("all_gather", json.dumps(fact).encode(), **fields)))
            ended[name.rpartition("/")[2] if name.startswith("host ") else name] = time.monotonic()

    for steps in iter(pipe.recv, None):
        for rank in ranks:
            rank.requests = rank.sent = rank.received = 0
        drive(ranks, {"join": join, "all_gather": all_gather}[steps])
        pipe.send((ended, [(rank.requests, rank.sent, rank.received) for rank in ranks]))
    for rank in ranks:
        rank.close()


# --- The server -------------------------------------------------------------------------------------------------------


def serve(pipe: Connection, alone: Place, hosts: bool, memory: bool) -> None:
    """Serve a job as the launcher of node 0 does, or that of one host; tell CPU seconds and bytes kept when asked."""
    provide_descriptors()
    if memory:
        tracemalloc.start()
    with ExitStack() as stack:
        if hosts:
            gate = TcpGate([listen("127.0.0.1", [0], "--master-addr")], [alone.secret.encode()], KEEPALIVE)
            stack.enter_context(serving(Server(gate, None), 0.0))
            place = replace(alone, store=gate.addresses[0])
        else:
            place = stack.enter_context(serve_one_host(alone))
        pipe.send(place)
        while pipe.recv():
            pipe.send((time.process_time(), tracemalloc.get_traced_memory()[0]))


def provide_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# --- The job ----------------------------------------------------------------------------------------------------------


def measure(hosts: bool, options: argparse.Namespace) -> None:
    """Start the server and the processes that play ranks; print a row for each step of the start."""
    size, per_host = options.ranks, options.per_host
    context = multiprocessing.get_context("fork")
    alone = Place(0, size, "job", secrets.token_hex(32), members=range(size))

    def start(target: Callable[..., None], *arguments: Any) -> Connection:
        ours, theirs = context.Pipe()
        context.Process(target=target, args=(theirs, *arguments), daemon=True).start()
        theirs.close()
        return ours

    server = start(serve, alone, hosts, options.memory)
    first = server.recv()
    places = [replace(first, rank=rank) for rank in range(size)]
    gathers = between_hosts if hosts else on_one_host
    parts = [places[number :: options.processes] for number in range(options.processes)]
    players = [start(play, part, gathers, per_host) for part in parts]

    def ask(pipe: Connection, question: object) -> Any:
        pipe.send(question)
        return pipe.recv()

    where = f"TCP, {-(-size // per_host)} hosts of {per_host}" if hosts else "a Unix socket, one host"
    print(f"\n{size} ranks, {where}; played by {options.processes} processes on {os.cpu_count()} cores")
    names = ("server's CPU s", "requests a rank", "MB to the server", "MB from it", "bytes kept a rank")
    print(f"{'s':>8}  {'step':<12}" + "".join(f"{each:>18}" for each in names[: 4 + options.memory]))
    cpu, kept = ask(server, True)
    total = 0.0
    for steps in ("join", "all_gather"):
        begin = time.monotonic()
        for player in players:
            player.send(steps)
        reports = [player.recv() for player in players]
        requests, sent, received = zip(*(count for _, counts in reports for count in counts), strict=True)
        ends: dict[str, float] = {}
        for ended, _ in reports:
            ends |= {name: max(at, ends.get(name, at)) for name, at in ended.items()}
        for name, at in ends.items():
            print(f"{at - begin:8.2f}  {name}")
        now, keeps = ask(server, True)
        figures = [f"{now - cpu:.2f}", max(requests), f"{sum(sent) / 1e6:.1f}", f"{sum(received) / 1e6:.1f}"]
        figures += [f"{(keeps - kept) / size:.0f}"] * options.memory
        print(f"{time.monotonic() - begin:8.2f}  {steps:<12}" + "".join(f"{each:>18}" for each in figures))
        cpu, kept, total = now, keeps, total + time.monotonic() - begin
    print(f"{total:8.2f}  in all")
    for pipe in (*players, server):
        pipe.send(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("-n", "--ranks", type=whole(1), default=10_000, metavar="N", help="default: 10000")
    add("--per-host", type=whole(1), default=128, metavar="N", help="ranks of a host (default: 128)")
    add("--processes", type=whole(1), default=3, metavar="N", help="that play the ranks (default: 3)")
    add("--memory", action="store_true", help="count what the server keeps of each rank, which slows it down")
    options = parser.parse_args()
    for hosts in (True, False):
        measure(hosts, options)


if __name__ == "__main__":
    main()
