"""Cross-entropy of sharded logits, compared with torch's of the full logits."""

import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)

from cases.pipelines import gpt_pipeline
from harness import torch_world
from harness.failures import raised
from ringcomm import ArgumentError
from ringcomm.parallel import (
    CountedLoss,
    DataParallel,
    GPTConfig,
    Grid,
    Pipeline,
    count_targets,
    gpt_stages,
    make_schedule,
    vocab_parallel_cross_entropy,
)
from ringcomm.parallel.model.verify import full_values

TOKENS = 2, 5


def shard_logits(logits, tp):
    """Return this rank's shard, with padding that would dominate the loss if it counted."""
    share = -(-logits.shape[-1] // tp.size)
    padded = F.pad(logits, (0, share * tp.size - logits.shape[-1]), value=1000.0)
    return padded.chunk(tp.size, -1)[tp.rank].clone()


def compared(vocab_size, smoothing, dtype):
    tp = Grid(tp=dist.get_world_size()).tp
    generator = torch.Generator().manual_seed(0)
    whole = (30 * torch.randn(*TOKENS, vocab_size, dtype=torch.float64, generator=generator)).to(dtype)
    targets = torch.randint(vocab_size, TOKENS, generator=generator)
    targets[0, 0], targets[0, 1], targets[1, 1] = 0, vocab_size - 1, -100
    mine = shard_logits(whole, tp).requires_grad_()
    kept = mine.detach().clone()
    loss = vocab_parallel_cross_entropy(mine, targets, tp, vocab_size=vocab_size, label_smoothing=smoothing)
    (3 * loss).backward()

    whole = whole.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, -2), targets.flatten(), label_smoothing=smoothing)
    (3 * expected).backward()
    near = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-2, "atol": 1e-5}
    torch.testing.assert_close(loss, expected, **near)
    grads = torch.cat(gathered(mine.grad), -1)
    torch.testing.assert_close(grads[..., :vocab_size], whole.grad, check_dtype=False, **near)
    assert not grads[..., vocab_size:].any()
    assert torch.equal(mine, kept)


def gathered(x):
    out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x)
    return out


@torch_world.on(1, 2, 4)
@torch_world.each("smoothing", [0.0, 0.1])
@torch_world.each("vocab_size", [8, 1001])
def test_loss_and_gradients_equal_those_of_the_full_logits(vocab_size, smoothing):
    compared(vocab_size, smoothing, torch.float64)


@pytest.mark.parametrize(
    ("size", "vocab_size", "dtype"), [(4, 50_257, torch.float64), (2, 1001, torch.bfloat16)], ids=str
)
def test_a_large_vocabulary_and_16_bits_on_gloo(size, vocab_size, dtype):
    torch_world.run(compared, size, vocab_size, 0.1, dtype, backend="gloo")


@torch_world.on(2)
def test_targets_and_vocabularies_of_other_sizes_are_refused():
    tp = Grid(tp=2).tp
    with pytest.raises(ArgumentError, match="targets: expected numbers from 0 to 6, got some from 1 to 7"):
        vocab_parallel_cross_entropy(torch.ones(2, 4), torch.tensor([1, 7]), tp, vocab_size=7)
    with pytest.raises(ArgumentError, match=r"shape of the targets: expected \(2,\), got \(3,\)"):
        vocab_parallel_cross_entropy(torch.ones(2, 4), torch.tensor([1, 2, 3]), tp)
    with pytest.raises(ArgumentError, match="vocab_size: expected 5 to 8, for 2 · 4 logits, got 9"):
        vocab_parallel_cross_entropy(torch.ones(2, 4), torch.tensor([1, 2]), tp, vocab_size=9)
    with pytest.raises(ArgumentError, match="label_smoothing: expected a number from 0 to 1, got 7"):
        vocab_parallel_cross_entropy(torch.ones(2, 4), torch.tensor([1, 2]), tp, label_smoothing=7)


@torch_world.on(2)
def test_targets_that_are_all_ignored_have_a_loss_of_nan_and_no_gradients():
    logits = torch.randn(2, 4, requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([-100, -100]), Grid(tp=2).tp)
    assert loss.isnan()
    torch.where(loss.isnan(), 0, loss).backward()
    assert logits.grad.tolist() == [[0.0] * 4] * 2


def uneven(rows, length):
    """Return ids and targets of which some micro-batches ignore many, and one ignores all."""
    ids = torch.arange(rows * (length + 1)).view(rows, -1) * 7 % 11
    inputs, targets = ids[:, :-1], ids[:, 1:].clone()
    for row in range(rows):
        targets[row, : row * 3 % (length + 1)] = -100
    targets[2] = -100
    return inputs, targets


@pytest.mark.parametrize(("dp", "tp", "pp"), [(1, 1, 1), (2, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 1)], ids=str)
def test_the_loss_is_the_mean_over_the_tokens_that_are_not_ignored(dp, tp, pp):
    torch_world.run(over_tokens, dp * tp * pp, dp, tp, pp)


def over_tokens(dp, tp, pp):
    grid, alone = Grid(dp, tp, pp), Grid.alone()
    config = GPTConfig(vocab_size=11, context=6, layers=2, hidden=8, heads=2)
    inputs, targets = uneven(8, 6)
    chunks, pipe = gpt_pipeline(config, grid, make_schedule("1f1b", pp, 4))
    (whole,) = (chunk.double() for chunk in gpt_stages(config, alone))
    expected = F.cross_entropy(whole(inputs).flatten(0, 1), targets.flatten())
    expected.backward()
    mine = [each.chunk(dp)[grid.dp.rank] for each in (inputs, targets)]
    near = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(pipe.step(*mine, 4.0), expected.detach(), **near)
    torch.testing.assert_close(pipe.evaluate(*mine), expected.detach(), **near)
    for name, grad in full_values("gradient", chunks, grid).items():
        torch.testing.assert_close(grad / 4, whole.get_parameter(name).grad, **near)
    ignored = torch.full_like(mine[1], -100)
    assert math.isnan(pipe.step(mine[0], ignored))
    assert all(parameter.grad.isfinite().all() for chunk in chunks for parameter in chunk.parameters())


@torch_world.on(1)
def test_a_counted_loss_takes_functions_and_counts_numbers():
    mean = F.cross_entropy
    for name, wrong in (("function", (None, count_targets)), ("count", (mean, 3))):
        assert str(raised(ArgumentError, lambda wrong=wrong: CountedLoss(*wrong))).startswith(
            f"{name} of a CountedLoss: expected a function, got "
        )
    grid, model, x, y = Grid(), torch.nn.Linear(4, 5), torch.randn(2, 4), torch.tensor([0, 3])
    for count in (lambda _: 1, lambda _: 1.0, lambda _: np.int64(1), count_targets):
        pipe = Pipeline(grid, model, make_schedule("1f1b", 1, 2), CountedLoss(mean, count))
        assert pipe.evaluate(x, y).isfinite()
        assert pipe.step(x, y).isfinite()
    for wrong in (None, "3"):
        pipe = Pipeline(grid, model, make_schedule("1f1b", 1, 2), CountedLoss(mean, lambda _, wrong=wrong: wrong))
        text = str(raised(ArgumentError, lambda pipe=pipe: pipe.step(x, y)))
        assert text == f"count of a CountedLoss: expected one that returns a number or a tensor, got {wrong!r}"


@torch_world.on(2)
def test_torchs_cross_entropy_may_be_counted_with_another_ignored_index():
    grid = Grid(dp=2)
    torch.manual_seed(0)
    model, whole = (torch.nn.Linear(4, 5).double() for _ in range(2))
    whole.load_state_dict(model.state_dict())
    x, y = torch.randn(8, 4).double(), torch.tensor([0, 0, 0, 3, 2, 1, 0, 4])
    loss_fn = CountedLoss(partial(F.cross_entropy, ignore_index=0), partial(count_targets, ignore_index=0))
    pipe = Pipeline(grid, model, make_schedule("1f1b", 1, 2), loss_fn, data_parallel=DataParallel(model, grid.dp))
    dist.broadcast(x, 0)
    for parameter, other in zip(whole.parameters(), model.parameters(), strict=True):
        parameter.data.copy_(other)
    expected = F.cross_entropy(whole(x), y, ignore_index=0)
    expected.backward()
    assert float(pipe.step(x.chunk(2)[grid.dp.rank], y.chunk(2)[grid.dp.rank])) == pytest.approx(float(expected))
    torch.testing.assert_close(model.weight.grad, whole.weight.grad)
