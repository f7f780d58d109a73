"""Datatypes, operations, errors, infos and handles of ringcomm.mpi4py, in one process."""

import pickle

import numpy as np
import pytest

from ringcomm.errors import ArgumentError, MismatchError, PeerLost
from ringcomm.mpi4py.base import constants, errors, info, unsupported
from ringcomm.mpi4py.base.errors import Exception as MPIException
from ringcomm.mpi4py.datatypes import predefined as types
from ringcomm.mpi4py.datatypes.datatype import CODES, Datatype
from ringcomm.mpi4py.groups import group
from ringcomm.mpi4py.ops import predefined as ops
from ringcomm.mpi4py.requests import message

INT = types.INT
DEFAULT, DISTRIBUTE_NONE = constants.DISTRIBUTE_DFLT_DARG, constants.DISTRIBUTE_NONE


# --- Datatypes --------------------------------------------------------------------------------------------------------


def test_handles_are_equal_until_they_are_freed():
    datatype = INT.Create_contiguous(2)
    copy = Datatype(datatype)
    assert copy == datatype
    copy.Free()
    assert not copy
    assert copy == types.DATATYPE_NULL
    assert datatype.size == 8
    with pytest.raises(MPIException, match="MPI_ERR_TYPE"):
        INT.Free()
    with pytest.raises(MPIException, match="DATATYPE_NULL"):
        copy.Get_size()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: INT.Create_contiguous(-1), "MPI_ERR_COUNT: count: expected at least 0, got -1"),
        (lambda: INT.Create_vector(-1, 1, 1), "MPI_ERR_COUNT: count: .* got -1"),
        (lambda: INT.Create_vector(2, -1, 1), "MPI_ERR_ARG: blocklength: .* got -1"),
        (lambda: INT.Create_hindexed([1, -2], [0, 4]), r"MPI_ERR_ARG: blocklengths\[1\]: .* got -2"),
        (lambda: INT.Create_subarray([2], [3], [0]), "MPI_ERR_ARG: dimension 0: .* got 3 from 0"),
        (lambda: INT.Create_subarray([2], [1], [0], 7), "MPI_ERR_ARG: order: .* got 7"),
        (lambda: INT.Create_darray(4, 4, [8], [0], [DEFAULT], [4]), "MPI_ERR_ARG: .* rank 4"),
        (lambda: INT.Create_darray(4, 0, [8, 8], [0, 0], [DEFAULT] * 2, [-2, -2]), r"MPI_ERR_ARG: .*\[-2, -2\]"),
        (lambda: INT.Create_darray(4, 0, [8], [0], [1], [4]), "MPI_ERR_ARG: dargs: expected blocks of 2 .* got 1"),
        (lambda: INT.Create_darray(2, 0, [8], [DISTRIBUTE_NONE], [DEFAULT], [2]), "MPI_ERR_ARG: psizes: .* got 2"),
        (lambda: INT.Create_darray(2, 0, [8], [9], [DEFAULT], [2]), "MPI_ERR_ARG: distribs: .* got 9"),
        (lambda: types.DATATYPE_NULL.Create_contiguous(1), "MPI_ERR_TYPE: .* got DATATYPE_NULL"),
        (lambda: Datatype.Create_struct([1], [0], [types.DATATYPE_NULL]), "MPI_ERR_TYPE: .* got DATATYPE_NULL"),
        (lambda: INT.Get_contents(), "MPI_ERR_TYPE: .*MPI_INT"),
        (lambda: Datatype.Match_size(constants.TYPECLASS_REAL, 3), r"MPI_ERR_ARG: .*\[2, 4, 8\] bytes, .* 3 bytes"),
        (lambda: Datatype.Create_f90_real(40, 1), "MPI_ERR_ARG: .* got 40 and 1"),
    ],
)
def test_wrong_arguments_are_refused_with_what_was_expected(make, text):
    with pytest.raises(MPIException, match=text):
        make()


def test_lists_of_different_length_are_refused():
    for make in (
        lambda: INT.Create_indexed([1], [1, 2]),
        lambda: INT.Create_subarray([2], [1, 1], [0]),
        lambda: Datatype.Create_struct([1], [0, 1], [INT]),
    ):
        with pytest.raises(ValueError, match="expected lists of one length, got 1 "):
            make()


def test_fortran_type_has_name_and_attributes_of_its_own():
    real, key = Datatype.Create_f90_real(6, 30), Datatype.Create_keyval()
    real.Set_name("mine")
    real.Set_attr(key, 1)
    assert (types.REAL4.name, types.REAL4.Get_attr(key)) == ("MPI_REAL4", None)
    Datatype.Free_keyval(key)


def test_elements_that_overlap_span_their_data():
    layout = INT.Create_contiguous(3).Create_resized(0, 4)._named
    assert (layout.extent, layout.span(0), layout.span(3)) == (4, (0, 0), (0, 20))
    backwards = INT.Create_resized(0, -8)
    assert backwards._named.span(3) == (-16, 4)
    assert layout.pack(np.arange(5, dtype="i4").view(np.uint8), 0, 3).tolist() == [0, 1, 2, 1, 2, 3, 2, 3, 4]


def test_codes_of_c_and_of_fortran_mean_their_types():
    assert {code: types.C_CODES[code] for code in "?bilqfdD"} == {code: CODES[code] for code in "?bilqfdD"}
    assert (CODES["i4"], types.F_CODES["i4"]) == (types.INT32_T, types.INTEGER4)
    assert (types.C_CODES["l"], types.F_CODES["l"], types.F_CODES["l8"]) == (types.LONG, types.LOGICAL, types.LOGICAL8)
    assert (types.F_CODES["r8"], types.F_CODES["c16"], types.F_CODES["z"]) == (
        *(types.REAL8, types.COMPLEX16, types.DOUBLE_COMPLEX),
    )
    assert all(datatype.size == np.dtype(code).itemsize for code, datatype in types.C_CODES.items())


# --- Operations, errors, infos ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "expected"), [("REPLACE", [4, 5, 0]), ("NO_OP", [3, 5, 6])])
def test_operations_that_open_mpi_has_for_windows_only_fold_in_rank_order(name, expected):
    arrays = list(np.array([[3, 5, 6], [5, 2, 7], [4, 5, 0]], "i4"))
    assert getattr(ops, name).fold(arrays, INT._named).tolist() == expected
    assert arrays[0].tolist() == [3, 5, 6]


def test_native_operations_are_those_with_the_same_result():
    assert ops.SUM.native_for(np.dtype("f8")) == "sum"
    assert ops.LAND.native_for(np.dtype("?")) == "band"
    assert ops.LAND.native_for(np.dtype("i4")) is None
    assert ops.SUM.native_for(np.dtype("g")) is None
    assert ops.MAX.native_for(np.dtype("F")) is None
    assert ops.MAXLOC.native_for(types.DOUBLE_INT._named.base) is None


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


@pytest.mark.parametrize("kind", [unsupported.Win, unsupported.File, unsupported.Session])
def test_what_is_not_there_names_what_to_use(kind):
    for call in (kind.Create, kind().Fence):
        with pytest.raises(NotImplementedError, match=rf"{kind.__name__}\.(Create|Fence) is not supported.*; use "):
            call(1, key=2)
    assert not kind()
    assert kind() == pickle.loads(pickle.dumps(kind()))
    assert not hasattr(kind(), "_private")


def test_numbers_of_no_handle_are_refused():
    for known in (INT, ops.SUM, info.INFO_ENV, group.GROUP_EMPTY, message.MESSAGE_NO_PROC):
        assert type(known).fromhandle(known.handle) == known
    with pytest.raises(ValueError, match="expected the number of an existing Datatype, got 12345"):
        Datatype.fromhandle(12345)


def test_handles_of_another_kind_are_refused():
    with pytest.raises(TypeError, match="expected Datatype, got Op"):
        Datatype(ops.SUM)


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
