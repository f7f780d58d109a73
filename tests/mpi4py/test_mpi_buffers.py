"""The buffers of ringcomm.mpi4py, in one process: what a specification means, and which memory is read and written."""

import mpi_programs
import numpy as np
import pytest
from mpi_programs import MPI

from ringcomm.arrays import protocols
from ringcomm.devices import emulated
from ringcomm.mpi4py.base import errors
from ringcomm.mpi4py.base.buffer import Get_address, buffer
from ringcomm.mpi4py.base.constants import BOTTOM
from ringcomm.mpi4py.base.errors import Exception as MPIException
from ringcomm.mpi4py.buffers import specification as buffers
from ringcomm.mpi4py.datatypes import predefined as types
from ringcomm.mpi4py.datatypes.datatype import Datatype
from ringcomm.mpi4py.ops import predefined as ops

BYTE, INT, DOUBLE = types.BYTE, types.INT, types.DOUBLE


def test_contiguous_elements_are_a_view():
    x = np.arange(6.0)
    assert np.shares_memory(buffers.sent(x).data(), x)
    assert np.shares_memory(buffers.received([x, (2, 1), DOUBLE]).target(), x[1:3])
    assert np.shares_memory(buffers.sent([x.reshape(2, 3).T, DOUBLE]).data(), x)
    assert DOUBLE.Create_contiguous(3)._named.contiguous
    assert not DOUBLE.Create_vector(2, 1, 2)._named.contiguous
    assert DOUBLE.Create_vector(2, 2, 2)._named.contiguous


def test_elements_outside_of_the_memory_are_refused():
    for spec in ([np.zeros(4), 5, DOUBLE], [np.zeros(4), 1, DOUBLE.Create_vector(2, 1, 4)]):
        with pytest.raises(MPIException) as refused:
            buffers.sent(spec).data()
        assert refused.value == errors.ERR_BUFFER


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: buffers.divided(x, 4), "4 equal blocks"),
        (lambda x: buffers.vector([x, [1, 2]], 3), "expected 3"),
        (lambda x: buffers.w_vector([x], 1), "2 to 4 items"),
        (lambda x: buffer(x).__setitem__(slice(2), b"abc"), "expected 2 bytes for the slice, got 3"),
        (lambda x: ops.SUM.Reduce_local(x[:1], x), "differ"),
    ],
)
def test_wrong_specifications_are_refused_with_what_was_expected(call, text):
    with pytest.raises(ValueError, match=text):
        call(np.arange(6, dtype="i4"))


@pytest.mark.parametrize(
    ("obj", "datatype", "count"),
    [
        (np.zeros(2, "M8[s]"), types.INT64_T, 2),
        (np.float32(1), types.FLOAT, 1),
        (emulated.array([1.0, 2.0]), DOUBLE, 2),
    ],
)
def test_objects_with_buffers_are_arrays(obj, datatype, count):
    found = buffers.sent(obj)
    assert (found.layout, found.count, found.nbytes) == (datatype._named, count, count * datatype.size)


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


class _Null(_Versionless):
    def __dlpack__(self, stream=None):
        capsule = super().__dlpack__()
        protocols._Tensor.from_address(protocols._pointer(capsule, b"dltensor")).data = None
        return capsule


def test_dlpack_without_memory_is_refused_unless_it_is_empty():
    with pytest.raises(BufferError, match=r"DLPack: a null pointer to an array of shape \(4,\)"):
        buffers.received(_Null(np.arange(4)))
    assert protocols.expose(_Null(np.arange(0))).data.size == 0


class _Versioned(_Versionless):
    """A tensor of DLPack 1.0, which says whether it may be written."""

    def __dlpack__(self, **options):
        return self._x.__dlpack__(**options)


def test_memory_may_be_read_only():
    x = np.arange(4, dtype="i4")
    assert buffers.received(_Versioned(x)).data().tolist() == x.tolist()
    x.flags.writeable = False
    for spec in (_Versioned(x), x):
        with pytest.raises(BufferError, match="read-only"):
            buffers.received(spec).target()


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


def absolute(*arrays):
    """Return a type of all elements of arrays of integers, by their addresses."""
    return Datatype.Create_struct([x.size for x in arrays], [Get_address(x) for x in arrays], [INT] * len(arrays))


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


# --- Elements beside the array ----------------------------------------------------------------------------------------


@mpi_programs.on(1)
def test_elements_beside_the_array_must_lie_in_the_object_of_which_it_is_a_part(comm):
    column = MPI.DOUBLE.Create_vector(5, 1, 4)
    matrix, fixed = np.arange(20.0).reshape(5, 4), np.zeros((5, 4))
    fixed.flags.writeable = False
    for source, target, error in (
        (matrix[1, 3:], np.zeros((5, 4)), MPI.Exception),  # beyond the matrix
        (np.zeros(1), np.zeros((5, 4)), MPI.Exception),  # no part of anything
        (matrix[0, 3:], fixed[0, 3:], BufferError),
    ):
        with pytest.raises(error):
            comm.Sendrecv([source, 1, column], 0, 0, [target, 1, column], 0, 0)
    assert not fixed.any()
    assert comm.allreduce(1) == 1


@mpi_programs.on(2)
def test_an_empty_array_takes_part_in_alltoallw_with_any_type(comm):
    types = [MPI.DOUBLE.Create_vector(5, 1, 4).Create_resized(0, 8)] * comm.size
    empty = np.empty(0)
    comm.Alltoallw([empty, types], [empty, types])
    assert comm.allreduce(1) == 2


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
