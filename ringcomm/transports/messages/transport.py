"""A transport over messages, for ranks that share no memory: a link carries them to other processes and hosts.

Every collective is the same exchange: each rank sends each other rank the signature of its call together with the data
that rank needs. Once a rank has heard from all, it compares the signatures and computes. So a mismatch is named on
every rank, and sums are made in rank order and rounded once, as everywhere in ringcomm. Each rank sends n - 1 messages,
a large all_reduce 2 (n - 1), of S / n bytes each.

Outgoing data is copied first, and incoming data has memory of its own: no link ever touches the caller's memory.
"""

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ringcomm.devices.contract import Device
from ringcomm.errors import (
    ArgumentError,
    MemoryShortage,
    MismatchError,
    RingcommError,
    describe_error,
    raise_first_failure,
)
from ringcomm.native import check, lib
from ringcomm.transports.blocks import NOTHING, Blockwise, Bytes, Signature, Steps, view
from ringcomm.transports.contract import (
    NO_FAST_PATH,
    CollectiveCall,
    FastPath,
    Fused,
    LocalTransport,
    Pending,
    Transport,
)
from ringcomm.transports.messages.call_queue import QueuedCall, no_steps
from ringcomm.transports.messages.group import Header, Membership, MessageGroup
from ringcomm.transports.messages.matching import PostedReceive
from ringcomm.transports.waits import Deadline
from ringcomm.types import COLLECTIVES

__all__ = ["MessageTransport"]

T = TypeVar("T")


class MessageTransport(MessageGroup):
    """The calls of a group whose ranks exchange messages."""

    fast_path: FastPath = NO_FAST_PATH
    as_local: LocalTransport | None = None

    def __init__(self, name: str, membership: Membership) -> None:
        self.name = name
        self.fused: Mapping[str, Fused] = {each: partial(self._blocking, each) for each in COLLECTIVES}
        self._arrived: dict[tuple[int, int], dict[int, tuple[Header, Bytes]]] = defaultdict(dict)  # by epoch and phase
        self._splits = 0
        super().__init__(membership)

    def path(self) -> tuple[str, int]:
        return "messages", 1

    def message_arrived(self, link_rank: int, header: Header, payload: Bytes) -> None:
        if header["kind"] == "call":
            with self.changed:
                messages = self._arrived[header["epoch"], header["phase"]]
                messages[self._members.index(link_rank)] = header, payload
        super().message_arrived(link_rank, header, payload)

    # --- Collectives --------------------------------------------------------------------------------------------------

    def start(self, collective: str, call: CollectiveCall, timeout: float) -> Pending:
        queued = QueuedCall(self, collective, no_steps())
        self._submit(queued, self._steps(collective, call, timeout))
        self._progress_in_background()
        return queued

    def _blocking(self, collective: str, call: CollectiveCall, timeout: float) -> None:
        self._run(collective, self._steps(collective, call, timeout))

    def _steps(self, collective: str, call: CollectiveCall, timeout: float) -> Callable[[int], Steps]:
        """Return a function that maps the epoch of a call to its steps."""
        check(lib.rc_check_collective(self.rank, self.size, COLLECTIVES[collective].code, (call,), 0))
        return lambda epoch: self._collective(Blockwise(self.rank, self.size, collective, call), epoch, timeout)

    def _submit(self, queued: QueuedCall, steps: Callable[[int], Steps]) -> None:
        self._check_open()  # before the lock, which a forked child may have inherited
        if self._queue.interrupted():
            where = f"in the middle of another call of rank {self.rank}"
            raise ArgumentError(f"{queued.description} was called by a signal handler, {where}", rank=self.rank)
        with self.changed:
            self._check()
            queued.steps = self._breaking_on_error(steps(next(self._epochs)))
            self._queue.append(queued)

    def _run(self, description: str, steps: Callable[[int], Steps]) -> None:
        """Run a call to its end. When this returns or raises, the memory is the caller's again."""
        queued = QueuedCall(self, description, no_steps())
        with self._breaking_on_interrupt():
            try:
                self._submit(queued, steps)
                self._queue.drive(may_block=True)  # may already finish it
                queued.wait(-1.0)
            finally:
                while queued in self._queue:
                    self._queue.drive(may_block=True)
                    self._link.pause(self, self.changes)

    def _breaking_on_error(self, steps: Steps) -> Steps:
        """Break the group if a call fails: it may fail on this rank only, while the others wait."""
        try:
            yield from steps
        except (MismatchError, MemoryShortage):  # all ranks raise these
            raise
        except RingcommError as error:
            with self.changed:
                self._fail(error)
            raise

    def _gather_and_apply(self, description: str, block: Bytes, apply: Callable[[list[Bytes]], T]) -> T:
        """Gather a block from every rank and return `apply(blocks)`; if that fails on one rank, all raise its error."""
        results: list[T] = []

        def steps(epoch: int) -> Steps:
            signature, deadline = Signature(description), Deadline(self.timeout)
            yield from self._check_signatures(signature, epoch, deadline)
            blocks = yield from self._exchange(signature, epoch, deadline, 0, [block] * self.size)
            failure: Exception | None = None
            try:
                results.append(apply(blocks))
            except Exception as raised:
                failure = raised
            outcome = np.frombuffer(describe_error(failure).encode(), np.uint8)
            outcomes = yield from self._exchange(signature, epoch, deadline, 1, [outcome] * self.size)
            raise_first_failure((each.tobytes().decode() for each in outcomes), self.rank, failure)
            self._done = epoch

        self._run(description, steps)
        return results[0]

    def _collective(self, call: Blockwise, epoch: int, timeout: float) -> Steps:
        self._check()
        entry = self._flight.begin(call.signature.text, epoch)
        deadline = Deadline(self.effective_timeout(timeout))
        outcome = "failed"
        try:
            yield from self._check_signatures(call.signature, epoch, deadline)
            yield from self._execute(call, epoch, deadline)
            outcome = "done"
        except MismatchError:
            outcome = "mismatch"
            raise
        finally:
            if outcome != "failed":  # every rank has finished with it
                self._done = epoch
            entry.end(outcome)

    def _check_signatures(self, signature: Signature, epoch: int, deadline: Deadline) -> Steps:  # noqa: ARG002
        """Ensure that all ranks make the same call. Here every message carries the signature, and no step is needed."""
        return no_steps()

    def _execute(self, call: Blockwise, epoch: int, deadline: Deadline) -> Steps:
        return call.run(partial(self._exchange, call.signature, epoch, deadline))

    def _exchange(
        self, signature: Signature, epoch: int, deadline: Deadline, phase: int, blocks: list[Bytes]
    ) -> Generator[None, None, list[Bytes]]:
        """Send block p and the signature to rank p; return the blocks from all ranks, without waiting for its own."""
        key = epoch, phase
        header = {"kind": "call", "epoch": epoch, "phase": phase, "signature": signature}
        for rank in range(self.size):
            if rank != self.rank:
                self._send(rank, header, blocks[rank].copy())
        with self.changed:
            arrived = self._arrived[key]
            arrived[self.rank] = header, blocks[self.rank]
        missing = lambda: [rank for rank in range(self.size) if rank not in arrived]  # noqa: E731 (one expression)
        description = f"{signature.text} (epoch {epoch})"
        yield from self.wait_until(lambda: len(arrived) == self.size, deadline, description, missing)
        with self.changed:
            del self._arrived[key]
        signatures = [Signature(*arrived[rank][0]["signature"]) for rank in range(self.size)]
        others = [rank for rank in range(self.size) if signatures[rank] != signature]
        if others:
            lines = self._differences(signatures)
            raise self._mismatch(signature, epoch, others[-1], signatures[others[-1]], lines)
        return [arrived[rank][1] for rank in range(self.size)]

    def _differences(self, signatures: list[Signature]) -> list[str]:
        mine = signatures[self.rank].counts
        other = f", other counts than on rank {self.rank}"
        return [
            f"rank {rank}: {text}{other if mine and counts != mine else ''}"
            for rank, (text, counts) in enumerate(signatures)
        ]

    def _mismatch(
        self, signature: Signature, epoch: int, other: int, got: Signature, lines: list[str]
    ) -> MismatchError:
        """Return the error that all ranks raise, each with its own call and that of another rank."""
        text = "\n  ".join([f"the ranks called different things at epoch {epoch}:", *lines])
        name = signature.collective
        return MismatchError(text, rank=other, collective=name, epoch=epoch, expected=signature.text, got=got.text)

    # --- Point to point -----------------------------------------------------------------------------------------------

    def isend(self, data: Any, count: int, dtype: int, peer: int, tag: int, timeout: float) -> Pending:
        del timeout  # a send finishes once its data is copied
        payload = view(data, count, dtype).copy()
        header = {"kind": "p2p", "tag": tag, "count": count, "dtype": dtype}
        self._check_open()
        with self.changed:
            self._check()
            if peer in self._lost:
                self._fail(self._lost[peer])
                self._check()
            if peer == self.rank:
                self._matching.deliver(peer, tag, count, dtype, payload)
                self.notify()
        if peer != self.rank:
            self._send(peer, header, payload)
            self._link.poll()
            if self._link.busy():
                self._progress_in_background()
        queued = QueuedCall(self, "send", no_steps())
        queued.finish()
        return queued

    def irecv(self, *call: Any) -> Pending:
        receive = self._post(*call)
        self._progress_in_background()
        return receive

    def _post(self, *call: Any) -> PostedReceive:
        receive = PostedReceive(self, *call)
        self._check_open()
        with self.changed:
            self._check()
            self._matching.post(receive)
        return receive

    def send(self, *call: Any) -> None:
        self.isend(*call)

    def recv(self, *call: Any) -> int:
        with self._breaking_on_interrupt():
            return self._post(*call).wait(-1.0)

    def sendrecv(self, *call: Any) -> int:
        data, count, dtype, dest, target, target_count, target_dtype, source, tag, timeout = call
        self.isend(data, count, dtype, dest, tag, timeout)
        return self.recv(target, target_count, target_dtype, source, tag, timeout)

    # --- Memory and groups --------------------------------------------------------------------------------------------

    def all_reduce_on_gpus(self, device: Device, call: CollectiveCall, timeout: float) -> bool:  # noqa: ARG002
        return False

    def allocate(self, description: str, size: int) -> Any:
        """Return zeros in private memory: collectives treat them as any other array."""
        return self._gather_and_apply(description, NOTHING, lambda _: np.zeros(size, np.uint8).data)

    def split(self, color: int | None, key: int) -> Transport | None:
        mine = np.array([color is not None, color or 0, key], np.int64).view(np.uint8)
        child = self._gather_and_apply("split()", mine, lambda answers: self._divide(answers, color))
        if isinstance(child, MessageTransport):
            with self.changed:
                self._children.add(child)
        return child

    def _divide(self, answers: list[Bytes], color: int | None) -> Transport | None:
        """Make the group of the ranks with this color. Ranks without a color take part and get no group."""
        given = [tuple(each.view(np.int64).tolist()) for each in answers]  # has a color, color, key
        colors = sorted({each for has_color, each, _ in given if has_color})
        groups = [
            sorted((rank for rank in range(self.size) if given[rank][:2] == (1, each)), key=lambda rank: given[rank][2])
            for each in colors
        ]  # sorted is stable: ties keep the order of the ranks
        self._splits += 1
        mine = None if color is None else colors.index(color)
        resources = self._split_resources(mine, 0 if mine is None else groups[mine].index(self.rank))
        if mine is None:
            return None
        members = [self._members[rank] for rank in groups[mine]]
        membership = replace(self._membership, members=members, group=f"{self._group}.{self._splits}.{mine}")
        return self._make_child(resources, membership)

    def _split_resources(self, group: int | None, rank: int) -> Any:
        """Return what a child group needs beside the link, given its number and this rank's rank in it."""

    def _make_child(self, resources: Any, membership: Membership) -> Transport:  # noqa: ARG002
        return type(self)(self.name, membership)
