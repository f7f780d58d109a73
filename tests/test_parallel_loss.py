"""Cross-entropy over a vocabulary that is cut, against torch's of the whole logits."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)

import torch_world
from ringcomm import ArgumentError
from ringcomm.parallel import Grid, vocab_parallel_cross_entropy

TOKENS = 2, 5


def cut_logits(logits, tp):
    """Return this rank's part, padded with numbers that would spoil everything if they counted."""
    share = -(-logits.shape[-1] // tp.size)
    padded = F.pad(logits, (0, share * tp.size - logits.shape[-1]), value=1000.0)
    return padded.chunk(tp.size, -1)[tp.rank].clone()


def compared(vocabulary, smoothing, dtype):
    tp = Grid(tp=dist.get_world_size()).tp
    generator = torch.Generator().manual_seed(0)
    whole = (30 * torch.randn(*TOKENS, vocabulary, dtype=torch.float64, generator=generator)).to(dtype)
    targets = torch.randint(vocabulary, TOKENS, generator=generator)
    targets[0, 0], targets[0, 1], targets[1, 1] = 0, vocabulary - 1, -100
    mine = cut_logits(whole, tp).requires_grad_()
    kept = mine.detach().clone()
    loss = vocab_parallel_cross_entropy(mine, targets, tp, vocabulary=vocabulary, label_smoothing=smoothing)
    (3 * loss).backward()

    whole = whole.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, -2), targets.flatten(), label_smoothing=smoothing)
    (3 * expected).backward()
    near = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-2, "atol": 1e-5}
    torch.testing.assert_close(loss, expected, **near)
    grads = torch.cat(gathered(mine.grad), -1)
    torch.testing.assert_close(grads[..., :vocabulary], whole.grad, check_dtype=False, **near)
    assert not grads[..., vocabulary:].any()
    assert torch.equal(mine, kept)


def gathered(x):
    out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x)
    return out


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradients_are_those_of_the_whole_logits(size, smoothing):
    for vocabulary in (8, 1001):
        torch_world.run(compared, size, vocabulary, smoothing, torch.float64)


@pytest.mark.parametrize("size", [2, 4])
def test_a_vocabulary_of_50257_is_cut(size):
    torch_world.run(compared, size, 50_257, 0.1, torch.float64, backend="gloo")


def test_logits_of_16_bits_are_summed_in_32():
    torch_world.run(compared, 2, 1001, 0.1, torch.bfloat16)


def misfits():
    tp = Grid(tp=2).tp
    with pytest.raises(ArgumentError, match="targets: expected numbers from 0 to 6, got some from 1 to 7"):
        vocab_parallel_cross_entropy(torch.ones(2, 4), torch.tensor([1, 7]), tp, vocabulary=7)
    with pytest.raises(ArgumentError, match=r"shape of the targets: expected \(2,\), got \(3,\)"):
        vocab_parallel_cross_entropy(torch.ones(2, 4), torch.tensor([1, 2, 3]), tp)
    with pytest.raises(ArgumentError, match="the vocabulary: expected 5 to 8, for 2 · 4 logits, got 9"):
        vocab_parallel_cross_entropy(torch.ones(2, 4), torch.tensor([1, 2]), tp, vocabulary=9)
    with pytest.raises(ArgumentError, match="label_smoothing: expected a number from 0 to 1, got 7"):
        vocab_parallel_cross_entropy(torch.ones(2, 4), torch.tensor([1, 2]), tp, label_smoothing=7)


def test_targets_and_vocabularies_that_do_not_fit_are_refused():
    torch_world.run(misfits, 2)
