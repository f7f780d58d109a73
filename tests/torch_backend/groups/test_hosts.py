"""Groups that span hosts."""

import os
import re
import signal
import time

import numpy as np
import pytest
import test_clients
import test_failures
import test_groups
import torch
import torch.distributed as dist

import harness
import ringcomm
from cases.training import GPT, losses, train
from harness import leftovers, torch_world
from harness.failures import PROMPT, raised, until
from harness.hosts import why_no_hosts
from ringcomm import MismatchError, PeerLost, RingcommError

os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def across_hosts(fn, *args):
    """Call `fn(*args)` in a world that treats every two ranks as one host."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    timeout = dist.group.WORLD.comm.timeout
    dist.destroy_process_group()
    os.environ["RINGCOMM_HOST_ID"] = str(rank // 2)
    try:
        options = {"timeout": torch_world.timedelta(seconds=timeout)}
        dist.init_process_group("ringcomm", store=store, rank=rank, world_size=size, **options)
        assert dist.group.WORLD.comm._router.name == "shm+sockets"
        return torch_world.on_rank(fn)(*args)
    finally:
        del os.environ["RINGCOMM_HOST_ID"]


def test_operations_across_hosts():
    torch_world.run(across_hosts, 4, test_groups.every_operation)


def inside_a_host():
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    x = torch.full((1000,), float(rank))
    dist.all_reduce(x, group=mine)
    assert x[0] == (1 if rank < 2 else 5)
    return mine.comm._router.name


def test_a_group_inside_a_host_shares_memory():
    assert torch_world.run(across_hosts, 4, inside_a_host) == ["shm"] * 4


@pytest.mark.slow
def test_a_late_rank_on_another_host_is_named():
    answers = torch_world.run(across_hosts, 3, test_failures.late, "all_reduce", timeout=1.0)
    for kind, culprit, text, seconds in answers:
        assert (kind, culprit) == ("CollectiveTimeout", 1)
        assert "it was not called by rank 1" in text
        assert seconds < 3


def killed():
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(100_000))
        os.kill(os.getpid(), signal.SIGKILL)  # perhaps before all of its part has left
    started = time.monotonic()
    error = raised(PeerLost, lambda: [dist.all_reduce(torch.ones(100_000)) for _ in range(2)])
    return error.rank, str(error), time.monotonic() - started


@pytest.mark.slow
def test_a_killed_rank_on_another_host_is_named():
    answers = test_failures.answers_of(across_hosts, 3, killed)
    assert isinstance(answers.pop(1), ConnectionError)
    for culprit, text, seconds in answers.values():
        assert culprit == 1
        assert re.search(r"rank 1 (was lost|\(process \d+\) died)", text)
        assert seconds < PROMPT


def wordy():
    reason = 600 * "ü"
    if dist.get_rank() == 0:
        dist.group.WORLD.comm.abort(reason)
    return str(raised(RingcommError, dist.barrier))


@pytest.mark.slow
def test_a_long_reason_reaches_the_other_hosts_whole():
    for text in torch_world.run(across_hosts, 3, wordy):
        assert 600 * "ü" in text


def make_and_close_groups():
    comm = dist.group.WORLD.comm

    def footprint():
        return len([*leftovers.threads(), *leftovers.descriptors()])

    def use(groups):
        for _ in range(groups):
            with comm.split(0) as group:
                group.barrier()
        comm.barrier()

    use(2)
    before = footprint()
    use(20)
    until(lambda: footprint() <= before, "the threads and descriptors of closed groups to go")


def test_closed_groups_leave_nothing_behind():
    torch_world.run(across_hosts, 4, make_and_close_groups)


def test_different_calls_across_hosts_are_named():
    for texts in torch_world.run(across_hosts, 4, mismatched):
        assert "ranks 0-2: all_reduce(float32 x 3, sum)" in texts
        assert "rank 3: all_reduce(float32 x 4, sum)" in texts


def mismatched():
    error = raised(MismatchError, lambda: dist.all_reduce(torch.ones(3 + (dist.get_rank() == 3))))
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x[0] == 4
    return str(error)


# --- One job of torchrun on two hosts ---------------------------------------------------------------------------------

CLIENTS = [
    (test_clients.ddp, {}),
    (test_clients.fully_sharded, (2, 2)),
    (test_clients.tensor_parallel, True),
    (test_clients.pipeline, "Schedule1F1B"),
]


@pytest.fixture(scope="module")
def job():
    """Two ranks on each of two hosts."""
    if reason := why_no_hosts():
        pytest.skip(reason)
    with harness.world("0011", "torchrun") as pool:
        yield pool


def init_twice(_):
    for _ in range(2):
        with ringcomm.init(timeout=harness.OPERATION) as comm:
            x = np.full(100_000, comm.rank + 1.0)
            comm.all_reduce(x)
            assert (x == 10).all()
            found = comm.rank, comm.size, comm._router.name
    return found


@pytest.mark.slow
def test_init_under_torchrun_on_two_hosts(job):
    assert job.run(init_twice, ()) == [(rank, 4, "shm+sockets") for rank in range(4)]


def in_world(_, fn, *args):
    """Call `fn(*args)` in the group that the environment of torchrun describes."""
    dist.init_process_group("ringcomm", timeout=torch_world.timedelta(seconds=harness.OPERATION))
    try:
        assert dist.group.WORLD.comm._router.name == "shm+sockets"
        return fn(*args)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("client", "how"), CLIENTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_clients_on_two_hosts_get_the_results_of_gloo(job, client, how):
    test_clients.assert_as_on_gloo(job.run(in_world, (client, how)), client, how)


@pytest.mark.slow
def test_a_checkpoint_of_two_hosts_is_loaded_on_both_and_on_one(job, tmp_path):
    saved = job.run(in_world, (test_clients.save, str(tmp_path)))
    loaded = job.run(in_world, (test_clients.load, str(tmp_path)))
    for parameters, step in loaded + torch_world.run(test_clients.load, 2, str(tmp_path)):
        assert (parameters == saved[0]).all()
        assert step == 7


@pytest.fixture(scope="module")
def losses_alone():
    (alone,) = harness.run(train, 1, *GPT)
    return losses(alone)


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["--dp 2 --tp 2 --zero 1", "--dp 2 --pp 2"])
def test_a_gpt_on_two_hosts_has_the_losses_of_one_process(job, grid, losses_alone):
    together, *others = job.run(train, (*GPT, *grid.split()))
    assert losses(together) == pytest.approx(losses_alone, abs=2e-4)
    assert others == [""] * 3
