"""The pools of mpi4py.futures, on ranks and on processes."""

import textwrap
from concurrent.futures import CancelledError, Future, as_completed, wait

import pytest

from ringcomm.mpi4py.futures.combine import collect, compose

WORKERS = ["-m", "mpi4py.futures"]

slow = pytest.mark.slow


@pytest.fixture
def run(run_program):
    """Return a function that runs a program, in which `attempt` prints the exception of a call, and returns what rank 0
    prints."""

    def run(size, text, *options, status=0):
        start = """
        import os, signal, sys, time
        from mpi4py import MPI
        from mpi4py.futures import *

        def square(x):
            return x * x

        def attempt(function):
            try:
                return function()
            except Exception as error:
                print(type(error).__name__, *str(error).splitlines()[:1])
        """
        done = run_program(size, textwrap.dedent(start) + textwrap.dedent(text), *options, status=status)
        return [line.removeprefix("[0] ") for line in done.stdout.splitlines() if line.startswith("[0] ")]

    return run


@slow
def test_a_pool_in_a_world_of_one_rank_starts_processes(run):
    text = """
    if __name__ == "__main__":
        with MPIPoolExecutor(2) as pool:
            print(list(pool.map(square, range(7))), list(pool.map(square, range(7), chunksize=3)))
            print(list(pool.map(square, range(7), buffersize=2)), sorted(pool.map(square, range(7), unordered=True)))
            print(list(pool.starmap(pow, [(2, 3), (3, 2)])), pool.num_workers)
    """
    squares = [x * x for x in range(7)]
    assert run(1, text) == [f"{squares} {squares}"] * 2 + ["[8, 9] 2"]


@slow
def test_a_pool_beside_ranks_that_run_the_same_program_names_the_alternatives(run):
    printed = run(2, "attempt(MPIPoolExecutor)")
    assert printed[0].startswith("NotImplementedError")
    assert "-m mpi4py.futures" in printed[0]
    assert "MPICommExecutor" in printed[0]


FAILURES = """
class Picky(Exception):
    def __init__(self, first, second):
        super().__init__("picky")

class Leaver(Exception):
    def __reduce__(self):
        return sys.exit, (3,)

def fail(kind, *arguments):
    raise kind(*arguments)

def local():
    return lambda: 0

if __name__ == "__main__":
    with MPIPoolExecutor() as pool:
        attempt(pool.submit(fail, KeyError, "a key").result)
        print("in fail" in str(pool.submit(fail, KeyError).exception().__cause__))
        attempt(pool.submit(fail, Picky, 1, 2).result)
        attempt(pool.submit(fail, Leaver, "leaves").result)
        attempt(pool.submit(local).result)
        attempt(pool.submit(lambda: 0).result)
        print(repr(pool.submit(sys.exit, 3).exception()))
        print(pool.submit(square, 3).result())
"""


@slow
def test_a_failure_of_a_call_reaches_its_future_and_the_pool_lives_on(run):
    printed = run(2, FAILURES, *WORKERS)
    assert printed[0] == "KeyError 'a key'"
    assert printed[1] == "True"
    assert printed[2] == "RuntimeError Picky: picky"
    assert printed[3] == "RuntimeError Leaver: leaves"
    assert "pickle" in printed[4]
    assert "pickle" in printed[5]
    assert printed[6:] == ["SystemExit(3)", "9"]


@slow
def test_an_initializer_runs_once_on_each_worker_and_its_failure_breaks_the_executor_alone(run):
    text = """
    count = 0

    def initialize(step):
        global count
        count += step

    def get_count():
        return count

    def refuse():
        raise OSError("no")

    if __name__ == "__main__":
        with MPIPoolExecutor(initializer=initialize, initargs=(5,)) as pool:
            print({pool.submit(get_count).result() for _ in range(8)})
        with MPIPoolExecutor(initializer=refuse) as pool:
            attempt(pool.submit(get_count).result)
            attempt(lambda: pool.submit(get_count).result())
        with MPIPoolExecutor() as pool:
            print(pool.submit(square, 4).result())
    """
    printed = run(3, text, *WORKERS)
    assert printed[0] == "{5}"
    assert all(line.startswith("BrokenExecutor the initializer failed on worker") for line in printed[1:3])
    assert printed[3:] == ["16"]


@slow
def test_shutdown_cancels_what_has_not_begun(run):
    text = """
    if __name__ == "__main__":
        pool = MPIPoolExecutor()
        first = pool.submit(time.sleep, 0.3)
        while not first.running():
            time.sleep(0.001)
        rest = [pool.submit(square, x) for x in range(20)]
        pool.shutdown(cancel_futures=True)
        print(first.done(), {future.cancelled() for future in rest})
    """
    assert run(2, text, *WORKERS) == ["True {True}"]


@slow
def test_the_death_of_a_worker_ends_every_future_with_a_named_error(run):
    text = """
    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    if __name__ == "__main__":
        pool = MPIPoolExecutor()
        futures = [pool.submit(die), *(pool.submit(time.sleep, 0.1) for _ in range(9))]
        for future in futures:
            attempt(future.result)
        attempt(lambda: pool.submit(square, 1).result())
    """
    printed = run(3, text, *WORKERS, status=128 + 9)
    broken = [line for line in printed if line.startswith("BrokenExecutor the pool is broken")]
    assert len(broken) >= 2
    assert all("rank 1" in line for line in broken)
    assert len(printed) == len(broken)  # calls on the other worker may have returned


@slow
def test_a_broken_pool_notifies_those_who_wait_for_canceled_futures_and_shuts_down(run):
    text = """
    def die():
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)

    if __name__ == "__main__":
        pool = MPIPoolExecutor()
        first = pool.submit(die)
        while not first.running():
            time.sleep(0.001)
        rest = [pool.submit(square, x) for x in range(3)]
        print(rest[0].cancel(), first.cancel())
        done, pending = wait([first, *rest], timeout=20)
        print(len(done), len(pending), [future.cancelled() for future in rest])
        attempt(lambda: pool.submit(square, 1))
        pool.shutdown()
        print("down")
    """
    printed = run(2, text, *WORKERS, status=128 + 9)
    assert printed[:2] == ["True False", "4 0 [True, False, False]"]
    assert printed[2].startswith("BrokenExecutor the pool is broken")
    assert printed[3:] == ["down"]


@slow
def test_a_canceled_call_is_not_run_and_ends_as_completed(run):
    text = """
    if __name__ == "__main__":
        with MPIPoolExecutor() as pool:
            first = pool.submit(time.sleep, 0.2)
            while not first.running():
                time.sleep(0.001)
            second, third = pool.submit(square, 2), pool.submit(square, 3)
            print(second.cancel(), second.cancel(), third.cancelled())
            ended = list(as_completed([first, second, third], timeout=20))
            print(len(ended), second in ended, third.result(), third.cancel(), first.cancel())
            attempt(second.result)
        pool.shutdown(cancel_futures=True)
        pool.shutdown()
    """
    printed = run(2, text, *WORKERS)
    assert printed == ["True True False", "3 True 9 False False", "CancelledError"]


# --- Futures made of futures ------------------------------------------------------------------------------------------


def futures(count):
    return [Future() for _ in range(count)]


def test_collected_results_are_in_order():
    first, second = futures(2)
    collected = collect([first, second, first])
    second.set_result(2)
    assert not collected.done()
    first.set_result(1)
    assert collected.result(0) == [1, 2, 1]
    assert collect([]).result(0) == []


def test_the_first_failure_is_that_of_the_collection_and_cancels_the_rest():
    first, second = futures(2)
    collected = collect([first, second])
    first.set_exception(KeyError("it"))
    assert isinstance(collected.exception(0), KeyError)
    assert second.cancelled()


def test_a_collection_is_canceled_with_its_futures():
    first, second = futures(2)
    collected = collect([first, second])
    collected.cancel()
    assert first.cancelled()
    assert second.cancelled()
    first, second = futures(2)
    collected = collect([first, second])
    first.cancel()
    with pytest.raises(CancelledError):
        collected.result(0)


def test_those_who_wait_for_a_canceled_combination_are_notified():
    first, second, third, fourth = futures(4)
    for combined, cancel in (
        (collect([first, second]), first.cancel),
        (composed := compose(third), composed.cancel),
        (compose(fourth), fourth.cancel),
    ):
        cancel()
        assert wait([combined], timeout=0).done == {combined}
        assert list(as_completed([combined], timeout=0)) == [combined]


def test_a_canceled_combination_ignores_what_comes_later():
    first, second = futures(2)
    first.set_running_or_notify_cancel()
    called = []
    composed, collected = compose(first, called.append), collect([first, second])
    assert composed.cancel()
    assert collected.cancel()
    first.set_result(1)
    assert composed.cancelled()
    assert collected.cancelled()
    assert called == []


def test_hooks_make_the_result_of_a_composed_future():
    first, second, third, fourth = futures(4)
    doubled = compose(first, lambda value: 2 * value)
    handled = compose(second, None, lambda error: str(error))
    raised = compose(third, None, lambda error: OSError(*error.args))
    broken = compose(fourth, lambda value: 1 / value)
    first.set_result(4)
    second.set_exception(ValueError("it"))
    third.set_exception(ValueError("it"))
    fourth.set_result(0)
    assert doubled.result(0) == 8
    assert handled.result(0) == "it"
    assert isinstance(raised.exception(0), OSError)
    assert isinstance(broken.exception(0), ZeroDivisionError)


def test_cancellation_passes_through_a_composed_future():
    first, second = futures(2)
    compose(first).cancel()
    assert first.cancelled()
    composed = compose(second)
    second.cancel()
    assert composed.cancelled()


# --- mpi4py.util.pool -------------------------------------------------------------------------------------------------


POOL = """
from mpi4py.futures import _core
from mpi4py.util.pool import Pool, ThreadPool

if __name__ == "__main__":
    print(_core.SharedPool is None)
    with Pool() as pool:
        print(pool.executor._max_workers == pool.executor.num_workers > 0)
        print(pool.map(square, range(9)), sorted(pool.imap_unordered(square, range(5), 2)))
        print(pool.starmap(pow, [(2, 3), (3, 2)]), pool.apply_async(square, (4,)).get())
        attempt(lambda: pool.apply(square, ("x",)))
    pool.join()
    with ThreadPool(2) as pool:
        print(pool.map(square, range(3)))
"""


@slow
@pytest.mark.parametrize(("size", "options", "alone"), [(1, (), True), (3, WORKERS, False)])
def test_a_pool_with_the_methods_of_multiprocessing(run, size, options, alone):
    squares = [x * x for x in range(9)]
    printed = run(size, POOL, *options)
    assert printed.pop(4).startswith("TypeError")
    assert printed == [str(alone), "True", f"{squares} {squares[:5]}", "[8, 9] 16", "[0, 1, 4]"]


def test_internals_that_are_not_there_are_named():
    from ringcomm.mpi4py.futures import _core

    with pytest.raises(AttributeError, match=r"_core\.WorkerPool: the pools of ringcomm"):
        _core.WorkerPool  # noqa: B018
