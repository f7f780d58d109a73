"""`grow` on one machine and between hosts, where something fails or is late meanwhile."""

import re
import textwrap
import time
from contextlib import closing

import pytest
from elastic_programs import ELASTIC, restarted
from test_restarts_nodes import start, write

from harness.nodes import Job, finish
from ringcomm import CollectiveTimeout, Config, PeerLost, elastic
from ringcomm.bootstrap.membership import Membership
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.server import serve_one_host

pytestmark = pytest.mark.slow

# Rank 1, restarted, waits for the file "over", and so never joins.
LOSING = f"""{ELASTIC}
from ringcomm.transports.routing import ArrayRouter

over = beside("over")

def wait_until_over():
    wait_for(over)
    os._exit(0)

def end():
    comm.barrier()
    over.touch()
"""


def run(tmp_path, text, hosts):
    """Run a program on four ranks; return what they print, in order."""
    text = LOSING + textwrap.dedent(text)
    if hosts == 1:
        ended = restarted(tmp_path, text, 1, ranks=4)
        assert ended.returncode == 0, ended.stderr
        return sorted(ended.stdout.splitlines())
    with closing(Job(tmp_path, 2)) as job:
        results = [finish(each) for each in start(job, str(write(job, text)), 1)]
    assert [status for status, _, _ in results] == [0, 0], results
    return sorted(line for _, out, _ in results for line in out)


def test_grow_does_not_wait_for_a_rank_that_has_ended_well(tmp_path):
    text = """
        comm = ringcomm.init()
        if comm.rank == 1:
            sys.exit(0)
        comm = shrunk(comm)
        start = time.monotonic()
        comm = comm.grow(timeout=50)
        print(comm.size, time.monotonic() - start < 25)
        end()
    """
    assert [line[4:] for line in run(tmp_path, text, 1)] == ["3 True"] * 3


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_rank_that_dies_in_grow_ends_it_on_all(tmp_path, hosts):
    text = """
    if restarts:
        wait_until_over()
    comm = lose(ringcomm.init())
    if rank == 2:
        threading.Timer(1, die).start()
    try:
        comm.grow(timeout=1000)
    except ringcomm.PeerLost as error:
        comm = comm.shrink()
        print(error.rank, error.collective, comm.size)
    end()
    """
    assert run(tmp_path, text, hosts) == ["[0] 1 grow 2", "[3] 1 grow 2"]


def test_a_rank_that_dies_once_it_has_connected_ends_grow_on_all(tmp_path):
    text = """
    comm = ringcomm.init()
    comm = lose(comm)
    if rank == 2:
        store.all_gather_facts = lambda *_, **__: die()
    try:
        comm.grow()
    except ringcomm.PeerLost as error:
        print(error.rank, error.collective)
    """
    assert run(tmp_path, text, 1) == ["[0] 2 grow", "[3] 2 grow"]


def test_an_interrupt_of_rank_0_in_grow_ends_it_on_all(tmp_path):
    text = """
    if restarts:
        wait_until_over()
    comm = lose(ringcomm.init())
    if rank == 0:
        known, calls = ArrayRouter.check, []
        def check(self):  # which grow calls at first, and then while it waits for rank 1
            calls.append(known(self))
            if len(calls) == 3:
                signal.raise_signal(signal.SIGINT)
        ArrayRouter.check = check
    try:
        comm.grow(timeout=1000)
    except KeyboardInterrupt:
        print("interrupted")
    except ringcomm.Aborted as error:
        print(error.rank, error)
    end()
    """
    told = "0 rank 0: KeyboardInterrupt"
    assert run(tmp_path, text, 1) == ["[0] interrupted", f"[2] {told}", f"[3] {told}"]


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_timeout_of_rank_0_holds_for_all(tmp_path, hosts):
    text = """
    if restarts:
        wait_until_over()
    comm = lose(ringcomm.init(config=ringcomm.Config(timeout=2, start_timeout=20)))
    assert comm.grow(timeout=0 if rank else 4) is comm
    end()
    """
    assert run(tmp_path, text, hosts) == []


def test_errors_name_grow(tmp_path):
    text = """
    comm = ringcomm.init(config=ringcomm.Config(timeout=2, start_timeout=20))
    for other in (lambda: comm.all_reduce(np.ones(5)), lambda: time.sleep(4)):
        try:
            other() if rank == 2 else comm.grow()
        except ringcomm.RingcommError as error:
            if rank == 3:
                print(repr(str(error).partition("\\nrank")[0]), error.rank, error.collective)
    """
    texts = [
        r"'the ranks called different things at epoch 1:\n  ranks 0, 1 and 3: grow()\n"
        r"  rank 2: all_reduce(float64 x 5, sum)' 2 grow",
        r"'timed out: rank N waited 2 s in grow() (epoch 2): it was not called by rank 2' 2 grow",
    ]
    lines = [re.sub(r"rank \d waited", "rank N waited", line) for line in run(tmp_path, text, 1)]
    assert lines == [f"[3] {text}" for text in texts]


def test_ranks_agree_whether_they_have_grown(tmp_path):
    text = """
    comm = ringcomm.init()
    if not restarts:
        comm = lose(comm)
        exchange = store.all_gather_facts

        def learns_of_a_loss(started, name, *arguments, **options):
            facts = exchange(started, name, *arguments, **options)
            if name != store.CONNECTED:
                return facts
            store.all_gather_facts = exchange  # others leave it without an error
            raise ringcomm.PeerLost("rank 1 was lost", rank=1)

        if rank == 2:
            store.all_gather_facts = learns_of_a_loss
        try:
            comm = comm.grow()
        except ringcomm.PeerLost:
            pass
    print(comm.size, int(comm.all_reduce(np.ones(1))[0]))
    """
    lines = run(tmp_path, text, 2)
    assert len({line.partition(" ")[2] for line in lines}) == 1, lines
    assert len(lines) >= 3


def test_a_communicator_that_is_closed_does_not_keep_its_rank_from_another_start(tmp_path):
    text = """
    kept = []
    for _ in range(2):
        kept.append(ringcomm.init())
        kept[-1].barrier()
        kept[-1].close()
    """
    assert run(tmp_path, text, 1) == []


def test_a_grow_that_fails_costs_a_joiner_none_of_its_time(monkeypatch):
    waits = []
    monkeypatch.setattr(Membership, "join", lambda _, timeout: waits.append(timeout))
    with serve_one_host(Place(1, 2, "job", max_restarts=1, restarts=1)) as place:
        rank = elastic.ElasticRank(place, Config(start_timeout=3))
        rank._membership.close()
    answers = iter([CollectiveTimeout("rank 0 was stopped"), PeerLost("rank 0 is lost"), "the communicator"])

    def connect(_):
        if isinstance(answer := next(answers), Exception):
            passed = time.monotonic() + 10
            monkeypatch.setattr(time, "monotonic", lambda: passed)
            raise answer
        return answer

    monkeypatch.setattr(rank, "_connect_as_planned", connect)
    assert rank.start() == "the communicator"
    assert waits == [3, 3, 3]
