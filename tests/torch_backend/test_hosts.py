"""Groups that span hosts."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
import test_clients
import test_failures
import test_groups
import test_operations
import torch
import torch.distributed as dist

import harness
import torch_world
from failures import PROMPT, raised, until
from ringcomm import PeerLost, RingcommError
from two_hosts import ADDRESSES, two_hosts, why_no_hosts

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
        assert dist.group.WORLD.comm._transport.name == "shm+network"
        return torch_world.on_rank(fn)(*args)
    finally:
        del os.environ["RINGCOMM_HOST_ID"]


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (test_operations.test_reduce_scatter_of_lists_and_tensors, (torch.float32,)),
        (test_operations.test_messages_between_ranks, ()),
        (test_operations.test_all_gather_of_every_kind, (torch.float8_e4m3fn,)),
        (test_operations.test_all_reduce_with_every_operation_and_dtype, ()),
        (test_operations.test_lists_may_be_uneven, ()),
        (test_operations.test_all_to_all_of_lists_and_tensors_even_and_not, ()),
        (test_operations.test_reduce_broadcast_gather_scatter_from_every_root, (torch.int64,)),
        (test_groups.test_objects_and_barriers, ()),
        (test_groups.test_async_calls_and_their_futures, ()),
        (test_groups.test_sub_groups_are_used_side_by_side, ()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_operations_across_hosts(fn, args):
    torch_world.run(across_hosts, 4, fn, *args)


def test_training_across_hosts_equals_training_on_one():
    apart = torch_world.run(across_hosts, 4, test_clients.ddp, {})
    together = torch_world.run(test_clients.ddp, 4, {})
    for (_, ours), (_, theirs) in zip(apart, together, strict=True):
        torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(theirs), rtol=1e-6, atol=1e-7)


def inside_a_host():
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    x = torch.full((1000,), float(rank))
    dist.all_reduce(x, group=mine)
    assert x[0] == (1 if rank < 2 else 5)
    return mine.comm._transport.name


def test_a_group_inside_a_host_shares_memory():
    assert torch_world.run(across_hosts, 4, inside_a_host) == ["shm"] * 4


@pytest.mark.slow
def test_a_late_rank_on_another_host_is_named():
    answers = test_failures.answers_of(across_hosts, 3, test_failures.late, "all_reduce", timeout=1.0)
    for kind, culprit, text, seconds in answers.values():
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
        assert "rank 1 on another host was lost" in text
        assert seconds < PROMPT


def wordy():
    reason = 600 * "ü"
    if dist.get_rank() == 0:
        dist.group.WORLD.comm.abort(reason)
    return str(raised(RingcommError, dist.barrier))


@pytest.mark.slow
def test_a_long_reason_reaches_the_other_hosts_whole():
    for text in test_failures.answers_of(across_hosts, 3, wordy).values():
        assert 600 * "ü" in text


def make_and_close_groups():
    comm = dist.group.WORLD.comm

    def footprint():
        return len([*harness.threads(), *harness.descriptors()])

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
        assert "rank 0: all_reduce(float32 x 3, sum)" in texts
        assert "rank 3: all_reduce(float32 x 4, sum)" in texts


def mismatched():
    from ringcomm import MismatchError

    error = raised(MismatchError, lambda: dist.all_reduce(torch.ones(3 + (dist.get_rank() == 3))))
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x[0] == 4
    return str(error)


INIT = r"""
import sys
import numpy as np
import ringcomm

for _ in range(2):
    with ringcomm.init(timeout=30) as comm:
        x = np.full(100_000, comm.rank + 1.0)
        comm.all_reduce(x)
        assert (x == 10).all()
        sys.stdout.write(f"{comm.rank} {comm.size} {comm._transport.name}\n")  # in one piece
"""


@pytest.mark.slow
def test_init_under_torchrun_on_two_hosts(tmp_path):
    if reason := why_no_hosts():
        pytest.skip(reason)
    path = tmp_path / "program.py"
    path.write_text(INIT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    master = ["--master-addr", ADDRESSES[0], "--master-port", "29500"]
    with two_hosts() as hosts, ExitStack() as nodes:
        started = []
        for number, host in enumerate(hosts):
            command = [*host.enter, *torchrun, "--node-rank", str(number), *master, str(path)]
            started.append(hosts.jobs.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
            nodes.callback(started[-1].kill)
        lines = [line for node in started for line in node.communicate(timeout=harness.JOB)[0].splitlines()]
    assert sorted(lines) == sorted(2 * [f"{rank} 4 shm+network" for rank in range(4)])
