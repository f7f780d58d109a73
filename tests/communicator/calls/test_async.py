"""Calls in the background: their order, their results, and what a wait leaves behind when it fails."""

import gc
import itertools
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import harness
import ringcomm
from cases.reference import assert_same, filled
from harness.failures import raised
from ringcomm import Aborted, ArgumentError, CollectiveTimeout, MismatchError

LARGE = 1_000_003


@pytest.mark.ranks(1, 2, 4)
def test_queued_calls_run_in_order_and_before_a_blocking_one(comm):
    for length in (3, LARGE):
        x = np.ones(length, np.int32)
        works = [comm.all_reduce(x, async_op=True) for _ in range(5)]
        gathered = comm.all_gather(x[:2], async_op=True)
        moved = comm.broadcast(x, root=comm.size - 1, async_op=True)
        comm.all_reduce(x)  # blocking, and after all of them
        assert all(work.done() for work in [*works, gathered, moved])
        assert_same(x, np.full(length, comm.size**6, np.int32))
        assert_same(gathered.result, np.full((comm.size, 2), comm.size**5, np.int32))
        assert moved.wait() is moved.result is works[0].wait() is works[0].result is x


@pytest.mark.ranks(3)
def test_works_that_several_threads_wait_for_run_in_order(comm):
    """Whichever thread runs a queued call, all run in order: alternating calls would not match otherwise."""
    x, order = np.zeros(8, np.int64), np.random.default_rng(comm.rank).permutation(60)
    x += comm.rank
    works = []
    for number in range(60):
        works.append(comm.broadcast(x, number % comm.size, async_op=True))
        works.append(comm.all_reduce(x, op="max" if number % 2 else "sum", async_op=True))
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda number: works[2 * number + 1].wait(30 if number % 3 else None), order))
    expected = np.zeros(8, np.int64)
    for number in range(60):
        expected *= 1 if number % 2 else comm.size
    assert_same(x, expected)
    assert all(work.done() for work in works)


def test_a_callback_may_be_added_after_close():
    def call(comm):
        called = threading.Event()
        works = [comm.barrier(async_op=True), comm.send(np.ones(1), comm.rank, async_op=True)]
        comm.close()
        for work in works:
            called.clear()
            work.add_done_callback(lambda _: called.set())
            assert called.wait(harness.OPERATION)

    ringcomm.launch(call, 2, world="threads")


@pytest.mark.ranks(2)
def test_several_threads_may_wait_for_one_work(comm):
    x = np.ones(4)
    work = comm.all_reduce(x, async_op=True)
    with ThreadPoolExecutor(4) as pool:
        assert all(result is x for result in pool.map(lambda _: work.wait(), range(4)))
    assert_same(x, np.full(4, float(comm.size)))


@pytest.mark.parametrize("later", [{}, {"timeout": harness.OPERATION}], ids=["plain", "general"])
@pytest.mark.ranks(2)
def test_an_abandoned_work_completes_and_then_releases_its_memory(comm, later):
    """With the start of any later call: one on the general path, too, as barriers are once GPUs are connected."""
    arrays = []
    for i in range(100):
        x = filled(comm.rank, 5000, "int32", salt=i)
        comm.all_reduce(x, async_op=True)
        comm.send(x, comm.rank, tag=i, async_op=True)
        arrays.append(weakref.ref(x))
        del x
        gc.collect(0)
    comm.barrier()
    for i in range(100):
        x = np.empty(5000, np.int32)
        comm.recv(x, comm.rank, tag=i)
    comm.barrier(async_op=True, **later).wait()
    assert not any(x() is not None for x in arrays)


@pytest.mark.parametrize("options", [{}, {"timeout": harness.OPERATION}], ids=["plain", "general"])
@pytest.mark.ranks(2)
def test_close_releases_the_memory_of_abandoned_works(comm, options):
    group = comm.split(0)
    x, out = np.zeros(5000), np.zeros(5000)
    group.recv(x, **options, async_op=True)
    if group.rank == 0:
        group.all_reduce(out, **options, async_op=True)  # the others never join
    arrays = weakref.ref(x), weakref.ref(out)
    del x, out
    gc.collect()
    assert arrays[0]() is not None
    comm.barrier()
    group.close()
    assert not any(array() is not None for array in arrays)


@pytest.mark.ranks(2)
def test_a_mismatch_is_raised_by_wait_and_the_queue_continues(comm):
    x = np.ones(4 + comm.rank)
    wrong, right = comm.all_reduce(x, async_op=True), comm.all_gather(np.array(comm.rank), async_op=True)
    first = None
    for _ in range(2):
        with pytest.raises(MismatchError, match=r"float64 x 4[\s\S]*float64 x 5") as caught:
            wrong.wait()
        first = first or caught.value
        assert caught.value is first
    assert wrong.done()
    with pytest.raises(MismatchError):
        _ = wrong.result
    assert_same(x, np.ones(4 + comm.rank))
    assert_same(right.wait(), np.arange(2))


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_the_clock_of_a_queued_call_starts_at_the_head_of_the_queue(comm):
    alone = comm.split(comm.rank)
    x = np.ones(3)
    if comm.rank == 0:
        works = [comm.all_reduce(x, async_op=True), comm.all_reduce(x, timeout=1.0, async_op=True)]
    else:
        with pytest.raises(CollectiveTimeout):  # no rank sends: this waits
            alone.recv(x, timeout=1.1)
        works = [comm.all_reduce(x, async_op=True) for _ in range(2)]
    for work in works:
        work.wait()
    assert_same(x, np.full(3, 4.0))


class StopError(Exception):
    """Raised by a signal handler."""


def stopped(step, call):
    """Make the call, and raise StopError when it enters its function number `step`; return whether it got there."""
    entered = itertools.count()

    def profile(frame, event, argument):  # noqa: ARG001
        if event == "call" and next(entered) == step:
            sys.setprofile(None)
            raise StopError

    sys.setprofile(profile)
    try:
        call()
    except StopError:
        return True
    except CollectiveTimeout:
        pass
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("options", [{}, {"timeout": harness.OPERATION}], ids=["plain", "general"])
@pytest.mark.ranks(1)
def test_a_start_that_a_signal_ends_loses_no_memory(comm, options):
    """If a start is interrupted, either its memory is kept, or the receive was not posted."""
    kept = []
    for step in itertools.count():
        x = np.zeros(3)
        memory = weakref.ref(x)
        reached = stopped(step, lambda x=x, step=step: comm.recv(x, comm.rank, step, **options, async_op=True))
        del x
        comm.send(np.ones(3), comm.rank, tag=step)
        if not reached:
            break
        kept.append(memory() is not None)
        if not kept[-1]:
            comm.recv(np.empty(3), comm.rank, tag=step, timeout=1)
    assert {True, False} == set(kept)


STARTS = {
    "recv": lambda group, x: group.recv(x, 1, async_op=True),
    "recv on the general path": lambda group, x: group.recv(x, 1, timeout=harness.OPERATION, async_op=True),
    "sendrecv": lambda group, x: group.sendrecv(np.ones(LARGE), 1, x, 1, async_op=True),
    "all_reduce": lambda group, x: group.all_reduce(x, async_op=True),
}


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.ranks(2)
def test_a_wait_that_a_signal_ends_leaves_no_memory_to_a_running_call(comm, name):
    """Rank 1 does nothing. After an interrupted wait the call has ended, or its memory is kept."""
    seen = set()
    reached, step = True, 0
    while comm.broadcast_object(reached):
        group = comm.split(0)
        if comm.rank == 0:
            x = np.zeros(3)
            memory = weakref.ref(x)
            work = STARTS[name](group, x)
            del x
            reached = stopped(step, lambda work=work: work.wait(timeout=0))
            try:
                group.check()
                broken = False
                assert not work.done()
                assert memory() is not None
            except (Aborted, CollectiveTimeout) as error:
                broken = True
                assert work.done()
                with pytest.raises(type(error)):
                    work.wait()
            seen.add((reached, broken))
            step += 1
        comm.barrier()
        group.close()
    assert comm.rank or seen == {(True, False), (True, True), (False, True)}


@pytest.mark.ranks(2)
def test_a_callback_runs_whether_the_call_succeeds_or_fails(comm):
    done, ended = [], threading.Semaphore(0)

    def note(name):
        def called(work):
            assert work.done()
            done.append((name, work))
            ended.release()

        return called

    works = {}
    for name in range(20):
        works[name] = comm.all_reduce(np.ones(1000), async_op=True)
    other = (comm.rank + 1) % comm.size
    works["both"] = comm.sendrecv(np.ones(3), other, np.empty(3), None, async_op=True)
    works["refused"] = comm.all_reduce(np.ones(3 + comm.rank), async_op=True)
    for name, work in works.items():
        work.add_done_callback(note(name))
    for _ in works:
        assert ended.acquire(timeout=harness.OPERATION)
    assert sorted(map(str, works)) == sorted(str(name) for name, _ in done)
    assert all(works[name] is work for name, work in done)
    with pytest.raises(MismatchError):
        works["refused"].wait()
    works[3].wait()
    works[3].add_done_callback(note("at once"))
    assert done[-1][0] == "at once"


def test_a_callback_that_raises_is_logged_and_the_next_one_runs(caplog):
    with ringcomm.init() as comm:
        ended = threading.Event()
        first, second = (comm.barrier(async_op=True) for _ in range(2))
        first.add_done_callback(lambda _: 1 / 0)
        second.add_done_callback(lambda _: ended.set())
        if not ended.wait(harness.OPERATION):
            raise AssertionError("the second callback was not called")
    assert "ZeroDivisionError" in caplog.text


def test_a_callback_may_wait_for_the_next_one():
    with ringcomm.init() as comm:
        woken, ended = threading.Event(), threading.Event()
        first, second = (comm.barrier(async_op=True) for _ in range(2))
        first.add_done_callback(lambda _: woken.wait(harness.OPERATION) and ended.set())
        second.add_done_callback(lambda _: woken.set())
        assert ended.wait(harness.OPERATION / 2)


@pytest.mark.ranks(2)
def test_close_ends_a_pending_call(comm):
    group = comm.split(0)
    if comm.rank == 0:
        work = group.all_reduce(np.ones(4), async_op=True)  # which rank 1 does not join
        group.close()
        assert "closed during all_reduce" in str(raised(ArgumentError, work.wait))
