"""The sessions of a server, without one: what each message of a member is answered with, and to whom."""

import pytest

from ringcomm import PeerLost
from ringcomm.bootstrap.member_store import MemberStore
from ringcomm.bootstrap.session import ALL, FIRST, Contribution, Refused, Start
from ringcomm.bootstrap.shrink import Shrink
from ringcomm.bootstrap.wire.framing import Frame, decode, failure_of


def message(kind, payload=b"", **fields):
    return Frame(kind, fields, payload)


def hello(rank=0, size=1, **more):
    return message("join", rank=rank, size=size, process=f"process {rank}", **more)


def told(replies):
    """Return what each peer is told: the kind, and the payload or else the fields without the number."""
    found = [(peer, decode(data)) for peer, data in replies]
    for _, answer in found:
        answer.fields.pop("id", None)
    return {peer: (answer.kind, answer.payload or answer.fields) for peer, answer in found}


def ask(key, wait=True):
    return message("get", id=0, key=key, wait=wait)


@pytest.fixture
def start():
    """A start of three, of which two have come; the peers are letters."""
    start = Start(3, [1, 4, 5])
    for rank, peer in enumerate("ab"):
        assert told(start.join(peer, hello(rank, 3))) == {peer: ("joined", {})}
    return start


def test_a_value_answers_those_that_wait_for_it_and_no_others(start):
    assert start.take("a", ask("key")) == start.take("b", ask("another")) == []
    assert told(start.set("key", b"value")) == {"a": ("value", b"value")}
    assert told(start.take("a", ask("key"))) == {"a": ("value", b"value")}
    assert start.poll() == []


def test_who_waits_no_longer_gets_an_answer_at_once(start):
    assert start.take("a", ask("key")) == start.take("b", ask("key")) == []
    assert told(start.take("b", ask("key", wait=False))) == {"b": ("absent", {})}
    assert told(start.set("key", b"value")) == {"a": ("value", b"value")}


def give(rank, size=3, kind="all_gather", reads=ALL):
    return message(kind, b"%d" % rank, id=rank, key="facts", rank=rank, size=size, reads=reads)


def test_the_facts_of_all_answer_all_and_who_asks_again(start):
    assert start.take("a", give(0)) == start.take("b", give(1)) == []
    assert told(start.take("a", give(0, kind="missing"))) == {"a": ("missing", {"ranks": [2]})}
    start.join("c", hello(2, 3))
    expected = "value", b"[0,1,2]"
    assert told(start.take("c", give(2))) == dict.fromkeys("bc", expected)  # the other one waits no longer
    start.fail(PeerLost("too late for these facts"))
    assert told(start.take("a", give(0))) == told(start.take("a", give(0, kind="missing"))) == {"a": expected}


def test_each_rank_gets_the_facts_that_it_reads(start):
    start.join("c", hello(2, 3))
    start.take("a", give(0, reads=FIRST))
    start.take("b", give(1, reads="a host"))
    expected = {"a": ("value", b"[0]"), "b": ("value", b"[1,2]"), "c": ("value", b"[1,2]")}
    assert told(start.take("c", give(2, reads="a host"))) == expected
    assert told(start.take("a", give(0, kind="missing", reads=FIRST))) == {"a": ("value", b"[0]")}


def test_after_a_failure_no_fact_completes_the_others(start):
    start.take("a", give(0, 2))
    start.fail(PeerLost("the reason"))
    for kind in ("all_gather", "missing"):
        assert told(start.take("b", give(1, 2, kind)))["b"][0] == "failure"
    assert not start.has("facts")


def test_the_loss_of_a_member_answers_all_and_one_that_has_left_is_not_lost(start):
    start.take("a", ask("key"))
    assert start.lose("b", "has ended") == []
    ((peer, data),) = start.poll()
    error = failure_of(decode(data))
    assert (peer, str(error), error.rank) == ("a", "rank 4 (process 1) exited during startup", 4)
    start.take("a", message("leave"))
    assert start.over
    assert start.lose("a", "has ended") == start.poll() == []
    assert told(start.join("c", hello(2, 3)))["c"][0] == "failure"
    assert "c" not in start.present


def test_a_failure_is_told_to_all_once_so_that_none_has_to_ask(start):
    start.take("a", give(0))
    start.fail(PeerLost("the reason"))
    replies = start.poll()
    assert {peer: decode(data).fields for peer, data in replies} == {"a": {"id": 0}, "b": {}}
    assert {str(failure_of(decode(data))) for _, data in replies} == {"the reason"}
    assert start.poll() == []


def test_the_absent_are_known_by_their_rank_in_the_job_until_all_have_come(start):
    assert start.absent() == [5]
    start.join("c", hello(2, 3))
    assert start.absent() == []
    assert Start(3, range(3)).absent() == [0, 1, 2]
    assert Start(3).absent() == []


def test_who_does_not_fit_is_refused():
    start = Start(2)
    start.join("a", hello(0, 2))
    for rank, size in ((0, 2), (1, 3), (-1, 2)):
        with pytest.raises(Refused):
            start.join("b", hello(rank, size))
    assert start.failure is None


def test_a_start_of_many_costs_the_server_some_messages_and_bytes_for_each():
    size, per_host = 10_000, 100
    start, peers = Start(size), range(size)
    for peer in peers:
        start.join(peer, hello(peer, size))
        answers = start.take(peer, give(peer, size, reads=FIRST if peer % per_host else ALL))
        assert len(answers) == (size if peer == size - 1 else 0)
        assert start.poll() == []
    assert sum(len(data) for _, data in answers) < size * (100 + 6 * size / per_host)
    assert sum(map(len, start._values.values())) < 6 * size


def lost_by(members):
    return {rank: str(error) for rank, error in members.lost.items()}


def test_watchers_are_told_what_is_there_and_what_changes():
    members = MemberStore()
    members.join("rank", hello(3))
    members.take("rank", message("set", b"first", key="member/3"))
    _, (_, present) = members.join("watcher", hello(-1, watch=True))
    assert (decode(present).fields, decode(present).payload) == ({"key": "member/3", "set": True}, b"first")
    assert told(members.take("rank", message("set", b"", key="waited/3")))["watcher"][1]["key"] == "waited/3"
    gone = [decode(data).fields for peer, data in members.lose("rank", "has ended") if peer == "watcher"]
    assert sorted(gone, key=str) == [{"key": key, "set": False} for key in ("member/3", "waited/3")]
    assert lost_by(members) == {3: "rank 3 (process 3) exited during startup"}


def test_a_key_lasts_as_long_as_any_member_that_has_set_it_unless_it_is_kept():
    members = MemberStore()
    for peer in "ab":
        members.join(peer, hello(ord(peer)))
        members.take(peer, message("set", b"", key="both"))
    members.take("a", message("keep", b"for good", key="kept"))
    members.lose("a", "has ended")
    assert told(members.take("b", message("keys", id=1, begin="both"))) == {"b": ("keys", {"keys": ["both"]})}
    members.lose("b", "has ended")
    members.join("c", hello(1))
    assert told(members.take("c", message("keys", id=1, begin="both"))) == {"c": ("keys", {"keys": []})}
    assert told(members.take("c", ask("kept"))) == {"c": ("value", b"for good")}


def test_who_says_that_it_leaves_is_not_lost_and_who_comes_back_neither():
    members = MemberStore()
    members.join("a", hello(1))
    members.take("a", message("leave"))
    members.join("b", hello(2))
    members.lose("b", "has ended")
    assert lost_by(members) == {2: "rank 2 (process 2) exited during startup"}
    members.join("b again", hello(2))
    assert members.lost == {}


def test_a_rank_that_has_ended_well_comes_to_no_start():
    members = MemberStore()
    members.join("launcher", hello(-1))
    assert members.take("launcher", message("ended", rank=1)) == []
    assert lost_by(members) == {1: "rank 1 ended with status 0 before it had started"}


# --- shrink -----------------------------------------------------------------------------------------------------------


class Survivors:
    """Three ranks of a group, rank 2 of which is lost."""

    def __init__(self, members=()):
        self.ended = []
        self.session = Shrink(lambda *facts: self.ended.append(facts))
        self.members = [*members]
        for rank in range(3):
            self.session.join(rank, hello(rank))

    def take(self, rank, kind, lost=(), **more):
        more = {"id": 0, "timeout": 10.0, "lost": [*lost], **more}
        request = message(kind, group="g", rank=rank, ranks=[0, 1, 2], members=self.members, **more)
        return told([*self.session.take(rank, request), *self.session.poll()])


def agreed(left, lost=(), attempt=0):
    return "agreed", {"survivors": left, "lost": [*lost], "attempt": attempt}


def test_survivors_agree_connect_and_go_on():
    group = Survivors()
    assert group.take(0, "shrink", lost=[2]) == {}
    assert group.take(1, "shrink") == dict.fromkeys((0, 1), agreed([0, 1], [2]))
    assert group.session.end("g.0") == []
    assert group.take(2, "shrink") == {2: agreed([0, 1])}  # it comes too late


def test_a_loss_that_is_told_later_ends_the_wait():
    group = Survivors()
    assert group.take(0, "shrink") == group.take(1, "shrink") == {}
    assert group.take(1, "lost", lost=[2]) == dict.fromkeys((0, 1), agreed([0, 1], [2]))


def test_a_rank_that_fails_to_connect_has_all_agree_again():
    group = Survivors()
    group.take(0, "shrink", lost=[2])
    group.take(1, "shrink")
    assert group.take(1, "shrink") == {}
    ((name, size, error),) = group.ended
    assert (name, size, str(error)) == ("g.0", 2, "rank 1 called shrink again before all had connected")
    assert group.take(0, "shrink") == dict.fromkeys((0, 1), agreed([0, 1], [2], 1))
    group.session.end("g.0")  # the attempt that has failed
    assert group.take(2, "lost") == {}
    group.session.end("g.1")
    assert group.take(2, "shrink") == {2: agreed([0, 1])}


def test_a_rank_that_is_lost_while_all_connect_ends_their_start():
    group = Survivors(members=[7, 8, 9])
    group.take(0, "shrink", lost=[2])
    group.take(1, "shrink")
    group.session.lose(1, "has ended")
    ((name, size, error),) = group.ended
    assert (name, size, error.rank, type(error)) == ("g.0", 2, 8, PeerLost)
    assert str(error) == "rank 8 (process 1) exited during startup"
    assert group.take(0, "shrink") == {0: agreed([0], [1, 2], 1)}


def test_a_rank_that_is_lost_after_an_attempt_has_failed_is_not_waited_for():
    group = Survivors()
    for rank in range(3):
        answers = group.take(rank, "shrink")
    assert answers == dict.fromkeys(range(3), agreed([0, 1, 2]))
    assert group.take(0, "shrink") == {}
    group.session.lose(2, "has ended")
    assert group.take(1, "shrink") == dict.fromkeys((0, 1), agreed([0, 1], [2], 1))
    assert len(group.ended) == 1


def test_a_rank_that_is_lost_once_all_have_connected_has_gone_on_too():
    group = Survivors()
    group.take(0, "shrink", lost=[2])
    group.take(1, "shrink")
    group.session.end("g.0")
    group.session.lose(1, "has ended")
    assert group.ended == []


def test_who_does_not_come_in_time_is_left_out_and_ended():
    group = Survivors(members=[7, 8, 9])
    group.take(1, "shrink", timeout=60.0)
    assert group.take(0, "shrink", timeout=0.0) == dict.fromkeys((0, 1), agreed([0, 1]))
    assert group.session.end("another start") == []
    assert group.session.end("g.0") == [9]
    assert group.session.end("g.0") == []


def test_a_fact_of_another_size_or_by_another_member_is_refused_and_the_others_stay():
    start = Start(3)
    assert start.all_gather("a", Contribution("facts", 2, 3, b"2")) == []
    for peer, rank, size in (("b", 0, 2), ("b", 2, 3), ("b", 3, 3), ("b", -1, 3)):
        with pytest.raises(ValueError, match="facts"):
            start.all_gather(peer, Contribution("facts", rank, size, b"9"))
    start.all_gather("b", Contribution("facts", 0, 3, b"0"))
    start.all_gather("c", Contribution("facts", 1, 3, b"1"))
    assert start.has("facts")
