"""Communicators: their names, how they are made and compared, their attributes and hints."""

from mpi4py import MPI
from sections import comm, compared, named, rank, refused, report, section, size


@section
def the_world():
    yield "size, rank", (comm.Get_size(), comm.Get_rank(), MPI.COMM_SELF.size, MPI.COMM_SELF.rank)
    yield "names", (comm.Get_name(), MPI.COMM_SELF.name, MPI.COMM_NULL.name)
    yield "kind", (comm.Is_intra(), comm.Is_inter(), comm.is_intra, comm.is_inter, comm.is_topo)
    yield "topology", [named(each, "UNDEFINED") for each in (comm.Get_topology(), comm.topology)]
    yield "truth", (bool(comm), bool(MPI.COMM_NULL), MPI.Intracomm(comm) == comm, MPI.Intracomm() == MPI.COMM_NULL)
    yield "classes", [type(each).__name__ for each in (comm, MPI.COMM_SELF, MPI.COMM_NULL, comm.Get_parent())]
    yield "no parent", comm.Get_parent() == MPI.COMM_NULL
    yield "null", [refused(call) for call in (MPI.COMM_NULL.Get_size, MPI.COMM_NULL.Barrier, MPI.COMM_NULL.Free)]
    yield "Free", refused(comm.Free)
    yield "handles", (MPI.Comm.fromhandle(comm.handle) == comm, type(MPI.Comm.fromhandle(comm.handle)).__name__)
    yield "Fortran", (MPI.Comm.f2py(comm.py2f()) == comm, MPI.Intracomm.fromint(comm.toint()) == comm)


@section
def duplicates():
    duplicate = comm.Dup()
    duplicate.Set_name("duplicate")
    yield "Dup", (compared(comm.Compare(duplicate)), duplicate.rank, duplicate.name, duplicate == comm)
    duplicate.name = "renamed"
    yield "name", duplicate.Get_name()
    clone = duplicate.Clone()
    yield "Clone", (compared(duplicate.Compare(clone)), clone.allreduce(1))
    later, request = comm.Idup()
    request.Wait()
    yield "Idup", (compared(comm.Compare(later)), later.allgather(rank))
    info = MPI.Info.Create({"mpi_assert_allow_overtaking": "true"})
    hinted = comm.Dup_with_info(info)
    also_hinted, request = comm.Idup_with_info(info)
    request.Wait()
    yield "with hints", [each.allreduce(rank) for each in (hinted, also_hinted)]
    for each in (duplicate, clone, later, hinted):
        each.Free()
    also_hinted.free()
    yield "Free", [each == MPI.COMM_NULL for each in (duplicate, clone, later, hinted, also_hinted)]
    gone = comm.Dup()
    gone.Disconnect()
    yield "Disconnect", (gone == MPI.COMM_NULL, refused(gone.Free))


@section
def hints():
    duplicate = comm.Dup()
    info = MPI.Info.Create({"mpi_assert_no_any_tag": "false"})
    duplicate.Set_info(info)
    duplicate.info = info
    yield "Get_info", (bool(duplicate.Get_info()), bool(duplicate.info), duplicate.info == duplicate.info)
    info.Free()
    duplicate.Free()


@section
def parts():
    turned = comm.Split(0, -rank)
    yield "Split, reversed", (turned.rank, compared(comm.Compare(turned)), turned.allgather(rank))
    part = comm.Split(rank % 2 if rank else MPI.UNDEFINED, rank)
    yield "Split, colors", (part == MPI.COMM_NULL, (part.rank, part.allgather(rank)) if part else None)
    yield "Split, refused", refused(comm.Split, -7)
    yield "Compare", compared(comm.Compare(MPI.COMM_SELF))
    shared = comm.Split_type(MPI.COMM_TYPE_SHARED, key=-rank)
    yield "Split_type", (shared.size, shared.rank)
    yield "no type", comm.Split_type(MPI.UNDEFINED) == MPI.COMM_NULL
    for each in (turned, part, shared):
        if each:
            each.Free()


@section
def of_groups():
    evens = comm.group.Incl(range(0, size, 2))
    made = comm.Create(evens)
    yield "Create", made.allgather(rank) if made else None
    halves = comm.Get_group().Incl([each for each in range(size) if each % 2 == rank % 2][::-1])
    half = comm.Create(halves)
    yield "Create, disjoint", (half.rank, half.allgather(rank))
    alone = MPI.COMM_NULL
    if rank % 2 == 0:
        alone = comm.Create_group(evens, tag=3)
    yield "Create_group", (alone.rank, alone.allgather(rank)) if alone else None
    yield "Compare", compared(made.Compare(alone)) if made else None
    empty = comm.Create(MPI.GROUP_EMPTY)
    yield "empty", empty == MPI.COMM_NULL
    direct = MPI.Intracomm.Create_from_group(halves, "half")
    yield "Create_from_group", (direct.rank, direct.allgather(rank))
    nested = half.Split(0, half.rank).Split(half.rank)
    yield "parts of parts", (nested.size, nested.group.Translate_ranks([0], comm.group))
    for each in (made, half, alone, direct, nested):
        if each:
            each.Free()


@section
def attributes():
    deleted = []
    key = MPI.Comm.Create_keyval(lambda comm, key, value: value + 1, lambda comm, key, value: deleted.append(value))
    plain = MPI.Comm.Create_keyval()
    kept = MPI.Comm.Create_keyval(copy_fn=True)
    first = comm.Dup()
    for each, value in ((key, 10), (plain, "plain"), (kept, "kept")):
        first.Set_attr(each, value)
    second = first.Dup()
    yield "copied", [second.Get_attr(each) for each in (key, plain, kept)]
    yield "elsewhere", comm.Get_attr(key)
    second.Free()
    yield "deleted with the communicator", deleted[:]
    first.Set_attr(key, 20)
    yield "deleted when set", deleted[:]
    first.Delete_attr(key)
    yield "Delete_attr", (deleted[:], first.Get_attr(key))
    first.Free()
    yield "Free_keyval", [MPI.Comm.Free_keyval(each) == MPI.KEYVAL_INVALID for each in (key, plain, kept)]
    yield "TAG_UB", comm.Get_attr(MPI.TAG_UB) >= 32767


report()
