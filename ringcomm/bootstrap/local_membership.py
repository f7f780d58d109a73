"""The membership of a job on one host, in abstract sockets.

A registered rank listens at an address of its own, and the launcher at one for each rank that is removed. Rank 0 of the
members listens in `grow`, and a joiner tries until it does:

    joiner → rank 0    the nonce of the job, its rank in the job, its process
    rank 0 → joiner    the plan
"""

import hmac
import json
import os
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import Self

from ringcomm.bootstrap.membership import Member
from ringcomm.bootstrap.notices import job_address
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.process_watch import process_id
from ringcomm.bootstrap.server import PeerServer
from ringcomm.bootstrap.sockets import (
    Message,
    close_descriptors,
    close_in_children,
    listen,
    packet_socket,
    receive_packet,
    send_packet,
    untrusted_reason,
)

__all__ = ["LocalMembership"]

RETRY_INTERVAL = 0.02  # seconds between two attempts of a joiner
POLL_INTERVAL = 0.1  # seconds between two looks at which ranks are removed, and at the members


class LocalMembership:
    """See Membership."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._removed: list[socket.socket] = []

    def register(self) -> socket.socket:
        registration = listen(job_address(self._place, f"rank {self._place.rank}"), "the registration of this rank")
        close_in_children(registration)
        return registration

    def any_registered(self) -> bool:
        return any(_listens(job_address(self._place, f"rank {rank}")) for rank in range(self._place.size))

    def remove(self, rank: int) -> None:
        self._removed.append(listen(_removal_address(self._place, rank), "the removal of a rank"))

    def joiners(self) -> "LocalJoiners":
        return LocalJoiners(self._place)

    def request_plan(self, timeout: float) -> Message | None:
        with ExitStack() as attempt, suppress(ConnectionError, BlockingIOError, TimeoutError):
            peer = attempt.enter_context(packet_socket())
            peer.settimeout(max(RETRY_INTERVAL, timeout))
            peer.connect(job_address(self._place, "grow"))
            if untrusted_reason(peer):
                raise ConnectionRefusedError
            member = json.dumps([self._place.rank, process_id()]).encode()
            peer.send(os.fsencode(self._place.nonce) + b"\0" + member)
            if (packet := receive_packet(peer)).data:
                return packet.read(self._place.rank)
        time.sleep(RETRY_INTERVAL)
        return None

    def confirm(self, job: str, connected: bool) -> bool:  # noqa: ARG002 (the hosts need a name, this one none)
        return connected  # memory that all share has told them alike who has come

    def close(self) -> None:
        for listener in self._removed:
            listener.close()


class LocalJoiners:
    """See Joiners."""

    def __init__(self, place: Place) -> None:
        self._place, self._nonce = place, os.fsencode(place.nonce)
        self._peers = PeerServer(
            job_address(place, "grow"), "the address where ranks join", self._receive, place.rank, 1.0
        )
        self._members: dict[socket.socket, Member] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._peers.close()

    def wait(self, ranks: Iterable[int], timeout: float, check: Callable[[], object]) -> list[Member]:
        wanted, deadline = set(ranks), time.monotonic() + max(timeout, 2 * RETRY_INTERVAL)
        while (left := deadline - time.monotonic()) > 0:
            absent = wanted - {rank for rank, _ in self._members.values()}
            if all(_listens(_removal_address(self._place, rank)) for rank in absent):
                break
            self._peers.serve(min(left, POLL_INTERVAL))
            check()
        found = {rank: (rank, process) for rank, process in self._members.values() if rank in wanted}  # the last one
        return [*found.values()]

    def send(self, plan: Message) -> None:
        for peer, (rank, _) in self._members.items():
            if rank in plan["ranks"]:
                with suppress(OSError):  # it has died: the startup will say so
                    send_packet(peer, plan)

    def _receive(self, peer: socket.socket) -> None:
        try:
            packet = receive_packet(peer)
        except OSError:  # it has disconnected
            self._members.pop(peer, None)
            self._peers.drop(peer)
            return
        close_descriptors(packet.fds)  # from an untrusted peer
        data = packet.data
        nonce, _, member = data.partition(b"\0")
        if peer not in self._members and hmac.compare_digest(nonce, self._nonce):
            rank, process = json.loads(member)
            self._members[peer] = rank, process
        elif self._members.pop(peer, None) is not None or not data:
            self._peers.drop(peer)
        else:
            self._peers.refuse(peer, "it sent a wrong nonce")


def _removal_address(place: Place, rank: int) -> str:
    return job_address(place, f"rank {rank} is removed")


def _listens(address: str) -> bool:
    with packet_socket() as peer:
        peer.setblocking(False)
        try:
            peer.connect(address)
        except BlockingIOError:  # nobody accepts: earlier looks have filled the queue
            return True
        except ConnectionRefusedError:
            return False
        return not untrusted_reason(peer)  # of another user
