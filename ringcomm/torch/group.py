"""A torch.distributed group whose calls are those of a communicator.

torch calls the operations of a group by the names of c10d, which differ between its versions: both are defined. What
cannot be used in place is copied once, and written back when the call is done (memory.py).
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar, cast
from weakref import WeakSet

import torch
import torch.distributed as dist

from ringcomm import Aborted, Communicator, RingcommError, premul_sum
from ringcomm.errors import refuse
from ringcomm.torch import labels
from ringcomm.torch.memory import Memory, Tensors, only, write_back
from ringcomm.torch.start import connect
from ringcomm.torch.works import Done, Handle, Running, joined, seconds

__all__ = ["Group", "create"]

c10d: Any = dist.distributed_c10d  # torch's stubs leave out much of what it calls

# From torch 2.14 on a backend can be written in Python, and a group can have others for other devices. Before, only a
# whole group can.
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
Base: Any = torch._C._distributed_c10d.Backend if TORCH >= (2, 14) else c10d.ProcessGroup

UNSET = timedelta(milliseconds=-1)  # a timeout that torch leaves to the group
DONE = Done()  # torch only looks whether a blocking call is done

Lists = Sequence[Tensors]
Method = TypeVar("Method", bound=Callable[..., Any])
_Op = c10d.ReduceOp.RedOpType
SUM = _Op.SUM
OPS = {
    _Op.SUM: "sum",
    _Op.AVG: "avg",
    _Op.PRODUCT: "prod",
    _Op.MIN: "min",
    _Op.MAX: "max",
    _Op.BAND: "band",
    _Op.BOR: "bor",
    _Op.BXOR: "bxor",
}


def explained(method: Method) -> Method:
    """Let what a method refuses be told in the words of its group."""

    @wraps(method)
    def explaining(self: "Group", *arguments: Any, **options: Any) -> Any:
        try:
            return method(self, *arguments, **options)
        except RingcommError as error:
            raise self.explained(error)  # noqa: B904 (it is the same error)

    return cast(Method, explaining)


def create(options: Any) -> "Group":
    """Return the group that torch asks for with its DistributedBackendOptions; every member does it."""
    name, ranks = options.group_id, list(options.global_ranks_in_group)
    try:
        return Group(connect(options), name, ranks)
    except RingcommError as error:
        raise told(error, name, ranks, options.group_rank)  # noqa: B904 (it is the same error)


def told(error: RingcommError, name: str, ranks: list[int], rank: int) -> RingcommError:
    """Say in the error which group it was, once: ranks in messages are those of the group."""
    group = f"in the torch.distributed group {name!r}"
    if group not in str(error):
        where = f"ranks {ranks} of the world" if ranks else "the world"
        error.args = (f"{error}\n{group} ({where}), on its rank {rank}",)
    return error


class Group(Base):  # type: ignore[misc]
    """One rank's end of a group. Ranks in its calls and errors are those of the group, as everywhere in c10d."""

    def __init__(self, comm: Communicator, name: str, ranks: list[int]) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm = comm
        self._name, self._description = name, "undefined"
        self._ranks = ranks  # in the world; empty for the world itself
        self._timeout: float | None = None  # None: the communicator's
        self._coalesced: list[Handle] | None = None
        self._running: WeakSet[Running] = WeakSet()  # collectives

    # --- Collectives --------------------------------------------------------------------------------------------------

    @explained
    def allreduce(self, tensors: Tensors, opts: Any = None) -> Handle:
        opts = opts or c10d.AllreduceOptions()
        memory = Memory()
        x = memory.both(only(tensors), reduces=True)
        return self._run("all_reduce", opts, tensors, memory, self.comm.all_reduce, x, _op(opts))

    @explained
    def reduce(self, tensors: Tensors, opts: Any = None) -> Handle:
        opts = opts or c10d.ReduceOptions()
        memory = Memory()
        tensor = only(tensors)
        take = memory.both if self.comm.rank == opts.rootRank else memory.source
        x = take(tensor, reduces=True)
        return self._run("reduce", opts, tensors, memory, self.comm.reduce, x, _op(opts), opts.rootRank)

    @explained
    def broadcast(self, tensors: Tensors, opts: Any = None) -> Handle:
        opts = opts or c10d.BroadcastOptions()
        memory = Memory()
        tensor = only(tensors)
        x = memory.source(tensor) if self.comm.rank == opts.rootRank else memory.target(tensor)
        return self._run("broadcast", opts, tensors, memory, self.comm.broadcast, x, opts.rootRank)

    @explained
    def allgather(self, output_lists: Lists, inputs: Tensors, opts: Any = None) -> Handle:
        opts = opts or c10d.AllgatherOptions()
        memory = Memory()
        outputs = self._all_ranks(only(output_lists))
        out, counts = memory.targets(outputs), _uneven(outputs)
        x = memory.source(only(inputs)).view(-1)
        x = memory.beside(x, out, sum(part.numel() for part in outputs[: self.comm.rank]))
        return self._run("all_gather", opts, outputs, memory, self.comm.all_gather, x, out, counts)

    @explained
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Handle:  # noqa: A002
        opts = opts or c10d.AllgatherOptions()
        memory = Memory()
        x, out = memory.source(input), memory.target(output)
        return self._run("all_gather", opts, [output], memory, self.comm.all_gather, x, out)

    @explained
    def gather(self, output_lists: Lists, inputs: Tensors, opts: Any = None) -> Handle:
        opts = opts or c10d.GatherOptions()
        memory = Memory()
        x = memory.source(only(inputs))
        outputs: Tensors = ()
        out = None
        if self.comm.rank == opts.rootRank:
            outputs = self._all_ranks(only(output_lists), only(inputs))
            out = memory.targets(outputs)
        return self._run("gather", opts, outputs, memory, self.comm.gather, x, out, opts.rootRank)

    @explained
    def scatter(self, outputs: Tensors, input_lists: Lists, opts: Any = None) -> Handle:
        opts = opts or c10d.ScatterOptions()
        memory = Memory()
        x = None
        if self.comm.rank == opts.rootRank:
            x = memory.sources(self._all_ranks(only(input_lists), only(outputs)))
        out = memory.target(only(outputs))
        return self._run("scatter", opts, outputs, memory, self.comm.scatter, x, out, opts.rootRank)

    @explained
    def reduce_scatter(self, outputs: Tensors, input_lists: Lists, opts: Any = None) -> Handle:
        opts = opts or c10d.ReduceScatterOptions()
        memory = Memory()
        inputs = self._all_ranks(only(input_lists))
        x, out = memory.sources(inputs, reduces=True), memory.target(only(outputs), reduces=True)
        call = self.comm.reduce_scatter
        return self._run("reduce_scatter", opts, outputs, memory, call, x, _op(opts), out, _uneven(inputs))

    @explained
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Handle:  # noqa: A002
        opts = opts or c10d.ReduceScatterOptions()
        memory = Memory()
        x, out = memory.source(input, reduces=True).view(-1), memory.target(output, reduces=True)
        return self._run("reduce_scatter", opts, [output], memory, self.comm.reduce_scatter, x, _op(opts), out)

    @explained
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Handle:
        opts = opts or c10d.AllToAllOptions()
        memory = Memory()
        x, out = memory.sources(self._all_ranks(inputs)), memory.targets(self._all_ranks(outputs))
        counts = [[tensor.numel() for tensor in tensors] for tensors in (inputs, outputs)]
        return self._run("all_to_all", opts, outputs, memory, self.comm.all_to_all, x, out, *counts)

    @explained
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Handle:
        opts = opts or c10d.AllToAllOptions()
        memory = Memory()
        x, out = memory.source(input).view(-1), memory.target(output).view(-1)
        counts = self._splits(input, input_splits, x.numel()), self._splits(output, output_splits, out.numel())
        return self._run("all_to_all", opts, [output], memory, self.comm.all_to_all, x, out, *counts)

    @explained
    def barrier(self, opts: Any = None) -> Handle:
        return self._run("barrier", opts or c10d.BarrierOptions(), (), Memory(), self.comm.barrier)

    # --- Many at once -------------------------------------------------------------------------------------------------

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Handle:
        opts = opts or c10d.AllreduceCoalescedOptions()
        return joined(self, "all_reduce", [self.allreduce([tensor], opts) for tensor in tensors])

    @explained
    def allgather_coalesced(self, output_lists: Lists, inputs: Tensors, opts: Any = None) -> Handle:
        opts = opts or c10d.AllgatherOptions()
        outputs_of_each = zip(*self._all_ranks(output_lists), strict=True)
        pairs = zip(outputs_of_each, inputs, strict=True)
        return joined(self, "all_gather", [self.allgather([list(outputs)], [x], opts) for outputs, x in pairs])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Handle:
        pairs = zip(outputs, inputs, strict=True)
        return joined(self, "all_gather", [self.all_gather_single(out, x, opts) for out, x in pairs])

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Handle:
        pairs = zip(outputs, inputs, strict=True)
        return joined(self, "reduce_scatter", [self.reduce_scatter_single(out, x, opts) for out, x in pairs])

    def _start_coalescing(self, device: object = None) -> None:  # noqa: ARG002
        self._coalesced = []

    def _end_coalescing(self, device: object = None) -> Handle:  # noqa: ARG002
        works, self._coalesced = self._coalesced, None
        return joined(self, "coalesced calls", works or [])

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing  # of a Backend
    supports_coalescing = supports_splitting = False  # point-to-point need not be coalesced; a group is made anew

    # --- Point to point -----------------------------------------------------------------------------------------------

    @explained
    def send(self, tensors: Tensors, peer: int, tag: int) -> Handle:
        memory = Memory()
        return self._run("send", None, tensors, memory, self.comm.send, memory.source(only(tensors)), peer, tag)

    @explained
    def recv(self, tensors: Tensors, peer: int | None, tag: int) -> Handle:
        memory = Memory()
        return self._run("recv", None, tensors, memory, self.comm.recv, memory.target(only(tensors)), peer, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Handle:
        return self.recv(tensors, None, tag)

    # The names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # --- The group itself ---------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802
        return "ringcomm"

    name = getBackendName

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc  # noqa: N815

    def set_timeout(self, timeout: timedelta) -> None:
        """Let later calls wait so long."""
        self._timeout = seconds(timeout)

    def abort(self) -> None:
        """Break the group, on all ranks, and tell them which error this rank handles, if it does."""
        error = sys.exc_info()[1]
        why = f": {type(error).__name__}: {str(error).partition(chr(10))[0]}" if error else ""
        first = isinstance(error, Aborted)  # that is why; it came from another group
        self.comm.abort(
            str(error) if first else f"rank {dist.get_rank()} aborted the torch.distributed group {self._name}{why}"
        )

    def shutdown(self) -> None:
        """End this rank's part, after the collectives that it has begun; messages that nobody has taken are dropped."""
        for work in list(self._running):
            with suppress(RingcommError):  # whoever waits for it is told
                work.wait()
        self.comm.close()

    def explained(self, error: RingcommError) -> RingcommError:
        return told(error, self._name, self._ranks, self.comm.rank)

    # --- Helpers ------------------------------------------------------------------------------------------------------

    def _run(
        self, name: str, opts: Any, outputs: Tensors, memory: Memory, call: Callable[..., Any], *arguments: Any
    ) -> Handle:
        """Make the call and return its handle. `opts` are None for point-to-point, which torch always waits for."""
        timeout = self._timeout
        if opts is not None and (given := opts.timeout) != UNSET:
            timeout = seconds(given) or timeout
        # Before torch had asyncOp, the caller always waited for the handle.
        runs_on = opts is None or getattr(opts, "asyncOp", True)
        with labels.label(self, name, outputs) if labels.enabled else nullcontext():
            result = call(*arguments, timeout=timeout, async_op=runs_on)
        work: Handle
        if runs_on:
            work = Running(self, name, [result], outputs, memory.copies)
            if opts is not None:
                self._running.add(work)
        else:
            if memory.copies:
                write_back(memory.copies)
            work = DONE if self._coalesced is None else Done(outputs)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _all_ranks(self, things: Sequence[Any], like: torch.Tensor | None = None) -> Sequence[Any]:
        """Return what must be one thing for each rank: tensors of the size of `like`, if that is given."""
        if len(things) != self.comm.size:
            raise refuse("the list", f"a tensor for each of {self.comm.size} ranks", f"{len(things)} tensors")
        if like is not None and any(tensor.numel() != like.numel() for tensor in things):
            sizes = ", ".join(str(tensor.numel()) for tensor in things)
            raise refuse("the list", f"tensors of {like.numel()} elements", f"such of {sizes}")
        return things

    def _splits(self, tensor: torch.Tensor, splits: Sequence[int], elements: int) -> list[int]:
        """Return the elements for, or from, each rank; torch gives rows, and none where they are equal."""
        rows = tensor.shape[0] if tensor.dim() else 0
        if not splits:
            if rows % self.comm.size:
                raise refuse("axis 0", f"a multiple of {self.comm.size} rows, or split sizes", f"{rows} rows")
            splits = [rows // self.comm.size] * self.comm.size
        if sum(splits) != rows or len(splits) != self.comm.size:
            raise refuse("split sizes", f"{self.comm.size} that are {rows} rows in all", list(splits))
        return [split * (elements // rows) if rows else 0 for split in splits]


def _op(opts: Any) -> Any:
    op = opts.reduceOp.op
    if op == SUM:  # hashing torch's enumerators costs as much as a small call
        return "sum"
    return OPS.get(op) or premul_sum(float(opts.reduceOp.__getstate__()[1]))


def _uneven(tensors: Tensors) -> list[int] | None:
    """Return how many elements each has, if they differ."""
    counts = [tensor.numel() for tensor in tensors]
    return counts if len(set(counts)) > 1 else None
