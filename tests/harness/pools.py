"""Ranks that wait for work: those of ringcomm.testing, and pools of a key. Deadlines; how a function becomes a test."""

import inspect
from functools import wraps
from multiprocessing import forkserver, resource_tracker

from ringcomm.testing import ranks

OPERATION = ranks.TIMEOUT
JOB = 40.0  # seconds
WORLDS = ranks.WORLDS


def run(fn, size, *args, world="processes", settings=()):
    """Run `fn` on ranks that are threads, or on warm processes, for which it must be a function of a module.

    `settings` are pairs of a RINGCOMM_* variable and its value, for processes; threads take those of this process.
    """
    return ranks.run(fn, size, *args, world=world, env=dict(settings), limit=JOB)


def made_test(fn, names, start, first=1):
    """Make a test of a function of the ranks, by `start(test, {name: value}, args)`.

    The test takes `names`, which say where the ranks are, and the parameters of `fn` without the `first` ones.
    """
    own = [*inspect.signature(fn).parameters.values()][first:]

    @wraps(fn)
    def test(**given):
        start(test, {name: given[name] for name in names}, [given[each.name] for each in own])

    more = [name for name in names if name not in {each.name for each in own}]
    places = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in more]
    test.__signature__ = inspect.Signature([*places, *own])
    test.on_rank = fn
    return test


def call(comm, test, *args):
    """Call on a rank the function that `on` has made a test of."""
    return test.on_rank(comm, *args)


def run_in_pool(key, make, fn, args):
    """Run `fn` in the pool of this key, created on first use and ended if `fn` fails."""
    pool = pools.get(key) or pools.setdefault(key, make())
    try:
        return pool.run(fn, args, JOB)
    except BaseException:
        pools.pop(key).kill()
        raise


class Pool(ranks.ProcessPool):
    """`hosts` has a character per rank, its host; empty: all are on one."""

    def __init__(self, size, settings=(), hosts=""):
        super().__init__([{**dict(settings), "RINGCOMM_HOST_ID": hosts[rank : rank + 1]} for rank in range(size)])

    def run(self, fn, args, limit=JOB):
        return super().run(fn, args, limit)


pools = {}


def end_pools():
    ranks.close_pools()
    while pools:
        pools.popitem()[1].close()


def stop_helpers():
    """End the pools, and the two processes that multiprocessing keeps for the next time."""
    end_pools()
    forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()
