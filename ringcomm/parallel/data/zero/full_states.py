"""The states of an optimizer that has pieces in place of parameters: cut from full ones, and joined to full ones."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ringcomm.errors import refuse
from ringcomm.parallel.data.zero.parameters import ParameterShard
from ringcomm.parallel.grid import Axis
from ringcomm.parallel.state.optimizers import optimized

__all__ = ["MASTER", "ShardStates"]

MASTER = "master"  # key of the value of a piece beside its states


class ShardStates:
    """Gives an optimizer this replica's pieces in place of the parameters, and converts its states.

    A state of the shape of the parameter is cut as the parameter is; any other must be a number.

    Attributes:
        parameters: those that the optimizer had, in order: their numbers are those of torch's state dicts
        partitions: that of each parameter that is trained
    """

    def __init__(self, optimizer: Optimizer, shards: Sequence[ParameterShard]) -> None:
        self._optimizer = optimizer
        self.parameters = list(optimized(optimizer))
        self.partitions = {parameter: shard.partition for shard in shards for parameter in shard.pieces}
        pieces_of = {parameter: piece for shard in shards for parameter, piece in shard.pieces.items()}
        self._pieces = [pieces_of.get(each, each) for each in self.parameters]
        numbers: dict[Tensor, int] = {parameter: number for number, parameter in enumerate(self.parameters)}
        given = {numbers[each]: state for each, state in optimizer.state.items()}  # few have states before a step
        pieces = iter(self._pieces)
        for group in optimizer.param_groups:
            group["params"] = [next(pieces) for _ in group["params"]]
        optimizer.state = defaultdict(dict, {self._pieces[each]: x for each, x in self._cut_all(given).items()})

    def state_dict(self) -> dict[str, Any]:
        """Return the full states and masters, on the CPU of every rank."""
        mine: dict[Axis, dict[int, dict[str, Any]]] = {partition.dp: {} for partition in self.partitions.values()}
        for number, (parameter, piece) in enumerate(zip(self.parameters, self._pieces, strict=True)):
            if parameter in self.partitions and piece.numel():
                state = {**self._optimizer.state.get(piece, {}), MASTER: piece.detach()}
                on_cpu = {key: x.cpu() if isinstance(x, Tensor) else x for key, x in state.items()}
                mine[self.partitions[parameter].dp][number] = on_cpu
        full = {}
        for axis, pieces in mine.items():
            replicas: list[dict[int, dict[str, Any]]] = [{}] * axis.size
            dist.all_gather_object(replicas, pieces, group=axis.group)
            for number, parameter in enumerate(self.parameters):
                if parts := [replica[number] for replica in replicas if number in replica]:
                    full[number] = _joined(parts, parameter.shape)
        return {
            "masters": {number: state.pop(MASTER) for number, state in full.items()},
            "state": {number: state for number, state in full.items() if state},
            "param_groups": self._optimizer.state_dict()["param_groups"],
        }

    def cut_states(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[nn.Parameter, Tensor]]:
        """Return this rank's part of full states, for the optimizer, and its pieces of the masters.

        Raises:
            ArgumentError: the states are of other groups or shapes of parameters.
        """
        groups, given = (
            [len(group["params"]) for group in x] for x in (self._optimizer.param_groups, state["param_groups"])
        )
        if groups != given:
            raise refuse("parameters in each group of the states", groups, given)
        if unknown := sorted({*state["state"], *state.get("masters", {})} - {*range(len(self.parameters))}):
            raise refuse("parameters of the states", f"numbers below {len(self.parameters)}", unknown)
        given = state.get("masters", {}).items()
        masters = self._cut_all({number: {MASTER: x.detach()} for number, x in given})
        pieces = {self._pieces[number]: cut[MASTER] for number, cut in masters.items()}
        return {"state": self._cut_all(state["state"]), "param_groups": state["param_groups"]}, pieces

    def _cut_all(self, states: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """Return the states of this replica's pieces, without entries for those that have none.

        Some optimizers ask the first entry what states look like.
        """
        cuts = {number: self._cut(number, state) for number, state in states.items()}
        return {number: cut for number, cut in cuts.items() if cut}

    def _cut(self, number: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of this replica's piece of a parameter; nothing, if it has none."""
        parameter, cut = self.parameters[number], dict(state)
        if parameter not in self.partitions or not self._pieces[number].numel():
            return {}
        for key, value in state.items():
            if isinstance(value, Tensor) and (value.dim() or not parameter.dim()):
                if value.shape != parameter.shape:
                    raise refuse(f"shape of {key} of parameter {number}", tuple(parameter.shape), tuple(value.shape))
                cut[key] = self.partitions[parameter].cut(value, parameter).clone()
        return cut


def _joined(parts: list[dict[str, Any]], shape: torch.Size) -> dict[str, Any]:
    """Return the full state of a parameter, given those of its pieces in order."""
    full = dict(parts[0])
    for key, value in parts[0].items():
        if isinstance(value, Tensor) and value.shape == parts[0][MASTER].shape:
            full[key] = torch.cat([part[key].view(-1) for part in parts]).view(shape)
    return full
