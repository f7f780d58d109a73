"""What belongs to no communicator: start, version, clock, statuses, hints, pickles."""

import pickle
import threading

import mpi4py
import numpy as np
from mpi4py import MPI
from sections import comm, described, named, rank, refused, report, section


@section
def the_world():
    yield "started", (MPI.Is_initialized(), MPI.Is_finalized(), refused(MPI.Init), refused(MPI.Init_thread))
    levels = "THREAD_SINGLE", "THREAD_FUNNELED", "THREAD_SERIALIZED", "THREAD_MULTIPLE"
    yield "threads", (named(MPI.Query_thread(), *levels), MPI.Is_thread_main())
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(MPI.Is_thread_main()))
    thread.start()
    thread.join()
    yield "another thread", elsewhere
    yield "version", [type(each).__name__ for each in MPI.Get_version()]
    yield "library", (bool(MPI.Get_library_version()), [type(each).__name__ for each in MPI.get_vendor()])
    yield "one host", len({*comm.allgather(MPI.Get_processor_name())})
    before = MPI.Wtime()
    yield "clock", (MPI.Wtime() >= before, 0 < MPI.Wtick() < 1)
    yield "Pcontrol", MPI.Pcontrol(1)
    yield "rc", (mpi4py.rc.initialize, mpi4py.rc.thread_level, mpi4py.__version__.startswith("4."))
    yield "sizes", (MPI.MAX_PROCESSOR_NAME > 0, MPI.BSEND_OVERHEAD >= 0, MPI.ROOT != MPI.PROC_NULL)


@section
def statuses():
    status = MPI.Status()
    yield "new", (described(status), status.Get_error(), status.Is_cancelled())
    status.Set_source(1)
    status.Set_tag(2)
    status.Set_error(MPI.ERR_TAG)
    status.Set_elements(MPI.INT, 6)
    status.Set_cancelled(True)
    copy = MPI.Status(status)
    yield "copied", (copy.Get_source(), copy.Get_tag(), copy.Get_error() == MPI.ERR_TAG, copy == status, copy is status)
    pair = MPI.INT.Create_contiguous(2).Commit()
    yield "counts", (copy.Get_count(), copy.Get_count(MPI.INT), copy.Get_count(pair), copy.Get_elements(pair))
    copy.source, copy.tag, copy.error, copy.count, copy.cancelled = 3, 4, 0, 9, False
    yield "set", (copy.source, copy.tag, copy.error, copy.count, copy.cancelled, copy != status)
    yield "not whole", named(copy.Get_count(MPI.INT), "UNDEFINED")
    again = pickle.loads(pickle.dumps(copy))
    yield "pickled", (again == copy, again.tag)
    yield "memory", len(memoryview(copy.tomemory())) > 0
    yield "Fortran", MPI.Status.f2py(copy.py2f()) == copy
    pair.Free()


@section
def hints():
    info = MPI.Info.Create({"one": "1"})
    info.Set("two", "2")
    info["three"] = "3"
    yield (
        "Get",
        (info.Get("two"), info.Get("none"), info.get("none", "default"), info["one"], refused(lambda: info["none"])),
    )
    yield (
        "keys",
        (info.Get_nkeys(), len(info), sorted(info.Get_nthkey(n) for n in range(3)), "two" in info, "four" in info),
    )
    yield "items", (sorted(info.keys()), sorted(info.values()), sorted(info.items()), sorted(info))
    copies = info.Dup(), info.copy()
    info.Delete("one")
    del info["two"]
    yield "deleted", (info.items(), [sorted(each.items()) for each in copies], refused(info.Delete, "one"))
    info.update({"four": "4"}, five="5")
    yield "pop", (info.pop("four"), info.pop("four", "default"), refused(info.pop, "four"))
    yield "popitem", (info.popitem()[0] in ("three", "five"), len(info))
    info.clear()
    yield "clear", (len(info), bool(info), bool(MPI.INFO_NULL), refused(info.popitem))
    yield "refused", (refused(info.Set, "k" * 300, "v"), refused(MPI.INFO_NULL.Set, "a", "b"))
    for each in (info, *copies):
        each.Free()
    yield "Free", (info == MPI.INFO_NULL, refused(MPI.INFO_NULL.Free))
    started = MPI.Info.Create_env()
    yield "Create_env", (type(started).__name__, started != MPI.INFO_NULL)
    started.Free()


@section
def pickles():
    obj = {"rank": rank, "list": [1, 2.5, None], "nested": ("text", b"bytes")}
    yield "dumps", (MPI.pickle.loads(MPI.pickle.dumps(obj)) == obj, type(MPI.pickle.dumps(obj)).__name__)
    data, buffers = MPI.pickle.dumps_oob([np.arange(100_000), "text"])
    again = MPI.pickle.loads_oob(data, buffers)
    yield "dumps_oob", (len(buffers), [len(each) for each in buffers], again[1], int(again[0].sum()))
    yield "THRESHOLD", (MPI.pickle.THRESHOLD, MPI.pickle.PROTOCOL == pickle.HIGHEST_PROTOCOL)
    own = MPI.Pickle(threshold=10)
    yield "own", (len(own.dumps_oob(np.arange(10))[1]), own.loads(own.dumps(obj)) == obj)
    own = MPI.Pickle(lambda obj: pickle.dumps(("wrapped", obj)), lambda data: pickle.loads(data)[1])
    yield "wrapped", (own.loads(own.dumps(5)), MPI.pickle.loads(own.dumps(5)))
    MPI.pickle.PROTOCOL = 3
    yield "PROTOCOL", MPI.pickle.dumps(1)[:2]
    MPI.pickle.PROTOCOL = None
    constants = (MPI.COMM_WORLD, MPI.INT, MPI.SUM, MPI.GROUP_EMPTY, MPI.REQUEST_NULL, MPI.INFO_NULL, MPI.ERRORS_RETURN)
    yield (
        "constants",
        [pickle.loads(pickle.dumps(each)) == each for each in (*constants, MPI.COMM_NULL, MPI.MESSAGE_NULL)],
    )


@section
def singletons():
    yield "IN_PLACE", (repr(MPI.IN_PLACE), repr(MPI.BOTTOM), type(MPI.IN_PLACE) is MPI.InPlaceType)
    yield "copies", (MPI.InPlaceType() == MPI.IN_PLACE, pickle.loads(pickle.dumps(MPI.BOTTOM)) == MPI.BOTTOM)


report()
MPI.Finalize()
if rank == 0:
    print("finalized", MPI.Is_initialized(), MPI.Is_finalized())
