"""Every algorithm is proved; what is wrong is caught, with the rank, the step and what happened."""

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
def test_its_recordings_prove_it(algorithm):
    prove(algorithm)


def test_the_page_of_algorithms_says_what_the_code_says():
    path = Path(__file__).parent.parent / "docs" / "algorithms.md"
    assert path.read_text() == page(), "run python -m ringcomm.algorithms > docs/algorithms.md"


def test_two_algorithms_of_a_collective_have_different_names():
    with pytest.raises(AssertionError, match="two algorithms are called ring"):
        algorithm("ring", "all_reduce", steps="0", sent="0")(ring.all_reduce.tell)


def test_a_long_array_passes_a_chain_in_pieces():
    lengths = Lengths((2000,) * 5)  # as in the proof
    assert len(record(chain.broadcast, 0, 5, lengths).steps) == 3


def test_copies_that_follow_on_each_other_are_one():
    steps = record(bruck.all_gather, 2, 5, Lengths((1,) * 5)).steps
    assert sum(isinstance(step, Copy) for step in steps) == 3  # its own; those after it, those before it


# --- What a proof catches -------------------------------------------------------------------------------------------


def refusal(algorithm, tell=None, **declared):
    """Return what the proof says of `algorithm` with this in place of its own."""
    changes = {name: Formula(text) if isinstance(text, str) else text for name, text in declared.items()}
    with pytest.raises(AssertionError) as caught:
        prove(replace(algorithm, tell=tell or algorithm.tell, **changes))
    text = str(caught.value)
    assert text.startswith(algorithm.title)
    return text


def neighbours(port):
    return (port.rank + 1) % port.size, (port.rank - 1) % port.size


def test_a_ring_that_sends_before_it_receives_is_a_deadlock():
    def tell(port, blocks):
        right, left = neighbours(port)
        for step in range(port.size - 1):
            port.send(blocks[(port.rank - step) % port.size], right)
            port.recv(blocks[(port.rank - 1 - step) % port.size], left)

    assert "deadlock: rank 0 (step 0) sends to 1, rank 1 (step 0) sends to 0" in refusal(ring.all_gather, tell)


def test_who_waits_for_a_rank_that_has_ended_waits_for_ever():
    def tell(port, data, root):
        if port.rank == root:
            port.send(data, (root + 1) % port.size)
        else:
            port.recv(data, root)

    text = refusal(tree.broadcast, tell, sent="S", steps="1")
    assert "3 ranks" in text
    assert "deadlock: rank 2 (step 0) receives from 0" in text


def test_a_send_and_its_receive_have_one_length():
    def tell(port, data, root):
        if port.rank == root:
            port.send(data, (root + 1) % port.size)
        else:
            port.recv(data.part(0, 1), root)

    text = refusal(tree.broadcast, tell, sent="S", steps="1")
    assert "from rank 0 (step 0) to rank 1 (step 0): 2 elements are sent, 1 are expected" in text


def test_a_block_that_is_one_off_is_found():
    def tell(port, blocks):
        ring.all_gather.tell(port, [*blocks[1:], blocks[0]])

    assert "rank 0 reads OUT[1:2], which it has not written" in refusal(ring.all_gather, tell)


def test_a_block_that_has_not_come_yet_cannot_be_sent():
    def tell(port, blocks):
        n, (right, left) = port.size, neighbours(port)
        for step in reversed(range(n - 1)):
            port.exchange(blocks[(port.rank - step) % n], right, blocks[(left - step) % n], left)

    text = refusal(ring.all_gather, tell)
    assert "from rank 1 (step 0) to rank 2 (step 0): rank 1 reads OUT[0:1], which it has not written" in text


def test_scratch_memory_is_written_before_it_is_copied():
    def tell(port, blocks):
        port.copy(port.scratch(1), blocks[port.rank])
        ring.all_gather.tell(port, blocks)

    text = refusal(ring.all_gather, tell, scratch="1")
    assert "in rank 1 (step 0): rank 1 reads SCRATCH[0:1], which it has not written" in text


def test_a_block_that_comes_to_the_wrong_place_is_found():
    def tell(port, blocks, out):
        pairwise.all_to_all.tell(port, [*blocks[1:], blocks[0]], out)

    text = refusal(pairwise.all_to_all, tell)
    assert "rank 0 ends with element 1 of rank 1 in OUT[1], not with element 0 of rank 1" in text


def test_what_is_missing_at_the_end_is_found():
    assert "rank 0 ends with nothing in OUT[1], not with element 0 of rank 1" in refusal(
        ring.all_gather, lambda port, blocks: None, sent="0", steps="0"
    )
    assert "rank 0 ends with element 0 of rank 0 in OUT[0], not with element 0 of ranks 0, 1" in refusal(
        ring.all_reduce, lambda port, data: None, sent="0", steps="0"
    )


def test_nothing_is_added_twice():
    def tell(port, data):
        right, left = neighbours(port)
        space = port.scratch(data.length)
        port.exchange(data, right, space, left, operand=data)
        port.exchange(space, right, data, left, operand=space)

    text = refusal(ring.all_reduce, tell, sent="2 * S", scratch="S", steps="2")
    assert "(step 1): element 0 of ranks 0, 1 is added to element 0 of ranks 0, 1: some of it twice" in text


def test_an_element_is_added_to_its_like_only():
    def tell(port, data):
        right, left = neighbours(port)
        first, second = data.split((data.length // 2, data.length - data.length // 2))
        port.exchange(first, right, second, left, operand=second)

    text = refusal(ring.all_reduce, tell, sent="S / 2", steps="1")
    assert "(step 0): element 1 of rank 1 is added to element 0 of rank 0" in text


def test_what_is_sent_is_not_written_over():
    def tell(port, data):
        right, left = neighbours(port)
        port.exchange(data, right, data, left, operand=data)

    text = refusal(ring.all_reduce, tell, sent="S", steps="1")
    assert "rank 0 (step 0): it writes OUT[0:2] while OUT[0:2] is read" in text


def test_an_operand_is_written_over_as_a_whole_or_not_at_all():
    def tell(port, data):
        right, left = neighbours(port)
        port.send(data, right) if port.rank else port.recv(data.part(1, 2), left, operand=data)

    text = refusal(ring.all_reduce, tell, sent="S", steps="1")
    assert "rank 0 (step 0): it writes OUT[1:2] while OUT[0:2] is added" in text


def test_the_input_stays_as_it_is():
    def tell(port, data, _, root):
        tree.reduce.tell(port, data, data, root)

    assert "rank 0 (step 0): it writes IN[0:2]" in refusal(tree.reduce, tell)


def test_memory_ends_where_it_ends():
    def tell(port, blocks):
        ring.all_gather.tell(port, [block.part(1, 2) for block in blocks])

    assert "rank 0 (step 0): OUT[2:3] is not within its 2 elements" in refusal(ring.all_gather, tell)


def test_nobody_talks_to_himself():
    def tell(port, blocks):
        port.send(blocks[port.rank], port.rank)
        port.recv(blocks[port.rank], port.rank)

    assert "rank 0 (step 0): it talks to itself" in refusal(ring.all_gather, tell, sent="S / n", steps="2")


def test_a_barrier_hears_from_everybody():
    def tell(port):
        right, left = neighbours(port)
        port.exchange(port.scratch(0), right, port.scratch(0), left)

    text = refusal(dissemination.barrier, tell, steps="1")
    assert "rank 0 goes on without having heard from [1]" in text
    assert "3 ranks" in text


def test_what_cannot_be_in_place_is_not_declared_so():
    text = refusal(pairwise.all_to_all, in_place=True)
    assert "in place: rank 0 (step 0): it writes OUT[1:2] while IN[1:2] is read" in text


def test_an_array_so_long_that_it_passes_in_pieces_is_tried():
    def tell(port, data, root):
        if data.length < 10_000:
            chain.broadcast.tell(port, data, root)

    assert "5 ranks with (2000, 2000, 2000, 2000, 2000), root 0: rank 1 ends with nothing" in refusal(
        chain.broadcast, tell
    )


def test_what_needs_equal_blocks_is_not_declared_for_others():
    assert "elements are sent" in refusal(bruck.all_to_all, equal_blocks=False)


def test_formulas_that_are_wrong_are_named_with_what_is_right():
    words = "ring all_reduce, 3 ranks, 3 elements: "
    assert refusal(ring.all_reduce, sent="S") == words + "sent is 4, and not S = 3"
    assert refusal(ring.all_reduce, scratch="n - 2") == words + "scratch is 0, and not n - 2 = 1"
    assert "steps is 4, and not 2 * (p - 1) = 2" in refusal(ring.all_reduce, steps="2 * (p - 1)")


# --- What a replay computes -----------------------------------------------------------------------------------------

SIZES = (2, 3, 4, 5, 7, 8)


def arrays(size, length, dtype=np.int64):
    return [(np.arange(length) * 7 + 3 * rank + 1).astype(dtype) for rank in range(size)]


@every("all_reduce", "reduce", "reduce_scatter")
def test_exact_numbers_have_one_sum(algorithm):
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
def test_what_is_only_moved_arrives(algorithm):
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


def test_the_share_of_the_lower_rank_comes_first():
    inputs = [np.array([number, 0, 0]) for number in (100, 10, 1)]
    assert replay(ring.all_reduce, inputs, np.subtract)[0][0] == 100 - (10 - 1)


@every("all_reduce")
def test_all_ranks_get_the_same_bits(algorithm):
    random = np.random.default_rng(5)
    for size in SIZES:
        inputs = [random.standard_normal(50).astype(np.float16) for _ in range(size)]
        for combine in (np.add, np.subtract):  # the order of the two shares is the same for all
            assert len({result.tobytes() for result in replay(algorithm, inputs, combine)}) == 1
