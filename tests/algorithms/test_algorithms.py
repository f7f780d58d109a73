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
        algorithm("ring", "all_reduce", steps="0", sent="0")(ring.all_reduce.function)


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


def neighbors(port):
    return (port.rank + 1) % port.size, (port.rank - 1) % port.size


def test_a_ring_that_sends_before_it_receives_is_a_deadlock():
    def function(port, blocks):
        right, left = neighbors(port)
        for step in range(port.size - 1):
            port.send(blocks[(port.rank - step) % port.size], right)
            port.recv(blocks[(port.rank - 1 - step) % port.size], left)

    assert "deadlock: rank 0 (step 0) sends to 1, rank 1 (step 0) sends to 0" in refusal(ring.all_gather, function)


def test_waiting_for_a_rank_that_has_finished_is_a_deadlock():
    def function(port, data, root):
        if port.rank == root:
            port.send(data, (root + 1) % port.size)
        else:
            port.recv(data, root)

    text = refusal(tree.broadcast, function, sent="S", steps="1")
    assert "3 ranks" in text
    assert "deadlock: rank 2 (step 0) receives from 0" in text


def test_a_send_and_its_receive_must_have_the_same_length():
    def function(port, data, root):
        if port.rank == root:
            port.send(data, (root + 1) % port.size)
        else:
            port.recv(data.part(0, 1), root)

    text = refusal(tree.broadcast, function, sent="S", steps="1")
    assert "from rank 0 (step 0) to rank 1 (step 0): 2 elements are sent, 1 expected" in text


def test_an_off_by_one_block_is_found():
    def function(port, blocks):
        ring.all_gather.function(port, [*blocks[1:], blocks[0]])

    assert "rank 1 reads OUT[0:1], which it has not written" in refusal(ring.all_gather, function)


def test_a_block_cannot_be_sent_before_it_is_received():
    def function(port, blocks):
        n, (right, left) = port.size, neighbors(port)
        for step in reversed(range(n - 1)):
            port.exchange(blocks[(port.rank - step) % n], right, blocks[(left - step) % n], left)

    text = refusal(ring.all_gather, function)
    assert "from rank 2 (step 0) to rank 0 (step 0): rank 2 reads OUT[1:2], which it has not written" in text


def test_scratch_memory_cannot_be_read_before_it_is_written():
    def function(port, blocks):
        port.copy(port.scratch(1), blocks[port.rank])
        ring.all_gather.function(port, blocks)

    text = refusal(ring.all_gather, function, scratch="1")
    assert "in rank 0 (step 0): rank 0 reads SCRATCH[0:1], which it has not written" in text


def test_a_block_at_the_wrong_destination_is_found():
    def function(port, blocks, out):
        pairwise.all_to_all.function(port, [*blocks[1:], blocks[0]], out)

    text = refusal(pairwise.all_to_all, function)
    assert "rank 0 ends with element 1 of rank 1 in OUT[1], expected element 0 of rank 1" in text


def test_a_missing_element_is_found():
    assert "rank 0 ends with nothing in OUT[1], expected element 0 of rank 1" in refusal(
        ring.all_gather, lambda port, blocks: None, sent="0", steps="0"
    )
    assert "rank 0 ends with element 0 of rank 0 in OUT[0], expected element 0 of ranks 0, 1" in refusal(
        ring.all_reduce, lambda port, data: None, sent="0", steps="0"
    )


def test_a_contribution_reduced_twice_is_found():
    def function(port, data):
        right, left = neighbors(port)
        space = port.scratch(data.length)
        port.exchange(data, right, space, left, operand=data)
        port.exchange(space, right, data, left, operand=space)

    text = refusal(ring.all_reduce, function, sent="2 * S", scratch="S", steps="2")
    assert "(step 1): element 0 of ranks 0, 1 is added to element 0 of ranks 0, 1: a contribution twice" in text


def test_only_elements_with_the_same_index_are_reduced():
    def function(port, data):
        right, left = neighbors(port)
        first, second = data.split((data.length // 2, data.length - data.length // 2))
        port.exchange(first, right, second, left, operand=second)

    text = refusal(ring.all_reduce, function, sent="S / 2", steps="1")
    assert "(step 0): element 0 of rank 1 is added to element 1 of rank 0" in text


def test_an_outgoing_block_is_not_overwritten():
    def function(port, data):
        right, left = neighbors(port)
        port.exchange(data, right, data, left, operand=data)

    text = refusal(ring.all_reduce, function, sent="S", steps="1")
    assert "rank 0 (step 0): writes OUT[0:2] while OUT[0:2] is read" in text


def test_a_partially_overwritten_operand_is_found():
    def function(port, data):
        right, left = neighbors(port)
        port.send(data, right) if port.rank else port.recv(data.part(1, 2), left, operand=data)

    text = refusal(ring.all_reduce, function, sent="S", steps="1")
    assert "rank 0 (step 0): writes OUT[1:2] while OUT[0:2] is reduced" in text


def test_writing_the_input_is_found():
    def function(port, data, _, root):
        tree.reduce.function(port, data, data, root)

    assert "rank 0 (step 0): writes IN[0:2]" in refusal(tree.reduce, function)


def test_a_block_outside_its_memory_is_found():
    def function(port, blocks):
        ring.all_gather.function(port, [block.part(1, 2) for block in blocks])

    assert "rank 0 (step 0): OUT[2:3] is not within its 2 elements" in refusal(ring.all_gather, function)


def test_a_rank_does_not_exchange_with_itself():
    def function(port, blocks):
        port.send(blocks[port.rank], port.rank)
        port.recv(blocks[port.rank], port.rank)

    assert "rank 0 (step 0): exchanges with itself" in refusal(ring.all_gather, function, sent="S / n", steps="2")


def test_a_barrier_waits_for_all_ranks():
    def function(port):
        right, left = neighbors(port)
        port.exchange(port.scratch(0), right, port.scratch(0), left)

    text = refusal(dissemination.barrier, function, steps="1")
    assert "rank 0 leaves without a signal from [1]" in text
    assert "3 ranks" in text


def test_a_wrong_in_place_declaration_is_found():
    text = refusal(pairwise.all_to_all, in_place=True)
    assert "in place: rank 0 (step 0): writes OUT[1:2] while IN[1:2] is read" in text


def test_the_proof_includes_an_array_of_several_pieces():
    def function(port, data, root):
        if data.length < 10_000:
            chain.broadcast.function(port, data, root)

    assert "5 ranks with (2000, 2000, 2000, 2000, 2000), root 0: rank 1 ends with nothing" in refusal(
        chain.broadcast, function
    )


def test_a_wrong_equal_blocks_declaration_is_found():
    assert "elements are sent" in refusal(bruck.all_to_all, equal_blocks=False)


def test_a_wrong_formula_is_reported_with_the_real_cost():
    words = "ring all_reduce, 3 ranks, 3 elements: "
    assert refusal(ring.all_reduce, sent="S") == words + "sent is 4, declared is S = 3"
    assert refusal(ring.all_reduce, scratch="n - 2") == words + "scratch is 0, declared is n - 2 = 1"
    assert "steps is 4, declared is 2 * (p - 1) = 2" in refusal(ring.all_reduce, steps="2 * (p - 1)")


# --- Replay ---------------------------------------------------------------------------------------------------------

SIZES = (2, 3, 4, 5, 7, 8)


def arrays(size, length, dtype=np.int64):
    return [(np.arange(length) * 7 + 3 * rank + 1).astype(dtype) for rank in range(size)]


@every("all_reduce", "reduce", "reduce_scatter")
def test_replay_reduces_exactly(algorithm):
    for size in SIZES:
        inputs = arrays(size, 3 * size + 1, np.float32)
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


@every("broadcast", "gather", "all_gather", "scatter", "all_to_all")
def test_replay_moves_every_block(algorithm):
    for size in SIZES:
        rows = (2,) * size if algorithm.equal_blocks else tuple(rank % 3 for rank in range(size))
        begins = np.cumsum((0, *rows))
        whole = arrays(size, begins[-1])
        blocks = [np.split(array, begins[1:-1]) for array in whole]  # of each rank, for each rank
        mine = [blocks[rank][rank] for rank in range(size)]
        nothing, lengths, here = whole[0][:0], [Lengths(rows)] * size, [rank == 1 for rank in range(size)]
        match algorithm.collective:
            case "broadcast":
                inputs, wanted, lengths = [whole[1] if it else nothing for it in here], [whole[1]] * size, None
            case "gather":
                inputs, wanted, lengths = mine, [np.concatenate(mine) if it else nothing for it in here], None
            case "all_gather":
                inputs, wanted, lengths = mine, [np.concatenate(mine)] * size, None
            case "scatter":
                inputs, wanted = [whole[1] if it else nothing for it in here], blocks[1]
            case "all_to_all":
                inputs, wanted = whole, [np.concatenate([each[rank] for each in blocks]) for rank in range(size)]
                lengths = [Lengths(rows, (rows[rank],) * size) for rank in range(size)]
        for result, expected in zip(replay(algorithm, inputs, lengths=lengths, root=1), wanted, strict=True):
            np.testing.assert_array_equal(result, expected, strict=True)


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
