"""Collectives of Python objects of any size."""

import pickle
import threading
from unittest.mock import Mock, patch

import numpy as np
import pytest

import harness
from cases.no_fast_path import on_path
from ringcomm import RingcommError
from ringcomm import objects as objects_of
from ringcomm.native import RECORD
from ringcomm.transports.messages import ANY_SOURCE, ANY_TAG


def objects(comm):
    mine = [
        comm.rank,
        None,
        {"rank": comm.rank, "name": "x" * comm.rank},
        "long" * 300_000 * comm.rank,  # of another length on every rank, and longer than a segment
        [np.arange(comm.rank), {1, 2}, b"\0"],
    ]
    for root in range(comm.size):
        theirs = comm.broadcast_object(mine if comm.rank == root else "ignored", root)
        assert (theirs[0], theirs[2]["name"], len(theirs[3])) == (root, "x" * root, 1_200_000 * root)
        gathered = comm.gather_object(mine[:4], root)
        if comm.rank != root:
            assert gathered is None
            continue
        assert [each[0] for each in gathered] == list(range(comm.size))
        assert [len(each[3]) for each in gathered] == [1_200_000 * rank for rank in range(comm.size)]
    gathered = comm.all_gather_object(mine)
    for rank, theirs in enumerate(gathered):
        assert theirs[1] is None
        assert theirs[2] == {"rank": rank, "name": "x" * rank}
        assert theirs[4][0].tolist() == list(range(rank))
    assert comm.all_gather_object(None) == [None] * comm.size


@pytest.mark.parametrize("size", [1, 2, 4])
def test_objects_arrive_as_they_were_sent(size, world):
    harness.run(objects, size, world=world)


@pytest.mark.ranks(3)
def test_the_general_path_makes_the_same_calls(comm):
    """The general path of some ranks beside the fast path of the others."""
    for general in range(comm.size):
        with on_path(comm, comm.rank == general):
            for check in (objects, own_object, at_the_edge, refused_on_one, ended_on_one):
                check(comm)


def own_object(comm):
    mine = object()
    assert comm.broadcast_object(mine if comm.rank == 1 else None, root=1) is mine or comm.rank != 1


def test_the_root_gets_its_own_object_back(world):
    harness.run(own_object, 2, world=world)


def at_the_edge(comm):
    """Pickled objects that just fit into a record, and that just do not, beside short ones."""
    room = objects_of.RECORD - 16  # beside two numbers
    fits = next(n for n in range(room) if len(pickle.dumps("x" * n, protocol=5)) == room)
    for length in (fits, fits + 1):
        for longer in range(comm.size):
            text = "x" * (length if comm.rank == longer else 1)
            lengths = [length if rank == longer else 1 for rank in range(comm.size)]
            assert [len(each) for each in comm.all_gather_object(text)] == lengths
            assert len(comm.broadcast_object(text, root=longer)) == length
            gathered = comm.gather_object(text, root=1)
            assert [*map(len, gathered)] == lengths if comm.rank == 1 else gathered is None
            sent = ["x" * (length if rank == longer else comm.rank) for rank in range(comm.size)]
            received = objects_of.all_to_all(comm, sent)
            expected = [length] * comm.size if comm.rank == longer else list(range(comm.size))
            assert [len(each) for each in received] == expected
            assert objects_of.scatter(comm, lengths if comm.rank == 1 else None, 1) == lengths[comm.rank]
            assert len(objects_of.scatter(comm, sent if comm.rank == 1 else None, 1)) == (
                length if comm.rank == longer else 1
            )


def test_objects_fit_into_their_record_or_not(world):
    harness.run(at_the_edge, 3, world=world)


def refused_on_one(comm):
    """All ranks raise, of a gather the root and the rank itself; the communicator stays usable."""
    wrong = comm.size - 1
    obj = threading.Lock() if comm.rank == wrong else comm.rank
    if comm.rank not in (0, wrong):
        assert comm.gather_object(obj) is None
    for call in (
        *([lambda: comm.gather_object(obj)] if comm.rank in (0, wrong) else []),
        lambda: comm.all_gather_object(obj),
        lambda: comm.broadcast_object(obj, root=wrong),
        lambda: objects_of.scatter(comm, [obj] * comm.size if comm.rank == wrong else None, wrong),
        lambda: objects_of.all_to_all(comm, [obj] * comm.size),
    ):
        with pytest.raises(RingcommError, match=f"rank {wrong} could not pickle its object") as caught:
            call()
        assert type(caught.value) is RingcommError  # not ArgumentError, after which nothing was sent
        assert caught.value.rank == wrong
        assert isinstance(caught.value.__cause__, TypeError) is (comm.rank == wrong)
    assert comm.all_gather_object(comm.rank) == list(range(comm.size))


def test_an_object_that_one_rank_cannot_pickle_is_an_error_on_all_that_get_it(world):
    harness.run(refused_on_one, 3, world=world)


class Ends:
    """Pickling it raises what is no Exception."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


def ended_on_one(comm):
    """The rank raises what pickling raised, the others that get objects the error; the next call is no other one."""
    wrong = comm.size - 1
    for error in (SystemExit(3), KeyboardInterrupt(), GeneratorExit()):
        obj = Ends(error) if comm.rank == wrong else comm.rank
        for call in (
            lambda obj=obj: comm.all_gather_object(obj),
            lambda obj=obj: comm.broadcast_object(obj, root=wrong),
            lambda obj=obj: objects_of.scatter(comm, [obj] * comm.size if comm.rank == wrong else None, wrong),
            lambda obj=obj: objects_of.all_to_all(comm, [obj] * comm.size),
        ):
            with pytest.raises(type(error) if comm.rank == wrong else RingcommError) as caught:
                call()
            if comm.rank == wrong:
                assert caught.value is error
            else:
                assert caught.value.rank == wrong
            assert comm.all_gather_object(comm.rank) == list(range(comm.size))
        if comm.rank in (0, wrong):
            with pytest.raises(type(error) if comm.rank == wrong else RingcommError) as caught:
                comm.gather_object(obj)
            assert caught.value is error or caught.value.rank == wrong
        else:
            assert comm.gather_object(obj) is None
        assert comm.all_gather_object(comm.rank) == list(range(comm.size))


def test_pickling_that_ends_a_program_leaves_the_ranks_in_step(world):
    harness.run(ended_on_one, 3, world=world)


@pytest.mark.ranks(2)
def test_a_codec_that_returns_no_bytes_is_an_error_on_all(comm):
    codec = objects_of.Codec(lambda obj: "text" if comm.rank else pickle.dumps(obj), None, pickle.loads)
    with pytest.raises(RingcommError, match="rank 1 could not pickle its object"):
        objects_of.all_gather(comm, comm.rank, codec=codec)
    assert comm.all_gather_object(comm.rank) == list(range(comm.size))


LARGE = objects_of.LARGE
FROZEN = np.arange(LARGE, dtype=np.uint8)
FROZEN.flags.writeable = False


@pytest.mark.parametrize("general", [False, True])
@pytest.mark.ranks(3)
def test_large_arrays_in_an_object_arrive_writable_and_owned(comm, general):
    """The arrays of all kinds, at any place of the object, arrive as pickle says: writable if they were, and owned."""
    with on_path(comm, general):
        x, y = np.arange(LARGE / 4, dtype="f4"), np.asfortranarray(np.arange(LARGE, dtype="i8").reshape(4, -1))
        sent = {
            "at the edge": [x, x[:-1]],
            "again": (x, {"nested": [y]}),
            "read-only": FROZEN,
            "strided": y.T[::2],
            "objects": np.array([x, None], object),
            "empty": x[:0],
            "text": "x" * 1000,
        }
        broadcast = Mock(wraps=comm._fused["broadcast"])
        with patch.dict(comm._fused, broadcast=broadcast):
            found = comm.broadcast_object(sent if comm.rank == 1 else None, 1)
        sizes = [call.args[0].count for call in broadcast.call_args_list if call.args[0].count != RECORD]
        assert sizes[1:] == [x.nbytes, y.nbytes, FROZEN.nbytes]  # after the pickle, which has not these
        if comm.rank == 1:
            assert found is sent
            return
        assert found["at the edge"][0].tobytes() == x.tobytes() == found["again"][0].tobytes()
        assert found["at the edge"][0] is found["again"][0]
        assert found["at the edge"][1].tobytes() == x[:-1].tobytes()
        nested = found["again"][1]["nested"][0]
        assert (nested == y).all()
        assert nested.flags.f_contiguous
        assert (found["strided"] == y.T[::2]).all()
        assert (found["objects"][0] == x).all()
        assert found["empty"].shape == (0,)
        assert not found["read-only"].flags.writeable
        found["at the edge"][0][:] = nested[0, 0] = comm.rank  # in nobody else's memory
        assert (x[1], y[0, 0]) == (1, 0)
        assert all(each.flags.aligned for each in (found["at the edge"][0], nested, found["read-only"]))


@pytest.mark.ranks(2)
def test_an_object_that_cannot_be_pickled_beside_a_large_array_is_an_error_on_all(comm):
    x = np.zeros(LARGE)
    for error, obj in ((TypeError, threading.Lock()), (KeyboardInterrupt, Ends(KeyboardInterrupt()))):
        with pytest.raises((RingcommError, KeyboardInterrupt)) as caught:
            comm.broadcast_object([x, obj] if comm.rank == 0 else None)
        own = caught.value if error is KeyboardInterrupt else caught.value.__cause__
        assert isinstance(own, error) is (comm.rank == 0)
        assert comm.all_gather_object(comm.rank) == list(range(comm.size))


class Shortening:
    """Pickling it shortens the list that it is in."""

    def __init__(self, objs):
        self.objs = objs

    def __reduce__(self):
        self.objs.clear()
        return (int, ())


@pytest.mark.ranks(2)
def test_a_list_that_pickling_shortens_is_an_error_on_all(comm):
    objs = list(range(comm.size))
    if comm.rank == 0:
        objs[0] = Shortening(objs)
    with pytest.raises(RingcommError, match="rank 0 could not pickle its object"):
        objects_of.all_to_all(comm, objs)
    assert comm.all_gather_object(comm.rank) == list(range(comm.size))


class Unloadable:
    def __reduce__(self):
        return (refuse_to_load, ())


def refuse_to_load():
    raise ValueError("cannot be loaded")


@pytest.mark.ranks(2)
def test_an_object_that_cannot_be_loaded_leaves_the_ranks_in_step(comm):
    obj = Unloadable() if comm.rank == 0 else bytes(10_000)
    with pytest.raises(ValueError, match="cannot be loaded"):
        comm.all_gather_object(obj)
    assert comm.gather_object(comm.rank, root=1) == ([0, 1] if comm.rank == 1 else None)


@pytest.mark.ranks(3)
def test_a_gather_of_objects_waits_for_no_root(comm):
    """With objects that fit a record the others return before the root begins."""
    with comm.split(0) as others_done:
        if comm.rank:
            assert comm.gather_object(comm.rank) is None
        others_done.barrier()
        if comm.rank == 0:
            assert comm.gather_object(comm.rank) == list(range(comm.size))


@pytest.mark.ranks(2)
def test_a_long_object_of_a_gather_is_no_message_of_the_program(comm):
    """A receive of any message, which is open meanwhile, gets none of a gather."""
    if comm.rank == 0:
        received = np.zeros(1, np.uint8)
        message = comm.messages.irecv(received, ANY_SOURCE, ANY_TAG)
        assert [len(each) for each in comm.gather_object(bytes(1000))] == [1000, 1001]
        comm.barrier()
        message.wait()
        assert received[0] == 7
    else:
        comm.gather_object(bytes(1001))
        comm.barrier()
        comm.send(np.full(1, 7, np.uint8), 0)
