"""1-bit Adam: both stages against one process, messages and their bytes, states, and misuse."""

import io
from copy import deepcopy
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from harness import torch_world
from harness.failures import raised
from ringcomm import ArgumentError
from ringcomm.parallel import DataParallel, Grid, load_checkpoint, save_checkpoint
from ringcomm.parallel.data.one_bit_adam import OneBitAdam, compress, decompress
from ringcomm.torch.traffic import bytes_sent, record_traffic

BETAS, EPS = (0.9, 0.99), 1e-8


def parameters(dtype=torch.float64):
    """Return parameters of odd sizes: together 47 elements, of which no rank uses the last 2, nor the second row."""
    draw = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=draw, dtype=dtype)) for shape in ((3, 9), (), (17,), (2,))]


def gradients(step, rank, like):
    """Return the gradients of a rank; rank 1 lacks that of the third parameter."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    grads = [torch.randn(each.shape, generator=draw, dtype=each.dtype) for each in like]
    grads[0][1] = 0.0
    return [grads[0], grads[1], None if rank == 1 else 0.01 * grads[2], None]


def set_gradients(parameters, step, rank):
    for parameter, grad in zip(parameters, gradients(step, rank, parameters), strict=True):
        parameter.grad = grad


def same_everywhere(tensors):
    seen = [None] * dist.get_world_size()
    dist.all_gather_object(seen, [x.tolist() for x in tensors])
    return all(each == seen[0] for each in seen)


@torch_world.on(1, 2, 3, backends=torch_world.BACKENDS)
@torch_world.each("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_warm_up_has_the_bits_of_dataparallel_and_adamw(dtype):
    dp = Grid(dp=dist.get_world_size()).dp
    ours, plain = parameters(dtype), nn.ParameterList(parameters(dtype))
    options = {"lr": 0.1, "betas": BETAS, "eps": EPS, "weight_decay": 0.1}
    optimizer = OneBitAdam([{"params": ours[:2]}, {"params": ours[2:], "lr": 0.2}], dp, warmup_steps=5, **options)
    adam = AdamW([{"params": plain[:2]}, {"params": plain[2:], "lr": 0.2}], **options)
    data_parallel = DataParallel(plain, dp)
    for step in range(4):
        for each in (ours, plain):
            set_gradients(each, step, dp.rank)
        data_parallel.finish_grad_sync()
        adam.step()
        optimizer.step()
        assert [x.tolist() for x in ours] == [x.tolist() for x in plain]


def in_one_process(n, steps, warmup_steps, lr, weight_decay):
    """Return the parameters after each step of the algorithm, with the ranks one after another."""
    elements = [each.detach().clone() for each in parameters()]
    momenta, variances = ([torch.zeros_like(x) for x in elements] for _ in range(2))
    count = sum(x.numel() for x in elements[:3])
    chunk = -(-count // (8 * n)) * 8
    workers, servers = torch.zeros(n, n, chunk, dtype=torch.float64), torch.zeros(n, chunk, dtype=torch.float64)
    directions = divisors = None
    for step in range(steps):
        grads = [gradients(step, rank, elements) for rank in range(n)]
        grads = [[torch.zeros_like(x) if g is None else g for g, x in zip(r, elements, strict=True)] for r in grads]
        if step < warmup_steps:
            for k in range(3):
                mean = sum(rank[k] for rank in grads) / n
                momenta[k] = BETAS[0] * momenta[k] + (1 - BETAS[0]) * mean
                variances[k] = BETAS[1] * variances[k] + (1 - BETAS[1]) * mean**2
            divisors = torch.cat([(x / (1 - BETAS[1] ** (step + 1))).sqrt().flatten() for x in variances[:3]]) + EPS
            directions = torch.cat([x.flatten() for x in momenta[:3]]) / divisors
        else:
            known = torch.cat([x.flatten() for x in variances[:3]]) > 0
            mean = torch.zeros(n, chunk, dtype=torch.float64)
            for rank in range(n):
                grad = torch.cat([x.flatten() for x in grads[rank][:3]]) / divisors
                workers[rank].view(-1)[:count] += BETAS[0] * directions + (1 - BETAS[0]) * grad * known
                sent = torch.stack([one_bit(x) for x in workers[rank]])
                workers[rank] -= sent
                mean += sent / n
            servers += mean
            sent = torch.stack([one_bit(x) for x in servers])
            servers -= sent
            directions = sent.flatten()[:count] * known
        updates = directions * lr / (1 - BETAS[0] ** (step + 1))
        for x, update in zip(elements[:3], updates.split([x.numel() for x in elements[:3]]), strict=True):
            x -= lr * weight_decay * x + update.view(x.shape)
        yield [x.clone() for x in elements]


def one_bit(x):
    return torch.tensor([1.0 if element >= 0 else -1.0 for element in x], dtype=x.dtype) * x.abs().sum() / len(x)


@torch_world.on(1, 2, 3, 4, backends=torch_world.BACKENDS)
def test_both_stages_equal_the_algorithm_in_one_process_and_replicas_stay_equal():
    n = dist.get_world_size()
    dp, ours = Grid(dp=n).dp, parameters()
    optimizer = OneBitAdam(ours, dp, lr=0.05, betas=BETAS, eps=EPS, weight_decay=0.1, warmup_steps=6)
    for step, expected in enumerate(in_one_process(n, 30, 6, 0.05, 0.1)):
        set_gradients(ours, step, dp.rank)
        optimizer.step()
        torch.testing.assert_close([x.detach() for x in ours], expected, rtol=1e-10, atol=1e-12)
        assert same_everywhere(ours)


@torch_world.on(3)
def test_replicas_start_from_the_first_and_elements_without_variance_do_not_change():
    dp = Grid(dp=3).dp
    ours = [nn.Parameter(x + dp.rank) for x in parameters(torch.float32)]
    optimizer = OneBitAdam(ours, dp, warmup_steps=1)
    start = [x.detach().clone() for x in parameters(torch.float32)]
    for step in range(5):
        set_gradients(ours, step, dp.rank)
        if step:
            ours[0].grad[1] = 1.0  # too late
            ours[3].grad = torch.ones(2)
        optimizer.step()
    assert torch.equal(ours[0][1], start[0][1])
    assert torch.equal(ours[3], start[3])
    assert (ours[0][0] != start[0][0]).all()
    assert same_everywhere(ours)


# --- Messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_message_has_a_bit_per_element_and_a_scale_and_the_error_is_what_it_lacks(dtype):
    x = torch.randn(3, 40, dtype=dtype, generator=torch.Generator().manual_seed(0))
    x[2] = 0.0
    error = x.clone()
    message = compress(error)
    assert (message.shape, message.dtype) == ((3, 40 // 8 + dtype.itemsize), torch.uint8)
    values = decompress(message, dtype)
    torch.testing.assert_close(values + error, x)
    torch.testing.assert_close(values.abs(), x.abs().mean(1, keepdim=True).expand(3, 40))
    assert torch.equal(values[:2] > 0, x[:2] > 0)


def traffic(n, count):
    """Return the bytes of a step of the warm-up, and of a later one."""
    dp, parameter = Grid(dp=n).dp, nn.Parameter(torch.ones(count))
    optimizer = OneBitAdam([parameter], dp, warmup_steps=1)
    sent = []
    for _ in range(2):
        parameter.grad = torch.ones(count)
        with record_traffic() as calls:
            optimizer.step()
        exchanged = [call for call in calls if call.operation == "all_to_all"]  # equal shares: one stays
        own = sum(Fraction(call.payload * (n - 1), n) for call in exchanged)
        sent.append(own + bytes_sent([call for call in calls if call not in exchanged], dp.group))
    return sent


@torch_world.on(2, 4)
def test_a_compressed_step_sends_at_least_31_times_fewer_bytes():
    n = dist.get_world_size()
    for count, times in ((992 * n, 31), (1 << 20, 32 / (1 + Fraction(n, 1 << 15)))):
        warm, later = traffic(n, count)
        assert warm == Fraction(2 * (n - 1), n) * 4 * count
        assert later == Fraction(2 * (n - 1), n) * (Fraction(count, 8) + 4 * n)
        assert warm / later == times
    warm, later = traffic(n, 992 * n - 1)  # padded
    assert later == Fraction(2 * (n - 1), n) * (Fraction(992 * n, 8) + 4 * n)


# --- States -----------------------------------------------------------------------------------------------------------


def trained(optimizer, ours, steps, rank):
    for step in steps:
        set_gradients(ours, step, rank)
        optimizer.step()
    return [x.detach().clone() for x in ours]


@pytest.mark.parametrize("saved_after", [2, 3, 7])
@torch_world.on(3)
def test_training_goes_on_from_the_saved_states_with_the_same_bits(saved_after):
    dp = Grid(dp=3).dp
    ours, later = parameters(torch.float32), parameters(torch.float32)
    optimizer, other = (OneBitAdam(each, dp, lr=0.05, warmup_steps=3) for each in (ours, later))
    trained(optimizer, ours, range(saved_after), dp.rank)
    file = io.BytesIO()
    torch.save(([x.detach() for x in ours], optimizer.state_dict()), file)
    file.seek(0)
    remaining = range(saved_after, 12)
    expected = trained(optimizer, ours, remaining, dp.rank)
    trained(other, later, range(5), dp.rank)  # which loading replaces
    values, states = torch.load(file)
    for parameter, value in zip(later, values, strict=True):
        parameter.data.copy_(value)
    other.load_state_dict(states)
    assert [x.tolist() for x in trained(other, later, range(saved_after, 12), dp.rank)] == [
        x.tolist() for x in expected
    ]


@torch_world.on(2)
def test_errors_restart_from_zero_without_those_of_as_many_replicas():
    dp = Grid(dp=2).dp
    ours = parameters()
    optimizer = OneBitAdam(ours, dp, warmup_steps=2)
    start, results = trained(optimizer, ours, range(6), dp.rank), []
    state = deepcopy(optimizer.state_dict())
    worker, server = state["errors"]
    assert (worker.shape, server.shape) == ((48,), (24,))
    zeros, of_four = (torch.zeros(48), torch.zeros(24)), (torch.ones(64), torch.ones(16))
    for errors in ((worker, server), None, zeros, of_four):
        for parameter, value in zip(ours, start, strict=True):
            parameter.data.copy_(value)
        saved = {**state, "errors": errors and tuple(x.double() for x in errors)}
        optimizer.load_state_dict(deepcopy(saved))
        results.append([x.tolist() for x in trained(optimizer, ours, range(6, 9), dp.rank)])
    assert results[1] == results[2] == results[3] != results[0]


@torch_world.on(2)
def test_checkpoints_keep_all_but_the_errors(tmp_path):
    grid, models = Grid(dp=2), [nn.Linear(3, 3) for _ in range(2)]
    optimizers = [OneBitAdam(model.parameters(), grid.dp_cp, warmup_steps=2) for model in models]
    for _ in range(4):
        models[0](torch.full((1, 3), 1.0 + grid.dp.rank)).sum().backward()
        optimizers[0].step()
    save_checkpoint(tmp_path, models[0], optimizers[0], grid, {})
    load_checkpoint(tmp_path, models[1], optimizers[1], grid)
    (ours, _), (loaded, errors) = ((each["state"], each["errors"]) for each in map(OneBitAdam.state_dict, optimizers))
    assert errors is None
    torch.testing.assert_close(loaded, ours, rtol=0, atol=0)
    assert [x.tolist() for x in models[1].parameters()] == [x.tolist() for x in models[0].parameters()]


# --- What it takes and refuses ----------------------------------------------------------------------------------------


@torch_world.on(2)
def test_a_closure_runs_with_gradients_and_schedulers_set_the_rate():
    ours = [nn.Parameter(torch.ones(5)) for _ in range(2)]
    optimizer = OneBitAdam(ours, Grid(dp=2).dp, lr=0.5, warmup_steps=2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step == 3 else 1.0)

    def closure():
        optimizer.zero_grad()
        loss = sum(x.square().sum() for x in ours)
        loss.backward()
        return loss

    values = []
    for _ in range(5):
        values.append(float(optimizer.step(closure)))
        scheduler.step()
    assert values[0] == 10.0
    assert values[3] == values[4] != values[2]


@torch_world.on(2)
def test_arguments_that_cannot_work_are_refused_on_all_ranks():
    rank, dp = dist.get_rank(), Grid(dp=2).dp
    embedding = nn.Embedding(10, 4, sparse=True)
    with pytest.raises(ArgumentError, match=r"warmup_steps: expected an integer from 1 to .*, got 0"):
        OneBitAdam(embedding.parameters(), dp, warmup_steps=0)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        OneBitAdam(embedding.parameters(), dp, lr=-1.0, warmup_steps=1)
    other = [nn.Parameter(torch.zeros(3 + rank))]
    text = str(raised(ArgumentError, lambda: OneBitAdam(other, dp, warmup_steps=1)))
    assert text.startswith("tensor 0 of replica 1 (rank 1): expected as on rank 0, 0 (3,) torch.float32")
    optimizer = OneBitAdam(embedding.parameters(), dp, warmup_steps=1)
    embedding(torch.arange(3)).sum().backward()
    with pytest.raises(ArgumentError, match="expected a dense one, got a sparse one"):
        optimizer.step()
