"""The session of the launchers of a job, as node 0 serves it."""

import pytest

from ringcomm.bootstrap.member_store import MemberStore
from ringcomm.bootstrap.session import Contribution
from ringcomm.bootstrap.wire.framing import Frame
from ringcomm.launcher.nodes import ENDED, NodeOptions, _Launchers


@pytest.fixture
def session():
    """Three launchers."""
    session = _Launchers(NodeOptions(0, 3, "", "", 20.0, 15.0, None, elastic=True), MemberStore())
    for node in range(3):
        session.join(node, Frame("join", {"rank": node, "size": 3, "process": f"host {node}"}, b""))
    return session


def test_the_nodes_have_ended_once_the_last_one_has(session):
    asked = [session.take(node, Frame("get", {"id": 0, "key": ENDED, "wait": True}, b"")) for node in range(3)]
    assert asked == [[]] * 3
    for node in (0, 1):
        assert session.all_gather(node, Contribution(ENDED, node, 3, b"")) == []
    assert [peer for peer, _ in session.all_gather(2, Contribution(ENDED, 2, 3, b""))] == [0, 1, 2]


@pytest.mark.parametrize("connected", [False, True])
def test_a_lost_launcher_ends_the_job_unless_its_ranks_have_connected(session, connected):
    session._membership.connected = connected
    session.lose(1, "has ended")
    for node in (0, 2):
        session.all_gather(node, Contribution(ENDED, node, 3, b""))
    assert session.has(ENDED) == connected
    assert str(session.failure) == ("None" if connected else "the launcher of node 1 (host 1) has ended")
