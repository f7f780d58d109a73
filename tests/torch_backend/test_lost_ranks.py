"""The default group of torch.distributed without lost ranks, and with those that come back."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import json, os, signal, sys
import torch
import torch.distributed as dist
import ringcomm.torch
from ringcomm import Aborted, ArgumentError, PeerLost
from torch.nn.parallel import DistributedDataParallel

rank, restarts, ranks = (int(os.environ[f"RINGCOMM_{name}"]) for name in ("RANK", "RESTARTS", "SIZE"))
torch.set_num_threads(1)
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


def run(tmp_path, ranks, kills):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "ringcomm", "run", "-n", str(ranks), "--respawn", "2"]
    command += [str(tmp_path / "program.py"), json.dumps(kills)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return {rank: rest for rank, *rest in (json.loads(line.partition(" ")[2]) for line in ended.stdout.splitlines())}


@pytest.mark.timeout(180)
def test_ddp_trains_through_the_loss_and_return_of_a_rank(tmp_path):
    undisturbed = run(tmp_path, 1, [])[0][3]
    found = run(tmp_path, 3, [[1, 0, 4]])
    assert {rank: rest[:2] for rank, rest in found.items()} == {0: [0, 3], 1: [1, 3], 2: [0, 3]}
    assert found[0][2] == [3] * 4 + [2] * 4 + [3] * 4
    assert len(found[1][2]) == 4
    for *_, values in found.values():
        assert values == pytest.approx(undisturbed, rel=1e-12)
