"""new_group inside one machine: the members open memory that the world shares already."""

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import harness
from harness import torch_world
from harness.failures import outcomes, raised
from ringcomm import CollectiveTimeout, PeerLost

TIMEOUT = 0.5  # seconds, where one must run out


@torch_world.on(2)
def test_a_member_makes_a_group_without_waiting_for_the_others():
    x = torch.ones(3)
    if dist.get_rank() == 0:
        group = dist.new_group()
        dist.send(x, 1)
    else:
        dist.recv(x, 0)  # until the other one has made it
        group = dist.new_group()
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2.0] * 3


class FailingStore:
    """A store whose calls raise an error."""

    def __init__(self, error):
        self._error = error

    def __getattr__(self, name):
        raise self._error


@torch_world.on(2)
def test_a_store_without_compare_set_connects_the_members_another_way():
    from ringcomm.torch import groups

    groups._starts[dist.group.WORLD.comm].store = FailingStore(RuntimeError("compare_set is not implemented"))
    group, x = dist.new_group(), torch.ones(3)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2.0] * 3


@torch_world.on(2)
def test_a_lost_store_is_named_with_the_group():
    from ringcomm.torch import groups

    groups._starts[dist.group.WORLD.comm].store = FailingStore(dist.DistNetworkError("Failed to recv"))
    with pytest.raises(PeerLost, match=r"the store of torch.distributed is lost: Failed to recv\n.*ranks \[0, 1\]"):
        dist.new_group()


@torch_world.on(2)
def test_a_timeout_of_zero_is_refused_by_every_member():
    with pytest.raises(ValueError, match="timeout: expected a finite number of seconds > 0, got 0"):
        dist.new_group(timeout=timedelta(0))


class CountingStore:
    def __init__(self, store):
        self._store, self.requests = store, 0

    def __getattr__(self, name):
        self.requests += 1
        return getattr(self._store, name)


@torch_world.on(4)
def test_a_new_group_takes_at_most_two_requests_to_the_store():
    from ringcomm.torch import groups

    start = groups._starts[dist.group.WORLD.comm]
    start.store = CountingStore(start.store)
    for made in range(1, 4):
        group = dist.new_group([0, 2, 3])
        if dist.get_rank() != 1:
            dist.barrier(group)
            assert start.store.requests <= 2 * made


@torch_world.on(3)
def test_a_group_is_made_again_under_the_name_of_a_destroyed_one():
    for pair in ([0, 1], [0, 1], [1, 0]):
        if dist.get_rank() in pair:
            group = dist.new_group(pair, use_local_synchronization=True)
            x = torch.full((1000,), float(dist.get_rank()))
            dist.all_reduce(x, group=group)
            assert x.tolist() == [1.0] * 1000
            dist.destroy_process_group(group)


def with_a_timeout_of_its_own():
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    if dist.get_rank() == 1:
        dist.barrier()  # first the world's: longer than the group waits
        raised(CollectiveTimeout, lambda: dist.barrier(group))
        return None
    error = raised(CollectiveTimeout, lambda: dist.barrier(group))
    dist.barrier()  # the world has not failed
    return error.rank, str(error)


def test_a_group_has_its_own_timeout_and_its_failure_is_not_the_world_s():
    rank, text = torch_world.run(with_a_timeout_of_its_own, 2)[0]
    assert rank == 1
    assert f"waited {TIMEOUT} s" in text


def killed_outside():
    rank = dist.get_rank()
    pair, other = dist.new_group([0, 1]), dist.new_group([2, 3])
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    error = raised(PeerLost, dist.barrier)
    if rank == 3:
        return error.rank, raised(PeerLost, lambda: dist.barrier(other)).rank
    x = torch.ones(5)
    dist.all_reduce(x, group=pair)
    later = dist.new_group([0, 1])
    dist.all_reduce(x, group=later)
    return error.rank, x.tolist()


@pytest.mark.slow
def test_groups_without_a_killed_rank_go_on():
    with harness.world(4) as pool:
        ended = outcomes(pool, torch_world.within, "ringcomm", 20.0, killed_outside, ())
        answers = {rank: answer for rank, answer, _ in ended}
    assert isinstance(answers.pop(2), ConnectionError)
    assert answers == {0: (2, [4.0] * 5), 1: (2, [4.0] * 5), 3: (2, 0)}
