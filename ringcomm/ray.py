"""The backend "RINGCOMM" of ray.util.collective: groups of Ray's actors, on NumPy arrays and PyTorch tensors.

    import ringcomm.ray
    from ray.util import collective

    ringcomm.ray.register()  # in the driver that declares groups, and in each actor
    collective.init_collective_group(4, rank, backend="RINGCOMM")
    collective.allreduce(x)

Actors on one node share memory, those on several are connected by TCP or UCX. The settings are RINGCOMM_* variables of
the actors, as in `runtime_env={"env_vars": {"RINGCOMM_TIMEOUT": "60"}}`. Written against Ray 2.60.
"""

import sys
from typing import Any

import numpy as np
import ray
from ray.experimental import internal_kv
from ray.util.collective import types
from ray.util.collective.backend_registry import _global_registry, register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup

from ringcomm.bootstrap.rendezvous import Rendezvous
from ringcomm.config import Config
from ringcomm.errors import refuse
from ringcomm.start import connect

__all__ = ["RayGroup", "register"]

NAME = "RINGCOMM"
OPS = {"SUM": "sum", "PRODUCT": "prod", "MIN": "min", "MAX": "max"}


def register() -> None:
    """Register the backend in this process, once. Every actor of a group and the driver that declares it call this."""
    if not _global_registry.is_registered(NAME):
        register_collective_backend(NAME, RayGroup)


class RayGroup(BaseGroup):  # type: ignore[misc]  # ray is optional
    """A group of actors, as ray.util.collective makes it: each call takes lists of one array, or of one list of them.

    Attributes:
        comm: its communicator
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        """Connect. Raises what ringcomm.init does."""
        super().__init__(world_size, rank, group_name)
        keys, config = _Keys(group_name), Config()
        start = Rendezvous(keys, ray.get_runtime_context().gcs_address, rank, world_size, config)
        with start.open() as store:
            self.comm = connect(rank, world_size, store, config, hosts=start.hosts)
        if rank == 0:
            keys.clear()

    @classmethod
    def backend(cls) -> str:
        return NAME

    @classmethod
    def check_backend_availability(cls) -> bool:
        return True

    def destroy_group(self) -> None:
        self.comm.close()

    def allreduce(self, tensor: list[Any], allreduce_options: Any = types.AllReduceOptions) -> None:
        self.comm.all_reduce(_one(tensor), _op(allreduce_options))

    def barrier(self, barrier_options: Any = None) -> None:  # noqa: ARG002 (which has nothing to choose)
        self.comm.barrier()

    def reduce(self, tensor: list[Any], reduce_options: Any = types.ReduceOptions) -> None:
        self.comm.reduce(_one(tensor), _op(reduce_options), reduce_options.root_rank)

    def broadcast(self, tensor: list[Any], broadcast_options: Any = types.BroadcastOptions) -> None:
        self.comm.broadcast(_one(tensor), broadcast_options.root_rank)

    def allgather(self, tensor_list: list[list[Any]], tensor: list[Any], _: Any = None) -> None:
        x, *parts = _of_one_kind([_one(tensor), *_one(tensor_list)])
        for rank, part in enumerate(parts):
            if (part.shape, part.dtype) != (x.shape, x.dtype):
                raise refuse(f"tensor_list[{rank}]", _described(x), _described(part))
        for part, got in zip(parts, self.comm.all_gather(x), strict=True):
            part[...] = got

    def reducescatter(
        self, tensor: list[Any], tensor_list: list[list[Any]], reducescatter_options: Any = types.ReduceScatterOptions
    ) -> None:
        out, *parts = _of_one_kind([_one(tensor), *_one(tensor_list)])
        mine = parts[self.rank]
        if (out.shape, out.dtype) != (mine.shape, mine.dtype):
            raise refuse("tensor", _described(mine), _described(out))
        flat = [part.reshape(-1) for part in parts]
        x = np.concatenate(flat) if isinstance(out, np.ndarray) else sys.modules["torch"].cat(flat)
        got = self.comm.reduce_scatter(x, _op(reducescatter_options), counts=[len(part) for part in flat])
        out[...] = got.reshape(out.shape)

    def send(self, tensor: list[Any], send_options: Any) -> None:
        self.comm.send(_one(tensor), send_options.dst_rank)

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        self.comm.recv(_one(tensor), recv_options.src_rank)


def _one(tensors: list[Any]) -> Any:
    if len(tensors) != 1:
        raise refuse("tensors", "one array of this process", len(tensors))
    return tensors[0]


def _of_one_kind(arrays: list[Any]) -> list[Any]:
    """Return NumPy's arrays, or where some are tensors of PyTorch, tensors in the same memory."""
    if all(isinstance(x, np.ndarray) for x in arrays):
        return arrays
    return [sys.modules["torch"].from_numpy(x) if isinstance(x, np.ndarray) else x for x in arrays]


def _described(x: Any) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}"


def _op(options: Any) -> str:
    return OPS[options.reduceOp.name]


class _Keys:
    """What the actors of a group publish to each other, in the store of Ray's head node."""

    def __init__(self, group: str) -> None:
        self._prefix = f"ringcomm/{ray.get_runtime_context().namespace}/{group}/"  # others may have such a group, too

    def set(self, key: str, value: str) -> None:
        internal_kv._internal_kv_put(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        value: bytes = internal_kv._internal_kv_get(self._prefix + key)
        return value or b"{}"  # cleared meanwhile

    def check(self, keys: list[str]) -> bool:
        return all(internal_kv._internal_kv_exists(self._prefix + key) for key in keys)

    def clear(self) -> None:
        internal_kv._internal_kv_del(self._prefix, del_by_prefix=True)
