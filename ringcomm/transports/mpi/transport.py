"""The transport over MPI: messages, signature checks, and the algorithms of ringcomm."""

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ringcomm.algorithms.schedule import NO_PEER, Lengths, even
from ringcomm.algorithms.select import MPI, AlgorithmSelector
from ringcomm.transports.blocks import NOTHING, Blockwise, Bytes, Signature, Steps
from ringcomm.transports.contract import CollectiveCall, Transport
from ringcomm.transports.messages.group import NOT_CALLED, Header, Membership
from ringcomm.transports.messages.transport import MessageTransport
from ringcomm.transports.mpi import builtin
from ringcomm.transports.mpi.link import MpiLink
from ringcomm.transports.mpi.rail import Rail, Wait, combine
from ringcomm.transports.waits import INFINITE, Deadline
from ringcomm.types import REDUCING, WHOLE, premul_sum, reduction

__all__ = ["MpiTransport"]

ANSWER = 0.5  # seconds that a timeout waits for the ranks to report which call they are in
SUM, AVG, PREMUL = (reduction(op)[0] for op in ("sum", "avg", premul_sum(1.0)))
MODULUS = 2**62  # of fingerprints: their negatives fit into 64 bits as well
MISMATCH = -1  # the phase of the exchange that names a mismatch
STALLED = "{} made no progress"


class MpiTransport(MessageTransport):
    """One rank's end of a group whose ranks communicate through MPI.

    A collective begins with a signature check: an all-reduce of a fingerprint of the call. So no rank moves data before
    all have made the same call. Then it runs the schedule of an algorithm.
    """

    _link: MpiLink

    def __init__(self, name: str, membership: Membership, rail: Rail, selector: AlgorithmSelector) -> None:
        self._all_ranks, self._selector = rail, selector
        self._path = ("single", 1)
        self._begun = 0  # the epoch of the last call that this rank began
        self._progress: dict[int, tuple[int, str]] = {}  # rank → its last call, as it reported
        super().__init__(name, membership)

    def _split_resources(self, group: int | None, rank: int) -> Any:
        return self._all_ranks.split(group, rank, self.timeout)

    def _make_child(self, resources: Any, membership: Membership) -> Transport:
        return type(self)(self.name, membership, resources, self._selector)

    def path(self) -> tuple[str, int]:
        return self._path

    def _leave(self) -> None:
        if not self._failure:
            self._link.free_with(self._group, self._rails())
        super()._leave()

    def _rails(self) -> list[Rail]:
        return [self._all_ranks]

    def _steps(self, collective: str, call: CollectiveCall, timeout: float) -> Callable[[int], Steps]:
        if self._selector.name == MPI and collective in REDUCING:
            builtin.refuse_unsupported(call.dtype)
        return super()._steps(collective, call, timeout)

    # --- The signature check ------------------------------------------------------------------------------------------

    def _check_signatures(self, signature: Signature, epoch: int, deadline: Deadline) -> Steps:
        self._begun = epoch
        number = (fingerprint(signature) + epoch) % MODULUS
        wait = partial(self._wait, signature, epoch, deadline, NOT_CALLED)
        extremes = yield from self._all_ranks.maximum(np.array([number, -number]), wait)
        if extremes[0] != number or -extremes[1] != number:
            yield from self._exchange(signature, epoch, deadline, MISMATCH, [NOTHING] * self.size)  # raises

    def _wait(
        self,
        signature: Signature,
        epoch: int,
        deadline: Deadline,
        reason: str,
        ready: Callable[[], bool],
        peers: Sequence[int],
    ) -> Steps:
        """Wait for peers. On a timeout, ask all ranks which call they are in; `reason` introduces the late ranks."""

        def lost() -> list[int]:
            return [rank for rank in self._owing(sorted({*peers} - {NO_PEER}), epoch) if rank in self._lost]

        description = f"{signature.text} (epoch {epoch})"
        done = False

        def done_or_past(limit: Deadline) -> Callable[[], bool]:
            def test() -> bool:
                nonlocal done
                done = done or ready()
                return done or limit.passed()

            return test

        yield from self.wait_until(done_or_past(deadline), Deadline(INFINITE), description, lost)
        if done:
            return
        self._progress = {self.rank: (epoch, self._flight.last(1))}
        self._send_to_all({"kind": "progress request"})
        yield from self.wait_until(done_or_past(Deadline(ANSWER)), Deadline(INFINITE), description, lost)
        if not done:
            with self.changed:
                calls = [self._progress.get(rank, (0, "no answer")) for rank in range(self.size)]
                late = [rank for rank, (theirs, _) in enumerate(calls) if theirs < epoch]
                lines = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(calls)]
                self._time_out(description, deadline, late, reason, lines)
            self._check()

    def message_arrived(self, link_rank: int, header: Header, payload: Bytes) -> None:
        rank = self._members.index(link_rank)
        if header["kind"] == "progress request":
            self._send(rank, {"kind": "progress", "epoch": self._begun, "text": self._flight.last(1)})
        elif header["kind"] == "progress":
            self._progress[rank] = header["epoch"], header["text"]
        super().message_arrived(link_rank, header, payload)

    # --- The data -----------------------------------------------------------------------------------------------------

    def _execute(self, call: Blockwise, epoch: int, deadline: Deadline) -> Steps:
        if self.size == 1:
            yield from super()._execute(call, epoch, deadline)
            return
        if call.name == "barrier":  # the signature check was one
            return
        wait = partial(self._wait, call.signature, epoch, deadline, STALLED)
        if call.name == "all_to_all" and call.recv_rows is not call.rows:
            yield from self._compare_counts(call, epoch, wait)
        source, target = call.memory()
        reduces, op = call.name in REDUCING, call.op
        if reduces and op == PREMUL:
            scaled = target if call.name == "all_reduce" else np.empty_like(source)
            combine(scaled, [source], call.dtype, op, call.factor)
            source = scaled
        yield from self._move(call, source, target, SUM if reduces and op in (PREMUL, AVG) else op, wait, deadline)
        if reduces and op == AVG and target.size:
            combine(target, [target], call.dtype, AVG, self.size)

    def _move(
        self,
        call: Blockwise,
        source: Bytes,
        target: Bytes,
        op: int,
        wait: Wait,
        deadline: Deadline,  # noqa: ARG002
    ) -> Steps:
        """Move the data of a call; `op` may be applied in any number of steps."""
        if self._selector.name == MPI:
            self._path = MPI, 1
            return self._all_ranks.builtin(call, source, target, op, wait)
        counted = call.name == "all_to_all" and call.recv_rows is not call.rows
        rows = even(call.count, self.size) if call.name in WHOLE else tuple(call.rows)
        lengths = Lengths(rows, tuple(call.recv_rows) if counted else ())
        algorithm = self._selector.of(call.name, self.size, lengths, call.item)
        self._path = algorithm.name, 1
        return self._all_ranks.collective(algorithm, source, target, lengths, call.dtype, op, call.root, wait)

    def _compare_counts(self, call: Blockwise, epoch: int, wait: Wait) -> Steps:
        """Raise MismatchError on every rank if a send count differs from the matching receive count."""
        table = yield from self._all_ranks.gather_all(np.array([*call.rows, *call.recv_rows], np.int64), wait)
        sent, expected = table[:, : self.size], table[:, self.size :].T
        pairs: list[tuple[int, int]] = [(p, q) for p, q in np.argwhere(sent != expected).tolist()]
        if not pairs:
            return
        lines = [f"rank {p} sends {sent[p, q]} elements to rank {q}, which expects {expected[p, q]}" for p, q in pairs]
        p, q = next((pair for pair in reversed(pairs) if self.rank in pair), pairs[0])
        raise self._mismatch(call.signature, epoch, q if p == self.rank else p, call.signature, lines)


@lru_cache(maxsize=1024)
def fingerprint(signature: Signature) -> int:
    return int.from_bytes(hashlib.blake2b(repr(signature).encode(), digest_size=7).digest(), "big")
