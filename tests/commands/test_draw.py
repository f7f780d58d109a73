"""`ringcomm draw`: the transfers of a schedule, their layout and labels, and the picture."""

import pytest

from ringcomm.algorithms import ALGORITHMS
from ringcomm.algorithms.block_transfers import BlockTransfer, block_transfers
from ringcomm.algorithms.draw import label, offsets
from ringcomm.commands.cli import main

every = pytest.mark.parametrize(
    "algorithm", [one for found in ALGORITHMS.values() for one in found.values()], ids=lambda algorithm: algorithm.title
)


def way_of(block, found):
    """Return the ranks through which a block passes when it moves alone, each with whether it reduces the block."""
    return [(arrow.sender, arrow.receiver, arrow.reduced) for arrow in found if arrow.blocks == (block,)]


def test_a_block_of_a_ring_all_reduce_goes_around_twice():
    """As the docstring says: 1 → 2 → 3 → 4 → 0, then 0 → 1 → 2 → 3 → 4."""
    found = block_transfers(ALGORITHMS["all_reduce"]["ring"], 5)
    grows = [(1, 2, True), (2, 3, True), (3, 4, True), (4, 0, True)]
    assert way_of(0, found) == [*grows, (0, 1, False), (1, 2, False), (2, 3, False), (3, 4, False)]
    assert [arrow.wave for arrow in found] == [wave for wave in range(1, 9) for _ in range(5)]


def test_blocks_are_tracked_through_scratch_memory():
    """Sums of a reduce_scatter travel in scratch memory."""
    found = block_transfers(ALGORITHMS["reduce_scatter"]["ring"], 5)
    assert way_of(0, found) == [(1, 2, True), (2, 3, True), (3, 4, True), (4, 0, True)]


def test_a_forwarded_block_keeps_its_number():
    found = block_transfers(ALGORITHMS["all_gather"]["bruck"], 5)
    assert [arrow.blocks for arrow in found if arrow.receiver == 3] == [(4,), (0, 1), (2,)]


def test_the_blocks_of_a_scatter_are_numbered_by_rank():
    found = block_transfers(ALGORITHMS["scatter"]["tree"], 5)
    assert [(arrow.sender, arrow.receiver, arrow.blocks) for arrow in found] == [
        (0, 3, (3, 4)),
        (0, 2, (2,)),
        (3, 4, (4,)),
        (0, 1, (1,)),
    ]


def test_an_array_that_is_never_divided_is_one_block():
    assert {arrow.blocks for arrow in block_transfers(ALGORITHMS["broadcast"]["tree"], 8)} == {(0,)}
    assert {arrow.blocks for arrow in block_transfers(ALGORITHMS["barrier"]["dissemination"], 4)} == {()}


@every
def test_every_step_has_a_row(algorithm):
    for size in (2, 5, 8, 16):
        found = block_transfers(algorithm, size)
        assert {arrow.wave for arrow in found} == {*range(1, found[-1].wave + 1)}
        if algorithm.name != "chain":
            assert found[-1].wave == algorithm.steps(size, 1)


def test_a_chain_is_drawn_in_pieces():
    assert len({arrow.blocks for arrow in block_transfers(ALGORITHMS["broadcast"]["chain"], 5)}) == 3


def row(*pairs):
    return [BlockTransfer(1, sender, receiver, False, (0,)) for sender, receiver in pairs]


def test_arrows_of_a_ring_take_the_shorter_direction():
    assert offsets(row((0, 1), (1, 2), (2, 0)), 3) == [1, 1, 1]
    assert offsets(row((0, 4), (1, 0), (2, 1), (3, 2), (4, 3)), 5) == [-1] * 5


def test_all_other_arrows_go_straight():
    assert offsets(row((0, 2)), 3) == [2]
    assert offsets(row((0, 1), (1, 0)), 2) == [1, -1]
    assert offsets(row((0, 2), (1, 3), (2, 0), (3, 1)), 4) == [2, 2, -2, -2]
    assert offsets(row((0, 3), (3, 0), (1, 2), (2, 1)), 4) == [3, -3, 1, -1]


@pytest.mark.parametrize(
    ("blocks", "words"),
    [((3,), "3"), ((3, 4, 5), "3–5"), ((7, 0), "7,0"), ((0, 2, 4, 6), "×4"), (tuple(range(8)), "all")],
)
def test_the_label_of_an_arrow_lists_its_blocks(blocks, words):
    assert label(blocks, 8) == words


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "head"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_the_command_writes_a_picture(kind, head, tmp_path):
    file = tmp_path / f"ring.{kind}"
    assert main(["draw", "ring", "-n", "5", "-o", str(file)]) == 0
    assert file.read_bytes().startswith(head)


@pytest.mark.slow
@every
def test_every_algorithm_can_be_drawn(algorithm, tmp_path):
    for size in (2, 5):
        file = tmp_path / f"{size}.svg"
        options = ["-n", str(size), "--collective", algorithm.collective, "-o", str(file)]
        assert main(["draw", algorithm.name, *options]) == 0
        assert file.stat().st_size


def test_the_default_collective_is_all_reduce_or_the_first(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("ringcomm.algorithms.draw.draw", lambda algorithm, size, output: drawn.append(algorithm.title))
    for name in ("ring", "chain"):
        main(["draw", name, "-o", str(tmp_path / "x.svg")])
    assert drawn == ["ring all_reduce", "chain broadcast"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rign"], "unknown algorithm or schedule 'rign'; did you mean 'ring'?"),
        (["1f2b"], "unknown algorithm or schedule '1f2b'; did you mean '1f1b'?"),
        (["chain", "--collective", "barrier"], "there is no chain barrier; chain implements: broadcast"),
        (["ring", "-n", "1"], "-n: expected 2 to 32 ranks, got 1"),
        (["ring", "-n", "33"], "-n: expected 2 to 32 ranks, got 33"),
    ],
)
def test_invalid_arguments_are_refused(arguments, words, tmp_path, capsys):
    assert main(["draw", *arguments, "-o", str(tmp_path / "x.svg")]) == 2
    assert capsys.readouterr().err.startswith(f"ringcomm draw: {words}")
