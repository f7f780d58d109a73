"""What the first rank of a host shares with the others there, when it is lost or stopped meanwhile."""

import json

import pytest

from ringcomm import CollectiveTimeout, PeerLost
from ringcomm.bootstrap.session import FIRST, Contribution
from ringcomm.bootstrap.store import HashStore
from ringcomm.transports.network.host_stores import SharingStore


class Local:
    """The second of two ranks, whose first one does not share what it has read."""

    rank, size = 1, 2

    def __init__(self, error):
        self.fused = {"broadcast": self.fail}
        self.error = error

    def fail(self, *_):
        raise self.error


def share(error, store=None):
    sharing = SharingStore(store or HashStore(), 4, Local(error), [2, 3])
    return sharing.share([], 7.0)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (PeerLost("rank 0 died", rank=0), "rank 2 exited during startup"),
        (CollectiveTimeout("rank 0 is late", rank=0), "timed out: rank 2 of 4 did not arrive within 7 s"),
    ],
)
def test_the_first_rank_of_a_host_is_named_by_its_rank_in_the_job(error, text):
    with pytest.raises(type(error)) as caught:
        share(error)
    assert (str(caught.value), caught.value.rank) == (text, 2)


def test_the_reason_of_another_rank_comes_first():
    store = HashStore()
    store.abort(PeerLost("the reason", rank=1))
    with pytest.raises(PeerLost, match="the reason"):
        share(PeerLost("rank 0 died", rank=0), store)


def test_only_what_all_have_told_is_shared():
    store = SharingStore(HashStore(), 2, Local(AssertionError("nothing to share")), [0, 1])
    store.all_gather(Contribution("facts", 0, 2, b"0", FIRST), 0.0)
    assert json.loads(store.all_gather(Contribution("facts", 1, 2, b"1", FIRST), 20)) == [0]
