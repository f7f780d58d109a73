"""What a trace holds: every call of every rank with its facts, who was late, queued calls, waits, marks, messages."""

import re
import time
from itertools import pairwise

import numpy as np
import pytest

import harness
import ringcomm
from cases.between_hosts import run_on
from cases.on_device import Gate
from harness import failures
from ringcomm.devices import emulated
from ringcomm.trace.entries import read
from ringcomm.trace.report import report
from ringcomm.transports.staged import staging

SIZE = 3
LATE = 0.01  # seconds, at least, after failures.until_waiting


def one_of_each(comm, folder):
    x, rows = np.ones(4, np.float32), np.ones((SIZE, 5), np.int64)
    with comm.trace(folder):
        comm.barrier()
        comm.all_reduce(x)
        comm.reduce(x, root=1)
        comm.broadcast(x, root=2)
        comm.all_gather(x)
        comm.gather(x, root=1)
        comm.scatter(rows if comm.rank == 2 else None, out=np.empty((1, 5), np.int64), root=2)
        comm.reduce_scatter(rows)
        comm.all_to_all(rows)
        comm.all_gather(np.ones(comm.rank + 1), counts=[1, 2, 3])
        comm.all_to_all(rows, send_counts=[1, 1, 1], recv_counts=[1, 1, 1])
    comm.barrier()  # which is not recorded


EACH = [  # name, bytes of the larger array, dtype, root
    ("barrier", 0, "", None),
    ("all_reduce", 16, "float32", None),
    ("reduce", 16, "float32", 1),
    ("broadcast", 16, "float32", 2),
    ("all_gather", 16 * SIZE, "float32", None),
    ("gather", 16 * SIZE, "float32", 1),
    ("scatter", 40 * SIZE, "int64", 2),
    ("reduce_scatter", 40 * SIZE, "int64", None),
    ("all_to_all", 40 * SIZE, "int64", None),
    ("all_gather", 48, "float64", None),
    ("all_to_all", 40 * SIZE, "int64", None),
]


def facts(recording, *names):
    return [tuple(getattr(call, name) for name in names) for call in recording.calls]


def test_every_call_of_every_rank_is_recorded(tmp_path, world):
    harness.run(one_of_each, SIZE, tmp_path, world=world)
    recordings = read(tmp_path)
    assert [(each.rank, each.size) for each in recordings] == [(rank, SIZE) for rank in range(SIZE)]
    assert len({each.group for each in recordings}) == 1
    assert len({each.process for each in recordings}) == SIZE
    for each in recordings:
        assert facts(each, "name", "bytes", "dtype", "root") == EACH
        assert {call.kind for call in each.calls} == {"collective"}
        first = each.calls[0].epoch
        assert [call.epoch for call in each.calls] == [*range(first, first + len(EACH))]
        assert not any(call.failed or call.queued for call in each.calls)
        for call, following in zip(each.calls, each.calls[1:], strict=False):
            assert 0 <= call.waited <= call.end - call.start
            assert call.end <= following.start
    assert min(call.start for each in recordings for call in each.calls) == 0
    for calls in zip(*(each.calls for each in recordings), strict=True):
        if calls[0].name in ("barrier", "all_reduce"):  # all have begun before one ends
            assert max(call.start for call in calls) <= min(call.end for call in calls) + 1e-4


def paths(comm, folder):
    with comm.trace(folder):
        for count in (4, 1_000_000):
            comm.all_reduce(np.ones(count, np.float32))
            path, chunks = comm._transport.path()
            comm.mark(f"{path} {chunks}")


def test_a_call_has_its_path_and_the_number_of_its_chunks(tmp_path):
    harness.run(paths, 2, tmp_path)
    for each in read(tmp_path):
        calls, marks = each.calls[::2], each.calls[1::2]
        assert [f"{call.path} {call.chunks}" for call in calls] == [mark.name for mark in marks]
        assert len({call.path for call in calls}) == 2


def one_is_late(comm, folder):
    comm.barrier()
    with comm.trace(folder):
        if comm.rank == 1:
            failures.until_waiting_longest(comm, {0: 1, 2: 1})
        comm.all_reduce(np.ones(10))


def test_others_wait_for_the_rank_that_is_late(tmp_path, world):
    harness.run(one_is_late, SIZE, tmp_path, world=world)
    calls = [each.calls[0] for each in read(tmp_path)]
    for rank in (0, 2):
        assert calls[rank].late == 1
        assert LATE < calls[rank].waited_for <= calls[rank].waited <= calls[rank].end - calls[rank].start
    assert calls[1].start > max(calls[0].start, calls[2].start)
    assert calls[1].late != 1


def one_of_a_host_is_late(comm, folder, count):
    comm.barrier()
    with comm.trace(folder):
        if comm.rank == 3:
            for rank in range(3):
                failures.until_waiting(comm, rank)
            time.sleep(0.2)  # far longer than the first ones have waited for each other
        comm.all_reduce(np.ones(count))


@pytest.mark.parametrize("count", [10, 100_000])
def test_between_hosts_ranks_wait_until_all_have_begun(tmp_path, count):
    run_on("AABB", one_of_a_host_is_late, tmp_path, count)
    recordings = read(tmp_path)
    calls = [each.calls[0] for each in recordings]
    # The first rank of host B waits for the late one, that of host A for it, and rank 1 for the first one of its host.
    assert [call.late for call in calls[:3]] == [2, 0, 3]
    for call in calls[:3]:
        assert LATE < call.waited_for <= call.waited <= call.end - call.start
    assert calls[3].waited < min(call.waited for call in calls[:3])
    text = report(recordings, lambda *_: 1.0)
    made_wait = [float(seconds) for seconds in re.findall(r"\n  \d(?: +\S+){3} +(\S+)(?=\n)", text)]
    assert made_wait[3] > 2 * sum(made_wait[:3])


def queued(comm, folder):
    x, y = np.ones(1000), np.ones(1000)
    with comm.trace(folder):
        works = [comm.all_reduce(x, async_op=True), comm.broadcast(y, async_op=True)]
        for work in works:
            work.wait()
        comm.barrier()


def test_queued_calls_and_the_waits_for_them(tmp_path):
    harness.run(queued, 2, tmp_path)
    for each in read(tmp_path):
        calls = [call for call in each.calls if call.kind == "collective"]
        assert [(call.name, call.queued) for call in calls[:2]] == [("all_reduce", True), ("broadcast", True)]
        assert calls[2].name == "barrier"
        waits = [call for call in each.calls if call.kind == "wait"]
        assert len(waits) <= 2  # a call may be done before
        assert all(wait.end <= calls[2].end for wait in waits)


def late_for_a_queued_call(comm, folder):
    comm.barrier()
    with comm.trace(folder):
        if comm.rank == 1:
            failures.until_waiting(comm, 0)
        comm.all_reduce(np.ones(10), async_op=True).wait()


def test_the_wait_for_a_queued_call_lasts_as_long(tmp_path):
    harness.run(late_for_a_queued_call, 2, tmp_path)
    wait = next(call for call in read(tmp_path)[0].calls if call.kind == "wait")
    assert wait.end - wait.start > LATE


def on_gpus(comm, folder):
    x, gate = emulated.array(np.ones(1000, np.float32)), Gate()
    rows = emulated.array(np.ones((SIZE, 2)))
    comm.all_reduce(x)  # connects them
    with comm.trace(folder):
        with emulated.Stream() as stream:
            gate.hold(stream)
            work = comm.all_reduce(x, async_op=True)
            comm.mark("launched")
            gate.open()
            work.wait()
        comm.synchronize()  # the GPU writes the time of the end after the end, and a thread then adds the entry
        comm.mark("reduced")
        comm.reduce_scatter(rows)
        comm.broadcast(x, root=2)
        comm.synchronize()
        comm.mark("end")


def test_calls_on_gpus_have_the_times_of_the_gpu(tmp_path):
    harness.run(on_gpus, SIZE, tmp_path)
    recordings = read(tmp_path)
    for each in recordings:
        launches = [call for call in each.calls if call.path == "cuda"]
        assert [(call.name, call.bytes, call.dtype, call.root, call.failed) for call in launches] == [
            ("all_reduce", 4000, "float32", None, False),
            ("reduce_scatter", 16 * SIZE, "float64", None, False),
            ("broadcast", 4000, "float32", 2, False),
        ]
        launched, reduced, end = (call.start for call in each.calls if call.kind == "mark")
        all_reduce, reduce_scatter, broadcast = launches
        assert launched < all_reduce.start < all_reduce.end < reduced < reduce_scatter.start
        assert reduce_scatter.end <= broadcast.start < broadcast.end < end
        assert all(call.queued for call in launches)
    lines = [line.split() for line in report(recordings, lambda *_: 1.0).splitlines()]
    (line,) = (line for line in lines if line[:2] == ["all_reduce,", "GPU"])
    assert line[2:4] == ["3", "12,000"]
    assert len(line) == 7  # without a share of memcpy


def test_the_times_of_a_gpu_are_right_though_a_look_at_its_clock_was_interrupted(monkeypatch):
    device, pauses = emulated.device, iter([0.1])
    synchronize = device.gpu.synchronize_event

    def interrupted(event):
        synchronize(event)
        time.sleep(next(pauses, 0))

    monkeypatch.setattr(device, "_origin", None)
    monkeypatch.setattr(device.gpu, "synchronize_event", interrupted)
    reached = device.record(device.stream()).time
    assert reached - time.monotonic_ns() < 50_000_000


def on_gpus_without_waiting(comm, folder):
    x = emulated.array(np.ones(1000, np.float32))
    comm.all_reduce(x)
    comm.all_reduce(x)  # launched without Python
    with comm.trace(folder):
        comm.all_reduce(x)
        comm.synchronize()


@pytest.mark.usefixtures("streams_as_on_a_gpu")
def test_a_call_that_returns_at_its_launch_is_recorded(tmp_path):
    harness.run(on_gpus_without_waiting, 2, tmp_path, world="threads")
    for each in read(tmp_path):
        assert [call.name for call in each.calls if call.path == "cuda"] == ["all_reduce"]


def staged(comm, folder):
    x, rows = emulated.array(np.ones(1000)), emulated.array(np.ones((comm.size, 500)))
    comm.all_reduce(x)  # connects them
    with comm.trace(folder):
        comm.all_reduce(x)
        comm.all_to_all(rows)
        comm.broadcast(x, root=1, async_op=True).wait()
        with pytest.raises(ringcomm.MismatchError):
            comm.all_reduce(x[comm.rank :])
        comm.barrier()


@pytest.mark.parametrize("layout", ["01", "0011"])
def test_a_call_that_is_staged_in_chunks_is_one_call(tmp_path, layout, monkeypatch):
    monkeypatch.setattr(staging, "CHUNK_BYTES", 1 << 10)
    run_on(layout, staged, tmp_path)
    size = len(layout)
    for each in read(tmp_path):
        assert facts(each, "name", "bytes", "root", "path", "failed")[:3] == [
            ("all_reduce", 8000, None, "cuda", False),
            ("all_to_all", 4000 * size, None, "cuda", False),
            ("broadcast", 8000, 1, "cuda", False),
        ]
        assert facts(each, "name", "path", "failed")[3:] == [
            ("all_reduce", "cuda", True),
            ("barrier", each.calls[-1].path, False),
        ]
        assert all(call.start < call.end <= after.start for call, after in pairwise(each.calls))


def marks(comm, folder):
    with comm.trace(folder):
        comm.mark("step")
        comm.barrier()
        comm.mark("35 bytes, as many as a name may be.")
        with pytest.raises(ringcomm.ArgumentError, match="name: expected at most 35 bytes, got 36: 'ö"):
            comm.mark("ö" * 18)
        comm.mark("schön")
    comm.mark("after the trace")


def test_marks(tmp_path):
    harness.run(marks, 2, tmp_path)
    for each in read(tmp_path):
        assert [(call.kind, call.name) for call in each.calls] == [
            ("mark", "step"),
            ("collective", "barrier"),
            ("mark", "35 bytes, as many as a name may be."),
            ("mark", "schön"),
        ]
        assert all(call.start == call.end for call in each.calls if call.kind == "mark")


def messages(comm, folder):
    x, out = np.arange(6, dtype=np.int32), np.empty(6, np.int32)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with comm.trace(folder):
        if comm.rank == 0:
            comm.send(x, 1)
            comm.send(x[:2], 1)
            comm.send(x, 1, async_op=True).wait()
        elif comm.rank == 1:
            comm.recv(out, 0)
            comm.recv(out, None, at_most=True)
            comm.recv(out, None, async_op=True).wait()
        comm.sendrecv(x, right, out, left)


def test_messages(tmp_path):
    harness.run(messages, SIZE, tmp_path)
    sender, receiver, other = ([call for call in each.calls if call.kind == "message"] for each in read(tmp_path))
    wanted = "name", "root", "bytes", "dtype", "queued"
    both = [tuple(getattr(call, name) for name in wanted) for call in sender[:3] + receiver[:3]]
    assert both == [
        ("send", 1, 24, "int32", False),
        ("send", 1, 8, "int32", False),
        ("send", 1, 24, "int32", True),
        ("recv", 0, 24, "int32", False),
        ("recv", 0, 8, "int32", False),
        ("recv", 0, 24, "int32", True),
    ]
    assert sorted((call.name, call.root) for call in other) == [("recv", 1), ("send", 0)]


def with_threads(comm, folder):
    from threading import Thread

    def exchange(tag):
        for _ in range(50):
            comm.sendrecv(np.ones(3), 1 - comm.rank, np.empty(3), 1 - comm.rank, tag)

    with comm.trace(folder):
        threads = [Thread(target=exchange, args=[tag]) for tag in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(50):
            comm.all_reduce(np.ones(3))
        for thread in threads:
            thread.join()


def test_threads_record_at_the_same_time(tmp_path):
    harness.run(with_threads, 2, tmp_path)
    for each in read(tmp_path):
        names = [call.name for call in each.calls]
        assert {name: names.count(name) for name in set(names)} == {"all_reduce": 50, "send": 150, "recv": 150}


def many(comm, folder, calls):
    with comm.trace(folder):
        x = np.ones(1)
        for _ in range(calls):
            comm.all_reduce(x, "max")


def test_the_file_grows(tmp_path):
    harness.run(many, 2, tmp_path, 20_000)  # the first MiB holds 16,384
    for each in read(tmp_path):
        assert [call.epoch - each.calls[0].epoch for call in each.calls] == [*range(20_000)]
