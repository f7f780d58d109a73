"""Groups of Ray's actors call each collective of ray.util.collective, on arrays of NumPy and PyTorch.

    python ray_actors.py BACKEND NODES created|declared FILE

Writes what each rank has got into the file, as JSON. On several nodes the actors of RINGCOMM are on as many hosts.
"""

import json
import sys
from pathlib import Path

import numpy as np
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util import collective
from ray.util.collective.types import ReduceOp

import ringcomm.ray

SIZE = 4


@ray.remote(num_cpus=0)
class Actor:
    def __init__(self, rank, backend):
        ringcomm.ray.register()
        self.rank, self.backend = rank, backend

    def create(self, group):
        collective.init_collective_group(SIZE, self.rank, backend=self.backend, group_name=group)

    def results(self, group):
        """Call everything in a group; return the results by kind of array and call."""
        kinds = {"numpy": lambda x: x, "torch": torch.from_numpy}
        return {kind: dict(self.calls(make, group)) for kind, make in kinds.items()}

    def calls(self, make, group):
        def array(salt=0):
            return make(np.arange(6, dtype=np.float32).reshape(2, 3) * (self.rank + 1) + salt)

        for op in ReduceOp:
            x = array(1)
            collective.allreduce(x, group, op)
            yield f"allreduce {op.name}", x.tolist()
            x = array(1)
            collective.reduce(x, 2, group, op)
            yield f"reduce {op.name}", x.tolist()
        x = array()
        collective.broadcast(x, 3, group)
        yield "broadcast", x.tolist()
        parts = [array(100) for _ in range(SIZE)]
        collective.allgather(parts, array(), group)
        yield "allgather", [part.tolist() for part in parts]
        out = array()
        collective.reducescatter(out, [array(rank) for rank in range(SIZE)], group)
        yield "reducescatter", out.tolist()
        # A tensor for the result, arrays of NumPy for what goes in.
        mixed = torch.zeros(2)
        collective.reducescatter(mixed, [np.full(2, self.rank + salt, np.float32) for salt in range(SIZE)], group)
        yield "reducescatter of both", mixed.tolist()
        x = array()
        if self.rank % 2:
            collective.send(x, self.rank - 1, group)
        else:
            collective.recv(x, self.rank + 1, group)
        yield "recv", x.tolist()
        collective.barrier(group)
        yield "place", [collective.get_rank(group), collective.get_collective_group_size(group)]

    def destroy(self, group):
        collective.destroy_collective_group(group)
        return collective.is_group_initialized(group)

    def lost(self, group):
        """Return the error of a call that needs an actor which has died."""
        try:
            collective.barrier(group)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def refusals(self, group):
        """Return the texts of the errors of bad calls, after which the group is usable."""
        texts = []
        for call in (
            lambda: collective.allgather([np.zeros(2)] * SIZE, np.zeros(3), group),
            lambda: collective.reducescatter(np.zeros(3), [np.zeros(2)] * SIZE, group),
            lambda: collective.allreduce(np.zeros((4, 4))[:, 1], group),
        ):
            try:
                call()
            except Exception as error:
                texts.append(f"{type(error).__name__}: {error}")
        x = np.ones(2)
        collective.allreduce(x, group)
        return [*texts, x.tolist()]


def main(backend, nodes, how):
    ringcomm.ray.register()
    ringcomm.ray.register()  # once more changes nothing
    cluster = Cluster()
    try:
        for node in range(nodes):
            cluster.add_node(num_cpus=1, resources={f"node{node}": SIZE})
        ray.init(address=cluster.address, log_to_driver=False)
        actors = []
        for rank in range(SIZE):
            node = rank * nodes // SIZE
            env = {"RINGCOMM_TIMEOUT": "60", "RINGCOMM_HOST_ID": f"node{node}", "GLOO_SOCKET_IFNAME": "lo"}
            where = Actor.options(resources={f"node{node}": 1}, runtime_env={"env_vars": env})
            actors.append(where.remote(rank, backend))
        found = []
        for group in ("default", "default", "another"):  # the second one where the first was
            if how == "declared":
                collective.create_collective_group(actors, SIZE, [*range(SIZE)], backend, group)
            else:
                ray.get([actor.create.remote(group) for actor in actors])
            found.append(ray.get([actor.results.remote(group) for actor in actors]))
            if backend == "RINGCOMM":
                found.append(ray.get([actor.refusals.remote(group) for actor in actors]))
            assert not any(ray.get([actor.destroy.remote(group) for actor in actors]))
        if backend == "RINGCOMM":
            ray.get([actor.create.remote("lost") for actor in actors])
            ray.kill(actors[3])
            found.append(ray.get([actor.lost.remote("lost") for actor in actors[:3]]))
        Path(sys.argv[4]).write_text(json.dumps(found))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
