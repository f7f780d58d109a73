"""A torch.distributed process group on top of a communicator.

torch calls the operations of a group by the names of c10d, which differ between its versions: both are defined. Tensors
that cannot be used in place are copied once, and written back when the call is done (tensors.py).
"""

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringcomm import Aborted, CollectiveTimeout, Communicator, MismatchError, PeerLost, RingcommError, Work
from ringcomm.errors import describe_error
from ringcomm.torch import observers, sparse
from ringcomm.torch.coalescing import Coalescing
from ringcomm.torch.compat import callers_in_cpp, inflight, native
from ringcomm.torch.compat.abort_hooks import AbortHooks
from ringcomm.torch.compat.capabilities import Capabilities, Options, has_other_backends
from ringcomm.torch.compat.subclasses import NoMemory, tracing, unwrapped
from ringcomm.torch.compat.untraced import untraced
from ringcomm.torch.groups import Splitting
from ringcomm.torch.memory import TensorMemory
from ringcomm.torch.operations import DONE, Prepared, flat, merged, operation, reduction, uneven
from ringcomm.torch.start import connect
from ringcomm.torch.tensors import CallTensors, Lists, Tensors, for_ranks, single, some, split_counts, write_back
from ringcomm.torch.timeouts import seconds
from ringcomm.torch.works import TorchWork

__all__ = ["RingcommProcessGroup", "create"]

c10d: Any = dist.distributed_c10d  # torch's stubs leave out much of what it calls
UNSET = timedelta(milliseconds=-1)  # torch leaves the timeout to the group
BREAKING = Aborted, CollectiveTimeout, PeerLost  # errors after which a group is of no use

# A group can have several Backends, each for other devices. Where none can be written in Python, a whole group can.
Base: Any = torch._C._distributed_c10d.Backend if native.PYTHON_BACKENDS else c10d.ProcessGroup

# Open groups that torch has wrapped to compare the calls of all ranks: its wrapper does not own an object of Python.
_wrapped: set["RingcommProcessGroup"] = set()


def create(options: Options) -> Any:
    """Return the group, or the Backend of one, for torch's DistributedBackendOptions. All its ranks call this."""
    name, ranks = options.group_id, list(options.global_ranks_in_group)
    shared = Base is c10d.ProcessGroup and has_other_backends()
    callers_in_cpp.serve()
    try:
        group = RingcommProcessGroup(connect(options), options)
    except RingcommError as error:
        raise annotate(error, name, ranks, options.group_rank)  # noqa: B904 (it is the same error)
    if shared:
        return native.backend_of(group)
    native.register(group)
    if native.PYTHON_BACKENDS and c10d.get_debug_level() == c10d.DebugLevel.DETAIL:
        _wrapped.add(group)
    return group


def annotate(error: RingcommError, name: str, ranks: list[int], rank: int) -> RingcommError:
    """Add the group to an error, once: the ranks in messages are those of the group."""
    group = f"in the torch.distributed group {name!r}"
    if group not in str(error):
        of = f"ranks {ranks} of the world" if ranks else "the world"
        error.args = (f"{error}\n{group} ({of}), on its rank {rank}",)
    return error


@untraced
class RingcommProcessGroup(AbortHooks, Capabilities, Coalescing, Splitting, TensorMemory, Base):  # type: ignore[misc]  # Base is one of two classes
    """One rank's end of a group. Ranks in calls and errors are those of the group, as everywhere in c10d."""

    def __init__(self, comm: Communicator, options: Options) -> None:
        Base.__init__(self, comm.rank, comm.size)
        Capabilities.__init__(self, options)
        AbortHooks.__init__(self)
        self.comm = comm
        self._pools = {}
        self._last: Work | None = None  # of the collectives, which run in order; None once a wait has seen its end
        self._unseen: Exception | None = None  # a mismatch that the program has not seen

    # --- Collectives --------------------------------------------------------------------------------------------------

    @operation("all_reduce", c10d.AllreduceOptions)
    def allreduce(self, opts: Any, call: CallTensors, tensors: Tensors) -> Prepared:
        if len(tensors) > 1:  # all of all ranks become one
            total = merged([call.input(tensor, reduces=True) for tensor in tensors], reduction(opts))
            call.copies += [(unwrapped(tensor), total) for tensor in tensors]
            return tensors, total, reduction(opts)
        if self._is_plain(opts):  # the most frequent call does what Communicator.all_reduce tries first
            async_op = _is_async(opts)
            done = self.comm.fast_path.all_reduce(single(tensors), None, reduction(opts), None, async_op)
            if done is not NotImplemented:
                return self._handle(opts, call, [done] if async_op else (), tensors)
        if (tensor := unwrapped(single(tensors))).layout is torch.sparse_coo:
            if tensor.is_meta:
                raise NoMemory
            sparse.all_reduce(self.comm, tensor, reduction(opts), self._limit(opts))
            self._begun += 1
            return TorchWork.made(self, (), tensors)
        return tensors, call.inout(tensor, reduces=True), reduction(opts)

    @operation("reduce", c10d.ReduceOptions)
    def reduce(self, opts: Any, call: CallTensors, tensors: Tensors) -> Prepared:
        take = call.inout if self.comm.rank == opts.rootRank else call.input
        return tensors, take(single(tensors), reduces=True), reduction(opts), opts.rootRank

    @operation("broadcast", c10d.BroadcastOptions)
    def broadcast(self, opts: Any, call: CallTensors, tensors: Tensors) -> Prepared:
        is_root = self.comm.rank == opts.rootRank
        one = unwrapped(some(tensors)[opts.rootTensor if is_root else 0])
        x = call.input(one) if is_root else call.output(one)
        call.copies += [(unwrapped(other), one) for other in tensors if other is not one]
        return tensors, x, opts.rootRank

    @operation("all_gather", c10d.AllgatherOptions)
    def allgather(self, _: Any, call: CallTensors, output_lists: Lists, inputs: Tensors) -> Prepared:
        outputs = for_ranks(self, single(output_lists))
        out = call.outputs(outputs)
        x = flat(call.input(single(inputs)))
        x = call.input_for(out, x, sum(part.numel() for part in outputs[: self.comm.rank]))
        return outputs, x, out, uneven(outputs)

    @operation("all_gather", c10d.AllgatherOptions)
    def all_gather_single(self, _: Any, call: CallTensors, output: torch.Tensor, input: torch.Tensor) -> Prepared:
        x, out = call.input(input), call.output(output)
        return [output], call.input_for(out, x, self.comm.rank * x.numel()), out

    @operation("gather", c10d.GatherOptions)
    def gather(self, opts: Any, call: CallTensors, output_lists: Lists, inputs: Tensors) -> Prepared:
        x = call.input(single(inputs))
        if self.comm.rank != opts.rootRank:
            return (), x, None, opts.rootRank
        outputs = for_ranks(self, single(output_lists), single(inputs))
        return outputs, x, call.outputs(outputs), opts.rootRank

    @operation("scatter", c10d.ScatterOptions)
    def scatter(self, opts: Any, call: CallTensors, outputs: Tensors, input_lists: Lists) -> Prepared:
        x = None
        if self.comm.rank == opts.rootRank:
            x = call.inputs(for_ranks(self, single(input_lists), single(outputs)))
        return outputs, x, call.output(single(outputs)), opts.rootRank

    @operation("reduce_scatter", c10d.ReduceScatterOptions)
    def reduce_scatter(self, opts: Any, call: CallTensors, outputs: Tensors, input_lists: Lists) -> Prepared:
        inputs = for_ranks(self, single(input_lists))
        x, out = call.inputs(inputs, reduces=True), call.output(single(outputs), reduces=True)
        x = call.input_for(out, x, -sum(part.numel() for part in inputs[: self.comm.rank]))
        return outputs, x, reduction(opts), out, uneven(inputs)

    @operation("reduce_scatter", c10d.ReduceScatterOptions)
    def reduce_scatter_single(
        self,
        opts: Any,
        call: CallTensors,
        output: torch.Tensor,
        input: torch.Tensor,
    ) -> Prepared:
        x, out = flat(call.input(input, reduces=True)), call.output(output, reduces=True)
        return [output], call.input_for(out, x, -self.comm.rank * out.numel()), reduction(opts), out

    @operation("all_to_all", c10d.AllToAllOptions)
    def alltoall(self, _: Any, call: CallTensors, outputs: Tensors, inputs: Tensors) -> Prepared:
        counts = [[tensor.numel() for tensor in tensors] for tensors in (inputs, outputs)]
        return outputs, call.inputs(for_ranks(self, inputs)), call.outputs(for_ranks(self, outputs)), *counts

    @operation("all_to_all", c10d.AllToAllOptions)
    def all_to_all_single(
        self,
        _: Any,
        call: CallTensors,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Prepared:
        x, out = flat(call.input(input)), flat(call.output(output))
        sent, received = split_counts(self, input, input_splits), split_counts(self, output, output_splits)
        return [output], x, out, *((sent, received) if input_splits or output_splits else (None, None))

    @operation("barrier", c10d.BarrierOptions)
    def barrier(self, _: Any, __: CallTensors) -> Prepared:
        if tracing():
            raise NoMemory
        return ((),)

    # --- Point to point -----------------------------------------------------------------------------------------------

    @operation("send")
    def send(self, _: Any, call: CallTensors, tensors: Tensors, peer: int, tag: int) -> Prepared:
        if self._is_plain():
            message = self.comm.fast_path.send(single(tensors), peer, tag, None, True)
            if message is not NotImplemented:
                return self._handle(None, call, [self.comm.started(message, tensors)], tensors)
        return tensors, call.input(single(tensors)), peer, tag

    @operation("recv")
    def recv(self, _: Any, call: CallTensors, tensors: Tensors, peer: int | None, tag: int) -> Prepared:
        if self._is_plain():
            message = self.comm.fast_path.recv(single(tensors), peer, tag, True, None, True)
            if message is not NotImplemented:
                return self._handle(None, call, [self.comm.started(message, tensors)], tensors)
        return tensors, call.inout(single(tensors)), peer, tag  # what a shorter message leaves stays

    def recv_anysource(self, tensors: Tensors, tag: int) -> TorchWork:
        with observers.label(self, "recvAnySource", tensors, "recv_anysource", (tensors, tag)):
            return self.recv(tensors, None, tag)

    # --- The group itself ---------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Break the group on all ranks, and report the exception that this rank is handling, if any."""
        error = sys.exc_info()[1]
        caller = f"global rank {dist.get_rank()}" if dist.is_initialized() else f"rank {self.comm.rank}"
        reason = f"{caller} ended the torch.distributed group {self._name}"
        if error:
            reason += f": {describe_error(error)}"  # with the group whose ranks it numbers
        self._run_abort_hooks()
        # An Aborted comes from another group, and names the cause.
        self.comm.abort(error if isinstance(error, Aborted) else reason)

    def shutdown(self) -> None:
        """Finish the collectives that this rank has begun, and close. Drops messages that were not received.

        Raises the mismatch of a call whose handle was dropped, as Communicator.close does.
        """
        if last := self._last:
            self._last = None
            try:
                last.wait()
            except RingcommError as error:
                self.found(error)
        unseen, self._unseen = self._unseen, None
        try:
            self.comm.close()
            if unseen:
                raise unseen
        except RingcommError as error:
            raise self.annotated(error)  # noqa: B904 (it is the same error)
        finally:
            _wrapped.discard(self)

    def annotated(self, error: RingcommError) -> RingcommError:
        if isinstance(error, BREAKING):
            self._run_abort_hooks()
        return annotate(error, self._name, self._ranks, self.comm.rank)

    def ended(self, work: Work) -> None:
        if work is self._last:  # it holds tensors
            self._last = None

    def found(self, error: Exception) -> None:
        if isinstance(error, MismatchError) and not self._unseen:  # other errors break the communicator
            self._unseen = error

    def shown(self, error: Exception) -> None:
        if error is self._unseen:
            self._unseen = None

    # --- Helpers ------------------------------------------------------------------------------------------------------

    def _run(self, name: str, opts: Any, call: CallTensors, outputs: Tensors, *arguments: Any) -> TorchWork:
        """Make the call and return its handle. `opts` is None for point-to-point, which torch always waits for."""
        for record in observers.recorders:
            record(self, name, outputs)
        async_op = _is_async(opts)
        options = {"at_most": True} if name == "recv" else {}  # a tensor may be larger than the message, as on Gloo
        call_comm = observers.timed(getattr(self.comm, name))
        result = call_comm(*arguments, timeout=self._limit(opts), async_op=async_op, **options)
        return self._handle(opts, call, [result] if async_op else (), outputs)

    def _handle(self, opts: Any, call: CallTensors, works: Sequence[Work], outputs: Tensors) -> TorchWork:
        """Return the handle of a call that runs as these works; a blocking one has none."""
        if opts is not None:
            self._begun += 1
        if works:
            handle = TorchWork.made(self, works, outputs, call.copies)
            if opts is not None:
                self._last = works[-1]
            if handle.is_registered and Base is c10d.ProcessGroup:  # else torch's group registers the work
                inflight.register(handle)
        else:
            if call.copies:
                write_back(call.copies)
            is_used = self._coalesced is not None or inflight.allowed()
            handle = TorchWork.made(self, (), outputs) if is_used else DONE
        if self._coalesced is not None:
            self._coalesced.append(handle)
        return handle

    def _is_plain(self, opts: Any = None) -> bool:
        """Return whether a call has the usual time, and no tool watches it."""
        watched = observers.watched() or inflight.allowed() or observers.recorders or observers.waits
        return self._timeout is None and not watched and (opts is None or opts.timeout == UNSET)

    def _limit(self, opts: Any) -> float | None:
        """Return the timeout of a call in seconds; None: the communicator's."""
        if opts is not None and (given := opts.timeout) != UNSET:
            return seconds(given) or self._timeout
        return self._timeout


for _name, _older in observers.OLDER.items():
    setattr(RingcommProcessGroup, _older, getattr(RingcommProcessGroup, _name))


def _is_async(opts: Any) -> bool:
    """Return whether the caller does not wait. Before torch had asyncOp, it waited for the handle of each call."""
    return opts is None or getattr(opts, "asyncOp", True)
