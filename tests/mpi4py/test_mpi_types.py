"""The types and buffers of ringcomm.mpi4py, in one process: what is copied where, and what is refused."""

import ctypes
import pickle
import struct
from array import array

import numpy as np
import pytest

from ringcomm.devices import emulated
from ringcomm.errors import ArgumentError, MismatchError, PeerLost
from ringcomm.mpi4py import buffers, errors, group, op
from ringcomm.mpi4py import datatype as types
from ringcomm.mpi4py.constants import BOTTOM, COMBINERS, IDENT, ORDER_F, SIMILAR, UNDEFINED, UNEQUAL
from ringcomm.mpi4py.errors import Exception as MPIException
from ringcomm.mpi4py.memory import buffer
from ringcomm.mpi4py.pickling import Pickle
from ringcomm.mpi4py.status import Status
from ringcomm.transports.messages import Envelope

INT, DOUBLE, BYTE = types.INT, types.DOUBLE, types.BYTE


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
    "of structures": (lambda: types.Datatype.Create_struct([1, 2], [4, 12], [INT, INT]), lambda x: x[[1, 3, 4]]),
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
    datatype = DERIVED[name][0]()
    memory = np.arange(400, dtype=np.uint8)
    offset = 40
    packed = datatype.pack(memory, offset, count).copy()
    assert packed.nbytes == count * datatype.size
    touched = np.zeros(400, np.uint8)
    datatype.unpack(np.full_like(packed, -1), touched, offset, count)
    copy = np.where(touched == 255, 0, memory).astype(np.uint8)
    datatype.unpack(packed, copy, offset, count)
    assert copy.tolist() == memory.tolist()
    assert np.count_nonzero(touched) == count * datatype.size


def test_structure_is_padded_as_c_pads_it():
    assert types.Datatype.Create_struct([1, 1], [0, 8], [DOUBLE, types.CHAR]).Get_extent() == (0, 16)
    assert (types.DOUBLE_INT.size, types.DOUBLE_INT.extent) == (12, struct.calcsize("di0d"))
    assert types.SHORT_INT.extent == struct.calcsize("hi")


def test_mixed_structure_moves_as_bytes():
    fields = np.dtype([("a", "f8"), ("b", "i4")], align=True)
    x = np.array([(1.5, 2), (2.5, 3)], fields)
    datatype = types.Datatype.Create_struct([1, 1], [0, 8], [DOUBLE, INT])
    packed = buffers.sent([x, 2, datatype]).data()
    assert (datatype.base, packed.dtype, packed.nbytes) == (None, np.uint8, 24)
    y = np.zeros_like(x)
    received = buffers.received([y, 2, datatype])
    received.target()[:] = packed
    received.store()
    assert y.tolist() == x.tolist()


def test_contiguous_elements_are_a_view():
    x = np.arange(6.0)
    assert np.shares_memory(buffers.sent(x).data(), x)
    assert np.shares_memory(buffers.received([x, (2, 1), DOUBLE]).target(), x[1:3])
    assert np.shares_memory(buffers.sent([x.reshape(2, 3).T, DOUBLE]).data(), x)
    assert DOUBLE.Create_contiguous(3).contiguous
    assert not DOUBLE.Create_vector(2, 1, 2).contiguous
    assert DOUBLE.Create_vector(2, 2, 2).contiguous


def test_shorter_message_stores_what_arrived():
    x = np.zeros(8, "i4")
    received = buffers.received([x, 2, INT.Create_vector(2, 1, 3)])
    received.target()[:] = [1, 2, 3, 4]
    received.store(12)
    assert x.tolist() == [1, 0, 0, 2, 3, 0, 0, 0]


def test_elements_outside_of_the_memory_are_refused():
    for spec in ([np.zeros(4), 5, DOUBLE], [np.zeros(4), 1, DOUBLE.Create_vector(2, 1, 4)]):
        with pytest.raises(MPIException) as refused:
            buffers.sent(spec).data()
        assert refused.value == errors.ERR_BUFFER


@pytest.mark.parametrize(
    "datatype",
    [
        *(make() for make, _ in DERIVED.values()),
        *(INT.Dup(), types.Datatype.Create_f90_real(15, 300), DOUBLE.Create_struct([2], [8], [INT.Dup()])),
    ],
)
def test_pickled_type_has_the_same_layout(datatype):
    again = pickle.loads(pickle.dumps(datatype))
    assert again != datatype
    assert again.Get_extent() == datatype.Get_extent()
    assert again.Get_true_extent() == datatype.Get_true_extent()
    assert (again.size, again.base, again.combiner) == (datatype.size, datatype.base, datatype.combiner)


def test_handles_are_equal_until_they_are_freed():
    datatype = INT.Create_contiguous(2)
    copy = types.Datatype(datatype)
    assert copy == datatype
    copy.Free()
    assert not copy
    assert copy == types.DATATYPE_NULL
    assert datatype.size == 8
    with pytest.raises(MPIException, match="MPI_ERR_TYPE"):
        INT.Free()
    with pytest.raises(MPIException, match="null"):
        copy.Get_size()


def test_decode_names_the_constructor():
    origin, combiner, parameters = INT.Create_vector(2, 1, 3).decode()
    assert (origin, combiner, parameters) == (INT, "VECTOR", {"count": 2, "blocklength": 1, "stride": 3})
    assert COMBINERS[INT.Create_resized(0, 8).combiner] == "RESIZED"


@pytest.mark.parametrize("code", "?bhilqBHILQefdgFDG")
def test_format_of_a_buffer_finds_its_type(code):
    x = np.zeros(3, code)
    for spec in (x, [x, 3], (x, None, None), memoryview(x)):
        found = buffers.sent(spec)
        assert found.count == 3
        assert found.type.size == x.itemsize
        assert found.data().dtype == x.dtype
    assert types.Datatype.fromcode(np.dtype(code).str[1:]).size == x.itemsize


@pytest.mark.parametrize(
    ("obj", "datatype", "count"),
    [
        (b"abc", BYTE, 3),
        (bytearray(2), BYTE, 2),
        (array("q", [1, 2]), types.LONG_LONG, 2),
        ((ctypes.c_int * 4)(), INT, 4),
        (np.zeros(2, "M8[s]"), types.INT64_T, 2),
        (np.zeros((2, 3), "S1"), types.CHAR, 6),
        (np.float32(1), types.FLOAT, 1),
        (emulated.array([1.0, 2.0]), DOUBLE, 2),
    ],
)
def test_objects_with_buffers_are_arrays(obj, datatype, count):
    found = buffers.sent(obj)
    assert (found.type, found.count, found.nbytes) == (datatype, count, count * datatype.size)


def test_specifications_have_the_defaults_of_mpi4py():
    x = np.arange(10, dtype="i4")
    for spec, count, offset in (
        ([x, INT], 10, 0),
        ([x, "i"], 10, 0),
        ([x, 4], 4, 0),
        ([x, (3, 2)], 3, 8),
        ([x, (None, 2)], 8, 8),
        ([x, [3, 2], INT], 3, 8),
        ([x, 3, 2, INT], 3, 8),
        ([x, INT.Create_contiguous(5)], 2, 0),
        ([None, 0, INT], 0, 0),
        ([BOTTOM, INT], 0, 0),
    ):
        found = buffers.sent(spec)
        assert (found.count, found.offset) == (count, offset)


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ([np.zeros(2), -1, DOUBLE], ValueError),
        ([np.zeros(2), 1, -1, DOUBLE], ValueError),
        ([np.zeros(2), 1, 3, DOUBLE], ValueError),
        ([bytearray(5), INT], ValueError),
        ([np.zeros(2), 1, 1, types.DATATYPE_NULL], ValueError),
        ([None, 1, INT], ValueError),
        ([np.zeros(2), 1, 1, 1, DOUBLE], ValueError),
        ([np.zeros(2), "no code"], KeyError),
        (np.zeros(2, "i4,f8"), KeyError),
        (np.zeros(2, np.dtype("i4").newbyteorder()), BufferError),
        (np.zeros((4, 4))[:, 1], BufferError),
        ([[1, 2], INT], TypeError),
        (None, TypeError),
        ([np.zeros(2), 1.5, DOUBLE], TypeError),
        ([BOTTOM, 1, INT], NotImplementedError),
    ],
)
def test_wrong_specifications_are_refused(spec, error):
    with pytest.raises(error):
        buffers.sent(spec)


def test_read_only_memory_is_not_received_into():
    for spec in (b"abc", _read_only(np.zeros(2))):
        buffers.sent(spec)
        with pytest.raises(BufferError):
            buffers.received(spec)
        with pytest.raises(BufferError):
            buffers.whole(spec).target()


def _read_only(x):
    x.flags.writeable = False
    return x


def test_divided_makes_equal_blocks():
    x = np.arange(6, dtype="i4")
    blocks = buffers.divided(x, 3)
    assert blocks.counts == [2, 2, 2]
    data, counts = blocks.data()
    assert np.shares_memory(data, x)
    assert counts == [2, 2, 2]
    assert buffers.divided([x, 1, INT], 3).data()[0].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="4 equal blocks"):
        buffers.divided(x, 4)


def test_vector_has_counts_and_displacements():
    x = np.arange(8, dtype="i4")
    assert buffers.vector(x, 3).counts == [3, 3, 2]
    for spec, expected in (
        ([x, [1, 2]], [0, 1, 2]),
        ([x, ([1, 2], [4, 1])], [4, 1, 2]),
        ([x, (2, 3), INT], [0, 1, 3, 4]),
        ([x, np.array([2, 0]), np.array([3, 99]), "i"], [3, 4]),
    ):
        assert buffers.vector(spec, 2).data()[0].tolist() == expected
    y = np.zeros(8, "i4")
    blocks = buffers.vector([y, ([1, 2], [4, 1])], 2)
    blocks.target()[:] = [7, 8, 9]
    blocks.store()
    assert y.tolist() == [0, 8, 9, 0, 7, 0, 0, 0]
    with pytest.raises(ValueError, match="expected 3"):
        buffers.vector([x, [1, 2]], 3)
    with pytest.raises(TypeError):
        buffers.vector([x, np.array([1.0, 2.0])], 2)


def test_w_vector_has_displacements_in_bytes_and_types():
    x = np.arange(16, dtype=np.uint8)
    blocks = buffers.w_vector([x, [1, 2], [8, 0], [INT, types.SHORT]], 2)
    data, counts = blocks.data()
    assert data.tolist() == [8, 9, 10, 11, 0, 1, 2, 3]
    assert counts == [4, 4]
    with pytest.raises(ValueError, match="2 to 4 items"):
        buffers.w_vector([x], 1)


def test_memory_of_a_device_is_copied_there_and_back():
    x = emulated.array(np.arange(6.0))
    assert buffers.sent([x, 2, 1, DOUBLE]).data().tolist() == [1, 2]
    received = buffers.received([x, 2, DOUBLE.Create_vector(2, 1, 2).Create_resized(0, 24)])
    received.target()[:] = [10, 11, 12, 13]
    assert x.tolist() == [0, 1, 2, 3, 4, 5]
    received.store()
    assert x.tolist() == [10, 1, 11, 12, 4, 13]


class _Versionless:
    """A tensor before DLPack 1.0."""

    def __init__(self, x):
        self._x = x

    def __dlpack__(self, stream=None):
        assert stream is None
        return self._x.__dlpack__()

    def __dlpack_device__(self):
        return (1, 0)


def test_dlpack_memory_is_shared_and_may_be_written():
    x = np.arange(4, dtype="i4")
    received = buffers.received(_Versionless(x))
    assert (received.type, received.count) == (INT, 4)
    received.target()[:] = 7
    received.store()
    assert x.tolist() == [7] * 4


class _Versioned(_Versionless):
    """A tensor of DLPack 1.0, which says whether it may be written."""

    def __dlpack__(self, **options):
        return self._x.__dlpack__(**options)


def test_dlpack_memory_may_be_read_only():
    x = np.arange(4, dtype="i4")
    assert buffers.received(_Versioned(x)).data().tolist() == x.tolist()
    with pytest.raises(BufferError, match="read-only"):
        buffers.received(_Versioned(_read_only(x)))


class _OnGpu:
    def __init__(self, x, **facts):
        self.x = x
        interface = x.__array_interface__
        self.__cuda_array_interface__ = {key: interface[key] for key in ("data", "typestr", "shape")} | facts


def test_cuda_array_interface_is_read():
    x = np.arange(4, dtype="i4")
    assert buffers.sent(_OnGpu(x)).type == INT
    with pytest.raises(BufferError, match="not contiguous"):
        buffers.sent(_OnGpu(x, strides=(8,)))
    with pytest.raises(BufferError, match="native byte order"):
        buffers.sent(_OnGpu(x, typestr=">i4"))


def test_buffer_is_bytes():
    x = array("i", [1, 2])
    data = buffer(x)
    assert (data.nbytes, data.obj, data.readonly, data.address) == (8, x, False, x.buffer_info()[0])
    data[4:] = b"\3\0\0\0"
    assert x.tolist() == [1, 3]
    assert data.cast("i").tolist() == [1, 3]
    with pytest.raises(TypeError):
        data.toreadonly()[0] = 1
    with pytest.raises(ValueError, match="differ"):
        data[:2] = b"abc"
    data.release()
    assert (data.nbytes, data.address) == (0, 0)


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
    result = getattr(op, name).fold(arrays, types.Datatype.fromcode(code))
    assert result.dtype == code
    assert result.tolist() == expected
    assert arrays[0].tolist() == [3, 5, 6]


def test_native_operations_are_those_with_the_same_result():
    assert op.SUM.native_for(np.dtype("f8")) == "sum"
    assert op.LAND.native_for(np.dtype("?")) == "band"
    assert op.LAND.native_for(np.dtype("i4")) is None
    assert op.SUM.native_for(np.dtype("g")) is None
    assert op.MAX.native_for(np.dtype("F")) is None
    assert op.MAXLOC.native_for(types.DOUBLE_INT.base) is None


def test_maxloc_takes_the_lowest_index_of_equal_values():
    arrays = [np.array([(value, index)], types.DOUBLE_INT.base) for value, index in ((1, 4), (2, 3), (2, 1), (0, 0))]
    assert op.MAXLOC.fold(arrays, types.DOUBLE_INT).tolist() == [(2, 1)]
    assert op.MINLOC.fold(arrays, types.DOUBLE_INT).tolist() == [(0, 0)]
    assert op.MAXLOC([2, 3], [2, 1]) == (2, 1)


def test_undefined_operations_are_refused():
    for operation, datatype in ((op.BAND, DOUBLE), (op.MAX, types.C_COMPLEX), (op.MAXLOC, INT)):
        with pytest.raises(MPIException, match="MPI_ERR_OP"):
            operation.fold([np.zeros(1, datatype.base)] * 2, datatype)


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
    assert operation.fold(arrays, INT).tolist() == [10 - (3 - 1)]
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


def test_status_counts_elements():
    status = Status()
    status._set(Envelope(3, 7, 20))
    assert (status.source, status.tag, status.count) == (3, 7, 20)
    assert status.Get_count(INT) == 5
    assert status.Get_count(DOUBLE) == UNDEFINED
    mixed = types.Datatype.Create_struct([1, 1], [0, 8], [DOUBLE, INT])
    assert (status.Get_count(mixed), status.Get_elements(mixed)) == (UNDEFINED, 3)
    assert (status.Get_count(types.DOUBLE_INT), status.Get_elements(types.DOUBLE_INT)) == (UNDEFINED, 3)
    status.Set_elements(mixed, 3)
    assert status.count == 20
    assert pickle.loads(pickle.dumps(status)) == status


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
        (ArgumentError("tag: expected an integer, got 'x'"), errors.ERR_TAG),
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
