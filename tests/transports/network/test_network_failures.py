"""Ranks on several hosts that are late, die, differ, abort or are interrupted, and hosts that vanish."""

import json
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

import numpy as np
import pytest
import test_peer_lost as deaths

import harness
from cases.between_hosts import on_layouts, run_on
from cases.failures_between_hosts import LARGE, SHORT, abort, be_late, wait_for_a_message, wait_for_works
from harness.failures import (
    PROMPT,
    check_usable,
    lines_of,
    outcomes,
    raised,
    survivors_of,
    until_broken,
    until_others_have_left,
)
from ringcomm import Aborted, ArgumentError, CollectiveTimeout, Config, MismatchError, PeerLost
from ringcomm.bootstrap.session import Contribution
from ringcomm.bootstrap.start_errors import format_ranks
from ringcomm.bootstrap.store import HashStore
from ringcomm.transports import network, shm

FEW_CONNECTED = "0000111122223333"  # most pairs of its ranks, when a call begins
LAYOUTS = ("01", "0011", "0001", "010", FEW_CONNECTED)

layouts = pytest.mark.parametrize("layout", LAYOUTS)


# --- Ranks that die ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "victim", "name", "n"),
    [
        ("01", 1, "all_reduce", 1),
        ("01", 0, "sendrecv", 1 << 20),
        ("0011", 3, "all_reduce", 1 << 20),
        ("0011", 2, "barrier", 1),
        ("0001", 1, "reduce", 1 << 20),
        ("010", 1, "split", 1),
        ("012", 1, "all_gather", 1 << 20),
        (FEW_CONNECTED, 13, "all_reduce", 1 << 20),
        (FEW_CONNECTED, 4, "barrier", 1),
    ],
)
def test_a_killed_rank_is_named_by_every_survivor(layout, victim, name, n):
    answers, ends = {}, {}
    with harness.world(layout, "nodes") as pool:
        pid = pool.processes[victim].pid
        for rank, answer, when in outcomes(pool, deaths.call_until_one_dies, name, n, victim, 0.1):
            answers[rank], ends[rank] = answer, when
    assert isinstance(answers.pop(victim), ConnectionError)
    for rank, (lost, text) in answers.items():
        assert lost == victim, text
        assert f"rank {victim} (process {pid}) died" in text or f"rank {victim} was lost" in text
        assert ends[rank] - ends[victim] < PROMPT


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["0011", "0101"])
def test_groups_without_the_dead_rank_continue_until_the_world_breaks(layout):
    found, _ = survivors_of(deaths.lose_in_groups, layout, 2, launcher="nodes")
    assert found == {0: None, 1: None, 3: None}


def lose_while_a_rank_of_this_host_is_late(comm):
    """Rank 2, alone on its host, dies while rank 0 waits for rank 1."""
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 1:
        assert until_broken(comm).rank == 2
        return ""
    return str(raised(PeerLost, comm.barrier))


@pytest.mark.slow
def test_a_death_on_another_host_ends_the_wait_for_a_late_rank_of_this_host():
    with harness.world("001", "nodes") as pool:
        answers, ends = {}, {}
        for rank, answer, when in outcomes(pool, lose_while_a_rank_of_this_host_is_late):
            answers[rank], ends[rank] = answer, when
    assert "rank 2 was lost" in answers[0]
    assert ends[0] - ends[2] < PROMPT


def lose_in_the_other_group(comm, victim):
    group = comm.split(comm.rank % 4 // 2)
    until_others_have_left(comm, victim)
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank % 4 // 2 == victim % 4 // 2:
        error = raised(PeerLost, lambda: [group.barrier() for _ in range(10**9)])
        assert error.rank == (victim if error.group else (victim // 4) * 2 + victim % 2)
    else:
        error = until_broken(group)
        assert (error.rank, error.group) == (victim, "the communicator of 8 ranks that this one was split from")
    assert until_broken(comm).rank == victim


@pytest.mark.slow
def test_a_death_breaks_the_groups_of_all_hosts():
    found, _ = survivors_of(lose_in_the_other_group, "00001111", 7, launcher="nodes")
    assert found == dict.fromkeys(range(7))


# --- Late ranks -------------------------------------------------------------------------------------------------------


LATE = [
    ("01", 0, "all_reduce"),
    ("01", 1, "small"),
    ("0011", 1, "barrier"),
    ("0011", 2, "a queue"),
    ("0001", 3, "all_to_all"),
    ("010", 2, "objects"),
    ("010", 1, "all_gather"),
    ("012", 2, "reduce"),
    (FEW_CONNECTED, 6, "all_reduce"),
    (FEW_CONNECTED, 12, "small"),
]


@pytest.mark.parametrize(("layout", "late", "name"), LATE)
def test_a_late_rank_is_named_on_every_rank(layout, late, name):
    run_on(layout, be_late, late, name)


def wait_inside_a_host(comm):
    """Rank 2 on the other host is late; rank 1 waits inside its host, and its timeout comes first."""
    group = comm.split(0)
    if comm.rank == 2:
        return str(until_broken(group))
    timeout = SHORT if comm.rank == 1 else None
    return str(raised(CollectiveTimeout, lambda: group.all_reduce(np.ones(3), timeout=timeout)))


def test_a_timeout_inside_a_host_names_the_call_of_the_user_on_every_rank():
    texts = run_on("001", wait_inside_a_host)
    first, late, *waiting = texts[0].splitlines()
    assert texts == [texts[0]] * 3
    call = "all_reduce(float64 x 3, sum)"
    assert first == f"timed out: rank 1 waited {SHORT:g} s in {call} (epoch 1): it was not called by rank 2"
    assert late == "rank 2: no call yet"
    for rank, (line, awaited) in enumerate(zip(waiting, (2, 0), strict=True)):
        does = rf"rank {rank}: {re.escape(call)} epoch 1, running for \S+ s, waits for rank {awaited}"
        assert re.fullmatch(does, line)


def test_a_small_call_fails_also_on_a_rank_that_comes_after_the_others_have_given_up():
    """What it needs of them has come."""
    given_up = threading.Event()

    def call(comm):
        if comm.rank:
            assert given_up.wait(10)
            time.sleep(0.1)  # not a wait for an event: the rank computes
        error = raised(CollectiveTimeout, lambda: comm.all_reduce(np.ones(3), timeout=SHORT))
        given_up.set()
        assert "it was not called by rank 1" in str(error)

    run_on("01", call)


@layouts
def test_a_message_that_never_comes_is_a_timeout(layout):
    run_on(layout, wait_for_a_message, 1)


@layouts
def test_an_expired_wait_breaks_the_communicator(layout):
    run_on(layout, wait_for_works)


def test_all_ranks_that_never_come_are_named_by_one_deadline():
    config = Config(timeout=SHORT, host_id="0")
    error = raised(CollectiveTimeout, lambda: network.connect(0, 4, HashStore(), config))
    assert str(error) == f"timed out: ranks 1-3 of 4 did not arrive within {SHORT:g} s"
    assert error.rank == 1


@pytest.mark.parametrize(
    ("link", "told", "what"),
    [(None, "network", "arrive"), ("sockets", "network", "arrive"), ("sockets", "network mesh", "connect to rank 0")],
)
def test_a_rank_that_does_not_connect_is_named(link, told, what):
    class Forgetful(HashStore):
        """Rank 1 tells where it is, perhaps its address, and is not heard of again."""

        def all_gather(self, given, *how):
            if given.name == "host":
                super().all_gather(Contribution("host", 1, 2, b"1", "another host"), 0.0)
            elif given.name in told.split():
                fact = given.fact.replace(b'"0"', b'"1"').replace(b"[0]", b"[1]")
                super().all_gather(Contribution(given.name, 1, 2, fact), 0.0)
            return super().all_gather(given, *how)

    config = Config(timeout=SHORT, host_id="0", link=link)
    error = raised(CollectiveTimeout, lambda: network.connect(0, 2, Forgetful(), config))
    assert error.rank == 1
    text, *hints = str(error).splitlines()
    assert text == f"timed out: rank 1 of 2 did not {what} within {SHORT:g} s"
    assert len(hints) == (2 if "connect" in what else 0)  # where rank 0 listens, and that a firewall may drop that


@pytest.mark.parametrize("late", [2, 3])  # the first rank of its host, and another
def test_a_rank_that_is_late_on_its_host_is_named_by_its_rank_in_the_job(monkeypatch, late):
    store, config = HashStore(), [Config(timeout=SHORT, host_id=host) for host in "0011"]
    rank, others_have_failed, share_memory = threading.local(), threading.Event(), shm.connect

    def be_late(*arguments):
        if rank.number == late:
            assert others_have_failed.wait(harness.OPERATION)
        return share_memory(*arguments)

    def start(number):
        rank.number = number
        error = raised(CollectiveTimeout, lambda: network.connect(number, 4, store, config[number]))
        return str(error), error.rank, error.got

    monkeypatch.setattr(shm, "connect", be_late)
    with ThreadPoolExecutor(4) as pool:
        errors = [pool.submit(start, number) for number in range(4)]
        wait(errors[:late] + errors[late + 1 :])
        others_have_failed.set()
    expected = f"timed out: rank {late} did not arrive within {SHORT:g} s", late, [late]
    assert [error.result() for error in errors] == [expected] * 4


def test_an_address_that_other_machines_cannot_reach_is_refused_at_once(monkeypatch):
    class Elsewhere(HashStore):
        """Rank 1 is on another machine."""

        def all_gather(self, given, *how):
            if given.name == "host":
                super().all_gather(Contribution("host", 1, 2, b"1", "another host"), 0.0)
            if given.name == "network":
                elsewhere = json.loads(given.fact) | {"ranks": [1], "host": ["another", None]}
                super().all_gather(Contribution("network", 1, 2, json.dumps(elsewhere).encode()), 0.0)
            return super().all_gather(given, *how)

    monkeypatch.setenv("MASTER_ADDR", "localhost")
    config = Config(timeout=PROMPT, link="sockets")
    error = raised(ArgumentError, lambda: network.connect(0, 2, Elsewhere(), config))
    assert "rank 0: the other hosts cannot reach this one at 127.0.0.1, the address of '127.0.0.1'" in str(error)
    assert "set RINGCOMM_HOST_ADDRESS" in str(error)
    assert error.rank == 0
    assert run_on("01", lambda comm: comm.size) == [2, 2]  # hosts by label are one machine


# --- Different calls --------------------------------------------------------------------------------------------------


def differ(comm, odd):
    """Make pairs of calls, of which rank `odd` makes the second."""
    x, y = np.full(LARGE, 5.0), np.full(LARGE, 6.0)
    pairs = [
        (lambda: comm.all_reduce(x[:3], out=y[:3]), lambda: comm.all_reduce(x[:4], out=y[:4])),
        (lambda: comm.all_reduce(x, out=y), lambda: comm.all_reduce(x[:-1], out=y[:-1])),
        (lambda: comm.all_reduce(x, out=y), lambda: comm.all_reduce(x[:3], out=y[:3])),
        (lambda: comm.all_reduce(x, "max", out=y), lambda: comm.all_reduce(x, out=y)),
        (lambda: comm.broadcast(x, 0), lambda: comm.broadcast(x, 1)),
        (lambda: comm.barrier(), lambda: comm.reduce(x[:9], out=y[:9])),
        (lambda: comm.all_gather(x[:3], counts=[3] * comm.size), lambda: comm.all_gather(x[:3])),
    ]
    texts = []
    for first, second in pairs:
        error = raised(MismatchError, second if comm.rank == odd else first)
        texts.append(str(error))
        assert (x == 5).all()
        assert (y == 6).all()
        check_usable(comm)
    return texts


@on_layouts("0011")
def test_a_report_has_the_last_call_of_the_own_rank_though_the_others_were_asked_before(comm):
    for name in ("barrier", "all_reduce"):
        comm.barrier() if name == "barrier" else comm.all_reduce(np.ones(1))
        assert name in lines_of(comm._transport.report(1))[comm.rank]
    check_usable(comm)


@layouts
@pytest.mark.parametrize("odd", [0, 1])
def test_different_calls_are_named_on_every_rank(layout, odd):
    for texts in zip(*run_on(layout, differ, odd), strict=True):
        assert len({*texts}) == 1
        others = [rank for rank in range(len(layout)) if rank != odd]
        for ranks in ([odd], others):
            assert f"\n  {format_ranks(ranks)}: " in texts[0]


@on_layouts("0123", "00112233")
def test_a_mismatch_is_one_on_every_rank_also_if_another_leaves_by_it_at_once(comm):
    """The first rank that finds it aborts the others; in tests/native/network/ that comes first."""
    me, other = comm.rank, "all_reduce(float64 x 3, max)"
    group = comm.split(0)
    with pytest.raises(MismatchError, match="the ranks called different things at epoch 1:") as raised, group:
        group.all_reduce(np.ones(3), "max" if me == 1 else "sum")
    error = raised.value
    assert (error.collective, error.epoch, error.group) == ("all_reduce", 1, None)
    assert [error.expected, error.got].index(other) == (me != 1)
    assert (error.rank == 1) == (me != 1)
    assert len(str(error).splitlines()) == 3  # the calls of rank 1, and those of all others


@on_layouts(*LAYOUTS)
def test_blocks_of_different_lengths_are_named_on_every_rank(comm):
    """Rank 0 sends more to rank 1 than it expects."""
    size, me = comm.size, comm.rank
    sent = [1 + (me == 0 and rank == 1) for rank in range(size)]
    out = np.full(size, 7.0)
    error = raised(
        MismatchError, lambda: comm.all_to_all(np.ones(sum(sent)), out, send_counts=sent, recv_counts=[1] * size)
    )
    assert "rank 0 sends 2 elements to rank 1, which expects 1" in str(error)
    assert (out == 7).all()
    check_usable(comm)


# --- Aborts and signals -----------------------------------------------------------------------------------------------


ABORTED = [
    ("01", "all_reduce"),
    ("0011", "a queue"),
    ("0001", "small"),
    ("010", "all_reduce"),
    (FEW_CONNECTED, "all_reduce"),
]


@pytest.mark.parametrize(("layout", "name"), ABORTED)
def test_an_abort_ends_the_calls_of_all_ranks(layout, name):
    run_on(layout, abort, 1, name)


kept = []  # arrays of calls that failed


def interrupt(comm, who, delay):
    x = np.zeros(4_000_000)

    def call_again_and_again():
        while True:
            comm.all_reduce(x, "max")

    comm.barrier()
    if comm.rank == who:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
        raised(KeyboardInterrupt, call_again_and_again)
        with suppress(Aborted):
            comm.check()  # or the signal came between two calls
            comm.abort(f"rank {who} was interrupted by a signal")
    else:
        error = raised(Aborted, call_again_and_again)
        assert error.rank == who
        assert f"rank {who} was interrupted by a signal" in str(error)
    x.fill(comm.rank)  # the memory is this rank's again
    kept.append(x)


def keep(comm):
    return bool((kept[-1] == comm.rank).all())


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "who"), [("01", 0), ("0011", 1), ("0011", 2), ("0001", 3)])
def test_an_interrupt_in_a_large_call_aborts_the_others(layout, who):
    with harness.world(layout, "nodes") as pool:
        pool.run(interrupt, (who, 0.15))
        assert pool.run(keep, ()) == [True] * len(layout)
