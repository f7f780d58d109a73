"""Ring and Ulysses attention compared with attention in one process: outputs, gradients, bytes and work."""

import math
from datetime import timedelta
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)

from harness import torch_world
from harness.failures import raised
from ringcomm import ArgumentError, CollectiveTimeout
from ringcomm.parallel import Grid
from ringcomm.parallel.collectives import all_gathered, local_slice
from ringcomm.parallel.context import block_attention, ring
from ringcomm.parallel.context.ring import ring_attention
from ringcomm.parallel.context.sequence import join_sequence, sequence_positions, split_sequence
from ringcomm.parallel.context.ulysses import ulysses_attention
from ringcomm.torch.traffic import bytes_sent, record_traffic

BOTH = {"ring": ring_attention, "ulysses": ulysses_attention}
# (B, heads, kv_heads, S, D): equal heads; grouped queries; one key, of an odd size, with two tokens per rank of four.
SHAPES = [(2, 4, 4, 16, 6), (1, 8, 2, 24, 8), (2, 4, 1, 8, 3)]
both = torch_world.each("name", BOTH)
causal_or_not = torch_world.each("causal", [False, True])


def drawn(shape, dtype=torch.float64):
    """Return queries, keys, values and a gradient of the output, of whole sequences."""
    batch, heads, kv_heads, length, width = shape
    generator = torch.Generator().manual_seed(0)
    counts = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(batch, n, length, width, dtype=dtype, generator=generator) for n in counts]


def outcome(attention, query, key, value, grad):
    """Return the output, and the gradients of the inputs."""
    inputs = [each.detach().requires_grad_() for each in (query, key, value)]
    out = attention(*inputs)
    out.backward(grad)
    return [out.detach(), *(each.grad for each in inputs)]


def in_one_process(causal, whole, scale=None):
    return outcome(partial(F.scaled_dot_product_attention, is_causal=causal, scale=scale, enable_gqa=True), *whole)


def on_ranks(attention, axis, whole, split=split_sequence, join=join_sequence, **options):
    parts = [split(each, axis, 2) for each in whole]
    return [join(each, axis, 2) for each in outcome(partial(attention, axis=axis, **options), *parts)]


def cp_axis():
    return Grid(cp=dist.get_world_size()).cp


@torch_world.on(1, 2, 4, backends=torch_world.BACKENDS)
@both
@causal_or_not
def test_attention_and_its_gradients_equal_those_of_one_process(name, causal):
    axis = cp_axis()
    for shape in SHAPES:
        whole = drawn(shape)
        found, expected = on_ranks(BOTH[name], axis, whole, causal=causal), in_one_process(causal, whole)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("size", [pytest.param(n, marks=() if n == 3 else pytest.mark.exhaustive) for n in (3, 5, 8)])
def test_attention_equals_that_of_one_process_on_other_numbers_of_ranks(size, name):
    torch_world.run(attended_on_many, size, name)


def attended_on_many(name):
    axis = cp_axis()
    for causal in (False, True):
        whole = drawn((1, 2 * axis.size, axis.size, 6 * axis.size, 8))
        found, expected = on_ranks(BOTH[name], axis, whole, causal=causal), in_one_process(causal, whole)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@torch_world.on(2)
@both
@causal_or_not
def test_scores_are_scaled_as_asked_and_tensors_of_any_strides_serve(name, causal):
    axis, whole = cp_axis(), drawn(SHAPES[0])

    def strided(x, axis, dim):
        return split_sequence(x, axis, dim).transpose(0, 2).contiguous().transpose(0, 2)

    whole[3] = torch.ones(()).double().expand(whole[3].shape)  # the gradient of a sum
    found = on_ranks(BOTH[name], axis, whole, strided, causal=causal, scale=0.1)
    torch.testing.assert_close(found, in_one_process(causal, whole, 0.1), rtol=1e-12, atol=1e-12)
    x = torch.ones(1, 2, 2, 1, dtype=torch.float64, requires_grad=True)
    BOTH[name](x, x.detach(), x.detach(), axis, causal=causal).sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))  # all scores are equal, and stay so


@torch_world.on(2, 4)
@both
@causal_or_not
@torch_world.each("dtype, rounding", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_attention_in_16_bits_is_as_close_as_that_of_one_process(name, causal, dtype, rounding):
    axis, whole = cp_axis(), drawn((2, 4, 4, 64, 16), dtype)
    found = on_ranks(BOTH[name], axis, whole, causal=causal)
    exact = in_one_process(causal, [each.double() for each in whole])
    assert {each.dtype for each in found} == {dtype}
    for got, right in zip(found, exact, strict=True):
        assert (got.double() - right).abs().max() <= 4 * rounding * right.abs().max()


@torch_world.on(2, 4)
@causal_or_not
def test_ulysses_takes_sequences_in_their_usual_order_too(causal):
    axis, whole = cp_axis(), drawn(SHAPES[0])
    found = on_ranks(ulysses_attention, axis, whole, local_slice, all_gathered, causal=causal, zigzag=False)
    torch.testing.assert_close(found, in_one_process(causal, whole), rtol=1e-12, atol=1e-12)


@torch_world.on(2)
def test_ulysses_drops_attention_weights():
    query, key, value, _ = (split_sequence(each, cp_axis(), 2) for each in drawn(SHAPES[0]))
    assert not ulysses_attention(query, key, value, cp_axis(), dropout=1.0).any()


# --- Bytes and work ---------------------------------------------------------------------------------------------------


def traffic(name, axis, shape, dtype, causal):
    """Return the recorded calls of forward and of backward."""
    query, key, value, grad = (split_sequence(each, axis, 2) for each in drawn(shape, dtype))
    query.requires_grad_(), key.requires_grad_(), value.requires_grad_()
    with record_traffic() as forward:
        out = BOTH[name](query, key, value, axis, causal=causal)
    with record_traffic() as backward:
        out.backward(grad)
    return forward, backward


@torch_world.on(2, 4)
@causal_or_not
@torch_world.each("dtype, backward_bytes", [(torch.float64, 2), (torch.float32, 2), (torch.bfloat16, 3)])
def test_a_ring_sends_keys_and_values_to_all_other_ranks_and_their_gradients_back(causal, dtype, backward_bytes):
    axis = cp_axis()
    for batch, heads, kv_heads, length, width in SHAPES:
        share = 2 * batch * kv_heads * (length // axis.size) * width * dtype.itemsize
        found = traffic("ring", axis, (batch, heads, kv_heads, length, width), dtype, causal)
        assert [bytes_sent(calls, axis.group) for calls in found] == [
            (axis.size - 1) * share,
            backward_bytes * (axis.size - 1) * share,
        ]
        assert {call.operation for calls in found for call in calls} == {"send", "recv"}


@torch_world.on(2, 4)
def test_ulysses_exchanges_all_but_its_own_part_of_inputs_and_outputs():
    axis = cp_axis()
    for batch, heads, kv_heads, length, width in SHAPES:
        share = batch * (2 * heads + 2 * max(kv_heads, axis.size)) * (length // axis.size) * width * 8
        for calls in traffic("ulysses", axis, (batch, heads, kv_heads, length, width), torch.float64, True):
            assert {call.operation for call in calls} == {"all_to_all"}
            assert sum(call.payload for call in calls) == share  # of which (P-1)/P go to others


def work(causal):
    """Return how many scores per head this rank computes for each block, and the order of events."""
    axis, counts, events = cp_axis(), [], []
    pass_on = ring._pass_on

    def counted(query, key_value, masked, scale):
        tokens, keys = query.shape[2], key_value.shape[3]
        counts.append(math.comb(tokens + 1, 2) if masked else tokens * keys)
        events.append("block")
        return block_attention.attend(query, key_value, masked, scale)

    def noted(*arguments):
        events.append("send")
        receive = pass_on(*arguments)
        return lambda: events.append("receive") or receive()

    with patch.object(ring, "attend", counted), patch.object(ring, "_pass_on", noted):
        ring_attention(*(split_sequence(each, axis, 2) for each in drawn((1, 1, 1, 16, 4))[:3]), axis, causal=causal)
    return counts, events


@pytest.mark.parametrize(("causal", "own", "other"), [(False, 16, 16), (True, 10, 8)])
def test_ranks_do_equal_work_skip_what_the_mask_hides_and_receive_while_they_compute(causal, own, other):
    needed = math.comb(16 + 1, 2) if causal else 16 * 16
    assert 4 * (own + 3 * other) == needed
    for counts, events in torch_world.run(work, 4, causal):
        assert counts == [own, other, other, other]
        assert events == ["send", "block", "receive"] * 3 + ["block"]


# --- Parts of a sequence ----------------------------------------------------------------------------------------------


def parts():
    axis = cp_axis()
    x = torch.arange(16.0).view(2, 8)
    positions = sequence_positions(8, axis)
    part = split_sequence(x.requires_grad_(), axis)
    with record_traffic() as calls:
        joined = join_sequence(part, axis)
    assert torch.equal(joined, x)
    assert bytes_sent(calls, axis.group) == x.nbytes * (axis.size - 1) / axis.size
    joined.backward(10 * x.detach())
    expected = torch.zeros(2, 8)
    expected[:, positions] = 10 * x.detach()[:, positions]
    assert torch.equal(x.grad, expected)
    assert torch.equal(join_sequence(split_sequence(x.T, axis, 0), axis, 0), x.T)
    return part.tolist(), positions.tolist()


def test_a_sequence_is_split_into_chunks_from_both_ends_and_joined():
    assert torch_world.run(parts, 2) == [
        ([[0, 1, 6, 7], [8, 9, 14, 15]], [0, 1, 6, 7]),
        ([[2, 3, 4, 5], [10, 11, 12, 13]], [2, 3, 4, 5]),
    ]
    assert [positions for _, positions in torch_world.run(parts, 4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]


@torch_world.on(1)
def test_on_one_rank_a_sequence_of_any_length_is_whole():
    for length in (1, 5):
        assert sequence_positions(length, cp_axis()).tolist() == [*range(length)]


# --- Refusals ---------------------------------------------------------------------------------------------------------


def called(attention, *shapes, dtypes=(torch.float32,), **options):
    """Return a call with queries, keys and values of these shapes; the last shape and dtype count for the rest."""
    shapes = (*shapes, *shapes[-1:] * 2)[:3]
    dtypes = (*dtypes, *dtypes[-1:] * 2)[:3]
    return lambda axis: attention(
        *(torch.ones(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)), axis, **options
    )


REFUSED = [  # a call on 4 ranks, and the error
    (lambda axis: split_sequence(torch.ones(2, 12), axis), "of a sequence: expected a multiple of .* = 8, got 12"),
    (called(ring_attention, (1, 2, 3, 4), causal=True), "this rank's part, two chunks: expected an even number, got 3"),
    (called(ring_attention, (2, 3, 4)), r"queries: expected \(B, heads, S/P, D\), none of them 0, got \(2, 3, 4\)"),
    (called(ring_attention, (1, 2, 0, 4)), r"queries: expected .*, got \(1, 2, 0, 4\)"),
    (
        called(ring_attention, (1, 2, 4, 4), (1, 2, 4, 4), (1, 2, 4, 5)),
        r"values: expected \(1, kv_heads, 4, 4\), got \(1, 2, 4, 4\) and \(1, 2, 4, 5\)",
    ),
    (called(ring_attention, (1, 2, 4, 4), (1, 2, 6, 4)), r"got \(1, 2, 6, 4\) and \(1, 2, 6, 4\)"),
    (called(ring_attention, (1, 2, 4, 4), (1, 0, 4, 4)), r"got \(1, 0, 4, 4\) and \(1, 0, 4, 4\)"),
    (called(ring_attention, (1, 4, 4, 4), (1, 3, 4, 4)), "queries: expected a multiple of the 3 of the keys, got 4"),
    (
        called(ring_attention, (1, 2, 4, 4), dtypes=(torch.float32, torch.float16)),
        "one floating-point dtype and device, got torch.float16 on cpu and torch.float32 on cpu",
    ),
    (called(ring_attention, (1, 2, 4, 4), dtypes=(torch.int64,)), "one floating-point .*, got torch.int64 on cpu"),
    (called(ulysses_attention, (1, 6, 4, 4)), "heads of the queries: expected a multiple of cp = 4, got 6"),
    (called(ulysses_attention, (1, 12, 4, 4), (1, 3, 4, 4)), "keys: expected a multiple or a divisor of cp = 4, got 3"),
]


@torch_world.on(4)
def test_sizes_that_do_not_fit_are_refused_on_every_rank_and_nothing_is_sent():
    axis = cp_axis()
    with record_traffic() as calls:
        for call, words in REFUSED:
            with pytest.raises(ArgumentError, match=words):
                call(axis)
    assert not calls


@torch_world.on(2)
def test_parts_of_different_lengths_fail_on_all_ranks():
    axis = Grid(cp=2, timeout=timedelta(seconds=1)).cp
    query, key, value = torch.randn(3, 1, 2, 8 + 4 * axis.rank, 4).unbind()
    raised(CollectiveTimeout, lambda: ring_attention(query, key, value, axis))
