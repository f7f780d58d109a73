"""1-bit Adam: after a warm-up, replicas exchange the signs of their momenta in place of gradients.

Adam divides the momentum by the root of the variance, so errors of compressed gradients would not cancel over time. But
the variance soon hardly changes. So plain Adam runs first; then the variance is frozen, and the update is linear in the
gradients. Each rank sends chunk j of its momentum, compressed to a bit per element and a scale, to rank j, its server.
The server sends the mean, compressed again, to all. Each adds what a compression lost to what it compresses next.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from ringcomm.errors import integer
from ringcomm.parallel.collectives import all_gather_single
from ringcomm.parallel.data.buckets import GradientBucket, partition
from ringcomm.parallel.grid import Axis
from ringcomm.parallel.replicas import broadcast_from_first, check_replicas

__all__ = ["OneBitAdam"]

PLACES = torch.arange(8, dtype=torch.uint8).view(8, 1)  # of the bits in a byte


class OneBitAdam(Optimizer):
    """Adam that averages over the replicas itself, with one bit per element after the warm-up.

    After Tang et al., 1-bit Adam (arXiv 2102.02888), with the error feedback of worker and server. It takes the place
    of an optimizer and of a DataParallel, which must not average the gradients too. ::

        optimizer = OneBitAdam(model.parameters(), grid.dp_cp, lr=1e-3, warmup_steps=1000)
        loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    Parameters stay equal on all replicas, bit for bit. The warm-up gives the bits of a DataParallel with torch's AdamW;
    it must be long enough for the variance to settle. The paper then compresses the momentum m and divides it by
    √v + ε, where v is the frozen variance. Here the quotient is compressed: its elements have similar sizes in all
    layers, so one scale per chunk suffices, and no element with a small variance gets a large step. An element whose
    gradients were all zero in the warm-up has no variance, and does not change afterwards.

    Let N be the elements that had a gradient in the warm-up, padded to a multiple of 8n for n replicas. Each has three
    numbers afterwards, one more than in Adam: the direction, its divisor √v + ε, and the error of the worker. That of
    the server has N/n elements. Errors are float32, or float64 if the first parameter is.

    Communication: at construction, a broadcast of the parameters from the first replica. A step of the warm-up
    all-reduces the gradients, which sends 2(n-1)/n · 4N bytes in float32. Each later step has an all-to-all and an
    all-gather, which send 2(n-1)/n · (N/8 + 4n) bytes together: at least 31 times fewer if N ≥ 992n.

    Args:
        parameters: the parameters, or groups of them with options, as for any optimizer of torch; equal on all
            replicas, unlike those of `Experts`
        axis: the replicas, `grid.dp_cp`
        lr, betas, eps, weight_decay: as those of AdamW, also in groups
        warmup_steps: number of steps of plain Adam

    Raises:
        ArgumentError: the replicas differ in a parameter's shape or dtype, or `warmup_steps` is not positive
        ValueError: torch's, if another option is out of range
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        axis: Axis,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int,
    ) -> None:
        self._adam = AdamW(parameters, lr, betas, eps, weight_decay)
        super().__init__(self._adam.param_groups, self._adam.defaults)
        self.axis, self.warmup_steps = axis, integer("warmup_steps", warmup_steps, 1)
        self._buckets: list[GradientBucket] = []  # of the warm-up
        self._errors: tuple[Tensor, Tensor] | None = None  # of the last compressions, as worker and as server
        trained = nn.ParameterList(parameter for _, parameter in self._trained())
        check_replicas(trained, axis)
        broadcast_from_first(trained, axis)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average over the replicas and update the parameters; return the result of `closure`, which runs first.

        Every replica calls it. A replica without a gradient of a parameter contributes zeros; in the warm-up, a
        parameter without a gradient on all replicas is skipped. Sparse gradients raise ArgumentError.
        """
        loss = None
        if closure:
            with torch.enable_grad():
                loss = closure()
        if any("divisor" in state for state in self.state.values()):
            self._step_compressed()
        else:
            self._average_gradients()
            self._adam.state, self._adam.param_groups = self.state, self.param_groups  # loading replaces them
            self._adam.step()
            if any(state["step"] >= self.warmup_steps for state in self.state.values()):
                self._freeze_variance()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which is equal on all replicas, except "errors": each replica restores only its own.

        Without "errors", or on another number of replicas, these restart from zero.
        """
        return {**super().state_dict(), "errors": self._errors}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, exactly."""
        super().load_state_dict(dict(state_dict))
        errors, device = state_dict.get("errors"), self.param_groups[0]["params"][0].device
        self._errors = errors and (errors[0].to(device), errors[1].to(device))

    def _trained(self) -> list[tuple[dict[str, Any], Tensor]]:
        """Return the parameters that require gradients, each with its group."""
        return [(group, each) for group in self.param_groups for each in group["params"] if each.requires_grad]

    def _average_gradients(self) -> None:
        if not self._buckets:
            lists = partition((each for _, each in self._trained()[::-1]), 25 << 20)  # as in DataParallel
            self._buckets = [GradientBucket(each, self.axis) for each in lists]
        for bucket in self._buckets:
            for parameter in bucket.views:
                bucket.collect(parameter)
            bucket.send()
        for bucket in self._buckets:
            bucket.wait()

    def _freeze_variance(self) -> None:
        """Keep √v + ε, and divide the momentum by it; divide by infinity where the variance is zero."""
        for group, parameter in self._trained():
            if state := self.state.get(parameter):
                variance, correction = state.pop("exp_avg_sq"), 1 - group["betas"][1] ** float(state["step"])
                divisor = (variance / correction).sqrt_().add_(group["eps"])
                state["divisor"] = divisor.masked_fill_(variance == 0, float("inf"))
                state["direction"] = state.pop("exp_avg").div_(divisor)
        self._buckets = []

    def _step_compressed(self) -> None:
        trained = [(group, parameter) for group, parameter in self._trained() if parameter in self.state]
        sizes = [parameter.numel() for _, parameter in trained]
        worker, server = self._errors = self._feedback(trained[0][1], sum(sizes))
        for (group, parameter), total in zip(trained, torch.split(worker[: sum(sizes)], sizes), strict=True):
            state, beta = self.state[parameter], group["betas"][0]
            total += beta * state["direction"].flatten()
            if parameter.grad is not None:
                total += (1 - beta) * (parameter.grad / state["divisor"]).flatten()
        mean = compressed_mean(worker, server, self.axis)
        for (group, parameter), direction in zip(trained, torch.split(mean[: sum(sizes)], sizes), strict=True):
            state, beta = self.state[parameter], group["betas"][0]
            state["step"] += 1
            state["direction"].copy_(direction.view(parameter.shape)).masked_fill_(state["divisor"].isinf(), 0.0)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(state["direction"], alpha=-group["lr"] / (1 - beta ** float(state["step"])))

    def _feedback(self, like: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the errors of the worker, for `count` elements and padding, and of the server, for one chunk."""
        n, chunk = self.axis.size, 8 * -(-count // (8 * self.axis.size))
        if self._errors and [len(error) for error in self._errors] == [n * chunk, chunk]:
            return self._errors
        like = like.new_zeros((), dtype=torch.promote_types(like.dtype, torch.float32))
        return like.new_zeros(n * chunk), like.new_zeros(chunk)


def compressed_mean(worker: Tensor, server: Tensor, axis: Axis) -> Tensor:
    """Return the mean over the ranks, compressed twice, with the same bits on every rank: (N,), (N/n,) → (N,).

    `worker` is this rank's vector plus the error of its last compression, `server` the error of the last compression
    of this rank's chunk of the mean. Both are replaced by the new errors.
    """
    sent = compress(worker.view(axis.size, -1))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=axis.group)
    server += decompress(received, server.dtype).mean(0)
    gathered = torch.empty_like(sent)
    all_gather_single(gathered, compress(server.view(1, -1)), group=axis.group)
    return decompress(gathered, server.dtype).view(-1)


def compress(chunks: Tensor) -> Tensor:
    """Return the scale and the signs of each chunk, (k, L) → bytes (k, size of a scale + L/8); leave the error.

    The scale is the mean absolute value: of all factors of the signs it leaves the error with the smallest norm.
    """
    scale = chunks.abs().mean(1, keepdim=True)
    positive = chunks >= 0
    chunks -= torch.where(positive, scale, -scale)
    bits = positive.view(len(chunks), 8, -1).byte() << PLACES.to(chunks.device)
    return torch.cat([scale.view(torch.uint8), bits.sum(1, dtype=torch.uint8)], 1)


def decompress(message: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the chunks of a message, (k, L): each element is the scale with the sign."""
    scale, packed = torch.split(message, [dtype.itemsize, message.shape[1] - dtype.itemsize], 1)
    scale = scale.flatten().view(dtype).unsqueeze(1)
    bits = packed.unsqueeze(1) >> PLACES.to(message.device) & 1
    return torch.where(bits.flatten(1).bool(), scale, -scale)
