"""Groups: their set operations, ranges and comparisons. Nothing is sent."""

from mpi4py import MPI
from sections import comm, compared, named, rank, refused, report, section, size

world = comm.Get_group()
LAST = size - 1


def members(group):
    """Return the world's ranks in a group, in order."""
    return group.Translate_ranks(list(range(group.size)), world)


@section
def groups():
    yield "size, rank", (world.Get_size(), world.Get_rank(), world.size, world.rank)
    yield "GROUP_EMPTY", (MPI.GROUP_EMPTY.size, named(MPI.GROUP_EMPTY.rank, "UNDEFINED"))
    yield "truth", (bool(world), bool(MPI.GROUP_EMPTY), bool(MPI.GROUP_NULL), MPI.Group() == MPI.GROUP_NULL)
    yield "null", [refused(lambda: MPI.GROUP_NULL.size), refused(MPI.GROUP_NULL.Incl, [0])]
    yield "handles", MPI.Group.fromhandle(world.handle) == world


@section
def chosen():
    for name, group in {
        "Incl": world.Incl([LAST, 0] if size > 1 else [0]),
        "Incl of none": world.Incl([]),
        "Excl": world.Excl([0]),
        "Excl of none": world.Excl([]),
        "Range_incl": world.Range_incl([(0, LAST, 2)]),
        "Range_incl, backwards": world.Range_incl([(LAST, 0, -2)]),
        "Range_excl": world.Range_excl([(1, LAST, 2)] if size > 1 else []),
        "Dup": world.Dup(),
    }.items():
        yield name, (members(group), named(group.rank, "UNDEFINED"), compared(world.Compare(group)))
        if group.size:
            group.Free()


@section
def set_operations():
    lower, upper = world.Incl(range((size + 1) // 2)), world.Incl(range(size // 2, size))
    odds = world.Incl(range(LAST, -1, -2))
    for name, operation in {
        "Union": MPI.Group.Union,
        "Intersection": MPI.Group.Intersection,
        "Intersect": MPI.Group.Intersect,
        "Difference": MPI.Group.Difference,
    }.items():
        for first, second in ((lower, upper), (upper, lower), (odds, upper), (world, odds), (odds, odds)):
            yield f"{name} of {members(first)} and {members(second)}", members(operation(first, second))
    yield "Compare", [compared(MPI.Group.Compare(lower, each)) for each in (lower, lower.Dup(), upper, odds)]
    turned = world.Incl(range(LAST, -1, -1))
    yield "Compare, reversed", compared(world.Compare(turned))
    yield "equal handles", (lower == MPI.Group(lower), lower == lower.Dup())
    yield "Translate_ranks", [named(each, "UNDEFINED") for each in world.Translate_ranks(range(size), upper)]
    yield "Translate_ranks, defaults", (world.Translate_ranks(), turned.Translate_ranks(group=world))
    yield "PROC_NULL", named(world.Translate_ranks([MPI.PROC_NULL], turned)[0], "PROC_NULL")


@section
def refusals():
    yield "Incl", refused(world.Incl, [size])
    yield "Excl", refused(world.Excl, [-1])
    yield "Range_incl", refused(world.Range_incl, [(0, size, 1)])
    yield "Range_excl", refused(world.Range_excl, [(-1, 0, 1)])
    group = world.Dup()
    group.Free()
    yield "Free", (group == MPI.GROUP_NULL, refused(group.Free))
    yield "usable", members(world)[rank] == rank


report()
