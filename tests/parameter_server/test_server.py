"""The parameter server: synchronous, asynchronous and bounded, whole parameters and rows."""

import gc
import weakref
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, SparseAdam

from harness import torch_world
from ringcomm import ArgumentError
from ringcomm.parallel import DataParallel
from ringcomm.parallel.grid import Axis
from ringcomm.parameter_server import ParameterServer, Worker
from ringcomm.torch.traffic import record_traffic


class Model(nn.Module):
    """Parameters of one row, of fewer rows than servers, of odd sizes, and one without dimensions."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        self.scale, self.unused = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.ones(1))
        self.to(dtype)

    def forward(self, x, rank):
        y = self.layers(x) * self.scale
        return y * self.sometimes if rank % 2 else y


def batch(step, rank, dtype):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 5, generator=generator).to(dtype)


def values(parameters):
    return [parameter.tolist() for parameter in parameters]


OPTIMIZERS = {"SGD": partial(SGD, lr=0.1, momentum=0.9), "AdamW": partial(AdamW, lr=0.1, weight_decay=0.5)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("size", "servers", "dtype", "backend"),
    [
        (3, [0], torch.float32, "ringcomm"),
        (4, [1, 0], torch.float64, "ringcomm"),
        (4, [3], torch.float32, "ringcomm"),
        (4, [0, 1], torch.float32, "gloo"),
    ],
    ids=str,
)
def test_synchronous_training_has_the_bits_of_dataparallel(size, servers, dtype, backend, optimizer):
    torch_world.run(synchronous, size, servers, dtype, OPTIMIZERS[optimizer], backend=backend)


def synchronous(servers, dtype, optimizer):
    rank, model = dist.get_rank(), Model(dtype)
    workers = [each for each in range(dist.get_world_size()) if each not in servers]
    group = dist.new_group(workers)
    if rank in servers:
        server = ParameterServer(model.parameters(), servers, optimizer)
        server.serve()
        assert not server.lost
        return
    reference, pulled = Model(dtype), []
    with Worker(model.parameters(), servers) as worker:
        for step in range(5):
            worker.pull()
            pulled.append(values(model.parameters()))
            model.zero_grad()
            model(batch(step, rank, dtype), rank).square().mean().backward()
            worker.push()
        worker.pull()
        pulled.append(values(model.parameters()))
    data_parallel = DataParallel(reference, Axis("dp", len(workers), workers.index(rank), tuple(workers), group))
    plain, expected = optimizer(reference.parameters()), [values(reference.parameters())]
    for step in range(5):
        plain.zero_grad()
        reference(batch(step, rank, dtype), rank).square().mean().backward()
        data_parallel.finish_grad_sync()
        plain.step()
        expected.append(values(reference.parameters()))
    assert pulled == expected


def served(parameters, servers, optimizer=None, **options):
    """Serve, by default with plain gradient descent; return the values at the end."""
    optimizer = optimizer or partial(SGD, lr=1.0)
    server = ParameterServer(parameters, servers, optimizer, **options)
    server.serve()
    return values(server.parameters)


@torch_world.on(3)
def test_a_worker_may_take_fewer_steps_and_the_mean_is_then_that_of_the_others():
    x, rank = nn.Parameter(torch.zeros(2)), dist.get_rank()
    if rank == 0:
        assert served([x], [0]) == [[-2 * 1.5 - 2 * 2.0] * 2]
        return
    with Worker([x], [0]) as worker:
        for _ in range(2 * rank):
            worker.pull()
            x.grad = torch.full((2,), float(rank))
            worker.push()


@torch_world.on(2)
def test_a_server_does_not_keep_the_model():
    values = np.zeros(3, np.float32)
    memory, x = weakref.ref(values), nn.Parameter(torch.from_numpy(values))
    if dist.get_rank() == 1:
        with Worker([x], [0]) as worker:
            worker.pull()
        return
    server = ParameterServer([x], [0], SGD)
    del values, x
    gc.collect()  # frames that torch's calls have left
    assert memory() is None
    server.serve()


# --- Staleness --------------------------------------------------------------------------------------------------------


class Recorded(SGD):
    """Counts in each step how often two workers have pushed; each lowers an element by 1."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=1.0)
        self.counts = []

    def step(self, *arguments):
        super().step(*arguments)
        self.counts.append([-int(x) for x in self.param_groups[0]["params"][0]])


def push_own(worker, x, own):
    worker.pull()
    x.grad = torch.tensor([1.0, 0.0] if own == 0 else [0.0, 1.0])
    worker.push()


@pytest.mark.parametrize("staleness", [1, 2, 5])
@torch_world.on(3, backends=torch_world.BACKENDS)
def test_a_fast_worker_is_never_further_ahead_than_the_bound_allows(staleness):
    """The slow worker begins when the fast one has pulled as far ahead as it may, and pulls three times as often."""
    rank, x, steps = dist.get_rank(), nn.Parameter(torch.zeros(2)), 30
    if rank == 0:
        server = ParameterServer([x], [0], Recorded, staleness=staleness)
        server.serve()
        leads = [fast - slow for fast, slow in server.optimizer.counts]
        assert leads[staleness - 1] == staleness
        assert max(leads) <= staleness + 1
        assert server.optimizer.counts[-1] == [steps, steps]
        return
    with Worker([x], [0]) as worker:
        for step in range(steps):
            if rank == 1 and step == staleness:
                worker.pull()  # the server has all its pushes then
                dist.send(torch.zeros(1), 2)
            if rank == 2:
                if step == 0:
                    dist.recv(torch.zeros(1), 1)
                worker.pull()
                worker.pull()
            push_own(worker, x, rank - 1)


@torch_world.on(3, backends=torch_world.BACKENDS)
def test_an_asynchronous_worker_never_waits_and_a_step_is_taken_with_each_push():
    """One worker finishes before the other begins."""
    rank, x = dist.get_rank(), nn.Parameter(torch.zeros(2))
    if rank == 0:
        server = ParameterServer([x], [0], Recorded, staleness=None)
        server.serve()
        assert server.optimizer.counts == [*([i, 0] for i in range(1, 11)), *([10, i] for i in range(1, 4))]
        return
    with Worker([x], [0]) as worker:
        if rank == 2:
            dist.recv(torch.zeros(1), 1)
            worker.pull()
            assert x.tolist() == [-10.0, 0.0]
        for _ in range(10 if rank == 1 else 3):
            push_own(worker, x, rank - 1)
        if rank == 1:
            worker.pull()
            dist.send(torch.zeros(1), 2)


# --- Rows -------------------------------------------------------------------------------------------------------------

WORDS, WIDTH = 11, 3


def words(step, rank):
    return torch.randint(WORDS, (2, 4), generator=torch.Generator().manual_seed(10 * step + rank))


@torch_world.on(4, backends=torch_world.BACKENDS)
@torch_world.each("sparse", [False, True])
@torch_world.each("optimizer", [partial(SGD, lr=0.1), partial(Adagrad, lr=0.1)])
def test_rows_train_as_in_one_process_and_others_are_not_pulled(sparse, optimizer):
    rank, servers = dist.get_rank(), [0, 1]
    torch.manual_seed(0)
    embedding, whole = (nn.Embedding(WORDS, WIDTH, sparse=sparse, dtype=torch.float64) for _ in range(2))
    whole.load_state_dict(embedding.state_dict())
    if rank in servers:
        served(embedding.parameters(), servers, optimizer)
        return
    plain = optimizer(whole.parameters())
    with Worker(embedding.parameters(), servers) as worker:
        for step in range(6):
            before, ids = embedding.weight.detach().clone(), words(step, rank)
            worker.pull({embedding.weight: ids})
            others = [row for row in range(WORDS) if row not in ids]
            assert torch.equal(embedding.weight[others], before[others])
            torch.testing.assert_close(embedding.weight[ids], whole.weight[ids], rtol=1e-12, atol=0)
            embedding.zero_grad()
            embedding(ids).sin().sum().backward()
            worker.push()
            plain.zero_grad()
            (sum(whole(words(step, each)).sin().sum() for each in (2, 3)) / 2).backward()
            plain.step()
        worker.pull()
    torch.testing.assert_close(embedding.weight, whole.weight, rtol=1e-12, atol=0)


@torch_world.on(3)
def test_only_the_values_and_gradients_of_the_rows_used_are_sent():
    rank, servers = dist.get_rank(), [0, 2]
    embedding, bias = nn.Embedding(WORDS, WIDTH, sparse=True), nn.Parameter(torch.zeros(8))
    parameters = [embedding.weight, bias]
    if rank in servers:
        served(parameters, servers)
        return
    with Worker(parameters, servers) as worker:
        with record_traffic() as calls:
            worker.pull({embedding.weight: torch.tensor([[1, 3, 3], [4, 5, 1]])})
        rows_and_bias = [1, 3 * WIDTH * 4, 4 * 4, 1, 1 * WIDTH * 4, 4 * 4]  # rows 0 to 4 are on the first server
        assert received(calls) == rows_and_bias
        embedding(torch.tensor([1, 3, 4, 5])).sum().backward()
        with record_traffic() as calls:
            worker.push()
        assert sent(calls) == [3 * WIDTH * 4, 1 * WIDTH * 4]  # the bias has no gradient
        with record_traffic() as calls:
            worker.pull()
        assert received(calls) == [1, 1, 1, 5 * WIDTH * 4, 4 * 4, 1, 6 * WIDTH * 4, 4 * 4]  # and answers to the push


def received(calls):
    """Return the bytes of each tensor received: first an answer of a byte."""
    return [call.payload for call in calls if call.operation == "recv"]


def sent(calls):
    """Return the bytes of each tensor sent: a request takes two messages, of which the first has 8 bytes."""
    payloads = [call.payload for call in calls]
    requests = [i for i, payload in enumerate(payloads) if payload == 8]
    return [payload for i, payload in enumerate(payloads) if i not in requests and i - 1 not in requests]


@torch_world.on(2)
def test_rows_that_no_parameter_has_are_refused_and_nothing_is_sent():
    x, other = (nn.Parameter(torch.zeros(4, 2)) for _ in range(2))
    if dist.get_rank() == 0:
        served([x], [0])
        return
    with Worker([x], [0]) as worker:
        for rows, text in (
            ({x: torch.tensor([2, 4, 0])}, r"rows of a parameter: expected numbers from 0 to 3, got \[0, 2, 4\]"),
            ({x: torch.tensor([-1])}, r"rows of a parameter: expected numbers from 0 to 3, got \[-1\]"),
            ({other: torch.tensor([0])}, r"rows: expected parameters of the worker as keys, got \[\(4, 2\)\]"),
        ):
            with record_traffic() as calls, pytest.raises(ArgumentError, match=text):
                worker.pull(rows)
            assert not calls
        worker.pull({x: torch.tensor([], dtype=torch.int64)})


@torch_world.on(2)
def test_an_optimizer_of_sparse_gradients_gets_those_of_rows():
    embedding = nn.Embedding(WORDS, WIDTH, sparse=True)
    if dist.get_rank() == 0:
        served(embedding.parameters(), [0], SparseAdam)
        return
    with Worker(embedding.parameters(), [0]) as worker:
        worker.pull()
        before = embedding.weight.detach().clone()
        worker.pull({embedding.weight: torch.tensor([2])})
        embedding(torch.tensor([2])).sum().backward()
        worker.push()
        worker.pull()
    assert [*(embedding.weight != before).any(1).nonzero()] == [2]
