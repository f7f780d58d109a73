"""The datatypes of ringcomm.mpi4py, in one process: which bytes each takes, and how it was made."""

import pickle
import struct

import numpy as np
import pytest

from ringcomm.mpi4py.base import constants
from ringcomm.mpi4py.base.constants import (
    DISTRIBUTE_BLOCK,
    DISTRIBUTE_CYCLIC,
    DISTRIBUTE_NONE,
    ORDER_C,
    ORDER_F,
    UNDEFINED,
)
from ringcomm.mpi4py.base.errors import Exception as MPIException
from ringcomm.mpi4py.buffers import specification as buffers
from ringcomm.mpi4py.datatypes import predefined as types
from ringcomm.mpi4py.datatypes.datatype import CODES, Datatype
from ringcomm.mpi4py.requests.status import Status, record
from ringcomm.transports.messages import Envelope

CHAR, INT, DOUBLE = types.CHAR, types.INT, types.DOUBLE
DEFAULT = constants.DISTRIBUTE_DFLT_DARG


def grid(rows=6, columns=8):
    return np.arange(rows * columns, dtype="i4").reshape(rows, columns)


# Each: the type, and the elements of an array of integers that it takes, per element of the type.
DERIVED = {
    "contiguous": (lambda: INT.Create_contiguous(3), lambda x: x[:12]),
    "vector": (lambda: INT.Create_vector(4, 1, 8).Create_resized(0, 4), lambda x: grid()[:4, :3].T.ravel()),
    "vector with blocks": (lambda: INT.Create_vector(2, 3, 5), lambda x: x[[0, 1, 2, 5, 6, 7]]),
    "hvector backwards": (lambda: INT.Create_hvector(3, 1, -4).Create_resized(-8, 12), None),
    "indexed": (lambda: INT.Create_indexed([2, 1], [5, 1]), lambda x: x[[5, 6, 1]]),
    "indexed block": (lambda: INT.Create_indexed_block(2, [4, 0]), lambda x: x[[4, 5, 0, 1]]),
    "hindexed": (lambda: INT.Create_hindexed([1, 0, 2], [12, 4, 0]), lambda x: x[[3, 0, 1]]),
    "hindexed block": (lambda: INT.Create_hindexed_block(1, [8, 0]), lambda x: x[[2, 0]]),
    "subarray": (lambda: INT.Create_subarray([6, 8], [2, 3], [1, 4]), lambda x: grid()[1:3, 4:7].ravel()),
    "subarray, Fortran": (
        lambda: INT.Create_subarray([8, 6], [3, 2], [4, 1], ORDER_F),
        lambda x: grid()[1:3, 4:7].ravel(),
    ),
    "nested": (lambda: INT.Create_vector(2, 1, 2).Create_contiguous(2), lambda x: x[[0, 2, 3, 5]]),
    "of structures": (lambda: Datatype.Create_struct([1, 2], [4, 12], [INT, INT]), lambda x: x[[1, 3, 4]]),
}


@pytest.mark.parametrize("name", [name for name, (_, expected) in DERIVED.items() if expected])
def test_derived_type_packs_its_elements(name):
    make, expected = DERIVED[name]
    x = np.arange(48, dtype="i4")
    count = 4 if name == "contiguous" else 3 if name == "vector" else 1
    packed = buffers.sent([x, count, make()]).data()
    assert packed.dtype == np.dtype("i4")
    assert packed.tolist() == expected(x).tolist()


@pytest.mark.parametrize("name", DERIVED)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_unpack_reverses_pack_and_leaves_the_gaps(name, count):
    layout = DERIVED[name][0]()._named
    memory = np.arange(400, dtype=np.uint8)
    offset = 40
    packed = layout.pack(memory, offset, count).copy()
    assert packed.nbytes == count * layout.size
    touched = np.zeros(400, np.uint8)
    layout.unpack(np.full_like(packed, -1), touched, offset, count)
    copy = np.where(touched == 255, 0, memory).astype(np.uint8)
    layout.unpack(packed, copy, offset, count)
    assert copy.tolist() == memory.tolist()
    assert np.count_nonzero(touched) == count * layout.size


def test_structure_is_padded_as_c_pads_it():
    assert Datatype.Create_struct([1, 1], [0, 8], [DOUBLE, CHAR]).Get_extent() == (0, 16)
    assert (types.DOUBLE_INT.size, types.DOUBLE_INT.extent) == (12, struct.calcsize("di0d"))
    assert types.SHORT_INT.extent == struct.calcsize("hi")


def test_mixed_structure_moves_as_bytes():
    fields = np.dtype([("a", "f8"), ("b", "i4")], align=True)
    x = np.array([(1.5, 2), (2.5, 3)], fields)
    datatype = Datatype.Create_struct([1, 1], [0, 8], [DOUBLE, INT])
    packed = buffers.sent([x, 2, datatype]).data()
    assert (datatype._named.base, packed.dtype, packed.nbytes) == (None, np.uint8, 24)
    y = np.zeros_like(x)
    received = buffers.received([y, 2, datatype])
    received.target()[:] = packed
    received.store()
    assert y.tolist() == x.tolist()


@pytest.mark.parametrize(
    "datatype",
    [
        *(make() for make, _ in DERIVED.values()),
        *(INT.Dup(), Datatype.Create_f90_real(15, 300), DOUBLE.Create_struct([2], [8], [INT.Dup()])),
    ],
)
def test_pickled_type_has_the_same_layout(datatype, monkeypatch):
    monkeypatch.setattr(Datatype, "__module__", types.__name__)  # pickle looks there; MPI.py says so of itself
    again = pickle.loads(pickle.dumps(datatype))
    assert again != datatype
    assert again.Get_extent() == datatype.Get_extent()
    assert again.Get_true_extent() == datatype.Get_true_extent()
    assert (again.size, again._named.base, again.combiner) == (datatype.size, datatype._named.base, datatype.combiner)


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


def test_decode_names_the_constructor():
    origin, combiner, parameters = INT.Create_vector(2, 1, 3).decode()
    assert (origin, combiner, parameters) == (INT, "VECTOR", {"count": 2, "blocklength": 1, "stride": 3})
    assert INT.Create_resized(0, 8).combiner == constants.COMBINER_RESIZED


def test_status_counts_elements():
    status = Status()
    record(status, Envelope(3, 7, 20))
    assert (status.source, status.tag, status.count) == (3, 7, 20)
    assert status.Get_count(INT) == 5
    assert status.Get_count(DOUBLE) == UNDEFINED
    mixed = Datatype.Create_struct([1, 1], [0, 8], [DOUBLE, INT])
    assert (status.Get_count(mixed), status.Get_elements(mixed)) == (UNDEFINED, 3)
    assert (status.Get_count(types.DOUBLE_INT), status.Get_elements(types.DOUBLE_INT)) == (UNDEFINED, 3)
    status.Set_elements(mixed, 3)
    assert status.count == 20
    assert pickle.loads(pickle.dumps(status)) == status


# Each: the type, and what Open MPI returns: integers, addresses, the combiner.
MADE = {
    "dup": (lambda: INT.Dup(), [], [], 1),
    "contiguous": (lambda: INT.Create_contiguous(3), [3], [], 2),
    "vector": (lambda: INT.Create_vector(4, 1, 8), [4, 1, 8], [], 3),
    "hvector": (lambda: INT.Create_hvector(3, 1, -4), [3, 1], [-4], 5),
    "indexed": (lambda: INT.Create_indexed([2, 1], [5, 1]), [2, 2, 1, 5, 1], [], 6),
    "hindexed": (lambda: INT.Create_hindexed([2, 1], [20, 4]), [2, 2, 1], [20, 4], 8),
    "indexed block": (lambda: INT.Create_indexed_block(2, [4, 0]), [2, 2, 4, 0], [], 9),
    "hindexed block": (lambda: INT.Create_hindexed_block(2, [16, 0]), [2, 2], [16, 0], 18),
    "structure": (lambda: Datatype.Create_struct([1, 2], [0, 8], [DOUBLE, INT]), [2, 1, 2], [0, 8], 11),
    "empty structure": (lambda: Datatype.Create_struct([], [], []), [0], [], 11),
    "subarray": (lambda: INT.Create_subarray([6, 8], [2, 3], [1, 4]), [2, 6, 8, 2, 3, 1, 4, 0], [], 12),
    "distributed array": (
        lambda: INT.Create_darray(4, 1, [8, 8], [DISTRIBUTE_BLOCK] * 2, [DEFAULT] * 2, [2, 2]),
        [4, 1, 2, 8, 8, 0, 0, -1, -1, 2, 2, 0],
        [],
        13,
    ),
    "Fortran real": (lambda: Datatype.Create_f90_real(15, 300), [15, 300], [], 14),
    "Fortran integer": (lambda: Datatype.Create_f90_integer(9), [9], [], 16),
    "resized": (lambda: INT.Create_resized(-4, 16), [], [-4, 16], 17),
}


@pytest.mark.parametrize("name", MADE)
def test_contents_are_those_of_open_mpi(name):
    make, integers, addresses, combiner = MADE[name]
    datatype = make()
    parts = {"structure": [DOUBLE, INT]}.get(name, [] if name.startswith(("Fortran", "empty")) else [INT])
    assert datatype.Get_contents() == (integers, addresses, [], parts)
    assert datatype.Get_envelope() == (len(integers), len(addresses), 0, len(parts), combiner)


@pytest.mark.parametrize("name", MADE)
def test_decoded_arguments_make_the_same_type(name):
    datatype = MADE[name][0]()
    origin, combiner, arguments = datatype.decode()
    again = getattr(origin, f"Create_{combiner.lower()}")(**arguments)
    assert again.Get_contents() == datatype.Get_contents()
    assert (again.Get_extent(), again.Get_true_extent()) == (datatype.Get_extent(), datatype.Get_true_extent())


def test_contents_of_a_predefined_type_are_refused():
    assert INT.Get_envelope() == (0, 0, 0, 0, constants.COMBINER_NAMED)
    with pytest.raises(MPIException, match=r"MPI_ERR_TYPE.*MPI_INT"):
        INT.Get_contents()


def distributed(rank, kinds, arguments=(DEFAULT, DEFAULT), psizes=(2, 3), shape=(5, 7), order=ORDER_C):
    """Return the numbers of the elements that a rank has of an array distributed over a grid."""
    datatype = INT.Create_darray(int(np.prod(psizes)), rank, shape, kinds, arguments, psizes, order)
    whole = np.arange(35, dtype="i4")
    assert datatype.Get_extent() == (0, whole.nbytes)
    return buffers.sent([whole, 1, datatype]).data().tolist()


@pytest.mark.parametrize("rank", range(6))
def test_distributed_array_has_the_part_of_a_rank(rank):
    x, (i, j) = np.arange(35).reshape(5, 7), divmod(rank, 3)
    block, cyclic = [DISTRIBUTE_BLOCK] * 2, [DISTRIBUTE_CYCLIC] * 2
    assert distributed(rank, block) == x[3 * i : 3 * i + 3, 3 * j : 3 * j + 3].ravel().tolist()
    assert distributed(rank, cyclic) == x[i::2, j::3].ravel().tolist()
    assert distributed(rank, block, (4, 6)) == x[4 * i : 4 * i + 4, 6 * j : 6 * j + 6].ravel().tolist()
    columns = [column for column in range(7) if column // 2 % 3 == j]
    assert distributed(rank, cyclic, (DEFAULT, 2)) == x[i::2][:, columns].ravel().tolist()
    one = (6, 1)
    assert distributed(rank, [DISTRIBUTE_BLOCK, DISTRIBUTE_NONE], psizes=one) == x[rank : rank + 1].ravel().tolist()
    fortran = np.arange(35).reshape(5, 7, order="F")[i::2, j::3].ravel("F").tolist()
    assert distributed(rank, cyclic, order=ORDER_F) == fortran


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
