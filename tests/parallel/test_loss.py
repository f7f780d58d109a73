"""Cross-entropy of sharded logits, compared with torch's of the full logits."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)

import torch_world
from ringcomm import ArgumentError
from ringcomm.parallel import Grid, vocab_parallel_cross_entropy

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


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradients_equal_those_of_the_full_logits(size, smoothing):
    for vocab_size in (8, 1001):
        torch_world.run(compared, size, vocab_size, smoothing, torch.float64)


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
