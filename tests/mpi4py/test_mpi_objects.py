"""Operations, groups, errors, infos and handles of ringcomm.mpi4py, in one process."""

import pickle

import numpy as np
import pytest

from ringcomm.errors import ArgumentError, MismatchError, PeerLost
from ringcomm.mpi4py.base import errors, info, unsupported
from ringcomm.mpi4py.base.constants import IDENT, SIMILAR, UNDEFINED, UNEQUAL
from ringcomm.mpi4py.base.errors import Exception as MPIException
from ringcomm.mpi4py.calls import message, op
from ringcomm.mpi4py.calls.pickling import Pickle
from ringcomm.mpi4py.datatypes import predefined as types
from ringcomm.mpi4py.datatypes.datatype import Datatype
from ringcomm.mpi4py.groups import group

INT, DOUBLE = types.INT, types.DOUBLE


ARRAYS = np.array([[3, 5, 6], [5, 2, 7], [4, 5, 0]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("MAX", [5, 5, 7]), ("MIN", [3, 2, 0]), ("SUM", [12, 12, 13]), ("PROD", [60, 50, 0])),
        *(("LAND", [1, 1, 0]), ("LOR", [1, 1, 1]), ("LXOR", [1, 1, 0]), ("BAND", [0, 0, 0]), ("BOR", [7, 7, 7])),
        *(("BXOR", [2, 2, 1]), ("REPLACE", [4, 5, 0]), ("NO_OP", [3, 5, 6])),
    ],
)
@pytest.mark.parametrize("code", ["i1", "u2", "i8"])
def test_operations_fold_in_rank_order(name, expected, code):
    arrays = list(ARRAYS.astype(code))
    result = getattr(op, name).fold(arrays, Datatype.fromcode(code)._named)
    assert result.dtype == code
    assert result.tolist() == expected
    assert arrays[0].tolist() == [3, 5, 6]


def test_native_operations_are_those_with_the_same_result():
    assert op.SUM.native_for(np.dtype("f8")) == "sum"
    assert op.LAND.native_for(np.dtype("?")) == "band"
    assert op.LAND.native_for(np.dtype("i4")) is None
    assert op.SUM.native_for(np.dtype("g")) is None
    assert op.MAX.native_for(np.dtype("F")) is None
    assert op.MAXLOC.native_for(types.DOUBLE_INT._named.base) is None


def test_maxloc_takes_the_lowest_index_of_equal_values():
    pair = types.DOUBLE_INT._named
    arrays = [np.array([(value, index)], pair.base) for value, index in ((1, 4), (2, 3), (2, 1), (0, 0))]
    assert op.MAXLOC.fold(arrays, pair).tolist() == [(2, 1)]
    assert op.MINLOC.fold(arrays, pair).tolist() == [(0, 0)]
    assert op.MAXLOC([2, 3], [2, 1]) == (2, 1)


def test_undefined_operations_are_refused():
    for operation, datatype in ((op.BAND, DOUBLE), (op.MAX, types.C_COMPLEX), (op.MAXLOC, INT)):
        with pytest.raises(MPIException, match="MPI_ERR_OP"):
            operation.fold([np.zeros(1, datatype._named.base)] * 2, datatype._named)


def test_user_function_is_called_as_mpi_calls_it():
    seen = []

    def minus(x, y, datatype):
        if datatype is None:
            return x - y
        seen.append(datatype)
        a, b = np.frombuffer(x, "i4"), np.frombuffer(y, "i4")
        b[:] = a - b
        return None

    operation = op.Op.Create(minus)
    arrays = [np.array([value], "i4") for value in (10, 3, 1)]
    assert operation.fold(arrays, INT._named).tolist() == [10 - (3 - 1)]
    assert seen == [INT, INT]
    assert operation(5, 3) == 2
    assert not operation.Is_commutative()
    operation.Free()
    assert operation == op.OP_NULL


def test_reduce_local_reduces_into_the_second_buffer():
    x, y = np.array([1, 2], "i4"), np.array([3, 5], "i4")
    op.SUM.Reduce_local(x, y)
    assert y.tolist() == [4, 7]
    with pytest.raises(ValueError, match="differ"):
        op.SUM.Reduce_local(x[:1], y)


def test_groups_are_ordered_sets():
    whole = group.Group((4, 2, 7, 5), 7)
    assert (whole.size, whole.rank) == (4, 2)
    part = whole.Incl([2, 0])
    assert (part.ranks, part.rank) == ((7, 4), 0)
    assert group.Group.Union(part, whole).ranks == (7, 4, 2, 5)
    assert group.Group.Intersection(whole, part).ranks == (4, 7)
    assert group.Group.Difference(whole, part).ranks == (2, 5)
    assert whole.Range_excl([(0, 3, 2)]).ranks == (2, 5)
    assert whole.Range_incl([(3, 0, -2)]).ranks == (5, 2)
    assert whole.Translate_ranks([0, 1], part) == [1, UNDEFINED]
    assert whole.Excl([]).Compare(whole) == IDENT
    assert part.Compare(group.Group((4, 7), 7)) == SIMILAR
    assert part.Compare(whole) == UNEQUAL
    with pytest.raises(MPIException, match="MPI_ERR_RANK"):
        whole.Incl([4])


def test_errors_are_translated_with_their_text():
    for error, code in (
        (PeerLost("rank 1 died"), errors.ERR_PROC_FAILED),
        (MismatchError("message of 8 bytes", peer=1), errors.ERR_TRUNCATE),
        (MismatchError("the calls differ"), errors.ERR_OTHER),
        (ArgumentError("tag: expected an integer, got 'x'", argument="tag"), errors.ERR_TAG),
        (ArgumentError("something else"), errors.ERR_ARG),
    ):
        translated = errors.translate(error)
        assert translated == code
        assert str(error) in str(translated)
        assert str(pickle.loads(pickle.dumps(translated))) == str(translated)


def test_pickle_leaves_large_buffers_out():
    serializer = Pickle(threshold=100)
    x, y = np.arange(100), np.arange(3)
    data, parts = serializer.dumps_oob([x, y])
    assert [part.nbytes for part in parts] == [800]
    assert len(data) < 800
    for mine, original in zip(serializer.loads_oob(data, parts), (x, y), strict=True):
        assert mine.tolist() == original.tolist()


@pytest.mark.parametrize("kind", [unsupported.Win, unsupported.File, unsupported.Session])
def test_what_is_not_there_names_what_to_use(kind):
    for call in (kind.Create, kind().Fence):
        with pytest.raises(NotImplementedError, match=rf"{kind.__name__}\.(Create|Fence) is not supported.*; use "):
            call(1, key=2)
    assert not kind()
    assert kind() == pickle.loads(pickle.dumps(kind()))
    assert not hasattr(kind(), "_private")


def test_numbers_of_no_handle_are_refused():
    for known in (INT, op.SUM, info.INFO_ENV, group.GROUP_EMPTY, message.MESSAGE_NO_PROC):
        assert type(known).fromhandle(known.handle) == known
    with pytest.raises(ValueError, match="expected the number of an existing Datatype, got 12345"):
        Datatype.fromhandle(12345)


def test_handles_of_another_kind_are_refused():
    with pytest.raises(TypeError, match="expected Datatype, got Op"):
        Datatype(op.SUM)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda each: each.Set("", "x"), "MPI_ERR_INFO_KEY: key: expected 1 to 36 characters, got ''"),
        (lambda each: each.Delete("b"), r"MPI_ERR_INFO_NOKEY: key: expected one of \['a'\], got 'b'"),
        (lambda each: each.Get_nthkey(1), "MPI_ERR_ARG: n: expected a number below 1, got 1"),
        (lambda _: info.INFO_NULL.Get("a"), "MPI_ERR_INFO: expected an info object, got INFO_NULL"),
        (lambda _: Datatype.Free_keyval(-5), "MPI_ERR_KEYVAL: expected a number of Create_keyval, got -5"),
    ],
)
def test_errors_say_what_was_expected_and_what_was_given(call, text):
    with pytest.raises(MPIException, match=text):
        call(info.Info.Create({"a": "1"}))


def test_error_of_a_user_function_says_which_and_why(capsys):
    def copy(*_):
        raise KeyError("no copy")

    key, datatype = Datatype.Create_keyval(copy), INT.Create_contiguous(2)
    datatype.Set_attr(key, 1)
    with pytest.raises(MPIException, match=r"MPI_ERR_OTHER: .*copy raised KeyError"):
        datatype.Dup()
    assert "no copy" in capsys.readouterr().err
    Datatype.Free_keyval(key)
