"""torchft: one of two replicas is killed; the other goes on alone, and with it again once it is back.

All replicas take the same batches, so the mean gradient does not depend on how many there are: the parameters must be
those of one process, bit for bit.
"""

import json
import os
import signal
import sys
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import tiny
import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from ringcomm.torch.torchft import ProcessGroupRingcomm

GROUPS = {"gloo": ProcessGroupGloo, "ringcomm": ProcessGroupRingcomm}
LIMIT = timedelta(seconds=30)
TOGETHER = 3  # steps at first and in the end


def train(backend, number, lighthouse, starts, results):
    """Train until the replicas have been two, one, and two again; send the steps, the participants and parameters."""
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model = tiny.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    manager = Manager(
        pg=GROUPS[backend](timeout=LIMIT),
        min_replica_size=1,
        init_sync=False,  # all begin with the same parameters
        load_state_dict=lambda saved: [each.load_state_dict(saved[name]) for name, each in state.items()],
        state_dict=lambda: {name: each.state_dict() for name, each in state.items()},
        replica_id=f"replica_{number}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=LIMIT,
        quorum_timeout=LIMIT,
    )
    net, stepper = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    participants = []  # of each step, without repeats
    together = 0  # steps of both since a change
    while True:
        stepper.zero_grad()  # asks who takes part
        tiny.loss_of(net, batch_of(manager.current_step())).backward()
        ends = torch.tensor(float(participants[-3:] == [2, 1, 2] and together >= TOGETHER))
        manager.allreduce(ends).wait()
        if number == 1 and starts == 0 and participants[-1:] == [2] and together >= TOGETHER:
            os.kill(os.getpid(), signal.SIGKILL)
        before = manager.current_step()
        stepper.step()
        if manager.current_step() == before:  # a participant is lost: torchft takes the step again
            continue
        if participants[-1:] != [manager.num_participants()]:
            participants.append(manager.num_participants())
            together = 0
            if participants[-2:] == [2, 1]:
                results.send("alone")
        together += 1
        if ends:
            break
    results.send([manager.current_step(), participants, [x.tolist() for x in model.parameters()]])
    manager.shutdown()


def batch_of(step):
    batches = list(tiny.batches(0, 1))
    return batches[step % len(batches)]


def reference(steps):
    """Return the parameters that one process has after some steps."""
    model = tiny.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        tiny.loss_of(model, batch_of(step)).backward()
        optimizer.step()
    return [x.tolist() for x in model.parameters()]


def main(backend):
    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=500, heartbeat_timeout_ms=1000)
    spawn = get_context("spawn")
    received, sender = spawn.Pipe(duplex=False)

    def start(number, starts=0):
        process = spawn.Process(target=train, args=(backend, number, server.address(), starts, sender))
        process.start()
        return process

    stays, dies = start(0), start(1)
    dies.join()
    assert dies.exitcode == -signal.SIGKILL
    assert received.recv() == "alone"
    comes_back = start(1, starts=1)
    found = [received.recv() for _ in range(2)]
    for process in (stays, comes_back):
        process.join()
        assert process.exitcode == 0
    server.shutdown()
    steps = found[0][0]
    assert reference(steps) != reference(steps - 1)
    assert all(each[0] == steps and each[2] == reference(steps) for each in found)
    changes = sorted(each[1][-3:] for each in found)
    assert changes[-1] == [2, 1, 2]
    Path(f"{backend}.json").write_text(json.dumps(changes))


if __name__ == "__main__":
    main(*sys.argv[1:])
