"""Failures under torch.distributed: every rank raises, in time, an error with rank, call, group and epoch."""

import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import harness
from harness import torch_world
from harness.failures import PROMPT, outcomes, raised, until, until_broken
from ringcomm import Aborted, CollectiveTimeout, MismatchError, PeerLost, RingcommError

TIMEOUT = 1.0  # seconds, where one must run out


def answers_of(fn, size, *args, timeout=20.0):
    """Return the answer of each rank of a fresh world: a result, or the error that ended it."""
    with harness.world(size) as pool:
        answers = outcomes(pool, torch_world.within, "ringcomm", timeout, fn, args)
        return {rank: answer for rank, answer, _ in answers}


def facts(error):
    return type(error).__name__, error.rank, str(error)


def different():
    rank = dist.get_rank()
    errors = [
        raised(MismatchError, lambda: dist.all_reduce(torch.ones(3 + rank))),
        raised(MismatchError, lambda: dist.all_reduce(torch.ones(3), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[rank])),
        raised(MismatchError, lambda: dist.barrier() if rank else dist.all_reduce(torch.ones(3))),
        raised(MismatchError, dist.all_reduce(torch.ones(3 + rank), async_op=True).wait),
        raised(MismatchError, lambda: dist.all_to_all_single(torch.ones(2), torch.ones(2), *[[1, 1]] * 2 * rank)),
    ]
    x = torch.ones(3)
    dist.all_reduce(x)  # the group stays usable
    assert x.tolist() == [2.0] * 3
    future = dist.all_reduce(torch.ones(3 + rank), async_op=True).get_future()
    with pytest.raises((RuntimeError, MismatchError), match="the ranks called different things"):
        future.wait()
    work = dist.all_reduce(torch.ones(3 + rank), async_op=True)
    raised(MismatchError, work.wait)
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), MismatchError)
    return [str(error) for error in errors]


def test_different_calls_are_named_on_both_ranks():
    for rank, texts in enumerate(torch_world.run(different, 2)):
        assert "rank 0: all_reduce(float32 x 3, sum)" in texts[0]
        assert "rank 1: all_reduce(float32 x 4, sum)" in texts[0]
        assert re.search(rf"in the torch.distributed group '\d+' \(the world\), on its rank {rank}", texts[0])
        assert "epoch 1" in texts[0]
        assert "all_reduce(float32 x 3, max)" in texts[1]
        assert "barrier()" in texts[2]
        assert "all_to_all(" in texts[4]
        assert texts[3].count("in the torch.distributed group") == 1


def abandoned(how):
    """What destroy_process_group raises after a call that differs, and how much of it the program has seen."""
    group = dist.new_group()
    work = dist.all_reduce(torch.ones(3 + dist.get_rank()), group=group, async_op=True)
    if how == "polled":
        until(work.is_completed, "the call")
    if how == "waited":
        raised(MismatchError, work.wait)
    if how == "asked":
        until(work.is_completed, "the call")
        assert isinstance(work.exception(), MismatchError)
    seen = how in ("waited", "asked")
    assert not seen or work.is_completed()
    del work
    if how == "followed":
        dist.all_reduce(torch.ones(3), group=group)
    text = "" if seen else str(raised(MismatchError, lambda: dist.destroy_process_group(group)))
    dist.destroy_process_group(group)  # raises no more
    return text


@pytest.mark.parametrize("how", ["dropped", "polled", "followed", "waited", "asked"])
def test_destroy_raises_the_mismatch_that_the_program_has_not_seen(how):
    for text in torch_world.run(abandoned, 2, how):
        if how in ("waited", "asked"):
            assert text == ""
        else:
            assert "rank 1: all_reduce(float32 x 4, sum)" in text
            assert text.count("in the torch.distributed group") == 1


def passed_on():
    """Rank 1 passes the failure of rank 0 on to rank 2."""
    rank = dist.get_rank()
    first, second = dist.new_group([0, 1]), dist.new_group([1, 2])
    if rank == 0:
        try:
            raise ValueError("the data is wrong")
        except ValueError:
            first.abort()
    if rank == 1:
        try:
            dist.barrier(first)
        except Aborted:
            second.abort()
    if rank == 2:
        return facts(raised(Aborted, lambda: dist.barrier(second)))
    return None


def test_an_aborted_group_passes_its_error_on_with_the_rank_and_text_of_the_cause():
    kind, rank, text = torch_world.run(passed_on, 3)[2]
    assert (kind, rank) == ("Aborted", 0)
    assert text.startswith("rank 0 aborted: global rank 0 ended the torch.distributed group ")
    assert ": ValueError: the data is wrong" in text
    assert text.count(" aborted: ") == 1


def relayed():
    """Rank 1 waits in vain for rank 3 in one group, and ends another one for that."""
    rank = dist.get_rank()
    first, second = dist.new_group([1, 3], timedelta(seconds=0.5)), dist.new_group([0, 1])
    if rank == 1:
        try:
            dist.barrier(first)
        except CollectiveTimeout:
            second.abort()
    if rank == 0:
        return str(raised(Aborted, lambda: dist.barrier(second)))
    if rank == 3:
        until_broken(first.comm)
    return ""


def test_a_relayed_failure_names_the_group_whose_ranks_it_numbers():
    text = torch_world.run(relayed, 4)[0]
    assert text.startswith("rank 1 aborted: global rank 1 ended the torch.distributed group ")
    assert ": CollectiveTimeout: " in text
    assert "it was not called by rank 1" in text
    assert "(ranks [1, 3] of the world), on its rank 0" in text


def different_in_a_sub_group():
    rank = dist.get_rank()
    groups = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    if rank in (0, 3):
        return str(raised(MismatchError, lambda: dist.all_reduce(torch.ones(3 + rank), group=groups[0])))
    dist.barrier(groups[1])
    return ""


def test_a_sub_group_is_named_with_its_members():
    texts = torch_world.run(different_in_a_sub_group, 4)
    assert "rank 1: all_reduce(float32 x 6, sum)" in texts[0]
    assert "(ranks [0, 3] of the world), on its rank 0" in texts[0]
    assert "(ranks [0, 3] of the world), on its rank 1" in texts[3]


CALLS = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(100_000)),
    "in the background": lambda: dist.all_reduce(torch.ones(5), async_op=True).wait(),
}


def late(name):
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(TIMEOUT + 1)  # later than the others wait
    started = time.monotonic()
    error = raised(RingcommError, CALLS[name])
    return *facts(error), time.monotonic() - started


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_late_rank_is_a_timeout_on_every_rank(name):
    for rank, (kind, culprit, text, seconds) in enumerate(torch_world.run(late, 3, name, timeout=TIMEOUT)):
        assert (kind, culprit) == ("CollectiveTimeout", 1)
        assert "it was not called by rank 1" in text
        assert "epoch 2" in text
        assert f"group '0' (the world), on its rank {rank}" in text
        assert seconds < TIMEOUT + 2


def killed(name):
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    error = raised(PeerLost, CALLS[name])
    return *facts(error), time.monotonic() - started


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_killed_rank_is_named_on_every_other(name):
    answers = answers_of(killed, 3, name)
    assert isinstance(answers.pop(1), ConnectionError)
    assert len(answers) == 2
    for kind, culprit, text, seconds in answers.values():
        assert (kind, culprit) == ("PeerLost", 1)
        assert "died while rank" in text
        assert "in the torch.distributed group '0'" in text
        assert seconds < PROMPT


def killed_in_backward():
    rank = dist.get_rank()
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    net(torch.ones(2, 8)).sum().backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(3):
            net(torch.ones(2, 8)).sum().backward()
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.slow
def test_ddp_raises_an_error_that_names_the_killed_rank():
    answers = answers_of(killed_in_backward, 2)
    kind, text = answers[0]
    assert kind in ("PeerLost", "RuntimeError")
    assert "rank 1 (process" in text
    assert "died while rank 0" in text


def wait_shorter():
    if dist.get_rank() == 1:
        time.sleep(TIMEOUT + 1)
        return facts(raised(RingcommError, dist.barrier))
    work = dist.all_reduce(torch.ones(1), async_op=True)
    started = time.monotonic()
    error = raised(CollectiveTimeout, lambda: work.wait(timedelta(seconds=TIMEOUT / 2)))
    assert time.monotonic() - started < TIMEOUT + 1
    return facts(error)


@pytest.mark.slow
def test_a_wait_may_have_its_own_timeout():
    kinds = [kind for kind, _, _ in torch_world.run(wait_shorter, 2)]
    assert kinds == ["CollectiveTimeout"] * 2  # the late rank gets the first reason


def shorter_for_a_group():
    dist.group.WORLD.set_timeout(timedelta(seconds=TIMEOUT / 2))
    if dist.get_rank() == 1:
        time.sleep(TIMEOUT + 1)
    return facts(raised(CollectiveTimeout, dist.barrier))


@pytest.mark.slow
def test_the_timeout_of_a_group_can_be_changed():
    assert "waited 0.5 s" in torch_world.run(shorter_for_a_group, 2)[0][2]
