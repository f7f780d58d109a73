"""How a method of c10d becomes a call of the communicator: options, reductions, what tools see, errors."""

from collections.abc import Callable
from contextlib import suppress
from functools import reduce, wraps
from inspect import Parameter, Signature, signature
from typing import Any

import torch
import torch.distributed as dist

from ringcomm import RingcommError, premul_sum, types
from ringcomm.errors import ArgumentError, refuse
from ringcomm.torch import observers
from ringcomm.torch.compat.native import PYTHON_BACKENDS
from ringcomm.torch.compat.subclasses import NoMemory, Wrapper
from ringcomm.torch.compat.wrappers import calls_of
from ringcomm.torch.tensors import CallTensors, Tensors
from ringcomm.torch.works import TorchWork, coalesced

__all__ = ["DONE", "Prepared", "flat", "merged", "operation", "reduction", "uneven"]

DONE = TorchWork()  # of blocking calls: torch only checks that they are complete

Prepared = tuple[Any, ...] | TorchWork  # the outputs of a call, and the arguments of the communicator's method
_Op: Any = dist.distributed_c10d.ReduceOp.RedOpType
INPUTS = {"tensors", "inputs", "input", "input_lists"}  # the names of parameters
# By number: comparing or hashing torch's enumerators costs as much as a small call.
OPS = {
    getattr(_Op, torch_name).value: name
    for name in types.OPS
    if hasattr(_Op, torch_name := "PRODUCT" if name == "prod" else str(name).upper())
}

MERGES: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def operation(
    name: str, options: Callable[[], Any] | None = None, of_many: bool = False
) -> Callable[[Callable[..., Prepared]], Callable[..., TorchWork]]:
    """Make a method of c10d of one that prepares the communicator's call of that name.

    The method takes options last, by default those that `options` makes; without it, none. `prepare` takes them and an
    empty CallTensors first. It may make the call itself, or many, and then returns the work.
    """

    def method_of(prepare: Callable[..., Prepared]) -> Callable[..., TorchWork]:
        this, _, _, *parameters = signature(prepare).parameters.values()
        last = [Parameter("opts", Parameter.POSITIONAL_OR_KEYWORD, default=None)] if options else []
        public, count = Signature([this, *parameters, *last]), len(parameters)
        inputs = next((number for number, each in enumerate(parameters) if each.name in INPUTS), count)

        @wraps(prepare)
        def method(self: Any, *arguments: Any, **named: Any) -> TorchWork:
            if named or not count <= len(arguments) <= count + len(last):  # torch passes all by position
                arguments = public.bind(self, *arguments, **named).args[1:]
            opts = arguments[count] if len(arguments) > count else None
            if options:
                opts = opts or options()
            own = arguments[:count]
            if not observers.watched():
                return _perform(self, name, prepare, opts, own, arguments)
            shown = (prepare.__name__, arguments) if of_many else ()
            with observers.label(self, name, own[inputs : inputs + 1], *shown):
                return _perform(self, name, prepare, opts, own, arguments)

        method.__signature__ = public  # type: ignore[attr-defined]  # it is a function
        return method

    return method_of


def _perform(
    group: Any, name: str, prepare: Callable[..., Prepared], opts: Any, own: tuple[Any, ...], arguments: tuple[Any, ...]
) -> TorchWork:
    """Make the communicator's call of a name, given the arguments of c10d's method: all, and those beside options."""
    call, method = CallTensors(), prepare.__name__
    try:
        prepared = prepare(group, opts, call, *own)
        observers.show_to_modes(group, method, arguments)  # which need checked arguments
        return prepared if isinstance(prepared, TorchWork) else group._run(name, opts, call, *prepared)
    except NoMemory:
        return DONE
    except Wrapper:
        return coalesced(group, *calls_of(group, method, own if opts is None else (*own, opts), DONE))
    except RingcommError as error:
        is_single = group._coalesced is None
        with suppress(RingcommError):  # the first error is raised
            group._stop_coalescing()  # torch does not, when a call of a batch raises
        error = group.annotated(error)
        # torch calls its post-hooks for calls that return, and waits for the work. Before 2.14 it has none.
        if PYTHON_BACKENDS and is_single and not isinstance(error, ArgumentError):
            return TorchWork.failed(group, error)
        raise error


def reduction(opts: Any) -> Any:
    """Return the op of torch's options, as the communicator takes it."""
    op = opts.reduceOp
    return OPS.get(op.op.value) or premul_sum(float(op.__getstate__()[1]))


def merged(tensors: Tensors, op: Any) -> torch.Tensor:
    """Return the reduction of tensors of this rank, as a new one."""
    if op not in MERGES:
        raise refuse("op", f"one of {', '.join(MERGES)} for several tensors", op)
    shapes = {(tensor.shape, tensor.dtype) for tensor in tensors}
    if len(shapes) > 1:
        raise refuse("tensors", "tensors of one shape and dtype", [(tuple(shape), dtype) for shape, dtype in shapes])
    with torch.no_grad():
        return reduce(MERGES[op], tensors)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 1 else tensor.view(-1)  # a view costs as much as a small call


def uneven(tensors: Tensors) -> list[int] | None:
    """Return the number of elements of each tensor, if these differ."""
    counts = [tensor.numel() for tensor in tensors]
    return counts if len(set(counts)) > 1 else None
