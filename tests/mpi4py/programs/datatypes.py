"""Datatypes: how they are made, what they tell of themselves, and what messages, packs and reductions of them move."""

import pickle

import numpy as np
from mpi4py import MPI
from sections import comm, left, named, rank, refused, report, right, section

DERIVED = {
    "contiguous": lambda: MPI.INT.Create_contiguous(3),
    "vector": lambda: MPI.INT.Create_vector(2, 1, 3),
    "hvector": lambda: MPI.INT.Create_hvector(2, 2, 16),
    "indexed": lambda: MPI.INT.Create_indexed([2, 1], [0, 4]),
    "hindexed": lambda: MPI.INT.Create_hindexed([1, 2], [4, 16]),
    "indexed block": lambda: MPI.INT.Create_indexed_block(2, [1, 5]),
    "hindexed block": lambda: MPI.INT.Create_hindexed_block(1, [0, 12]),
    "struct": lambda: MPI.Datatype.Create_struct([1, 2], [0, 8], [MPI.INT, MPI.SHORT]),
    "padded struct": lambda: MPI.Datatype.Create_struct([1, 1], [0, 8], [MPI.DOUBLE, MPI.CHAR]),
    "subarray": lambda: MPI.INT.Create_subarray([3, 4], [2, 2], [1, 1]),
    "subarray, Fortran": lambda: MPI.INT.Create_subarray([3, 4], [2, 2], [1, 1], MPI.ORDER_F),
    "resized": lambda: MPI.INT.Create_resized(0, 8),
    "resized, another name": lambda: MPI.SHORT.Resized(-2, 8),
    "distributed": lambda: MPI.INT.Create_darray(4, 1, [8], [MPI.DISTRIBUTE_BLOCK], [MPI.DISTRIBUTE_DFLT_DARG], [4]),
    "distributed, cyclic": lambda: MPI.INT.Create_darray(
        4, 3, [4, 6], [MPI.DISTRIBUTE_CYCLIC] * 2, [1, 2], [2, 2], MPI.ORDER_F
    ),
    "empty struct": lambda: MPI.Datatype.Create_struct([], [], []),
    "empty blocks": lambda: MPI.INT.Create_hindexed([1, 0, 2], [12, 4, 0]),
    "duplicate": lambda: MPI.INT.Dup(),
    "Fortran 90 real": lambda: MPI.Datatype.Create_f90_real(15, 300),
    "Fortran 90 integer": lambda: MPI.Datatype.Create_f90_integer(9),
    "nested": lambda: MPI.INT.Create_vector(2, 1, 2).Create_contiguous(2),
}


@section
def basic():
    for kind in (
        MPI.BYTE,
        MPI.CHAR,
        MPI.SHORT,
        MPI.INT,
        MPI.LONG,
        MPI.FLOAT,
        MPI.DOUBLE,
        MPI.C_DOUBLE_COMPLEX,
        MPI.C_BOOL,
    ):
        codes = (kind.tocode(), kind.typechar, kind.typestr)
        yield kind.Get_name(), (kind.Get_size(), kind.Get_extent(), kind.size, kind.extent, codes)
    for kind in (MPI.FLOAT_INT, MPI.DOUBLE_INT, MPI.LONG_INT, MPI.TWOINT, MPI.SHORT_INT):
        yield kind.name, (kind.size, kind.Get_extent(), kind.Get_true_extent())
    yield "Match_size", MPI.Datatype.Match_size(MPI.TYPECLASS_REAL, 8).Get_size()
    yield "Get_value_index", MPI.Datatype.Get_value_index(MPI.DOUBLE, MPI.INT) == MPI.DOUBLE_INT
    fortran = (
        MPI.Datatype.Create_f90_integer(5),
        MPI.Datatype.Create_f90_real(6, 30),
        MPI.Datatype.Create_f90_complex(6, 30),
    )
    yield "Fortran 90", [each.Get_size() for each in fortran]
    yield "fromcode", [MPI.Datatype.fromcode(code).name for code in ("i", "d", "?", "f8", "i2")]
    yield (
        "refused",
        (refused(MPI.INT.Free), refused(MPI.Datatype.fromcode, "nothing"), refused(MPI.DATATYPE_NULL.Get_size)),
    )
    yield "handles", (MPI.Datatype.fromhandle(MPI.INT.handle) == MPI.INT, MPI.Datatype.f2py(MPI.INT.py2f()) == MPI.INT)


@section
def derived():
    for label, make in DERIVED.items():
        kind = make().Commit()
        bounds = (kind.lb, kind.ub, kind.true_lb, kind.true_ub, kind.true_extent)
        yield label, (kind.Get_size(), kind.Get_extent(), kind.Get_true_extent(), bounds)
        yield "Free", (refused(kind.Free), kind == MPI.DATATYPE_NULL)


@section
def contents():
    for label, make in DERIVED.items():
        kind = make()
        origin, combiner, parameters = kind.decode()
        for again in (getattr(origin, f"Create_{combiner.lower()}")(**parameters), pickle.loads(pickle.dumps(kind))):
            yield "made again", (again.Get_extent(), again.Get_true_extent(), again.Get_contents()[:3])
        integers, addresses, counts, kinds = kind.Get_contents()
        parameters.pop("datatypes", None)  # of a struct, which has no single origin
        yield label, (kind.Get_envelope()[:4], combiner, parameters, origin.Get_size() if origin else None)
        yield "Get_contents", (integers, addresses, counts, [each.Get_size() for each in kinds])
        yield (
            "properties",
            (kind.envelope == kind.Get_envelope(), kind.is_named, kind.is_predefined, len(kind.contents)),
        )
    yield "predefined", (named(MPI.INT.combiner, "COMBINER_NAMED"), MPI.INT.decode()[1], MPI.INT.is_predefined)
    yield "its envelope", MPI.INT.Get_envelope()[:4]


@section
def distributed():
    default, psizes = [MPI.DISTRIBUTE_DFLT_DARG] * 2, [2, 3]
    block, cyclic, whole = MPI.DISTRIBUTE_BLOCK, MPI.DISTRIBUTE_CYCLIC, MPI.DISTRIBUTE_NONE
    for arguments in (
        ([block] * 2, default, psizes),
        ([block] * 2, [4, 6], psizes),
        ([cyclic] * 2, default, psizes),
        ([cyclic] * 2, [default[0], 2], psizes),
        ([cyclic] * 2, default, psizes, MPI.ORDER_F),
        ([block, whole], default, [6, 1]),
    ):
        for each in range(6):
            kind = MPI.INT.Create_darray(6, each, [5, 7], *arguments).Commit()
            position = kind.Pack(np.arange(35, dtype="i"), packed := np.zeros(35, "i"), 0, comm)
            yield f"part {each}", (kind.Get_extent(), packed[: position // 4].tolist())


@section
def messages():
    for label, make in DERIVED.items():
        kind = make().Commit()
        for count in (0, 1, 2):
            sent, received, status = np.arange(48, dtype="i") + 100 * rank, np.full(48, -1, "i"), MPI.Status()
            comm.Sendrecv([sent, count, kind], right, 0, [received, count, kind], left, 0, status)
            apart = np.zeros(count * kind.Get_size(), "b")
            comm.Sendrecv([sent, count, kind], right, 1, [apart, MPI.BYTE], left, 1)
            yield label, (received.tolist(), apart.tolist())
            yield "status", (status.Get_count(kind), status.Get_elements(kind))
    for label in ("vector", "struct"):
        kind, x = DERIVED[label]().Commit(), np.zeros(8, "i")
        sending = comm.Isend(np.arange(1, 4, dtype="i"), right, 2)
        comm.Recv([x, 2, kind], left, 2, status)
        sending.Wait()
        elements = MPI.Status(status)
        elements.Set_elements(kind, 1)
        yield f"a part of a {label}", (x.tolist(), elements.count, status.Get_elements(kind))
        yield "status", (named(status.Get_count(kind), "UNDEFINED"), named(status.Get_count(MPI.DOUBLE), "UNDEFINED"))


@section
def collectives():
    column = MPI.DOUBLE.Create_vector(3, 1, 2).Create_resized(0, 8).Commit()
    matrix = np.arange(6.0).reshape(3, 2) + 10 * rank
    comm.Bcast([matrix, 1, column], 0)
    yield "a column of Bcast", matrix.tolist()
    columns = np.zeros((3, comm.size))
    wide = MPI.DOUBLE.Create_vector(3, 1, comm.size).Create_resized(0, 8).Commit()
    comm.Allgather(np.arange(3.0) + rank, [columns, 1, wide])
    yield "transposed by Allgather", columns.tolist()
    triple = MPI.INT.Create_contiguous(3).Commit()

    def add(inbuf, inout, kind):
        assert kind == triple
        np.frombuffer(inout, "i")[:] += np.frombuffer(inbuf, "i")

    op = MPI.Op.Create(add, commute=True)
    x = np.zeros(6, "i")
    comm.Allreduce([np.arange(6, dtype="i") + rank, 2, triple], [x, 2, triple], op)
    yield "reduced by a function", x.tolist()
    yield "no operation of MPI's", refused(comm.Allreduce, [x.copy(), 2, triple], [x, 2, triple], MPI.SUM)
    op.Free()
    for kind in (column, wide, triple):
        kind.Free()


@section
def packs():
    room = bytearray(100)
    position = MPI.INT.Pack(np.arange(3, dtype="i") + rank, room, 0, comm)
    position = MPI.DOUBLE.Pack(np.array([0.5]), room, position, comm)
    yield "Pack", (position, MPI.INT.Pack_size(3, comm) + MPI.DOUBLE.Pack_size(1, comm) >= position)
    received = bytearray(100)
    comm.Sendrecv([room, position, MPI.PACKED], right, 0, [received, MPI.PACKED], left, 0)
    x, y = np.zeros(3, "i"), np.zeros(1)
    position = MPI.INT.Unpack(received, 0, x, comm)
    yield "Unpack", (x.tolist(), MPI.DOUBLE.Unpack(received, position, y, comm), y.tolist())
    every_other = MPI.INT.Create_vector(2, 1, 2).Commit()
    x = np.full(4, -1, "i")
    position = every_other.Pack(np.arange(4, dtype="i"), room, 0, comm)
    yield "derived", (position, every_other.Unpack(room, 0, x, comm), x.tolist())
    every_other.Free()


@section
def names_and_attributes():
    deleted = []
    key = MPI.Datatype.Create_keyval(lambda kind, key, value: value + 1, lambda kind, key, value: deleted.append(value))
    kind = MPI.INT.Create_contiguous(2)
    kind.Set_name("two")
    kind.Set_attr(key, 1)
    duplicate = kind.Dup()
    yield "names", (kind.Get_name(), kind.name, MPI.DATATYPE_NULL.name)
    yield "attributes", (kind.Get_attr(key), duplicate.Get_attr(key))
    duplicate.Delete_attr(key)
    kind.Free()
    duplicate.Free()
    yield "deleted", (deleted, MPI.Datatype.Free_keyval(key) == MPI.KEYVAL_INVALID)
    duplicated = MPI.INT.Create_dup()
    yield "Create_dup", (duplicated == MPI.INT, duplicated.Get_size())
    duplicated.Free()


@section
def refusals():
    for label, call in {
        "count": lambda: MPI.INT.Create_contiguous(-1),
        "blocklength": lambda: MPI.INT.Create_vector(2, -1, 2),
        "lengths": lambda: MPI.INT.Create_indexed([1, 2], [0]),
        "padded struct": lambda: MPI.Datatype.Create_struct([1, 1], [0, 8], [MPI.DOUBLE, MPI.CHAR]),
        "subarray": lambda: MPI.INT.Create_subarray([4], [5], [0]),
        "not committed": lambda: MPI.COMM_SELF.Bcast([np.zeros(2, "i"), 1, MPI.INT.Create_contiguous(2)]),
        "null": lambda: MPI.DATATYPE_NULL.Create_contiguous(2),
    }.items():
        yield label, refused(call)


report()
