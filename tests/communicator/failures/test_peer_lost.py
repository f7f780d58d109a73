"""Ranks that die or close: ranks that need them raise PeerLost with their rank, all others continue."""

import os
import random
import signal
import threading
import time

import numpy as np
import pytest

import harness
from harness.failures import PROMPT, check_usable, outcomes, raised, survivors_of, until_others_have_left, until_waiting
from harness.jobs import run_job
from ringcomm import PeerLost

# Each on an array of shape (size, n). A call may be made any number of times.
CALLS = {
    "barrier": lambda comm, x: comm.barrier(),
    "broadcast": lambda comm, x: comm.broadcast(x),
    "reduce": lambda comm, x: comm.reduce(x, root=1),
    "all_reduce": lambda comm, x: comm.all_reduce(x, "max"),
    "gather": lambda comm, x: comm.gather(x[0]),
    "scatter": lambda comm, x: comm.scatter(x if comm.rank == 0 else None, out=x[0]),
    "all_gather": lambda comm, x: comm.all_gather(x[0]),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "all_to_all": lambda comm, x: comm.all_to_all(x, out=np.empty_like(x)),
    "sendrecv": lambda comm, x: comm.sendrecv(x[0], (comm.rank + 1) % comm.size, x[1], (comm.rank - 1) % comm.size),
    "queue": lambda comm, x: [work.wait() for work in [comm.all_reduce(x, "max", async_op=True) for _ in range(4)]],
    "all_gather_object": lambda comm, x: comm.all_gather_object(x[0]),
    "split": lambda comm, x: comm.split(0).barrier(),
    "empty": lambda comm, x: comm.all_reduce(comm.empty(x[0].shape, "float32")),
}


def call_until_one_dies(comm, name, n, victim, delay):
    """Call again and again. The process of `victim` is killed `delay` seconds after the start."""
    x = np.zeros((comm.size, n), np.float32)
    comm.barrier()
    if comm.rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def call_again_and_again():
        while True:
            CALLS[name](comm, x)

    error = raised(PeerLost, call_again_and_again)
    assert raised(PeerLost, comm.barrier).rank == error.rank
    return error.rank, str(error)


def check_death(name, n, size, victim, delay, settings=()):
    answers, ends = {}, {}
    with harness.world(size, settings=settings) as pool:
        pid = pool.processes[victim].pid
        for rank, answer, when in outcomes(pool, call_until_one_dies, name, n, victim, delay):
            answers[rank], ends[rank] = answer, when
    death = answers.pop(victim)
    assert isinstance(death, ConnectionError), death
    for rank, (lost, text) in answers.items():
        assert lost == victim
        assert text.startswith(f"rank {victim} (process {pid}) died while rank ")
        assert ends[rank] - ends[victim] < PROMPT


def replace_one(comm):
    comm.barrier()
    if comm.rank == 1:
        os.execv("/bin/sleep", ["sleep", "3"])
    error = raised(PeerLost, comm.barrier)
    return error.rank, str(error)


def test_a_rank_that_runs_another_program_is_lost():
    with harness.world(3) as pool:
        pid, start = pool.processes[1].pid, time.monotonic()
        found = {rank: (answer, when) for rank, answer, when in outcomes(pool, replace_one)}
    gone, _ = found.pop(1)
    assert isinstance(gone, ConnectionError)
    for (lost, text), when in found.values():
        assert lost == 1
        assert text.startswith(f"rank 1 (process {pid}) replaced itself by another program while rank ")
        assert when - start < PROMPT


def scenarios():
    """Every call once, with sizes and moments from a fixed seed."""
    draw = random.Random(7)
    for name in CALLS:
        n = draw.choice([1 << 17, 3_000_001, 1 << 20])
        size = draw.choice([2, 3, 3, 4])
        yield pytest.param(name, n, size, draw.randrange(size), draw.uniform(0, 0.1), id=name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n", "size", "victim", "delay"), [*scenarios()])
def test_a_rank_killed_in_large_calls_is_named_by_every_survivor(name, n, size, victim, delay):
    check_death(name, n, size, victim, delay)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gather", "scatter", "all_gather", "all_to_all"])
def test_a_rank_killed_while_others_copy_from_its_memory_is_named_by_every_survivor(name):
    check_death(name, 3_000_001, 3, victim=0, delay=0.05, settings=[("RINGCOMM_CMA_BYTES", "1")])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n"), [("barrier", 1), ("all_reduce", 1), ("sendrecv", 1), ("all_to_all", 500)])
def test_a_rank_killed_between_small_calls_is_named_by_every_survivor(name, n):
    check_death(name, n, 3, victim=n % 3, delay=0.05)


def sleep_until_one_dies(comm, victim):
    """Rank 1 receives from any rank, rank 2 sends a message that is not received, the others wait for all."""
    x = np.zeros(1 << 20)
    calls = {1: lambda: comm.recv(x), 2: lambda: comm.send(x, victim)}
    if comm.rank == victim:
        for rank in range(comm.size):
            if rank != victim:
                until_waiting(comm, rank)
        os.kill(os.getpid(), signal.SIGKILL)
    error = raised(PeerLost, calls.get(comm.rank, comm.barrier))
    assert str(raised(PeerLost, comm.barrier)) == str(error)
    return error.rank, str(error)


@pytest.mark.slow
def test_a_death_wakes_sleeping_ranks():
    answers, ends = {}, {}
    with harness.world(4) as pool:
        for rank, answer, when in outcomes(pool, sleep_until_one_dies, 3):
            answers[rank], ends[rank] = answer, when
    assert isinstance(answers.pop(3), ConnectionError)
    assert len({text for _, text in answers.values()}) == 1
    assert {lost for lost, _ in answers.values()} == {3}
    assert max(ends.values()) - ends[3] < PROMPT


def lose_in_groups(comm, victim):
    """Groups without the victim work until a survivor needs it; the world is broken then, and all groups with it."""
    neighbors = comm.split(comm.rank // 2)
    whole = comm.split(0)
    survivors = comm.split(None if comm.rank == victim else 0)
    until_others_have_left(comm, victim)
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank // 2 != victim // 2:
        check_usable(neighbors)
    until_others_have_left(survivors, survivors.size - 1)
    if comm.rank // 2 == victim // 2:
        error = raised(PeerLost, neighbors.barrier)
        assert error.rank == (victim if error.group else victim % 2)  # the others may have noticed first, for the world
    for group in (whole, comm):
        error = raised(PeerLost, group.barrier)
        assert error.rank == victim
    if comm.rank // 2 != victim // 2:
        raised(PeerLost, neighbors.barrier)  # its parent is broken now


@pytest.mark.slow
def test_groups_without_the_dead_rank_continue_until_the_world_breaks():
    assert survivors_of(lose_in_groups, 4, 2)[0] == {0: None, 1: None, 3: None}


def lose_while_exchanging(comm, victim):
    """An all_to_all of a group in which the ranks have other numbers than in the world."""
    group = comm.split(0 if comm.rank else None, key=-comm.rank)
    if comm.rank == victim:
        until_waiting(group, 0)
        os.kill(os.getpid(), signal.SIGKILL)
    if group is None:
        return raised(PeerLost, comm.barrier).rank
    error = raised(PeerLost, lambda: CALLS["all_to_all"](group, np.zeros((group.size, 300_001), np.float32)))
    # Rank 1 of the world is rank 2 of the group 3, 2, 1. Rank 0 may have noticed first, for the world.
    assert error.rank == (1 if error.group else 2)
    assert f"rank {error.rank} (process" in str(error)
    return victim


@pytest.mark.slow
def test_a_death_in_an_all_to_all_of_a_group_has_the_numbers_of_the_group_that_failed():
    assert survivors_of(lose_while_exchanging, 4, 1)[0] == {0: 1, 2: 1, 3: 1}


# --- Closing ----------------------------------------------------------------------------------------------------------


def close_early(comm, call, n):
    group = comm.split(0)
    leaver = group.size - 1
    x = np.ones((group.size, n), np.float32)
    if group.rank == leaver:
        for rank in range(leaver):
            until_waiting(group, rank)
        group.close()
    else:
        # A gather of one element returns on the ranks that only give: the next call needs all.
        error = raised(PeerLost, lambda: (CALLS[call](group, x), group.barrier()))
        assert f"rank {leaver} closed the communicator while rank " in str(error)
        assert error.rank == leaver
        assert str(raised(PeerLost, group.barrier)) == str(error)
        assert (x == 1).all()
    check_usable(comm)


@pytest.mark.parametrize("call", ["barrier", "all_reduce", "gather", "sendrecv", "queue"])
@pytest.mark.parametrize("n", [1, 300_001])
def test_a_rank_that_closes_is_lost_to_the_ranks_that_need_it(call, n, world):
    harness.run(close_early, 2 if call == "sendrecv" else 3, call, n, world=world)


@pytest.mark.ranks(3)
def test_a_receive_from_any_rank_needs_only_the_ranks_that_are_left(comm):
    """A receive from any rank fails only when all other ranks have closed."""
    group = comm.split(0)
    x = np.zeros(1)
    if comm.rank == 0:
        group.send(x, 2)  # arrives, though its sender leaves
        group.close()
        comm.barrier()
    elif comm.rank == 1:
        comm.barrier()
        until_waiting(group, 2)
        group.send(x + 1, 2, tag=1)
        group.close()
    else:
        comm.barrier()
        assert group.recv(x, tag=1) == 1
        assert group.recv(x) == 0
        assert "all other ranks closed" in str(raised(PeerLost, lambda: group.recv(x)))
    check_usable(comm)


@pytest.mark.parametrize("n", [1, 300_001])
@pytest.mark.ranks(3)
def test_a_rank_may_close_once_its_part_of_a_call_is_done(comm, n):
    for name in [*CALLS] * 5:
        with comm.split(0, key=-comm.rank) as group:
            x = np.full((group.size, n), group.rank, np.float32)
            CALLS[name](group, x)
        assert name != "broadcast" or (x == 0).all()
        assert name != "all_reduce" or (x == group.size - 1).all()


def call_and_exit(comm, name):
    """Rank 1 exits without closing once its part is done; rank 0 is not done yet."""
    x = np.full((comm.size, 1_000_001), comm.rank, np.float32)
    if name == "send":
        if comm.rank == 1:
            comm.send(x[0, :100], 0)
    else:
        CALLS[name](comm, x)
    if comm.rank == 1:
        os._exit(0)
    if name == "send" and comm.rank == 0:
        assert comm.recv(x[0, :100], 1) == 1
        assert (x[0, :100] == 1).all()
    assert raised(PeerLost, comm.barrier).rank == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gather", "reduce_scatter", "all_to_all", "send"])
def test_a_process_may_exit_once_its_part_of_a_call_is_done(name):
    assert survivors_of(call_and_exit, 3, name)[0] == {0: None, 2: None}


# --- Programs that end ------------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys
from contextlib import nullcontext
import numpy as np, ringcomm

how, held = sys.argv[1:]
comm, x = ringcomm.init(timeout=20), np.ones(300_001)
with comm if held == "with" else nullcontext():
    comm.all_reduce(x)
    if comm.rank == 1:
        print(comm.rank, "ends", flush=True)
        if how == "raise":
            raise ValueError("on purpose")
        {"exit": sys.exit, "_exit": os._exit, "end": str}[how](3)
    else:
        try:
            comm.all_reduce(x)
        except ringcomm.RingcommError as error:
            print(comm.rank, type(error).__name__, error.rank, error, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "held", "status", "words"),
    [
        ("exit", "with", 3, "Aborted 1 rank 1 aborted: SystemExit: 3"),
        ("raise", "with", 1, "Aborted 1 rank 1 aborted: ValueError: on purpose"),
        ("raise", "bare", 1, "PeerLost 1 rank 1 closed the communicator while rank "),
        ("_exit", "with", 3, "PeerLost 1 rank 1 (process "),
        ("end", "with", 0, "PeerLost 1 rank 1 closed the communicator while rank "),
        ("end", "bare", 0, "PeerLost 1 rank 1 closed the communicator while rank "),
    ],
)
def test_the_other_ranks_notice_the_exit_of_a_program(how, held, status, words, tmp_path):
    lines = sorted(run_job(tmp_path, 3, PROGRAM, how, held, status=status).stdout.splitlines())
    assert lines[0].startswith(f"[0] 0 {words}")
    assert lines[1] == "[1] 1 ends"
    assert lines[2].startswith(f"[2] 2 {words}")
    assert len(lines) == 3
