"""The parameter server: lost workers and servers, failures, and refusals."""

import os
import re
import signal
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from test_server import push_own, served, values
from torch import nn
from torch.optim import SGD, Adam

import harness
from harness import torch_world
from harness.failures import PROMPT, outcomes, raised
from ringcomm import Aborted, ArgumentError, CollectiveTimeout, PeerLost, RingcommError
from ringcomm.parameter_server import ParameterServer, Worker

STEPS, LAST = 6, 2  # the victim dies, or raises, after it has pulled for this step


def losing(how, staleness, servers, victim):
    """Train with gradients equal to the rank; return who is lost, and the values, on servers; the time, on workers."""
    x, rank = nn.Parameter(torch.zeros(4)), dist.get_rank()
    if rank in servers:
        server = ParameterServer([x], servers, partial(SGD, lr=1.0), staleness=staleness)
        server.serve()
        return {lost: type(error).__name__ for lost, error in server.lost.items()}, values(server.parameters)
    begun = time.monotonic()
    with Worker([x], servers) as worker:
        for step in range(STEPS):
            worker.pull()
            if rank == victim and step == LAST:
                if how == "died":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ZeroDivisionError("this worker fails")
            x.grad = torch.full((4,), float(rank))
            worker.push()
    return time.monotonic() - begun


@pytest.mark.slow
@pytest.mark.parametrize(
    ("staleness", "backend"), [(0, "ringcomm"), (1, "ringcomm"), (None, "ringcomm"), (0, "gloo")], ids=str
)
def test_the_others_go_on_without_a_worker_that_dies(staleness, backend):
    with harness.world(4) as pool:
        arguments = (backend, 20.0, losing, ("died", staleness, [0], 3))
        answers = {rank: answer for rank, answer, _ in outcomes(pool, torch_world.within, *arguments)}
    assert isinstance(answers.pop(3), ConnectionError)
    lost, ((value, *_),) = answers.pop(0)
    assert lost == {3: "PeerLost" if backend == "ringcomm" else "RuntimeError"}
    # Synchronous: two steps with the mean of 1, 2 and 3, then four with that of 1 and 2. Otherwise, each push counts.
    expected = -LAST * 2 - (STEPS - LAST) * 1.5 if staleness == 0 else -STEPS * (1 + 2) - LAST * 3
    assert value == pytest.approx(expected)
    assert all(seconds < PROMPT for seconds in answers.values())


@torch_world.on(4, backends=torch_world.BACKENDS)
def test_the_others_go_on_without_a_worker_whose_block_raises():
    servers, victim = [0, 1], 3
    if dist.get_rank() == victim:
        raised(ZeroDivisionError, lambda: losing("raised", 0, servers, victim))
        return
    answer = losing("raised", 0, servers, victim)
    if dist.get_rank() in servers:
        (lost,), ((value, *_),) = answer
        assert lost == victim
        assert value == pytest.approx(-LAST * 2.5 - (STEPS - LAST) * 2)


@torch_world.on(3)
def test_a_worker_that_is_silent_for_the_timeout_is_lost():
    x, rank, timeout = nn.Parameter(torch.zeros(2)), dist.get_rank(), timedelta(seconds=0.5)
    if rank == 0:
        server = ParameterServer([x], [0], partial(SGD, lr=1.0), timeout=timeout)
        server.serve()
        assert [(lost, type(error)) for lost, error in server.lost.items()] == [(2, CollectiveTimeout)]
        return
    worker = Worker([x], [0], timeout=None if rank == 1 else timeout)
    if rank == 2:
        dist.recv(torch.zeros(1), 1)
        raised(CollectiveTimeout, worker.pull)
        return
    with worker:
        push_own(worker, x, 0)
        worker.pull()  # until the other one is lost
        assert x.tolist() == [-1.0, 0.0]
        dist.send(torch.zeros(1), 2)


@torch_world.on(4, backends=torch_world.BACKENDS)
def test_workers_that_wait_for_a_late_one_longer_than_the_timeout_are_not_lost():
    """Let the late worker pause twice in each step, each time for less than the timeout. The last one only pushes."""
    x, rank, timeout = nn.Parameter(torch.zeros(2)), dist.get_rank(), timedelta(seconds=1.5)
    if rank == 0:
        server = ParameterServer([x], [0], partial(SGD, lr=3.0), timeout=timeout)
        server.serve()
        assert server.lost == {}
        assert values(server.parameters) == [pytest.approx([-4.0, -2.0])]
        return
    with Worker([x], [0], timeout=timeout) as worker:
        for _ in range(2):
            for act in (worker.push,) if rank == 3 else (worker.pull, worker.push):
                time.sleep(rank == 2)
                x.grad = torch.arange(2.0) if rank == 2 else 1 - torch.arange(2.0)
                act()


@torch_world.on(2)
def test_messages_have_the_timeout_of_init_process_group():
    x, limit = nn.Parameter(torch.zeros(2)), dist.group.WORLD.options._timeout
    if dist.get_rank() == 0:
        server = ParameterServer([x], [0], partial(SGD, lr=1.0))
        assert server._connections[0].group.options._timeout == limit
        assert server._interval == limit.total_seconds() / 3
        server.serve()
        return
    with Worker([x], [0]) as worker:
        assert worker._connections[0].group.options._timeout == limit


class Slow(SGD):
    def step(self):
        time.sleep(1.0)
        super().step()


@pytest.mark.parametrize("staleness", [0, None], ids=str)
@torch_world.on(3, backends=torch_world.BACKENDS)
def test_a_step_that_takes_longer_than_the_timeout_loses_nobody(staleness):
    """Take a second for a step: time has to pass."""
    x, rank, timeout = nn.Parameter(torch.zeros(2)), dist.get_rank(), timedelta(seconds=0.5)
    if rank == 0:
        server = ParameterServer([x], [0], partial(Slow, lr=1.0), staleness=staleness, timeout=timeout)
        server.serve()
        assert server.lost == {}
        assert values(server.parameters) == ([[-1.5, -1.5]] if staleness == 0 else [[-3.0, -3.0]])
        return
    with Worker([x], [0], timeout=timeout) as worker:
        x.grad = torch.full((2,), float(rank))
        worker.push()
        worker.pull()
        assert staleness is None or x.tolist() == [-1.5, -1.5]


@torch_world.on(2)
def test_a_server_without_workers_raises_the_error_of_the_last():
    if dist.get_rank() == 0:
        with pytest.raises(Aborted, match=r"global rank 1 ended .*: ZeroDivisionError: this worker fails"):
            losing("raised", 0, [0], 1)
        return
    raised(ZeroDivisionError, lambda: losing("raised", 0, [0], 1))


def refused_in_the_end(embedding):
    rank, ids = dist.get_rank(), torch.tensor([1])
    with Worker(embedding.parameters(), [0]) as worker:
        for _ in range(2 if rank == 1 else 0):
            worker.push()  # without gradients
        if rank == 1:
            dist.send(torch.zeros(1), 2)
        while rank == 1:
            worker.pull()  # the first waits for the other worker
        dist.recv(torch.zeros(1), 1)
        worker.pull({embedding.weight: ids})
        embedding(ids).sum().backward()
        worker.push()
        worker.pull()


@torch_world.on(3)
def test_an_optimizer_that_fails_makes_its_workers_fail():
    """Let the first worker wait for the second, whose gradient the optimizer refuses."""
    embedding = nn.Embedding(4, 2, sparse=True)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="Adam does not support sparse gradients"):
            served(embedding.parameters(), [0], partial(Adam, lr=0.1), staleness=1)
        return
    with pytest.raises(Aborted, match=r"global rank 0 ended .*: RuntimeError: Adam does not support sparse gradients"):
        refused_in_the_end(embedding)


class AbortsLate(ParameterServer):
    """Leaves time after a failed step, in which a wrong answer would reach the worker."""

    def _step_until_all_have_left(self):
        try:
            super()._step_until_all_have_left()
        finally:
            time.sleep(0.1)


class FailsLate(SGD):
    def step(self):
        time.sleep(0.1)
        raise ZeroDivisionError("this step fails")


@torch_world.on(2)
def test_a_worker_that_waits_for_a_step_that_fails_gets_no_values():
    """Let it send the request during the step."""
    x = nn.Parameter(torch.zeros(2))
    if dist.get_rank() == 0:
        raised(ZeroDivisionError, lambda: AbortsLate([x], [0], FailsLate).serve())
        return
    worker, x.grad = Worker([x], [0]), torch.ones(2)
    worker.push()
    with pytest.raises(Aborted, match=r"global rank 0 ended .*: ZeroDivisionError: this step fails"):
        worker.pull()


def losing_the_server():
    x = nn.Parameter(torch.zeros(4))
    if dist.get_rank() == 0:
        ParameterServer([x], [0, 1], partial(SGD, lr=1.0))
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 1:
        return str(raised(RingcommError, lambda: served([x], [0, 1])))
    begun = time.monotonic()
    return str(raised(PeerLost, lambda: pulled_once(x, [0, 1]))), time.monotonic() - begun


def pulled_once(x, servers):
    with Worker([x], servers) as worker:
        worker.pull()


@pytest.mark.slow
def test_workers_fail_if_a_server_dies():
    with harness.world(3) as pool:
        arguments = ("ringcomm", 20.0, losing_the_server, ())
        answers = {rank: answer for rank, answer, _ in outcomes(pool, torch_world.within, *arguments)}
    text, seconds = answers[2]
    assert re.search(r"rank 0 \(process \d+\) died", text)
    assert seconds < PROMPT
    assert re.search(r"global rank 2 ended .*: PeerLost: rank 0", answers[1])


# --- Refusals ---------------------------------------------------------------------------------------------------------


@torch_world.on(3)
def test_ranks_and_parameters_that_cannot_work_are_refused():
    rank, x = dist.get_rank(), nn.Parameter(torch.zeros(2))
    for servers in ([], [0, 1, 2], [3], [0, 0]):
        for construct in (lambda servers: Worker([x], servers), lambda servers: ParameterServer([x], servers, SGD)):
            with pytest.raises(ArgumentError, match="servers: expected ranks below 3, not all, with rank"):
                construct(servers)
    with pytest.raises(ArgumentError, match=rf"with rank {rank} {'not ' if rank == 0 else ''}among them, got \[0\]"):
        Worker([x], [0]) if rank == 0 else ParameterServer([x], [0], SGD)
    other = [nn.Parameter(torch.zeros(2 + rank // 2))]
    with pytest.raises(ArgumentError, match=r"parameter 0 of rank 2: expected as on rank 0, \(2,\) .*, got \(3,\)"):
        ParameterServer(other, [0], SGD) if rank == 0 else Worker(other, [0])
    if rank == 0:
        with pytest.raises(ArgumentError, match=r"staleness: expected an integer from 0 to .*, got -1"):
            ParameterServer([x], [0], SGD, staleness=-1)
    else:
        with pytest.raises(Aborted, match=r"global rank 0 ended .*: ArgumentError: staleness"):
            pulled_once(x, [0])
    dist.barrier()  # the world is usable
