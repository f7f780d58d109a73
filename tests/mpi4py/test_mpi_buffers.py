"""The buffers of ringcomm.mpi4py, in one process: what a specification means, and which memory is read and written."""

import ctypes
from array import array

import numpy as np
import pytest
from mpi_programs import run_in_world

from ringcomm.devices import emulated
from ringcomm.mpi4py.base import errors
from ringcomm.mpi4py.base.constants import BOTTOM, BottomType
from ringcomm.mpi4py.base.errors import Exception as MPIException
from ringcomm.mpi4py.buffers import specification as buffers
from ringcomm.mpi4py.datatypes import predefined as types
from ringcomm.mpi4py.datatypes.datatype import Datatype
from ringcomm.mpi4py.memory.buffer import Get_address, buffer

BYTE, INT, DOUBLE = types.BYTE, types.INT, types.DOUBLE


def test_contiguous_elements_are_a_view():
    x = np.arange(6.0)
    assert np.shares_memory(buffers.sent(x).data(), x)
    assert np.shares_memory(buffers.received([x, (2, 1), DOUBLE]).target(), x[1:3])
    assert np.shares_memory(buffers.sent([x.reshape(2, 3).T, DOUBLE]).data(), x)
    assert DOUBLE.Create_contiguous(3)._named.contiguous
    assert not DOUBLE.Create_vector(2, 1, 2)._named.contiguous
    assert DOUBLE.Create_vector(2, 2, 2)._named.contiguous


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


@pytest.mark.parametrize("code", "?bhilqBHILQefdgFDG")
def test_format_of_a_buffer_finds_its_type(code):
    x = np.zeros(3, code)
    for spec in (x, [x, 3], (x, None, None), memoryview(x)):
        found = buffers.sent(spec)
        assert found.count == 3
        assert found.layout.size == x.itemsize
        assert found.data().dtype == x.dtype
    assert Datatype.fromcode(np.dtype(code).str[1:]).size == x.itemsize


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
    assert (found.layout, found.count, found.nbytes) == (datatype._named, count, count * datatype.size)


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
        ([BOTTOM, 1, INT], ValueError),
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
    assert (received.layout, received.count) == (INT._named, 4)
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
    assert buffers.sent(_OnGpu(x)).layout is INT._named
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
    with pytest.raises(ValueError, match="expected 2 bytes for the slice, got 3"):
        data[:2] = b"abc"
    data.release()
    assert (data.nbytes, data.address) == (0, 0)


def absolute(*arrays):
    """Return a type of all elements of arrays of integers, by their addresses."""
    return Datatype.Create_struct([x.size for x in arrays], [Get_address(x) for x in arrays], [INT] * len(arrays))


def test_bottom_reads_and_writes_at_addresses():
    x, y = np.arange(5, dtype="i4"), np.arange(10, 13, dtype="i4")
    for bottom in (BOTTOM, BottomType()):
        assert buffers.sent([bottom, 1, absolute(x, y)]).data().tolist() == [0, 1, 2, 3, 4, 10, 11, 12]
    received = buffers.received([BOTTOM, 1, absolute(y, x[3:])])
    received.target()[:] = [7, 8, 9, 5, 6]
    received.store()
    assert (x.tolist(), y.tolist()) == ([0, 1, 2, 5, 6], [7, 8, 9])


def test_bottom_counts_from_the_address_of_the_first_element():
    x = np.arange(8, dtype="i4")
    each = absolute(x[:1]).Create_resized(Get_address(x), 8)
    assert buffers.sent([BOTTOM, 3, each]).data().tolist() == [0, 2, 4]
    assert buffers.sent([BOTTOM, 2, 1, each]).data().tolist() == [2, 4]
    data, counts = buffers.divided([BOTTOM, 2, each], 2).data()
    assert (data.tolist(), counts) == ([0, 2, 4, 6], [2, 2])
    data, counts = buffers.vector([BOTTOM, ([1, 2], [3, 0]), each], 2).data()
    assert (data.tolist(), counts) == ([6, 0, 2], [1, 2])


def test_bottom_has_addresses_as_displacements():
    x, y = np.arange(4, dtype="i4"), np.arange(2, dtype="f8")
    spec = [BOTTOM, ([2, 1], [Get_address(x[1:]), Get_address(y[1:])]), [INT, DOUBLE]]
    data, counts = buffers.w_vector(spec, 2).data()
    assert (data[:8].view("i4").tolist(), data[8:].view("f8").tolist(), counts) == ([1, 2], [1.0], [8, 8])
    blocks = buffers.w_vector([BOTTOM, [1, 1], [0, 0], [absolute(x[:2]), absolute(x[3:])]], 2)
    blocks.target()[:] = np.array([4, 5, 6], "i4")
    blocks.store()
    assert x.tolist() == [4, 5, 2, 6]


def test_bottom_without_addresses_is_refused():
    for spec in ([BOTTOM, 1, INT], [BOTTOM, 2, 3, INT.Create_vector(2, 1, 4)]):
        with pytest.raises(ValueError, match="expected addresses of Get_address with BOTTOM"):
            buffers.sent(spec)
    with pytest.raises(ValueError, match="Get_address"):
        buffers.w_vector([BOTTOM, [1], [8], [INT]], 1)
    assert buffers.w_vector([BOTTOM, [0], [8], [INT]], 1).data()[1] == [0]


BY_ADDRESS = """
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size


def at(*arrays):
    addresses = [MPI.Get_address(x) for x in arrays]
    types = [MPI._typedict[x.dtype.char] for x in arrays]
    return MPI.Datatype.Create_struct([x.size for x in arrays], addresses, types).Commit()


x, y, z = np.arange(size, dtype="i4") + 10 * rank, np.zeros(size, "i4"), np.full(2, rank, "f8")
comm.Sendrecv([MPI.BOTTOM, 1, at(x)], (rank + 1) % size, 0, [MPI.BOTTOM, 1, at(y)], (rank - 1) % size, 0)
assert y.tolist() == [10 * ((rank - 1) % size) + i for i in range(size)]
comm.Bcast([MPI.BOTTOM, 1, at(y, z)], size - 1)
assert y.tolist() == [10 * ((size - 2) % size) + i for i in range(size)]
assert z.tolist() == [size - 1] * 2
one_each = [at(x[i : i + 1]) for i in range(size)], [at(y[i : i + 1]) for i in range(size)]
comm.Alltoallw(*([MPI.BOTTOM, [1] * size, [0] * size, types] for types in one_each))
assert y.tolist() == [10 * i + rank for i in range(size)]
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_messages_and_collectives_reach_memory_by_its_address(size, run_program):
    run_program(size, BY_ADDRESS)


# --- Elements beside the array ----------------------------------------------------------------------------------------


BESIDE = """
    import numpy as np
    from mpi4py import MPI

    comm = MPI.COMM_SELF
    column = MPI.DOUBLE.Create_vector(5, 1, 4)
    matrix, fixed = np.arange(20.0).reshape(5, 4), np.zeros((5, 4))
    fixed.flags.writeable = False
    for name, source, target in (
        ("beyond the matrix", matrix[1, 3:], np.zeros((5, 4))),
        ("no part of anything", np.zeros(1), np.zeros((5, 4))),
        ("read-only", matrix[0, 3:], fixed[0, 3:]),
    ):
        try:
            comm.Sendrecv([source, 1, column], 0, 0, [target, 1, column], 0, 0)
            print(name, "was accepted")
        except (MPI.Exception, BufferError) as error:
            print(name, type(error).__name__)
    print(fixed.sum(), comm.allreduce(1))
    """


def test_elements_beside_the_array_must_lie_in_the_object_of_which_it_is_a_part():
    refused = ["beyond the matrix Exception", "no part of anything Exception", "read-only BufferError"]
    assert run_in_world(1, BESIDE).splitlines() == [f"[0] {line}" for line in (*refused, "0.0 1")]


def test_an_empty_array_takes_part_in_alltoallw_with_any_type():
    text = """
        import numpy as np
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        types = [MPI.DOUBLE.Create_vector(5, 1, 4).Create_resized(0, 8)] * comm.size
        empty = np.empty(0)
        comm.Alltoallw([empty, types], [empty, types])
        print(comm.allreduce(1))
        """
    assert sorted(run_in_world(2, text).splitlines()) == ["[0] 2", "[1] 2"]


@pytest.mark.exhaustive
def test_an_object_of_more_than_2_gb_passes_beside_its_pickle(run_program):
    text = """
        import numpy as np
        from mpi4py import MPI
        from mpi4py.util import pkl5

        comm = pkl5.Intracomm(MPI.COMM_WORLD)
        if comm.rank == 0:
            data = np.zeros(2**31 + 8, "B")
            data[-1] = 7
            comm.send(data, 1)
        else:
            data = comm.recv(source=0)
            print(data.nbytes - 2**31, data[-1])
        """
    assert run_program(2, text).stdout == "[1] 8 7\n"
