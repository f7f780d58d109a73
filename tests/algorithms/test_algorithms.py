"""Every algorithm is proved; the proof reports an error with its rank and step."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ringcomm.algorithms import ALGORITHMS, bruck, chain, dissemination, pairwise, ring, tree
from ringcomm.algorithms.page import page
from ringcomm.algorithms.replay import replay
from ringcomm.algorithms.schedule import Copy, Formula, Lengths, algorithm, record
from ringcomm.testing import prove


def every(*collectives):
    chosen = [each for name in collectives for each in ALGORITHMS[name].values()]
    return pytest.mark.parametrize("algorithm", chosen, ids=lambda algorithm: algorithm.title)


@every(*ALGORITHMS)
def test_every_algorithm_is_proved(algorithm):
    prove(algorithm)


def test_the_page_of_algorithms_is_current():
    path = Path(__file__).parents[2] / "docs" / "algorithms.md"
    assert path.read_text() == page(), "run python -m ringcomm.algorithms > docs/algorithms.md"


def test_two_algorithms_of_a_collective_have_different_names():
    with pytest.raises(AssertionError, match="duplicate algorithm ring"):
        algorithm("ring", "all_reduce", steps="0", sent="0", rounds=ring.all_reduce.rounds)(ring.all_reduce.function)


def test_a_long_array_passes_a_chain_in_pieces():
    lengths = Lengths((2000,) * 5)  # as in the proof
    assert len(record(chain.broadcast, 0, 5, lengths).steps) == 3


def test_consecutive_copies_are_merged():
    steps = record(bruck.all_gather, 2, 5, Lengths((1,) * 5)).steps
    assert sum(isinstance(step, Copy) for step in steps) == 3  # its own block; those after it; those before it


# --- Errors that the proof finds --------------------------------------------------------------------------------------


def refusal(algorithm, function=None, **declared):
    """Return the error of the proof of `algorithm` with another function or other declarations."""
    changes = {name: Formula(text) if isinstance(text, str) else text for name, text in declared.items()}
    with pytest.raises(AssertionError) as caught:
        prove(replace(algorithm, function=function or algorithm.function, **changes))
    text = str(caught.value)
    assert text.startswith(algorithm.title)
    return text


def refused(algorithm, *words, **declared):
    """Make a test of a function with which the proof of `algorithm` must fail, with these words."""

    def test_of(function):
        def test():
            text = refusal(algorithm, function, **declared)
            assert all(each in text for each in words), text

        return test

    return test_of


def neighbors(port):
    return (port.rank + 1) % port.size, (port.rank - 1) % port.size


@refused(ring.all_gather, "deadlock: rank 0 (step 0) sends to 1, rank 1 (step 0) sends to 0")
def test_a_ring_that_sends_before_it_receives_is_a_deadlock(port, blocks):
    right, left = neighbors(port)
    for step in range(port.size - 1):
        port.send(blocks[(port.rank - step) % port.size], right)
        port.recv(blocks[(port.rank - 1 - step) % port.size], left)


@refused(tree.broadcast, "3 ranks", "deadlock: rank 2 (step 0) receives from 0", sent="S", steps="1")
def test_waiting_for_a_rank_that_has_finished_is_a_deadlock(port, data, root):
    if port.rank == root:
        port.send(data, (root + 1) % port.size)
    else:
        port.recv(data, root)


@refused(
    tree.broadcast, "from rank 0 (step 0) to rank 1 (step 0): 2 elements are sent, 1 expected", sent="S", steps="1"
)
def test_a_send_and_its_receive_must_have_the_same_length(port, data, root):
    if port.rank == root:
        port.send(data, (root + 1) % port.size)
    else:
        port.recv(data.part(0, 1), root)


@refused(ring.all_gather, "rank 1 reads OUT[0:1], which it has not written")
def test_an_off_by_one_block_is_found(port, blocks):
    ring.all_gather.function(port, [*blocks[1:], blocks[0]])


@refused(ring.all_gather, "from rank 2 (step 0) to rank 0 (step 0): rank 2 reads OUT[1:2], which it has not written")
def test_a_block_cannot_be_sent_before_it_is_received(port, blocks):
    n, (right, left) = port.size, neighbors(port)
    for step in reversed(range(n - 1)):
        port.exchange(blocks[(port.rank - step) % n], right, blocks[(left - step) % n], left)


@refused(ring.all_gather, "in rank 0 (step 0): rank 0 reads SCRATCH[0:1], which it has not written", scratch="1")
def test_scratch_memory_cannot_be_read_before_it_is_written(port, blocks):
    port.copy(port.scratch(1), blocks[port.rank])
    ring.all_gather.function(port, blocks)


@refused(pairwise.all_to_all, "rank 0 ends with element 1 of rank 1 in OUT[1], expected element 0 of rank 1")
def test_a_block_at_the_wrong_destination_is_found(port, blocks, out):
    pairwise.all_to_all.function(port, [*blocks[1:], blocks[0]], out)


def test_a_missing_element_is_found():
    assert "rank 0 ends with nothing in OUT[1], expected element 0 of rank 1" in refusal(
        ring.all_gather, lambda port, blocks: None, sent="0", steps="0"
    )
    assert "rank 0 ends with element 0 of rank 0 in OUT[0], expected element 0 of ranks 0, 1" in refusal(
        ring.all_reduce, lambda port, data: None, sent="0", steps="0"
    )


@refused(
    ring.all_reduce,
    "(step 1): element 0 of ranks 0, 1 is added to element 0 of ranks 0, 1: a contribution twice",
    sent="2 * S",
    scratch="S",
    steps="2",
)
def test_a_contribution_reduced_twice_is_found(port, data):
    right, left = neighbors(port)
    space = port.scratch(data.length)
    port.exchange(data, right, space, left, operand=data)
    port.exchange(space, right, data, left, operand=space)


@refused(ring.all_reduce, "(step 0): element 0 of rank 1 is added to element 1 of rank 0", sent="S / 2", steps="1")
def test_only_elements_with_the_same_index_are_reduced(port, data):
    right, left = neighbors(port)
    first, second = data.split((data.length // 2, data.length - data.length // 2))
    port.exchange(first, right, second, left, operand=second)


@refused(ring.all_reduce, "rank 0 (step 0): writes OUT[0:2] while OUT[0:2] is read", sent="S", steps="1")
def test_an_outgoing_block_is_not_overwritten(port, data):
    right, left = neighbors(port)
    port.exchange(data, right, data, left, operand=data)


@refused(ring.all_reduce, "rank 0 (step 0): writes OUT[1:2] while OUT[0:2] is reduced", sent="S", steps="1")
def test_a_partially_overwritten_operand_is_found(port, data):
    right, left = neighbors(port)
    port.send(data, right) if port.rank else port.recv(data.part(1, 2), left, operand=data)


@refused(tree.reduce, "rank 0 (step 0): writes IN[0:2]")
def test_writing_the_input_is_found(port, data, out, root):  # noqa: ARG001 (data are in its place)
    tree.reduce.function(port, data, data, root)


@refused(ring.all_gather, "rank 0 (step 0): OUT[2:3] is not within its 2 elements")
def test_a_block_outside_its_memory_is_found(port, blocks):
    ring.all_gather.function(port, [block.part(1, 2) for block in blocks])


@refused(ring.all_gather, "rank 0 (step 0): exchanges with itself", sent="S / n", steps="2")
def test_a_rank_does_not_exchange_with_itself(port, blocks):
    port.send(blocks[port.rank], port.rank)
    port.recv(blocks[port.rank], port.rank)


@refused(dissemination.barrier, "rank 0 leaves without a signal from [1]", "3 ranks", steps="1")
def test_a_barrier_waits_for_all_ranks(port):
    right, left = neighbors(port)
    port.exchange(port.scratch(0), right, port.scratch(0), left)


def test_a_wrong_in_place_declaration_is_found():
    text = refusal(pairwise.all_to_all, in_place=True)
    assert "in place: rank 0 (step 0): writes OUT[1:2] while IN[1:2] is read" in text


@refused(chain.broadcast, "5 ranks with (2000, 2000, 2000, 2000, 2000), root 0: rank 1 ends with nothing")
def test_the_proof_includes_an_array_of_several_pieces(port, data, root):
    if data.length < 10_000:
        chain.broadcast.function(port, data, root)


def test_a_wrong_equal_blocks_declaration_is_found():
    assert "elements are sent" in refusal(bruck.all_to_all, equal_blocks=False)


def test_a_wrong_formula_is_reported_with_the_real_cost():
    words = "ring all_reduce, 3 ranks, 3 elements: "
    assert refusal(ring.all_reduce, sent="S") == words + "sent is 4, declared is S = 3"
    assert refusal(ring.all_reduce, scratch="n - 2") == words + "scratch is 0, declared is n - 2 = 1"
    assert "steps is 4, declared is 2 * (p - 1) = 2" in refusal(ring.all_reduce, steps="2 * (p - 1)")


# --- Replay ---------------------------------------------------------------------------------------------------------

SIZES = (2, 3, 4, 5, 7, 8)


@every("all_reduce", "reduce", "reduce_scatter")
def test_replay_reduces_exactly(algorithm):
    for size in SIZES:
        inputs = [np.arange(3 * size + 1, dtype=np.float32) * 7 + rank for rank in range(size)]
        total = sum(inputs)
        results = replay(algorithm, inputs, root=1)
        match algorithm.collective:
            case "all_reduce":
                wanted = [total] * size
            case "reduce":
                wanted = [total if rank == 1 else total[:0] for rank in range(size)]
            case _:
                wanted = np.array_split(total, size)
        for result, expected in zip(results, wanted, strict=True):
            np.testing.assert_array_equal(result, expected, strict=True)


@every("all_gather")
def test_replay_moves_blocks_of_the_lengths_of_the_arrays(algorithm):
    blocks = [np.arange(rank) for rank in range(5)]
    for result in replay(algorithm, blocks):
        np.testing.assert_array_equal(result, np.concatenate(blocks), strict=True)


def test_a_sum_is_rounded_at_each_hop():
    # Block 0 goes 1 → 2 → 0. Above 2,048 float16 has even numbers only, and 2,049 is rounded down.
    def first(*numbers):
        inputs = [np.array([number, 0, 0], np.float16) for number in numbers]
        results = replay(ring.all_reduce, inputs)
        assert len({result.tobytes() for result in results}) == 1
        return results[0][0]

    assert first(1, 2048, 1) == 2048
    assert first(2048, 1, 1) == 2050


def test_the_share_of_the_lower_rank_is_first():
    inputs = [np.array([number, 0, 0]) for number in (100, 10, 1)]
    assert replay(ring.all_reduce, inputs, np.subtract)[0][0] == 100 - (10 - 1)


@every("all_reduce")
def test_all_ranks_get_the_same_bits(algorithm):
    random = np.random.default_rng(5)
    for size in SIZES:
        inputs = [random.standard_normal(50).astype(np.float16) for _ in range(size)]
        for combine in (np.add, np.subtract):  # both partners use the same order
            assert len({result.tobytes() for result in replay(algorithm, inputs, combine)}) == 1
