"""Mixture of experts: an MLP of which every token uses a few parts, divided among replicas (expert parallelism).

A router chooses `top_k` of E experts for each token (Shazeer et al., Outrageously Large Neural Networks, arXiv
1701.06538). The n ranks of `grid.ep` hold E/n experts each, and send each token to the ranks of its experts and the
results back, by all-to-alls with counts. That follows Lepikhin et al., GShard (arXiv 2006.16668) and Fedus et al.,
Switch Transformers (arXiv 2101.03961). Without a capacity no token is dropped, as in Gale et al., MegaBlocks (arXiv
2211.15841).

All ranks of `grid.ep` must call a layer equally often, also in evaluation; a rank may have no tokens. An expert's
gradient is that of the mean of these ranks' losses. `DataParallel` averages it over `grid.edp`, the others over
`grid.dp_cp`.
"""

from math import inf
from typing import Any, Unpack

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import Tensor, nn

from ringcomm.errors import integer, refuse
from ringcomm.parallel.collectives import all_to_all_rows, copy_to
from ringcomm.parallel.experts.router import add_loss, balance_loss, by_expert, choose
from ringcomm.parallel.grid import Grid
from ringcomm.parallel.sharding import ExpertAxes, Modules, as_list
from ringcomm.parallel.tensor.layers import MLPOptions, ParallelMLP, enter, leave

__all__ = ["Experts", "set_loss_factor"]


class Experts(nn.Module):
    """A mixture-of-experts MLP: (B, S, H) → (B, S, H), or S/t in place of S with sequence parallelism.

    y = Σ gate_e · MLP_e(x) over the chosen experts e of a token. The router, a linear layer in float32, and a softmax
    give the probability of each expert, and these the gates (see `choose` in `router.py`).

    With a capacity, an expert computes at most ⌈capacity_factor · k · T / E⌉ of the T tokens of a rank in a call: first
    choices of all tokens before second ones, then earlier tokens before later ones. It adds nothing to the others.

    The balance loss, balance · E · Σ_e f_e · P_e, is least if all experts get equally many tokens: f_e is the part of
    choices that fell on e, before any are dropped, and P_e the mean probability of e, both of this rank's tokens in a
    call (Switch Transformers, equations 4 to 6). Backward adds its gradient to that of the model's loss, so a stage has
    one output; if that loss is multiplied by a factor, see `set_loss_factor`.

    Communication: let R of the k · T rows of a rank be for other ranks of `ep`, T tokens in all, and R' the rows they
    send here. Forward: all-to-alls of 8 · E · (n-1)/n bytes of counts, of R · H elements, and of R' · H back. Backward:
    all-to-alls of R · H and R' · H elements. On tp, that of entering and leaving the region as in a ParallelMLP, and of
    the T · E logits entering it; in backward, all-reduces of the gradients of the last biases of this rank's experts,
    and with sequence parallelism of the router's.

    Args:
        hidden: hidden size
        inner: size of the activations of an expert
        experts: number of experts in all
        grid: the ranks: `grid.ep` divides the experts, `grid.tp` shards each of them
        top_k: number of experts for a token
        capacity_factor: capacity of an expert relative to its part of evenly distributed tokens; None: no limit
        balance: coefficient of the balance loss
        mlp: options of each expert, and `sequence_parallel`, as those of a ParallelMLP; the router has no bias

    Attributes:
        router: the router, replicated
        experts: this rank's experts, by their number in the full model
        balance_loss: that of the last call, of this rank's tokens; nan without tokens
        dropped: number of choices that exceeded a capacity in the last call

    Raises:
        ArgumentError: `experts` is not a multiple of ep, `inner` not one of tp, `top_k` not from 1 to `experts`,
            `capacity_factor` not positive and finite, or `balance` negative.
    """

    balance_loss: Tensor
    dropped: int = 0

    def __init__(
        self,
        hidden: int,
        inner: int,
        experts: int,
        grid: Grid,
        *,
        top_k: int = 2,
        capacity_factor: float | None = None,
        balance: float = 0.01,
        **mlp: Unpack[MLPOptions],
    ) -> None:
        super().__init__()
        count = grid.ep.divide("experts", integer("experts", experts, 1))
        if capacity_factor is not None and not 0 < capacity_factor < inf:
            raise refuse("capacity_factor", "None or a finite number above 0", capacity_factor)
        if not balance >= 0:
            raise refuse("balance", "at least 0", balance)
        self.tp, self.ep, self.sequence_parallel = grid.tp, grid.ep, mlp.pop("sequence_parallel", False)
        self.top_k, self.capacity_factor, self.balance = integer("top_k", top_k, 1, experts), capacity_factor, balance
        self.loss_factor = 1.0
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = LocalExperts()
        for number in range(experts):  # each rank draws all, so that equal seeds give the weights of one process
            expert = Expert(hidden, inner, grid.tp, **mlp)
            if number // count == grid.ep.rank:
                expert.expert_axes = ExpertAxes(grid.ep, grid.edp)
                self.experts[str(number)] = expert

    def forward(self, x: Tensor) -> Tensor:
        logits = enter(self._logits(x), self.tp, self.sequence_parallel).flatten(0, -2)
        x = enter(x, self.tp, self.sequence_parallel)
        gates, chosen = self._choose(logits.softmax(-1))
        order, counts = by_expert(chosen.flatten(), self.router.out_features, self.capacity_factor)
        self.dropped = chosen.numel() - len(order)
        rows = self._exchange(x.flatten(0, -2)[order % len(logits)], counts)
        weighted = rows * gates.flatten()[order].unsqueeze(-1).to(rows.dtype)
        y = weighted.new_zeros(chosen.numel(), x.shape[-1]).index_put((order,), weighted)  # index_copy keeps its source
        return leave(y.view(self.top_k, *x.shape).sum(0), self.tp, self.sequence_parallel)

    def _logits(self, x: Tensor) -> Tensor:
        # With sequence parallelism, a rank has the logits of its tokens only, so the gradients must be summed.
        weight = copy_to(self.router.weight, self.tp) if self.sequence_parallel else self.router.weight
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(wide), weight.to(wide))

    def _choose(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        gates, chosen = choose(probabilities, self.top_k)
        loss = self.balance * balance_loss(probabilities, chosen)
        self.balance_loss = loss.detach()
        # The ranks of tp repeat this inside the region, where gradients are sums over them.
        return add_loss(gates, loss, self.loss_factor / self.tp.size), chosen

    def _exchange(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the results of the experts, on whichever rank, for rows in their order."""
        count = len(self.experts)
        sent = counts.view(self.ep.size, count)  # by rank and its experts
        received = sent.clone()
        if self.ep.size > 1:
            dist.all_to_all_single(received, sent, group=self.ep.group)
        outgoing, incoming = torch.stack([sent, received]).tolist()  # one wait for the GPU
        sends, receives = ([sum(row) for row in lengths] for lengths in (outgoing, incoming))
        got = all_to_all_rows(rows, self.ep, sends, receives, self.ep.size)
        parts = list(torch.split(got, [length for row in incoming for length in row]))  # by rank and expert
        for number, expert in enumerate(self.experts.values()):
            mine = parts[number::count]
            parts[number::count] = torch.split(expert(torch.cat(mine)), [len(part) for part in mine])
        return all_to_all_rows(torch.cat(parts), self.ep, receives, sends, 1 / self.ep.size)

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, capacity_factor={self.capacity_factor}, ep={self.ep.size}"


class LocalExperts(nn.ModuleDict):
    """The experts of a rank by their number. `load_state_dict` takes those of other ranks too, and ignores them."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        for name in list(state_dict):
            number = name.removeprefix(prefix).split(".")[0]
            if number.isdecimal() and number not in self:
                del state_dict[name]
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class Expert(ParallelMLP):
    """An MLP inside the tensor-parallel region: (rows, H) → (rows, H), of which the sum over tp is the result.

    Tokens leave the region after their results are added up, so `top_k` times fewer elements are reduced.
    """

    expert_axes: ExpertAxes

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.gate(x)) * self.up(x) if self.gate else self.activation(self.up(x))
        y = F.linear(y, self.down.weight)
        if self.down.bias is None:
            return y
        return y + (copy_to(self.down.bias, self.tp) / self.tp.size).to(y.dtype)


def set_loss_factor(chunks: Modules, factor: float) -> None:
    """Tell the layers with experts by what the loss is multiplied before backward, to scale their balance losses.

    For the mean over m micro-batches that is 1/m, times the loss scale of float16. `Pipeline` calls it.
    """
    for layer in nn.ModuleList(as_list(chunks)).modules():
        if isinstance(layer, Experts):
            layer.loss_factor = factor
