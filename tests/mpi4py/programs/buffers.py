"""Buffer specifications: how calls are told where the data is, how much of it, and of which type."""

import array
import ctypes

import numpy as np
from mpi4py import MPI
from sections import comm, left, rank, refused, report, right, section, size


class Exporter:
    """An object that has its memory through DLPack alone."""

    def __init__(self, memory):
        self._memory = memory

    def __dlpack__(self, **options):
        return self._memory.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._memory.__dlpack_device__()


def exchanged(sent, received):
    """Send to the right and receive from the left."""
    comm.Sendrecv(sent, right, 0, received, left, 0)


@section
def specifications():
    data = np.arange(6, dtype="i") + 10 * rank
    for label, spec in {
        "array": lambda x: x,
        "[array, type]": lambda x: [x, MPI.INT],
        "[array, letter]": lambda x: [x, "i"],
        "(array, type)": lambda x: (x, MPI.INT),
        "[array, count, type]": lambda x: [x, 4, MPI.INT],
        "[array, None, type]": lambda x: [x, None, MPI.INT],
        "[array, count, letter]": lambda x: [x, 5, "i"],
        "[array, count]": lambda x: [x, 3],
        "[array, (count, displ)]": lambda x: [x, (3, 2)],
        "[array, (None, displ)]": lambda x: [x, (None, 2)],
        "[array, [count, displ], type]": lambda x: [x, [2, 1], MPI.INT],
        "[array, (count, displ), type]": lambda x: [x, (2, 1), MPI.INT],
        "[array, count, displ, type]": lambda x: [x, 2, 3, MPI.INT],
        "[array, a longer type]": lambda x: [x, MPI.INT.Create_contiguous(3).Commit()],
        "(array, None, None)": lambda x: (x, None, None),
        "memoryview": memoryview,
        "[None, 0, type]": lambda x: [None, 0, MPI.INT],
        "[array, bytes]": lambda x: [x, MPI.BYTE],
        "[array, 8, bytes]": lambda x: [x, 8, MPI.BYTE],
    }.items():
        x = np.zeros(6, "i")
        exchanged(spec(data), spec(x))
        yield label, x.tolist()


@section
def vectors():
    counts, displs = [each + 1 for each in range(size)], [each * (each + 3) // 2 for each in range(size)]
    room = displs[-1] + counts[-1]
    for label, spec in {
        "[array, counts, displs, type]": lambda x: [x, counts, displs, MPI.INT],
        "[array, (counts, displs), type]": lambda x: [x, (counts, displs), MPI.INT],
        "[array, (counts, displs)]": lambda x: [x, (counts, displs)],
        "[array, counts, type]": lambda x: [x, counts, MPI.INT],
        "[array, counts, letter]": lambda x: [x, counts, "i"],
        "[array, counts, None, type]": lambda x: [x, counts, None, MPI.INT],
        "tuples": lambda x: (x, (tuple(counts), tuple(displs))),
        "arrays of counts": lambda x: [x, np.array(counts), np.array(displs), MPI.INT],
    }.items():
        x = np.full(room, -1, "i")
        comm.Allgatherv(np.full(rank + 1, rank, "i"), spec(x))
        yield label, x.tolist()
    counts, displs, x = np.arange(size), np.full(size, 99), np.full(room, -1, "i")
    displs[1:] = np.arange(size)[:0:-1]  # of a count of zero, the place does not matter
    comm.Allgatherv(np.full(rank, rank, "i"), [x, counts, displs, "i"])
    yield "none of a rank", x.tolist()
    x = np.zeros((6 + size - rank) // size)
    comm.Scatterv(np.arange(7.0) if rank == 0 else None, x)
    yield "an array in parts", x.tolist()


@section
def automatic_types():
    codes = "?bBhHiIlLqQfdgFDG"
    equal = []
    for code in codes:
        x, y = np.array([1, 0, 1], code), np.zeros(3, code)
        exchanged(x, y)
        equal.append(bool((x == y).all()) and MPI.Datatype.fromcode(code).Get_size() == x.itemsize)
    yield "NumPy", dict(zip(codes, equal, strict=True))
    for label, make in {
        "bytearray": lambda values: bytearray(values),
        "array.array": lambda values: array.array("i", values),
        "memoryview": lambda values: memoryview(array.array("d", values)),
        "ctypes": lambda values: (ctypes.c_int * 3)(*values),
    }.items():
        x = make([0, 0, 0])
        exchanged(make([rank, 2, 3]), x)
        yield label, [*map(int, x)]
    received = bytearray(5)
    exchanged(b"bytes" if rank % 2 else b"BYTES", received)
    yield "bytes", bytes(received)
    x = np.zeros(3)
    exchanged(Exporter(np.arange(3.0) + rank), Exporter(x))
    yield "DLPack", x.tolist()
    letters = np.zeros((2, 2), "S1")
    exchanged(np.array([["a", "b"], ["c", str(rank)]], "S1"), letters)
    yield "letters", letters.tolist()
    x = np.zeros(())
    exchanged(np.array(rank + 0.5), x)
    yield "a number", float(x)
    fortran = np.zeros((2, 3), "i", order="F")
    exchanged(np.asfortranarray(np.arange(6, dtype="i").reshape(2, 3)), fortran)
    yield "Fortran order", fortran.tolist()
    exchanged(np.zeros(0), np.zeros(0))
    yield "empty", comm.allgather(rank)


def at(*arrays):
    """Return a type of the elements of arrays, by their addresses."""
    places, kinds = [MPI.Get_address(x) for x in arrays], [MPI._typedict[x.dtype.char] for x in arrays]
    return MPI.Datatype.Create_struct([x.size for x in arrays], places, kinds).Commit()


@section
def bottom():
    x, y = np.array([rank], "i"), np.zeros(1, "i")
    there = [MPI.INT.Create_hindexed([1], [MPI.Get_address(each)]).Commit() for each in (x, y)]
    yield "Get_address", MPI.Aint_diff(MPI.Get_address(y), MPI.Get_address(x)) == y.ctypes.data - x.ctypes.data
    yield "Aint_add", MPI.Aint_add(MPI.Get_address(x), 4) == x.ctypes.data + 4
    for each in there:
        each.Free()
    x, y, z = np.arange(8, dtype="i") + 10 * rank, np.zeros(8, "i"), np.full(2, rank, "d")
    exchanged([MPI.BOTTOM, 1, at(x[5:], x[:3])], [MPI.BOTTOM, 1, at(y[1:4], y[5:])])
    yield "messages", y.tolist()
    comm.Bcast([MPI.BOTTOM, 1, at(y, z)], size - 1)
    yield "of two types", (y.tolist(), z.tolist())
    every = [[at(each[i : i + 1]) for i in range(size)] for each in (x, y)]
    comm.Alltoallw(*([MPI.BOTTOM, [1] * size, [0] * size, kinds] for kinds in every))
    yield "Alltoallw", y.tolist()
    spaced = at(x[:1]).Create_resized(MPI.Get_address(x), 8).Commit()
    exchanged([MPI.BOTTOM, 3, spaced], y)
    yield "every other", y.tolist()


@section
def memory():
    memory = MPI.Alloc_mem(16)
    memory[:4] = b"1234"
    yield "Alloc_mem", (len(memory), bytes(memory[:4]), memory.readonly, memory.nbytes, memory.itemsize)
    MPI.Free_mem(memory)
    room = MPI.buffer.allocate(8, clear=True)
    exchanged(MPI.buffer.frombuffer(bytes([rank] * 8), readonly=True), room)
    yield "buffer", (room.tobytes() == bytes([left] * 8), len(room[2:5]), room.format, room.cast("i").nbytes)
    yield "fromaddress", MPI.buffer.fromaddress(room.address, 8).tobytes() == room.tobytes()
    yield "obj", room.obj is not None
    yield "toreadonly", refused(exchanged, np.zeros(8, "b"), room.toreadonly())
    x = array.array("i", [1, 2])
    memory = MPI.buffer(x)
    memory[4:] = b"\3\0\0\0"
    yield "of an array", (x.tolist(), memory.cast("i").tolist(), memory.nbytes, memory.obj is x, memory.readonly)
    yield "its address", memory.address == x.buffer_info()[0]
    yield "slices", refused(memory.__setitem__, slice(2), b"abc")
    room.release()
    yield "released", len(room)


@section
def refusals():
    x = np.zeros(4, "i")
    for label, spec in {
        "None": None,
        "a number": 3,
        "text": "text",
        "no type of this letter": [x, "@"],
        "too many": [x, 1, 2, MPI.INT, 5],
        "count": [x, -1, MPI.INT],
        "displacement": [x, 1, -1, MPI.INT],
        "beyond the array": [x, 1, 5, MPI.INT],
        "half an element": [bytearray(5), MPI.INT],
        "None with a count": [None, 1, MPI.INT],
        "a count that is no integer": [x, 1.5, MPI.INT],
        "a list": [[1, 2], MPI.INT],
        "structures": np.zeros(2, "i4,f8"),
        "another byte order": np.zeros(2, np.dtype("i").newbyteorder()),
        "null type": [x, 4, MPI.DATATYPE_NULL],
        "objects": np.array([None, 1]),
        "not contiguous": np.zeros((2, 2))[:, 0],
    }.items():
        yield label, refused(MPI.COMM_SELF.Bcast, spec)
    for label, call in {
        "blocks": lambda: MPI.COMM_SELF.Allgatherv(x, [x, [1, 2]]),
        "counts that are no integers": lambda: MPI.COMM_SELF.Allgatherv(x, [x, np.array([1.0])]),
        "one item": lambda: MPI.COMM_SELF.Alltoallw([x], [x]),
    }.items():
        yield label, refused(call)
    yield "usable", comm.allgather(rank)


report()
