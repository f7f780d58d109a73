"""A rank that is late or stopped: the others raise at their deadline, the late rank at its next call."""

import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import harness
from harness.failures import PROMPT, check_usable, lines_of, outcomes, raised, until, until_broken
from ringcomm import CollectiveTimeout, launch

SHORT = 0.1  # seconds, the timeout of calls that never complete
SMALL, LARGE = 3, 300_001

CALLS = {
    "barrier": lambda comm, x: comm.barrier(timeout=SHORT),
    "broadcast": lambda comm, x: comm.broadcast(x, root=1, timeout=SHORT),
    "reduce": lambda comm, x: comm.reduce(x, root=1, timeout=SHORT),
    "all_reduce": lambda comm, x: comm.all_reduce(x, timeout=SHORT),
    "gather": lambda comm, x: comm.gather(x, root=1, timeout=SHORT),
    "scatter": lambda comm, x: comm.scatter(
        np.zeros((comm.size, x.size), x.dtype) if comm.rank == 1 else None, x, root=1, timeout=SHORT
    ),
    "all_gather": lambda comm, x: comm.all_gather(x, timeout=SHORT),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(np.zeros((comm.size, x.size)), timeout=SHORT),
    "all_to_all": lambda comm, x: comm.all_to_all(np.zeros((comm.size, x.size)), timeout=SHORT),
    "gather_object": lambda comm, x: comm.gather_object("me", root=1, timeout=SHORT),
}


# Who only gives does not wait. The object is small.
ONE_WAY = [(name, SMALL) for name in ("broadcast", "reduce", "gather", "scatter", "gather_object")]
ONE_WAY += [("gather_object", LARGE)]


def wait_for(comm, late, name, n):
    """Rank `late` calls after the others have timed out. The group breaks, its parent does not."""
    group = comm.split(0)
    x = np.full(n, 7, np.float32)
    if group.rank == late:
        until_broken(group)
        error = raised(CollectiveTimeout, lambda: CALLS[name](group, x))
    else:
        start = time.monotonic()
        error = raised(CollectiveTimeout, lambda: CALLS[name](group, x))
        elapsed = time.monotonic() - start
        assert elapsed < SHORT + PROMPT
        assert elapsed >= SHORT or not str(error).startswith(f"timed out: rank {comm.rank} waited")
    assert error.rank == late
    assert (x == 7).all()
    assert str(raised(CollectiveTimeout, group.barrier)) == str(error)
    assert str(raised(CollectiveTimeout, lambda: group.recv(x))) == str(error)
    assert str(raised(CollectiveTimeout, group.check)) == str(error)
    check_usable(comm)
    return str(error)


@pytest.mark.parametrize(
    ("name", "n"), [(name, n) for name in CALLS for n in (SMALL, LARGE) if (name, n) not in ONE_WAY]
)
def test_a_rank_that_never_arrives_is_named_on_every_rank(name, n, world):
    size = 2 + list(CALLS).index(name) % 3
    late = n % size
    texts = harness.run(wait_for, size, late, name, n, world=world)
    assert len(set(texts)) == 1, "all ranks raise the first reason, including the late one"
    words = rf"{name}\(.*\)"
    first, lines = texts[0].splitlines()[0], lines_of(texts[0])
    first = re.fullmatch(
        rf"timed out: rank (\d) waited {SHORT:g} s in {words} \(epoch 1\): it was not called by rank {late}", first
    )
    assert lines.pop(late) == "no call yet"
    assert re.fullmatch(rf"{words} epoch 1, running for \S+ s, waits for rank {late}", lines[int(first[1])])
    assert lines.keys() == set(range(size)) - {late}
    assert all(re.match(rf"{words} epoch 1, ", line) for line in lines.values())


def give_then_wait(comm, late, name):
    group = comm.split(0)
    x = np.full(SMALL, 7, np.float32)
    if group.rank == late:
        until_broken(group)
    error = raised(CollectiveTimeout, lambda: (CALLS[name](group, x), group.barrier(timeout=SHORT)))
    assert error.rank == late
    check_usable(comm)
    return str(error)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("name", dict(ONE_WAY))
def test_a_rank_that_a_one_way_call_does_not_wait_for_is_named_by_the_next(name, late, world):
    texts = harness.run(give_then_wait, 3, late, name, world=world)
    assert len(set(texts)) == 1
    first = texts[0].splitlines()[0]
    assert re.match(
        rf"timed out: rank \d waited {SHORT:g} s in .* \(epoch [12]\): .* not called by rank.*{late}", first
    )


@pytest.mark.ranks(2)
def test_a_root_runs_ahead_of_the_others_for_a_while_only(comm):
    """The root of small broadcasts is at most some calls ahead of a rank that never comes."""
    group = comm.split(0)
    x = np.zeros(1)
    if group.rank == 1:
        until_broken(group)
    error = raised(CollectiveTimeout, lambda: [group.broadcast(x, timeout=SHORT) for _ in range(100)])
    assert error.rank == 1
    assert "broadcast(float64 x 1, root 0) (epoch 1) was not called by rank 1" in str(error)
    check_usable(comm)


@pytest.mark.ranks(32, world="threads")
def test_the_report_of_a_timeout_has_room_for_many_ranks(comm):
    if comm.rank == 17:
        until_broken(comm)
    error = raised(CollectiveTimeout, lambda: comm.all_reduce(np.zeros(1000), timeout=1.0))
    assert "it was not called by rank 17\n" in str(error)
    assert lines_of(str(error)).keys() == set(range(comm.size))


@pytest.mark.ranks(4)
def test_all_ranks_that_did_not_arrive_are_named(comm):
    group = comm.split(0)
    if comm.rank in (0, 2):
        until_broken(group)
    error = raised(CollectiveTimeout, lambda: group.all_reduce(np.zeros(LARGE), timeout=SHORT))
    assert "it was not called by ranks 0 and 2" in str(error)
    assert error.rank == 0
    assert (error.collective, error.epoch) == ("all_reduce", 1) or comm.rank in (0, 2)
    check_usable(comm)


@pytest.mark.ranks(3)
def test_a_message_without_sender_or_receiver_is_a_timeout(comm):
    """Rank 1 does not answer rank 0. The group breaks also on rank 2, which waits for neither."""
    for call in (
        lambda group: group.recv(np.zeros(2), 1, tag=5, timeout=SHORT),
        lambda group: group.recv(np.zeros(2), timeout=SHORT),
        lambda group: group.send(np.zeros(LARGE), 1, timeout=SHORT),
        lambda group: group.sendrecv(np.zeros(1), 1, np.zeros(1), 1, timeout=SHORT),
    ):
        group = comm.split(0)
        if comm.rank == 0:
            error = raised(CollectiveTimeout, lambda call=call, group=group: call(group))
            words = r"(send|recv)\(float64 x \d+, (to 1|from 1|from any)\) with tag [05]"
            assert re.match(rf"timed out: rank 0 waited \S+ s for {words}\n", str(error))
            assert lines_of(str(error)).keys() == {0, 1, 2}
        else:
            text = str(until_broken(group))
            assert str(raised(CollectiveTimeout, group.barrier)) == text
        check_usable(comm)


def connect_with_short_timeout(comm):
    assert comm.timeout == 1.0
    group = comm.split(0)
    assert group.timeout == 1.0
    if comm.rank == 0:
        until_broken(group)
    error = raised(CollectiveTimeout, group.barrier)
    assert "waited 1 s in barrier()" in str(error)
    comm.all_reduce(np.zeros(1), timeout=harness.OPERATION)


def test_a_communicator_has_a_timeout_that_groups_inherit():
    launch(connect_with_short_timeout, 3, world="threads", timeout=1.0)


@pytest.mark.ranks(4)
def test_a_broken_group_breaks_its_subgroups_but_not_its_parent_or_sibling(comm):
    middle, sibling = comm.split(0), comm.split(0)
    inner = middle.split(comm.rank % 2)
    if comm.rank in (0, 2):
        if comm.rank == 0:
            until_broken(inner)
        error = raised(CollectiveTimeout, lambda: inner.barrier(timeout=SHORT))
        assert "rank 1 waited" in str(error)  # rank 2 of the world
        assert error.rank == 0
    else:
        check_usable(inner)  # the other group
    check_usable(middle)
    comm.barrier()
    if comm.rank == 3:
        until_broken(middle)
    error = raised(CollectiveTimeout, lambda: middle.barrier(timeout=SHORT))
    if comm.rank in (1, 3):
        within = raised(CollectiveTimeout, inner.barrier)
        ancestor = f"in the communicator of {middle.size} ranks that this one was split from"
        assert str(within) == f"timed out: {ancestor}: {str(error).removeprefix('timed out: ')}"
        assert within.group == f"the communicator of {middle.size} ranks that this one was split from"
        assert within.rank == error.rank  # as numbered in `middle`, like the text
    for usable in (sibling, comm):
        check_usable(usable)


@pytest.mark.ranks(2)
def test_a_wait_ends_when_the_parent_group_breaks(comm):
    """Rank 0 waits in the inner group while rank 1 breaks the outer one."""
    outer = comm.split(0)
    inner = outer.split(0)
    if comm.rank == 0:
        error = raised(CollectiveTimeout, inner.barrier)
    else:
        error = raised(CollectiveTimeout, lambda: outer.barrier(timeout=SHORT))
    assert "rank 1 waited 0.1 s in barrier()" in str(error)
    check_usable(comm)


# Works that rank 1 waits for in vain, with their descriptions.
WORKS = {
    "all_reduce": (lambda group, x: group.all_reduce(x, async_op=True), "all_reduce(float64 x {}, sum) epoch 1"),
    "send": (lambda group, x: group.send(x, 0, async_op=True), "send(float64 x {}, to 0)"),
    "recv": (lambda group, x: group.recv(x, 0, async_op=True), "recv(float64 x {}, from 0)"),
}


@pytest.mark.parametrize(
    ("name", "n"), [("all_reduce", SMALL), ("all_reduce", LARGE), ("send", LARGE), ("recv", SMALL)]
)
@pytest.mark.ranks(2)
def test_an_expired_wait_breaks_the_communicator_and_frees_the_memory(comm, name, n):
    call, words = WORKS[name]
    group = comm.split(0)
    x = np.full(n, 3.0)
    if comm.rank == 0:
        error = until_broken(group)
    else:
        message = group.recv(np.zeros(1), 0, tag=9, async_op=True)
        work = call(group, x)
        start = time.monotonic()
        assert not work.done()
        error = raised(CollectiveTimeout, lambda: work.wait(timeout=SHORT))
        assert SHORT <= time.monotonic() - start < SHORT + PROMPT
        assert work.done()
        assert str(raised(CollectiveTimeout, lambda: work.result)) == str(error)
        assert str(raised(CollectiveTimeout, message.wait)) == str(error)
    assert "did not complete within the timeout of wait" in str(error)
    assert f"rank 1: {words.format(n)}" in str(error)
    for late in (group.all_reduce, group.recv):
        raised(CollectiveTimeout, lambda late=late: late(x))
    assert (x == 3).all()
    check_usable(comm)


@pytest.mark.ranks(3)
def test_a_queued_call_has_its_own_timeout_and_fails_the_calls_behind_it(comm):
    group = comm.split(0)
    x = np.zeros(LARGE)
    if comm.rank == 0:
        until_broken(group)
    works = [group.all_reduce(x, timeout=SHORT, async_op=True) for _ in range(3)] if comm.rank else []
    errors = [raised(CollectiveTimeout, work.wait) for work in works]
    errors.append(raised(CollectiveTimeout, group.barrier))
    assert len({str(error) for error in errors}) == 1
    assert "waited 0.1 s in all_reduce(float64 x 300001, sum) (epoch 1): it was not called by rank 0" in str(errors[0])
    check_usable(comm)


def end_a_report_while_a_rank_is_missing(comm):
    group = comm.split(0)
    group.barrier()
    if comm.rank == 0:

        def asleep():  # in the second call: rank 1 may also have slept in the barrier
            lines = lines_of(group.report(calls=2))
            return lines[1].startswith("all_reduce") and "waits for rank 0" in lines[1] and lines

        lines = until(asleep, "rank 1 asleep")
        assert re.fullmatch(r"barrier\(\) epoch 1, done after \S+ s, \S+ s ago", lines[0])
        assert re.fullmatch(
            r"all_reduce\(int64 x 1, max\) epoch 2, running for \S+ s, waits for rank 0; "
            r"barrier\(\) epoch 1, done after \S+ s, \S+ s ago",
            lines[1],
        )
    group.all_reduce(np.array(1), "max")


def test_a_report_shows_which_rank_each_waiting_rank_waits_for(world, capsys):
    harness.run(end_a_report_while_a_rank_is_missing, 2, world=world)
    assert world == "processes" or "waits for rank 0" in capsys.readouterr().out


@pytest.mark.ranks(2, world="threads")
def test_a_report_shows_the_running_call_although_a_later_one_is_done(comm):
    """Rank 1 has several calls in progress: the report shows the one that it waits for."""

    def until_reported(call):
        until(lambda: f"{call}, running for " in lines_of(comm.report(calls=1))[1], call)

    if comm.rank == 0:
        until_reported("recv(float64 x 2, from 0) with tag 0")
        comm.send(np.zeros(2), 1)
        until_reported("barrier() epoch 1")
        comm.barrier()
        comm.recv(np.zeros(2), 1)
        comm.send(np.zeros(2), 1)
    else:
        comm.sendrecv(np.zeros(2), 0, np.zeros(2), 0)
        work = comm.barrier(async_op=True)
        later = comm.recv(np.zeros(2), 0, async_op=True)
        work.wait()
        later.wait()


# --- Stopped processes ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("colors", [(0, 0, 0), (1, 0, 0)], ids=["world", "group"])
def test_the_timeout_of_a_stopped_rank_names_it_as_stopped(colors):
    stopped = 2
    with harness.world(3) as pool:
        pid = pool.processes[stopped].pid
        answers = {}
        for rank, answer, _ in outcomes(pool, stop_in_group, colors, stopped):
            answers[rank] = answer
            if len(answers) == 2:
                assert "T (stopped)" in Path(f"/proc/{pid}/status").read_text()
                os.kill(pid, signal.SIGCONT)
    texts = {answers[rank][0] for rank in range(3) if colors[rank] == colors[stopped]}
    assert len(texts) == 1, "the stopped rank raises the same error once it continues"
    number = colors[:stopped].count(colors[stopped])  # its rank in the group
    (text,) = texts
    assert f"it was not called by rank {number}\n" in text
    assert f"\nrank {number}: process {pid} is stopped; " in text
    assert all(answers[rank][1] == number for rank in range(3) if colors[rank] == colors[stopped])


def stop_in_group(comm, colors, stopped):
    group = comm.split(colors[comm.rank])
    if colors[comm.rank] != colors[stopped]:
        check_usable(group)
        return "not concerned", -1
    if comm.rank == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
        until_broken(group)
    error = raised(CollectiveTimeout, lambda: group.all_reduce(np.zeros(LARGE), timeout=1.0))
    assert str(raised(CollectiveTimeout, group.barrier)) == str(error)
    return str(error), error.rank


def stop_in_the_middle(comm, stopped, symmetric):
    """A timer stops the rank in the middle of a call."""
    x = comm.empty(LARGE, "float64") if symmetric else np.zeros(LARGE)
    comm.barrier()
    if comm.rank == stopped:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
        signal.setitimer(signal.ITIMER_REAL, 0.02)

    def call_again_and_again():
        while True:
            comm.all_reduce(x, timeout=1.0)

    error = raised(CollectiveTimeout, call_again_and_again)
    return str(error), error.rank


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [False, True], ids=["plain", "symmetric"])
def test_a_rank_stopped_between_or_in_calls_is_the_one_named(symmetric):
    with harness.world(3) as pool:
        pid = pool.processes[2].pid
        answers = {}
        for rank, answer, _ in outcomes(pool, stop_in_the_middle, 2, symmetric):
            answers[rank] = answer
            if len(answers) == 2:
                os.kill(pid, signal.SIGCONT)
    assert len(set(answers.values())) == 1
    text, rank = answers[0]
    assert rank == 2
    assert f"\nrank 2: process {pid} is stopped; all_reduce(" in text
