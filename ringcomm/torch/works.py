"""The work handles that torch gets for its calls."""

import itertools
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ringcomm import RingcommError, Work
from ringcomm.callbacks import inside_callback
from ringcomm.torch import observers
from ringcomm.torch.compat import inflight
from ringcomm.torch.compat.native import result_after
from ringcomm.torch.compat.untraced import untraced
from ringcomm.torch.tensors import Copies, Tensors, write_back
from ringcomm.torch.timeouts import seconds

__all__ = ["TorchWork", "WorkOwner", "coalesced"]


_Work: Any = dist.Work  # torch's stubs leave out much of what it calls


class WorkOwner(Protocol):
    """What a handle needs of its process group."""

    @property
    def group_name(self) -> str: ...

    def annotated(self, error: RingcommError) -> RingcommError:
        """Return the error with the name of the group added."""

    def ended(self, work: Work) -> None:
        """Note that a wait has seen the end of a call."""

    def found(self, error: Exception) -> None:
        """Keep the error of a call, which the program has not seen."""

    def shown(self, error: Exception) -> None:
        """Note that the program has seen an error."""


@untraced
class TorchWork(_Work):  # type: ignore[misc]  # torch's stubs leave it out
    """Calls that run in the background, or none: then it is complete. `made` makes one.

    Every `wait` raises their error, and the future carries it.
    """

    owner: Any = None
    works: Sequence[Work] = ()
    outputs: Tensors = ()
    copies: Copies = ()  # pairs of an output and its copy, to be written back when the calls are done
    parts: Sequence["TorchWork"] = ()  # the handles of calls that this one waits for as well
    is_registered = False
    _written = True
    _shown = False  # whether the program has seen the error
    _lock: threading.Lock  # one thread may wait while another completes the future
    _error: Exception | None = None  # of a call that failed at once, or from writing back

    @classmethod
    def made(
        cls,
        owner: WorkOwner,
        works: Sequence[Work],
        outputs: Tensors,
        copies: Copies = (),
        parts: Sequence["TorchWork"] = (),
    ) -> "TorchWork":
        work = cls()  # with torch's own __init__: calling it from one in Python costs as much as a small call
        work.owner, work.works, work.outputs = owner, works, outputs
        if copies or parts:
            work.copies, work.parts = copies, parts
            work._written, work._lock = False, threading.Lock()
        if inflight.allowed():
            work.is_registered = True
        return work

    @classmethod
    def failed(cls, owner: WorkOwner, error: RingcommError) -> "TorchWork":
        """Return the handle of a call that has failed."""
        work = cls.made(owner, (), ())
        work._error = error
        owner.found(error)
        return work

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        try:
            self._complete(timeout)
        except Exception as error:
            self._show(error)
            raise
        return True

    def _complete(self, timeout: timedelta | float | None = None) -> None:
        if not (self.is_registered or self.parts):
            self._wait(timeout)
        elif not inflight.is_dropping(self):
            try:
                self._wait(timeout)
            finally:
                for work in (self, *self.parts):
                    if work.is_registered:
                        inflight.drop(work)
                        work.is_registered = False

    def _wait(self, timeout: timedelta | float | None) -> None:
        limit = seconds(timeout)
        deadline = None if limit is None else time.monotonic() + limit
        for work in self.works:
            try:
                observers.timed(work.wait)(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except RingcommError as error:
                if work.done():
                    self.owner.ended(work)
                raise self.owner.annotated(error)  # noqa: B904 (it is the same error)
            self.owner.ended(work)
        self._write_back()
        if self._error:
            raise self._error

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self.works:  # at once: torch asks after each blocking call
            return True
        if not all(work.done() for work in self.works):
            return False
        error = self._outcome()
        if error and not self._shown:
            self.owner.found(error)
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return the error that `wait` would raise; None for a running or successful call."""
        error = self._outcome()
        if error:
            self._show(error)
        return error

    def _outcome(self) -> Exception | None:
        """Return the error of a call that has ended, after writing back."""
        if all(work.done() for work in self.works):
            try:
                self._complete()
            except Exception as error:
                return error
        return None

    def _show(self, error: Exception) -> None:
        self._shown = True
        self.owner.shown(error)

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return list(self.outputs)

    def source_rank(self) -> int:
        """Return the rank that sent the received message."""
        self.wait()
        rank: int = self.works[0].result
        return rank

    _source_rank = source_rank

    def get_future(self) -> "torch.futures.Future[Any]":
        gpus = {tensor.device for tensor in self.outputs if tensor.is_cuda}
        done: torch.futures.Future[Any] = torch.futures.Future(devices=list(gpus))
        # Complete at once where result_after() does the waiting: on a GPU its stream waits for the calls, not the host;
        # and for a call started in a callback, as hooks of DDP do, so that callbacks run in one order on all ranks.
        if inside_callback() or all(work.on_stream for work in self.works):
            done.set_result(None)
        future = result_after(done, self)
        if done.done():
            return future
        ended = itertools.count(1)  # whose next() is atomic: callbacks may run on several threads

        def one_ended(_: Work) -> None:
            if next(ended) == len(self.works):
                done.set_result(None)

        for work in self.works:
            work.add_done_callback(one_ended)
        return future

    def _write_back(self) -> None:
        if self._written:
            return
        with self._lock:
            if not self._written:
                for part in self.parts:
                    part._write_back()
                    self._error = self._error or part._error
                try:
                    write_back(self.copies)
                except Exception as error:
                    self._error = error
                self._written, self.copies = True, ()


def coalesced(owner: WorkOwner, parts: Sequence[TorchWork], outputs: Tensors, copies: Copies = ()) -> TorchWork:
    """Return one handle for many."""
    works = [work for part in parts for work in part.works]
    if not works:
        write_back(copies)
        copies = ()
    return TorchWork.made(owner, works, outputs, copies, parts)
