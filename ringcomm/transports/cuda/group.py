"""The GPUs of a group: an arena on each, the launches, and what is done when one fails.

A call is one kernel launch on the caller's stream. The kernels of all ranks meet, wait and give up by themselves
(kernels/cuda/call.cuh); here is what they cannot do. While launches are under way a thread looks whether all peers are
still there, tells the kernels to give up when the group has failed, and tells the group when a kernel has given up.
"""

import itertools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from ringcomm.completion import call_back
from ringcomm.devices.contract import Device, Event, Memory
from ringcomm.errors import (
    Aborted,
    ArgumentError,
    CollectiveTimeout,
    MemoryShortage,
    MismatchError,
    PeerLost,
    RingcommError,
    refuse,
)
from ringcomm.native import NULL
from ringcomm.transports.blocks import Blockwise
from ringcomm.transports.cuda.arena import MOST, Arena
from ringcomm.transports.cuda.calls import KERNELS, REASONS, Plan, plan
from ringcomm.transports.cuda.launched import Inside, Launched
from ringcomm.transports.cuda.symmetric import Buffers, Lent
from ringcomm.transports.shm import ShmTransport
from ringcomm.transports.waits import INFINITE, Deadline

__all__ = ["CudaGroup", "Unreachable"]

SHORTEST, LONGEST = 50e-6, 2e-3  # seconds between two looks, growing
GRACE = 1.0  # seconds in which a launch may end by itself although a peer has gone: that may have done its part
PROBE = 10.0  # seconds in which GPUs that reach each other answer
FAREWELL = 2.0  # seconds in which peers close too
UNKNOWN = "a call of a graph", math.nan
LATE = {
    "not started": "it was not called by rank {}",
    "no data": "rank {} has stopped in the middle of it",
    "no room": "rank {} has stopped in the middle of it",
}

log = logging.getLogger("ringcomm")
_kept: list[Memory] = []  # that peers may still use when their group is closed here


class Unreachable(RingcommError):
    """The GPUs of some ranks cannot reach each other. All ranks know."""


class CudaGroup:
    """One rank's end of a group of GPUs. To make it is a collective of `host`, which has the same ranks.

    Raises Unreachable on all ranks, if a GPU does not reach another.
    """

    def __init__(self, host: ShmTransport, device: Device) -> None:
        self.device = device
        self.changed = threading.RLock()  # guards what is known of launches; nobody who has it waits for a kernel
        self._launched = threading.Condition(self.changed)
        self._launching = threading.Lock()
        self._talking = threading.Lock()  # one thread at a time tells the other ranks something
        self._inside = Inside()
        self._host = host
        self._process = os.getpid()
        self._numbers = itertools.count(1)
        self._number = 0  # of the newest call
        self._queued = 0  # of the newest whose launch is over
        self._calls: dict[int, tuple[str, float]] = {}  # in words, and the timeout
        self._counts: dict[int, tuple[list[int], list[int]]] = {}  # that only pairs know: to send, to receive
        self._outstanding: deque[Launched] = deque()
        self._last: tuple[Any, Event] | None = None  # the stream of the last launch, and that launch
        self._unraised: RingcommError | None = None
        self._watcher: threading.Thread | None = None
        self._closed = False
        self._callbacks: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._grace: Deadline | None = None  # for launches that wait for a rank that has gone
        talk = host.split(0, host.rank)
        assert talk is not None
        self._talk = talk  # nobody else says anything there
        self._buffers = Buffers(device, talk)
        try:
            exported = talk.together("all_gather", self._allocate)
            for step in (lambda: self._open([handle for _, handle in exported]), self._probe):
                for rank, reason in enumerate(talk.together("all_gather", step)):
                    if reason:
                        raise Unreachable(f"{exported[rank][0]} of rank {rank} does not reach all others: {reason}")
        except BaseException:
            talk.close()
            raise

    def _allocate(self) -> tuple[str, str]:
        self._arena = Arena(self.device, self._host.rank, self._host.size)
        self._control = self._arena.control
        return self.device.name, self._arena.export()

    def _open(self, exported: list[str]) -> str:
        """Open the arenas of the others; say why that cannot be."""
        try:
            self._arena.open(exported)
            self.device.prepare(KERNELS["barrier"], 0, 0)
        except (OSError, RuntimeError) as error:  # as CuPy says it
            return str(error) or repr(error)
        return ""

    def _probe(self) -> str:
        """Let every GPU write to every other; say which it does not hear."""
        host, limit = self._host, min(PROBE, self._host.timeout)
        barrier = Blockwise(host.rank, host.size, "barrier", 0, 0, 0, 0, 0, 1.0, 0, NULL)
        event = self._start(
            self.device, self.device.new_stream(), barrier, Plan("barrier", 0, 0, 1, 0, None, None), 0, 0, 0, limit
        )
        while not event.done:
            time.sleep(SHORTEST)
        return f"it has not heard of rank {self._control.peer} for {limit:g} s" if self._control.failed else ""

    # --- Launches -----------------------------------------------------------------------------------------------------

    def call(self, device: Device, call: Blockwise, source: int, target: int, timeout: float, asked: bool) -> Launched:
        """Queue a call on the current stream. Unless the handle will be `asked` what has gone wrong in it, a later call
        raises that.
        """
        self.check_device(device)
        self._check_outside(call.said.words)
        own = call.rows[self._host.rank], call.come[self._host.rank]
        if own[0] != own[1]:
            raise refuse("recv_counts, of this rank's own block", f"{own[0]}, as in send_counts", own[1])
        planned = plan(call, self.device.shape)
        capturing, stream = device.capturing(), device.stream()
        if capturing and planned.recv_rows:
            raise refuse("counts", "equal blocks while a CUDA graph is captured", call.said.words)
        device.prepare(KERNELS[planned.kernel], planned.dtype, planned.op)
        while len(self._outstanding) >= MOST and not capturing:
            time.sleep(SHORTEST)
            self.look()
        with self._launching, self._inside:
            with self.changed:
                if not capturing:
                    self._look_at_record()
                self.check()
                self._number = number = next(self._numbers)
                self._calls[number] = call.said.words, timeout
                if call.come is not call.rows:
                    self._counts[number] = call.rows, call.come
                self._counts.pop(number - 4 * MOST, None)
                self._calls.pop(number - 4 * MOST, None)
            if self._last and self._last[0] != stream and not capturing:
                device.wait(stream, self._last[1])  # the kernels of a group run one after the other
            try:
                event = self._start(device, stream, call, planned, source, target, number, timeout)
            except RuntimeError as error:  # CUDA's
                failure = RingcommError(f"{call.said.words} could not be launched on {device.name}: {error}")
                self.give_up(failure)
                raise failure from error
            launched = Launched(self, device, number, event, capturing, asked)
            with self.changed:
                self._queued = number
                if not capturing:
                    self._last = stream, event
                    self._outstanding.append(launched)
                    self._watch()
        return launched

    def _start(
        self,
        device: Device,
        stream: Any,
        call: Blockwise,
        planned: Plan,
        source: int,
        target: int,
        number: int,
        timeout: float,
    ) -> Event:
        places = self._buffers.places(call, source, target)
        args = self._arena.arguments(call, planned, source, target, number, timeout, places)
        device.launch(KERNELS[planned.kernel], planned.dtype, planned.op, args, planned.blocks, stream)
        return device.record(stream)

    def check_device(self, device: Device) -> None:
        if device.name != self.device.name:
            raise refuse("array", f"one on {self.device.name}, as the first of this communicator", device.name)

    def _check_outside(self, words: str) -> None:
        if self._inside.depth:
            text = f"{words} was called by a signal handler, in the middle of another call"
            raise ArgumentError(text, rank=self._host.rank)

    def allocate(self, words: str, size: int) -> Lent:
        """Make a symmetric buffer. Collective. Raises MemoryShortage on all ranks if one has not enough."""
        self._check_outside(words)
        self.finish()
        self.check()
        with self._inside, self._talking:
            try:
                return self._buffers.allocate(words, size)
            except (MemoryShortage, MismatchError):  # which are raised on all ranks
                raise
            except RingcommError as error:
                self.give_up(error)
                raise
            except BaseException as error:  # a signal
                self.give_up(Aborted(f"rank {self._host.rank} was interrupted: {error!r}", rank=self._host.rank))
                raise

    # --- Waiting ------------------------------------------------------------------------------------------------------

    def until_done(self, launched: Launched, timeout: float) -> None:
        """Let the calling thread wait. If that takes too long, or a signal ends it, the group is broken; the launch has
        ended then.
        """
        deadline, pause = Deadline(timeout if timeout >= 0 else INFINITE), SHORTEST
        with self._inside:
            try:
                while not launched.done():
                    if deadline.passed():
                        words, _ = self._calls.get(launched.number, UNKNOWN)
                        text = f"rank {self._host.rank} waited {timeout:.3g} s for {words} on {self.device.name}"
                        self.give_up(CollectiveTimeout(text, rank=self._host.rank))
                        deadline = Deadline(INFINITE)
                    time.sleep(pause)
                    pause = min(LONGEST, 1.5 * pause)
            except BaseException as error:  # a signal
                self.give_up(Aborted(f"rank {self._host.rank} was interrupted: {error!r}", rank=self._host.rank))
                while not launched.done():
                    time.sleep(SHORTEST)
                raise

    def finish(self) -> None:
        """Return when all that was launched is done."""
        if self._process == os.getpid():
            for launched in [*self._outstanding]:
                self.until_done(launched, -1.0)
            self.look()

    def ended_well(self, launched: Launched) -> bool:
        """Say whether a launch that is done has done its work: a kernel fails before it ends."""
        return not self._control.failed or launched.number < self._control.number

    def check_open(self) -> None:
        """Raise what has broken the group."""
        self._host.check()

    def check(self) -> None:
        """Raise what has broken the group, or what no call has raised yet."""
        self.check_open()
        with self.changed:
            error, self._unraised = self._unraised, None
        if error:
            raise error

    # --- Watching -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._run, name="ringcomm GPU", daemon=True)
            self._watcher.start()
        self._launched.notify()

    def _run(self) -> None:
        pause = SHORTEST
        self.device.watch()
        while True:
            with self.changed:
                while not self._outstanding:
                    if self._closed:
                        return
                    self._launched.wait()
                before = len(self._outstanding)
            time.sleep(pause)
            try:
                self.look()
            except Exception as error:
                log.exception("whether launches on a GPU are well cannot be seen any more")
                self.give_up(RingcommError(f"rank {self._host.rank} cannot look at {self.device.name}: {error!r}"))
            pause = SHORTEST if len(self._outstanding) < before else min(LONGEST, 1.5 * pause)

    def look(self) -> None:
        """See what has happened on the device and to the peers."""
        if self._process != os.getpid():
            return
        with self.changed:
            self._look_at_record()
            ended = []
            while self._outstanding and self._outstanding[0].done():
                ended.append(self._outstanding.popleft())
            if ended:
                self._look_at_record(ended)  # which may be of one of them
            callbacks = [callback for launched in ended for callback in launched.tell()]
            oldest = self._outstanding[0] if self._outstanding else None
        if callbacks:
            self._call_back(callbacks)
        if oldest and not self._control.abort:
            self._look_at_peers(oldest.number)

    def _call_back(self, callbacks: list[Callable[[], object]]) -> None:
        """Call back one after the other, on a thread that nobody waits for."""
        for callback in callbacks:
            self._callbacks.put(callback)

        def run() -> None:
            for _ in callbacks:
                call_back(self._callbacks.get())

        threading.Thread(target=run, name="ringcomm GPU callbacks", daemon=True).start()

    def _look_at_record(self, ended: Iterable[Launched] = ()) -> None:
        record = self._control
        if record.failed and not record.abort and record.number <= self._queued:  # a kernel can fail within its launch
            self._failed([*ended, *self._outstanding])

    def _look_at_peers(self, number: int) -> None:
        """Tell the kernels to give up when the group has failed, or a peer has gone that they still wait for."""
        words, _ = self._calls.get(number, UNKNOWN)
        try:
            self._host.check()
            gone = self._host.gone()
            if not gone:
                self._grace = None
            elif self._grace is None:
                self._grace = Deadline(GRACE)
            elif self._grace.passed():
                needed = f"while rank {self._host.rank} needed it in {words} on {self.device.name}"
                self.give_up(PeerLost(f"rank {gone[0]} died, or closed the communicator, {needed}", rank=gone[0]))
        except RingcommError:
            self._control.abort = 1

    # --- Failures -----------------------------------------------------------------------------------------------------

    def give_up(self, error: RingcommError) -> None:
        """Let the kernels give up, and break the group."""
        self._control.abort = 1
        with suppress(RingcommError):  # it has failed before
            self._host.fail(error)

    def _failed(self, launches: list[Launched]) -> None:
        """A kernel has given up: tell the others why."""
        record = self._control
        words, timeout = self._calls.get(record.number, UNKNOWN)
        reason = REASONS[record.reason]
        if reason == "mismatch":
            with self._talking:
                self._mismatch(record.number, words, launches)
        elif reason == "aborted":
            record.abort = 1
        else:
            why = LATE[reason].format(record.peer)
            text = f"rank {self._host.rank} waited {timeout:.3g} s in {words} on {self.device.name}: {why}"
            self.give_up(CollectiveTimeout(text, rank=record.peer))

    def _mismatch(self, number: int, words: str, launches: list[Launched]) -> None:
        """All ranks find it, as soon as they have come, and say what they have called.

        The calls that a rank has launched after that were skipped. If there are none, all arenas are made as new, and
        the group goes on; else nobody knows which of them belong together, and it is broken.
        """
        _, timeout = self._calls.get(number, UNKNOWN)
        if number in self._counts:  # two ranks know it, and the others do not
            peer, (send, recv) = self._control.peer, self._counts[number]
            counts = f"this rank sends {send[peer]} elements to rank {peer} and expects {recv[peer]}"
            text = f"ranks {self._host.rank} and {peer} do not agree in {words} on {self.device.name}: {counts}"
            self.give_up(MismatchError(text, rank=peer))
            return
        said = []
        with suppress(RingcommError):
            said = self._talk.exchange("all_gather", [words, self._number - number], timeout)
        lines = [f"rank {rank}: {theirs}" for rank, (theirs, _) in enumerate(said)]
        lines = lines or [f"rank {self._host.rank}: {words}", f"rank {self._control.peer}: something else"]
        other = next((rank for rank in reversed(range(len(said))) if said[rank][0] != words), self._control.peer)
        text = "\n  ".join([f"the ranks called different things on {self.device.name}, in call {number}:", *lines])
        got = said[other][0] if said else None
        error = MismatchError(
            text, rank=other, collective=words.partition("(")[0], epoch=number, expected=words, got=got
        )
        try:
            if not said or any(skipped for _, skipped in said):
                raise error
            while not all(launched.done() for launched in launches):
                time.sleep(SHORTEST)
            self._talk.exchange("all_gather", "ended", timeout)
            self._arena.reset()
            self._talk.exchange("all_gather", "as new", timeout)
        except (RingcommError, RuntimeError):
            self.give_up(error)
            return
        failed = [launched for launched in launches if launched.number == number]
        for launched in failed:
            launched.error = error
        if not any(launched.asked for launched in failed):
            self._unraised = error

    # --- The end ------------------------------------------------------------------------------------------------------

    def close(self) -> bool:
        """Let what is under way end; give the arena back when no peer can reach it any more. False: this is a signal
        handler in the middle of a call, which ends first.
        """
        if self._process != os.getpid():
            return True
        if self._inside.depth:
            self.give_up(Aborted(f"rank {self._host.rank} was closed by a signal handler", rank=self._host.rank))
            return False
        lent = self._buffers.own()
        try:
            self.finish()
            self._arena.opened.clear()
            self._buffers.close()
            self._talk.exchange("all_gather", "closed", FAREWELL)
        except (RingcommError, RuntimeError):
            if not self.device.outlives:
                _kept.extend([self._arena.memory, *(buffer.memory for buffer in lent)])
                text = "rank %d keeps %d bytes of %s until it ends: not all ranks have closed the communicator"
                size = self._arena.size + sum(buffer.size for buffer in lent)
                log.warning(text, self._host.rank, size, self.device.name)
        self._talk.close()
        with self.changed:
            self._closed = True
            self._launched.notify()
        return True
