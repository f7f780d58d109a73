"""How ranks that were started again meet those that went on: at a socket where rank 0 of these listens in `grow`.

    joiner → rank 0    the nonce of the job, its rank in the job
    rank 0 → joiner    the plan: which ranks of the job are in the grown group, and the name of its startup

A joiner tries until rank 0 listens. Every other member gets the plan in a broadcast. A rank that can call `grow` holds
a socket with its name, by which the launcher knows that there is one.
"""

import hashlib
import hmac
import os
import secrets
import socket
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Self

from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.server import PeerServer
from ringcomm.bootstrap.sockets import Message, listen, packet_socket, receive_packet, send_packet, untrusted_reason
from ringcomm.errors import CollectiveTimeout, PeerLost

__all__ = ["Joiners", "any_present", "join_group", "mark_present", "new_plan", "place_in"]

PAUSE = 0.02  # seconds between two attempts


class Joiners:
    """Rank 0's side: the ranks that wait to join."""

    def __init__(self, place: Place) -> None:
        self._nonce = os.fsencode(place.nonce)
        self._peers = PeerServer(_address(place, "grow"), "the place where ranks join", self._receive, place.rank, 1.0)
        self._ranks: dict[socket.socket, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._peers.close()

    def wait(self, ranks: Iterable[int], timeout: float) -> list[int]:
        """Wait until these ranks of the job have come, at most `timeout` seconds; return those that have."""
        missing, deadline = set(ranks), time.monotonic() + max(timeout, 2 * PAUSE)
        while missing - {*self._ranks.values()} and (left := deadline - time.monotonic()) > 0:
            self._peers.serve(left)
        return sorted(missing & {*self._ranks.values()})

    def send(self, plan: Message) -> None:
        for peer, rank in self._ranks.items():
            if rank in plan["ranks"]:
                with suppress(OSError):  # it has died: the startup will say so
                    send_packet(peer, plan)

    def _receive(self, peer: socket.socket) -> None:
        data = receive_packet(peer).data
        nonce, _, rank = data.partition(b"\0")
        if peer not in self._ranks and hmac.compare_digest(nonce, self._nonce) and rank.isdigit():
            self._ranks[peer] = int(rank)
        elif self._ranks.pop(peer, None) is not None or not data:
            self._peers.drop(peer)
        else:
            self._peers.refuse(peer, "it sent a wrong nonce")


def join_group(place: Place, timeout: float) -> Message:
    """Return the plan of the group that this rank joins, once the others call `grow`.

    Raises CollectiveTimeout after `timeout` seconds, and PeerLost if no rank is left that could call it.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if not any_present(place):
            raise PeerLost(f"rank {place.rank} was started again, but no rank is left that it could join")
        with ExitStack() as attempt, suppress(ConnectionError, BlockingIOError):
            peer = attempt.enter_context(packet_socket())
            peer.settimeout(max(PAUSE, deadline - time.monotonic()))
            peer.connect(_address(place, "grow"))
            if untrusted_reason(peer):
                raise ConnectionRefusedError
            peer.send(os.fsencode(place.nonce) + b"\0%d" % place.rank)
            with suppress(TimeoutError):
                if (packet := receive_packet(peer)).data:
                    return packet.read(place.rank)
        time.sleep(PAUSE)
    raise CollectiveTimeout(f"no rank has called grow within {timeout:g} s, for rank {place.rank} to join")


def new_plan(place: Place, ranks: Iterable[int]) -> Message:
    """Return the plan of a group of these ranks of the job."""
    return {"ranks": sorted(ranks), "job": f"{place.job}+{secrets.token_hex(8)}", "nonce": secrets.token_hex(16)}


def place_in(plan: Message, place: Place) -> Place:
    """Return where a rank of the job is in the grown group."""
    ranks = plan["ranks"]
    return replace(place, rank=ranks.index(place.rank), size=len(ranks), job=plan["job"], nonce=plan["nonce"])


def mark_present(place: Place) -> socket.socket:
    """Return a socket that shows, until it is closed, that this rank can call `grow`."""
    return listen(_address(place, f"rank {place.rank}"), "the name of this rank")


def any_present(place: Place) -> bool:
    """Return whether any rank of the job can call `grow`."""
    for rank in range(place.size):
        with packet_socket() as peer, suppress(ConnectionRefusedError):
            peer.setblocking(False)
            with suppress(BlockingIOError):  # nobody accepts: earlier looks have filled the queue
                peer.connect(_address(place, f"rank {rank}"))
            return True
    return False


def _address(place: Place, name: str) -> str:
    # By the nonce: the launcher has another name for the job.
    digest = hashlib.sha256(os.fsencode(f"{place.nonce}/{name}")).hexdigest()
    return f"\0ringcomm-{os.geteuid()}-{digest[:32]}"
