"""The states of a rank that may be restarted."""

from ringcomm.launcher.rank_state import LaunchedRank


def test_a_rank_that_joins_while_it_is_ended_keeps_its_deadline():
    rank = LaunchedRank()
    assert rank.move("is ended", 5.0)
    assert not rank.joined
    assert rank.move("joins", rank.deadline)
    assert rank.joined
    assert rank.deadline == 5.0


def test_a_rank_that_is_started_again_has_not_joined():
    rank = LaunchedRank()
    for event in ("joins", "is ended"):
        rank.move(event)
        assert rank.joined
    for event in ("is awaited again", "joins", "is started"):
        rank.move(event)
        assert not rank.joined
