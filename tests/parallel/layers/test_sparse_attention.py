"""Sparse attention layouts: the drawn patterns, and equality of masked dense attention and `flex_attention`."""

import warnings

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from harness import torch_world
from ringcomm import ArgumentError
from ringcomm.parallel import Grid, ParallelAttention
from ringcomm.parallel.sparse_attention import (
    all_of,
    any_of,
    block_sparse,
    causal,
    dense_mask,
    global_tokens,
    sliding_window,
    strided,
)

LAYOUT = torch.tensor([[1, 0, 0], [0, 1, 1], [1, 0, 1]], dtype=torch.bool)
SPARSE_TRANSFORMER = all_of(causal, any_of(sliding_window(2), strided(3)))
LONGFORMER = any_of(sliding_window(2), global_tokens(1))

# Query by query, the keys it attends to.
PATTERNS = {
    "causal": (causal, "100000 110000 111000 111100 111110 111111"),
    "sliding window": (sliding_window(2), "110000 111000 011100 001110 000111 000011"),
    "strided": (strided(3), "100100 010010 001001 100100 010010 001001"),
    "global": (global_tokens(1), "111111 100000 100000 100000 100000 100000"),
    "block-sparse": (block_sparse(LAYOUT, 2), "110000 110000 001111 001111 110011 110011"),
    "Sparse Transformer": (SPARSE_TRANSFORMER, "100000 110000 011000 101100 010110 001011"),
    "Longformer": (LONGFORMER, "111111 111000 111100 101110 100111 100011"),
}
SLOPES = torch.tensor([1, 4])


def by_head(_batch, head, query, key):
    """Attend to a window whose width depends on the head."""
    return (query - key).abs() < SLOPES[head]


@pytest.mark.parametrize("name", PATTERNS)
def test_masks_are_those_of_the_papers(name):
    mask, rows = PATTERNS[name]
    (dense,) = dense_mask(mask, 6).int().tolist()
    assert ["".join(map(str, row)) for row in dense] == rows.split()


def test_a_mask_may_depend_on_the_head():
    narrow, wide = dense_mask(by_head, 9, heads=2)
    assert torch.equal(narrow, torch.eye(9, dtype=torch.bool))
    assert torch.equal(wide, dense_mask(sliding_window(4), 9)[0])
    both = dense_mask(any_of(by_head, global_tokens(1)), 9, heads=2)
    assert torch.equal(both[1], dense_mask(any_of(sliding_window(4), global_tokens(1)), 9)[0])


@pytest.mark.parametrize("name", [*PATTERNS, "by head"])
@torch_world.on(1)
def test_flex_attention_gives_the_results_of_masked_dense_attention(name):
    """Use a length that is no multiple of the blocks, and a layout of other blocks."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # imports torch._dynamo

    length, block = 42, 16
    masks = {name: mask for name, (mask, _) in PATTERNS.items()} | {"by head": by_head}
    masks["block-sparse"] = block_sparse(LAYOUT.repeat(2, 2), 8)
    draw = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, length, 8, dtype=torch.float64, generator=draw)
    blocks = create_block_mask(masks[name], None, 2, length, length, "cpu", block)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow unless it is compiled
        sparse = flex_attention(query, key, value, block_mask=blocks)
    dense = F.scaled_dot_product_attention(query, key, value, dense_mask(masks[name], length, heads=2))
    torch.testing.assert_close(sparse, dense, rtol=1e-12, atol=1e-12)


@torch_world.on(2)
def test_parallel_attention_with_a_mask_equals_that_of_one_process():
    outputs = []
    for axis in (Grid(tp=2).tp, Grid.alone().tp):
        torch.manual_seed(0)
        attention = ParallelAttention(16, 4, axis).double()
        x = torch.randn(2, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = attention(x, dense_mask(LONGFORMER, 9))
        y.sin().sum().backward()
        outputs.append((y.detach(), x.grad))
    for got, expected in zip(*outputs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_masks_that_make_no_sense_are_refused():
    for make, words in (
        (lambda: sliding_window(0), "width: expected an integer from 1"),
        (lambda: strided(0), "stride: expected an integer from 1"),
        (lambda: block_sparse(LAYOUT, 0), "block: expected an integer from 1"),
        (
            lambda: dense_mask(block_sparse(torch.tensor([[False, False], [True, True]]), 1), 2),
            "mask: expected a key for every query, got none for query 0 of head 0",
        ),
    ):
        with pytest.raises(ArgumentError, match=words):
            make()
