"""What the programs of this folder share: sections, whose results rank 0 prints.

A section is a generator of pairs: a label, and what a call returned. Rank 0 prints one line per pair where all ranks
have the same result, else one line per result with the ranks that have it.
"""

import traceback

from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
left, right = (rank - 1) % size, (rank + 1) % size
ERRORS = {getattr(MPI, name): name for name in dir(MPI) if name.startswith("ERR_")}
SECTIONS = []


def section(fn):
    """Add a section to the program."""
    SECTIONS.append(fn)
    return fn


def report():
    """Run the sections in order and print their results. An exception on one rank ends the job."""
    try:
        for each in SECTIONS:
            results = comm.gather([(label, repr(result)) for label, result in each()])
            if rank == 0:
                print(each.__name__.replace("_", " "))
                for of_ranks in zip(*results, strict=True):
                    show(of_ranks)
        SECTIONS.clear()
    except BaseException:
        traceback.print_exc()
        comm.Abort(1)


def show(of_ranks):
    """Print one label with its result on each rank."""
    (label,) = {label for label, _ in of_ranks}
    ranks = {}
    for number, (_, result) in enumerate(of_ranks):
        ranks.setdefault(result, []).append(number)
    for result, those in ranks.items():
        print(f"  {label}{f' on {those}' if len(ranks) > 1 else ''}: {result}", flush=True)


def refused(call, *args):
    """Call, and return the class of the error that it raises; None if it raises none."""
    try:
        call(*args)
    except MPI.Exception as error:
        return ERRORS[error.Get_error_class()]
    except (TypeError, ValueError, KeyError, BufferError, RuntimeError) as error:
        return type(error).__name__
    return None


def named(value, *names):
    """Return which of the constants `names` the value is; the value itself if it is none of them."""
    return next((name for name in names if getattr(MPI, name) == value), value)


def compared(value):
    """Return the name of what Compare returns."""
    return named(value, "IDENT", "CONGRUENT", "SIMILAR", "UNEQUAL")


def finished(request):
    """Wait for a request, which is started before if it is persistent. Blocking calls return None."""
    if isinstance(request, MPI.Prequest):
        request.Start()
    if request is not None:
        request.Wait()
    if isinstance(request, MPI.Prequest):
        request.Free()


def agreed(results):
    """Return the result that several forms of a call have in common; all results if they differ."""
    return results[0] if all(each == results[0] for each in results) else results


def described(status):
    """Return the source, the tag and the bytes of a status."""
    source = named(status.source, "PROC_NULL", "ANY_SOURCE")
    return source, named(status.tag, "ANY_TAG"), status.count
