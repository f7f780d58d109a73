"""Reductions of arrays: every predefined operation on several types, functions, in place, all forms of the calls."""

import numpy as np
from mpi4py import MPI
from sections import agreed, comm, finished, named, rank, refused, report, section, size

NUMBERS, WHOLE = "bhilqBHILQfd", "bhilqBHILQ"  # type codes of the array module
LAST = size - 1


def values(code):
    return np.array([rank + 1, 3 * rank % 4, 2, 0]).astype(code)


@section
def predefined():
    for name, codes in {
        "SUM": NUMBERS + "FD",
        "PROD": NUMBERS + "FD",
        "MAX": NUMBERS,
        "MIN": NUMBERS,
        "LAND": WHOLE,
        "LOR": WHOLE,
        "LXOR": WHOLE,
        "BAND": WHOLE,
        "BOR": WHOLE,
        "BXOR": WHOLE,
    }.items():
        for call in (comm.Allreduce, comm.Scan):
            results = []
            for code in codes:
                x, y = values(code), np.zeros(4, code)
                call(x, y, getattr(MPI, name))
                results.append((y.real.astype(int).tolist(), x.real.astype(int).tolist()))
            yield f"{call.__name__}, {name}", agreed(results)
    flags, all_, any_ = np.array([rank == 0, True, False]), np.zeros(3, "?"), np.zeros(3, "?")
    comm.Allreduce(flags, all_, MPI.LAND)
    comm.Allreduce(flags, any_, MPI.LOR)
    yield "truth values", (all_.tolist(), any_.tolist())
    yield "complex", [comm.allreduce(each) for each in (1 + 1j * rank, complex(rank, -rank))]


@section
def refusals():
    x, y = np.ones(1), np.ones(1)
    yield "of floats", [refused(comm.Allreduce, x, y, op) for op in (MPI.BAND, MPI.BOR, MPI.BXOR)]
    yield "of complex numbers", refused(comm.Allreduce, x.astype("D"), y.astype("D"), MPI.MAX)
    yield "of no pairs", refused(comm.Allreduce, x, y, MPI.MAXLOC)
    yield "of other lengths", refused(MPI.SUM.Reduce_local, x, np.ones(2))
    yield "usable", comm.allreduce(rank)


@section
def locations():
    for code, kind in (("i", MPI.TWOINT), ("f", MPI.FLOAT_INT), ("d", MPI.DOUBLE_INT), ("h", MPI.SHORT_INT)):
        pairs = np.array(
            [(rank % 2, rank), (5, size - rank), (-rank, 7)], np.dtype([("x", code), ("at", "i")], align=True)
        )
        for op in (MPI.MINLOC, MPI.MAXLOC):
            best = np.zeros_like(pairs)
            comm.Allreduce([pairs, kind], [best, kind], op)
            yield f"{named(op, 'MINLOC', 'MAXLOC')} of {kind.name}", best.tolist()
    longs = np.array([(rank, -rank)], np.dtype([("x", "l"), ("at", "i")], align=True))
    comm.Reduce([longs, MPI.LONG_INT], [best := longs.copy(), MPI.LONG_INT], MPI.MAXLOC, LAST)
    yield "LONG_INT", best.tolist()


@section
def forms():
    for op in (MPI.SUM, MPI.MAX):
        label = named(op, "SUM", "MAX")
        for name, calls in {
            "Reduce": (comm.Reduce, comm.Ireduce, comm.Reduce_init),
            "Allreduce": (comm.Allreduce, comm.Iallreduce, comm.Allreduce_init),
            "Scan": (comm.Scan, comm.Iscan, comm.Scan_init),
            "Exscan": (comm.Exscan, comm.Iexscan, comm.Exscan_init),
        }.items():
            apart, in_place = [], []
            for call in calls:
                root = [LAST] if name == "Reduce" else []
                x, y = values("i"), np.full(4, -1, "i")
                finished(call(x, y, op, *root))
                apart.append(y.tolist())
                if name == "Reduce" and rank != LAST:
                    finished(call(x, None, op, LAST))
                else:
                    finished(call(MPI.IN_PLACE, x, op, *root))
                in_place.append(x.tolist())
            yield f"{name}, {label}", (agreed(apart), agreed(in_place))


@section
def scattered():
    wide, counts = np.arange(2 * size, dtype="d") + rank, list(range(size))
    results = []
    for call in (comm.Reduce_scatter_block, comm.Ireduce_scatter_block, comm.Reduce_scatter_block_init):
        share = np.zeros(2)
        finished(call(wide, share))
        results.append(share.tolist())
    yield "Reduce_scatter_block", agreed(results)
    results = []
    for call in (comm.Reduce_scatter, comm.Ireduce_scatter, comm.Reduce_scatter_init):
        share = np.zeros(rank)
        finished(call(wide[: sum(counts)].copy(), share, counts, MPI.MAX))
        results.append(share.tolist())
    yield "Reduce_scatter", agreed(results)
    comm.Reduce_scatter_block(MPI.IN_PLACE, [wide, 2, MPI.DOUBLE])
    yield "in place", wide[:2].tolist()
    wide = np.arange(size, dtype="d") + rank
    comm.Reduce_scatter(MPI.IN_PLACE, wide, [1] * size)
    yield "in place, of counts", wide[:1].tolist()


def first_odd(inbuf, inout, _):
    """a op b = a where a is odd, else b: associative, and not commutative."""
    a, b = np.frombuffer(inbuf, "i"), np.frombuffer(inout, "i")
    b[:] = np.where(a % 2, a, b)


def greatest(inbuf, inout, datatype):
    """The greater of each pair."""
    assert datatype == MPI.INT
    b = np.frombuffer(inout, "i")
    b[:] = np.maximum(np.frombuffer(inbuf, "i"), b)


@section
def functions():
    ordered, unordered = MPI.Op.Create(first_odd, commute=False), MPI.Op.Create(greatest, commute=True)
    yield "Is_commutative", [op.Is_commutative() for op in (ordered, unordered, MPI.SUM)]
    yield "properties", [(op.is_commutative, op.is_predefined) for op in (ordered, unordered, MPI.SUM)]
    for op, label in ((ordered, "not commutative"), (unordered, "commutative")):
        x = np.array([rank, rank + 1, 2 * rank, 7 - rank], "i")
        for call in (comm.Allreduce, comm.Scan, comm.Exscan):
            y = np.full(4, -1, "i")
            call(x, y, op)
            yield f"{call.__name__}, {label}", y.tolist()
        y = np.full(4, -1, "i")
        comm.Reduce(x, y, op, LAST)
        yield f"Reduce, {label}", y.tolist()
        share = np.zeros(1, "i")
        comm.Reduce_scatter_block(np.arange(size, dtype="i") + rank, share, op)
        yield f"Reduce_scatter_block, {label}", share.tolist()
        request = comm.Iallreduce(x, y, op)
        request.Wait()
        yield f"Iallreduce, {label}", y.tolist()
    for op in (ordered, unordered):
        op.Free()
    yield "Free", (ordered == MPI.OP_NULL, refused(MPI.SUM.Free))


@section
def local():
    inbuf, inout = np.array([1, 5, 3], "i"), np.array([4, 2, 3], "i")
    for op in (MPI.SUM, MPI.MAX, MPI.BXOR):
        result = inout.copy()
        op.Reduce_local(inbuf, result)
        yield named(op, "SUM", "MAX", "BXOR"), (result.tolist(), inbuf.tolist())
    yield "of the program's own", MPI.Op.Create(lambda x, y, kind: x - y)(5, 3)
    yield (
        "of objects",
        (MPI.SUM([1], [2]), MPI.MAX(3, 4), MPI.MINLOC((1, 5), (1, 2)), MPI.LXOR(True, True), MPI.BOR(1, 6)),
    )
    yield "truth", (bool(MPI.SUM), bool(MPI.OP_NULL), MPI.Op(MPI.SUM) == MPI.SUM)
    yield "handles", (MPI.Op.fromhandle(MPI.MAX.handle) == MPI.MAX, MPI.Op.f2py(MPI.SUM.py2f()) == MPI.SUM)


report()
