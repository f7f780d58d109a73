"""The default group of torch.distributed without lost ranks, and with those that come back."""

import json
from contextlib import closing

import pytest
import torch
import torch.distributed as dist

import ringcomm.torch
from harness import pools, torch_world
from harness.jobs import run_job
from harness.nodes import Job

pytestmark = pytest.mark.slow

PROGRAM = """
import json, os, signal, sys
import torch
import torch.distributed as dist
import ringcomm.torch
from ringcomm import Aborted, ArgumentError, PeerLost
from torch.nn.parallel import DistributedDataParallel

rank, restarts, ranks = (int(os.environ[f"RINGCOMM_{name}"]) for name in ("RANK", "RESTARTS", "SIZE"))
for call in (ringcomm.torch.shrink, ringcomm.torch.grow):
    try:
        call()
    except ArgumentError as error:
        assert "init_process_group" in str(error)
ringcomm.torch.init_process_group(timeout=60)
torch.manual_seed(rank)
model = torch.nn.Linear(3, 2, dtype=torch.float64)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
step, ready, sizes = 0, False, []
while step < 12:
    try:
        if not ready:
            step = ringcomm.torch.load_latest(step, [model, optimizer])
            replicas = DistributedDataParallel(model)
            optimizer.zero_grad()
            group = dist.new_group()
            ready = True
        x = torch.arange(36.0, dtype=torch.float64).reshape(12, 3).sin() + step
        share = x.chunk(dist.get_world_size())[dist.get_rank()]
        replicas(share).square().mean().backward()
        if [rank, restarts, step] in json.loads(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier(group)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        sizes.append(dist.get_world_size())
        if dist.get_world_size() < ranks and ringcomm.torch.grow(timeout=60 if step == 8 else 0):
            ready = False
    except (PeerLost, Aborted, RuntimeError):
        ready = False
        ringcomm.torch.shrink(timeout=60)
values = [x for each in (model.weight, model.bias) for x in each.flatten().tolist()]
print(json.dumps([rank, restarts, dist.get_world_size(), sizes, values]))
dist.destroy_process_group()
"""


def run(tmp_path, ranks, program, *arguments):
    """Return what each rank printed, by rank."""
    return results(
        run_job(tmp_path, ranks, program, *arguments, options=("--respawn=2",), timeout=3 * pools.JOB).stdout
    )


def run_on_two_nodes(tmp_path, ranks, program, *arguments):
    """As run, with the last rank on a host of its own."""
    with closing(Job(tmp_path, 2)) as job:
        path, options = job.program(program), {"arguments": arguments}
        nodes = [
            job.start(node, number, path, "--respawn=2", host_id=str(node), **options)
            for node, number in enumerate((ranks - 1, 1))
        ]
        ended = [node.communicate(timeout=120) for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], "".join(err for _, err in ended)
    return results("".join(out for out, _ in ended))


def results(text):
    return {rank: rest for rank, *rest in (json.loads(line.partition(" ")[2]) for line in text.splitlines())}


def undisturbed():
    """Return the parameters that one process gets."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2, dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(12):
        optimizer.zero_grad()
        x = torch.arange(36.0, dtype=torch.float64).reshape(12, 3).sin() + step
        model(x).square().mean().backward()
        optimizer.step()
    return [x for each in (model.weight, model.bias) for x in each.flatten().tolist()]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("run", [pytest.param(run, marks=pytest.mark.exhaustive), run_on_two_nodes])
def test_ddp_trains_through_the_loss_and_return_of_a_rank(run, tmp_path):
    found = run(tmp_path, 3, PROGRAM, "[[1, 0, 4]]")
    assert {rank: rest[:2] for rank, rest in found.items()} == {0: [0, 3], 1: [1, 3], 2: [0, 3]}
    assert found[0][2] == [3] * 4 + [2] * 4 + [3] * 4
    assert len(found[1][2]) == 4
    for *_, values in found.values():
        assert values == pytest.approx(undisturbed(), rel=1e-12)


WAITS_IN_A_GROUP = """
import json
import torch
import torch.distributed as dist
import ringcomm.torch
from ringcomm import Aborted

ringcomm.torch.init_process_group(timeout=60)
rank, text = dist.get_rank(), ""
of_all, of_two = dist.new_group(), dist.new_group([1, 2])
x = torch.ones(1)
for group in (None, of_all, of_two):
    if group is not of_two or rank > 0:
        dist.all_reduce(x, group=group)
if rank:  # rank 0 goes on for a reason of its own
    try:
        dist.all_reduce(x, group=of_all)
    except Aborted as error:
        text = str(error).splitlines()[0]
ringcomm.torch.shrink(timeout=60)
x = torch.ones(1)
dist.all_reduce(x)
print(json.dumps([rank, x.item(), text]))
dist.destroy_process_group()
"""


def test_ranks_that_wait_in_another_group_come_when_one_calls_shrink(tmp_path):
    text = "rank 0 has called shrink"
    assert run(tmp_path, 3, WAITS_IN_A_GROUP) == {0: [3, ""], 1: [3, text], 2: [3, text]}


class Versioned(torch.nn.Linear):
    """A module that changed in version 2, and migrates states that are older, or of no version."""

    _version = 2
    version = None  # of the state that was loaded

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        self.version = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@torch_world.on(2)
def test_a_state_keeps_the_versions_of_its_modules():
    rank = dist.get_rank()
    model = torch.nn.Sequential(Versioned(2, 2))
    torch.nn.init.constant_(model[0].weight, rank)
    assert ringcomm.torch.load_latest(rank, [model]) == 1
    assert (model[0].weight == 1).all()
    assert model[0].version == (None if rank else 2)
