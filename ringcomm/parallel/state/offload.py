"""Optimizer states off the device, moved to it in chunks while the optimizer steps.

An optimizer that updates each element by itself can update a model piece by piece: while one chunk of pieces is
updated, a thread writes the chunk before it and reads the next.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ringcomm.errors import integer, refuse
from ringcomm.parallel.state.elementwise import VECTOR, check_elementwise
from ringcomm.parallel.state.host_memory import Folder, host_empty
from ringcomm.parallel.state.optimizers import create_optimizer, optimized

__all__ = ["OffloadedOptimizer"]

Factory = Callable[[Any], Optimizer]
State = dict[str, Any]
Piece = tuple["_Span", nn.Parameter, State]  # a span on the device, as the optimizer updates it, and its state


class OffloadedOptimizer(Optimizer):
    """Runs an optimizer whose states are off the device, in host memory or in memory-mapped files.

    After Ren et al., ZeRO-Offload (arXiv 2101.06840), which keeps states in host memory; Rajbhandari et al.,
    ZeRO-Infinity (arXiv 2104.07857), which keeps them on disks; and Fang et al., PatrickStar (arXiv 2108.05818), which
    moves them in chunks. Unlike ZeRO-Offload, it computes where the parameters are. ::

        adam = partial(torch.optim.AdamW, lr=1e-3)
        offloaded = partial(OffloadedOptimizer, factory=adam, folder="/scratch")
        zero = ShardedOptimizer(chunks, grid, offloaded, torch.bfloat16)

    The optimizer must update each element by itself (SGD, Adam, AdamW); then parameters and states get the same bits as
    without this class. On the device are no states between steps, those of two chunks at most during a step. Gradients
    stay where they are. Without a folder, parameters on a CPU gain nothing. No communication.

    Args:
        params: parameters, or groups of them
        factory: creates the optimizer of `params`. It is tried on small matrices first.
        folder: where to keep the states, in files that vanish with the optimizer, or with the process, however it ends.
            None: in host memory, pinned for parameters on a GPU
        chunk_bytes: bytes of the parameters of a chunk

    Attributes:
        inner: the optimizer of `factory`

    Raises:
        ArgumentError: `factory` creates no optimizer, there are no parameters, one is not contiguous, the optimizer
            does not update each element by itself, or the folder cannot be written to; in a step, it is full.
    """

    def __init__(
        self, params: Any, factory: Factory, *, folder: Folder | None = None, chunk_bytes: int = 64 << 20
    ) -> None:
        self._folder, self._chunk_bytes = folder, integer("chunk_bytes", chunk_bytes, 1)
        host_empty(torch.empty(1), folder)  # refuses a bad folder here, not in the first step
        params = list(params)
        given = (x for x in tree_leaves(params) if isinstance(x, Tensor))
        check_elementwise("factory", factory, next((x.device for x in given), torch.device("cpu")))
        self.inner = create_optimizer("factory", factory, params)
        super().__init__(self.inner.param_groups, self.inner.defaults)
        for parameter in optimized(self):
            if not parameter.is_contiguous():
                raise refuse("parameters", "contiguous ones", f"one of strides {parameter.stride()}")
        self.state = self.inner.state  # that of Adagrad exists before the first step
        self._homes: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)  # of states, by parameter and key
        self._devices: dict[Tensor, torch.device] = {}  # of the parameters that are off the device too

    def offload_parameters(self) -> None:
        """Move the parameters too: masters. `MixedPrecision` and `ShardedOptimizer` call it for a model of 16 bits."""
        for parameter in optimized(self):
            self._devices.setdefault(parameter, parameter.device)
            parameter.data = self._host(parameter, parameter.dtype).copy_(parameter.detach())

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # without a closure
        """Update the parameters that have gradients."""
        chunks, writes = [*self._chunks(), []], []
        states: dict[Tensor, State] = defaultdict(dict)  # of parameters of which not all pieces are updated
        with _background(self._device(next(optimized(self)))) as submit:
            read = submit(self._read, chunks[0])
            for _, following in pairwise(chunks):
                pieces = read.result()
                read = submit(self._read, following)
                writes.append(submit(_copy, self._update(pieces, states)))
        for write in writes:
            write.result()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load states of this class, or of the optimizer without it.

        Raises:
            ArgumentError: a state does not have the shape of its parameter. Nothing is loaded.
        """
        states = state_dict["state"]
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        given = [(p, states[n]) for n, p in zip(numbers, optimized(self), strict=False) if n in states]
        large = [(parameter, key, x) for parameter, state in given for key, x in state.items() if _is_large(x)]
        for parameter, key, x in large:
            if x.shape != parameter.shape:
                raise refuse(f"shape of the state {key}", tuple(parameter.shape), tuple(x.shape))
        small = {number: {key: x for key, x in each.items() if not _is_large(x)} for number, each in states.items()}
        super().load_state_dict({**state_dict, "state": small})
        self._homes.clear()  # an earlier `state_dict` refers to them
        for parameter, key, x in large:
            home = self._host(parameter, parameter.dtype).copy_(x)
            self._homes[parameter][key] = self.state[parameter][key] = home

    def _device(self, parameter: Tensor) -> torch.device:
        """Return the device on which a parameter is updated."""
        return self._devices.get(parameter, parameter.device)

    def _host(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Return memory off the device, of the shape of a parameter."""
        like = torch.empty(parameter.shape, dtype=dtype, device="meta")
        return host_empty(like, self._folder, pinned=self._device(parameter).type == "cuda")

    def _chunks(self) -> Iterator[list["_Span"]]:
        """Divide the parameters that have gradients into chunks of spans."""
        chunk, room = [], self._chunk_bytes
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                begin, size = 0, parameter.element_size()
                while parameter.grad is not None and begin < parameter.numel():
                    end = min(parameter.numel(), begin + -(-room // (VECTOR * size)) * VECTOR)
                    chunk.append(_Span(number, parameter, parameter.grad, begin, end))
                    begin, room = end, room - (end - begin) * size
                    if room <= 0:
                        yield chunk
                        chunk, room = [], self._chunk_bytes
        if chunk:
            yield chunk

    def _read(self, chunk: list["_Span"]) -> list[Piece]:
        """Copy a chunk to the device, except for parameters and gradients that are there."""
        pieces = []
        for span in chunk:
            parameter, group = span.parameter, self.param_groups[span.group]
            to = partial(Tensor.to, device=self._device(parameter), non_blocking=True)
            value = nn.Parameter(to(span.of(parameter), copy=parameter in self._devices))
            value.grad = to(span.of(span.grad.contiguous()))
            state = dict(self.state.get(parameter, {}))
            for key, x in state.items():
                if _is_large(x):
                    state[key] = to(span.of(x), copy=True)
                elif isinstance(x, Tensor):  # the number of steps, which each piece counts
                    state[key] = to(x, copy=True) if group.get("fused") or group.get("capturable") else x.clone()
            pieces.append((span, value, state))
        return pieces

    def _update(self, pieces: list[Piece], states: dict[Tensor, State]) -> list[tuple[Tensor, Tensor]]:
        """Update a chunk. Return what to copy: targets off the device with their sources."""
        optimizer = self.inner
        optimizer.param_groups = [
            {**self.defaults, **group, "params": [value for span, value, _ in pieces if span.group == number]}
            for number, group in enumerate(self.param_groups)
        ]
        optimizer.state = defaultdict(dict, {value: state for _, value, state in pieces})
        optimizer.step()
        copies = []
        for span, value, _ in pieces:
            parameter, homes = span.parameter, self._homes[span.parameter]
            for key, x in optimizer.state[value].items():
                if _is_large(x):
                    homes[key] = homes[key] if key in homes else self._host(parameter, x.dtype)
                    copies.append((span.of(homes[key]), x))
                states[parameter][key] = homes.get(key, x)
            if parameter in self._devices:
                copies.append((span.of(parameter), value.detach()))
            if span.end == parameter.numel() and parameter in states:
                self.state[parameter] = states.pop(parameter)
        optimizer.param_groups, optimizer.state = [], defaultdict(dict)
        return copies


class _Span(NamedTuple):
    """Consecutive elements of a parameter of a group."""

    group: int
    parameter: nn.Parameter
    grad: Tensor
    begin: int
    end: int

    def of(self, x: Tensor) -> Tensor:
        """Return these elements of a tensor of the parameter's shape, flat; a scalar stays one."""
        return x.detach().view(-1)[self.begin : self.end] if x.dim() else x.detach()


def _is_large(x: Any) -> bool:
    """Return whether a state has a number for each element."""
    return isinstance(x, Tensor) and x.dim() > 0


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


@contextmanager
def _background(device: torch.device) -> Iterator[Callable[..., "Future[Any]"]]:
    """Yield a function that runs others on a thread, in order; on a GPU, on a stream, after the work until then."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(before: Any, function: Callable[..., Any], *args: Any) -> Any:
        if stream is None:
            return function(*args)
        with torch.cuda.stream(stream):
            stream.wait_event(before)
            result = function(*args)
            stream.synchronize()
            return result

    def submit(function: Callable[..., Any], *args: Any) -> "Future[Any]":
        return thread.submit(run, stream and torch.cuda.current_stream(device).record_event(), function, *args)

    with ThreadPoolExecutor(1) as thread:
        yield submit
