"""A small GPT on a grid, its batches, and the same training in one process."""

import torch
from torch import nn

from cases.pipelines import gpt_pipeline
from ringcomm.parallel import GPTConfig, Grid, gpt_loss, gpt_stages, make_schedule
from ringcomm.parallel.collectives import all_reduced
from ringcomm.parallel.experts.layer import set_loss_factor
from ringcomm.parallel.model.verify import check_model

MICRO_BATCHES, ROWS = 4, 2  # of a replica's batch; sequences of a micro-batch


def config_for(tp, pp, *, grouped=False, **options):
    """Return a small GPT for these axes; its vocabulary is not a multiple of either."""
    heads = 2 * tp
    if grouped:
        options["kv_heads"] = tp
    return GPTConfig(vocab_size=37, context=4 * tp, layers=2 * pp, hidden=4 * heads, heads=heads, **options)


def layouts(size):
    """Return all (dp, tp, pp) of `size` ranks."""
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    return [(dp, tp, size // dp // tp) for dp in divisors for tp in divisors if size % (dp * tp) == 0]


def batch_of(config, grid, step):
    """Return the inputs and targets of all replicas."""
    generator = torch.Generator().manual_seed(step)
    rows = grid.dp.size * MICRO_BATCHES * ROWS
    tokens = torch.randint(config.vocab_size, (rows, config.context + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def stepped(chunks, loss_fn, inputs, targets):
    """Run the micro-batches one by one through all chunks, and return their mean loss."""
    micro_batches = len(inputs) // ROWS
    total = 0.0
    for x, y in zip(inputs.split(ROWS), targets.split(ROWS), strict=True):
        for chunk in chunks:
            x = chunk(x)
        loss = loss_fn(x, y) / micro_batches
        loss.backward()
        total = total + loss.detach()
    return total


def mine(x, axis):
    return x.chunk(axis.size)[axis.rank]


def compared(dp, tp, pp, schedule, options, steps, dtype, tolerance, ep=1):
    """Train on the grid and in one process, and compare after each step; return the last loss."""
    grid, alone = Grid(dp, tp, pp, ep=ep), Grid.alone()
    config, chunks = config_for(tp, pp, **options), [2] if schedule == "interleaved" else []
    schedule = make_schedule(schedule, pp, MICRO_BATCHES, *chunks)
    chunks, pipeline = gpt_pipeline(config, grid, schedule, dtype=dtype, seed=3, bucket_bytes=2000)
    whole = [chunk.to(dtype) for chunk in gpt_stages(config, alone, seed=3)]
    set_loss_factor(whole, 1 / (MICRO_BATCHES * dp))  # of the balance losses of experts
    optimizers = [torch.optim.SGD(nn.ModuleList(each).parameters(), lr=0.5) for each in (chunks, whole)]
    for step in range(steps):
        for optimizer in optimizers if step != 1 else ():  # the second step accumulates
            optimizer.zero_grad()
        inputs, targets = batch_of(config, grid, step)
        expected = stepped(whole, gpt_loss(config, alone), inputs, targets)
        loss = pipeline.step(mine(inputs, grid.dp), mine(targets, grid.dp))
        loss = all_reduced(loss, grid.dp) / grid.dp.size
        assert abs(loss / expected - 1) <= tolerance
        check_model(chunks, whole, grid, tolerance)
        for optimizer in optimizers if step else ():
            optimizer.step()
    check_model(chunks, whole, grid, tolerance)
    return float(loss)
