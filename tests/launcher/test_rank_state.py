"""The states of a rank that may be restarted."""

import pytest

from ringcomm.launcher.rank_state import TRANSITIONS, LaunchedRank, State


@pytest.mark.parametrize("event", ["is started", "is cancelled", "is ended", "is to be restarted"])
def test_news_of_a_process_that_has_ended_change_nothing(event):
    rank = LaunchedRank(state=State.LOST, deadline=5.0)
    assert not rank.move(event, 7.0)
    assert (rank.state, rank.deadline) == (State.LOST, 5.0)


def test_a_rank_that_is_ended_has_joined_until_it_is_started_again():
    rank = LaunchedRank(joined=True)
    assert rank.move("is ended", 5.0)
    assert rank.joined
    assert rank.deadline == 5.0
    for event in ("is to be restarted", "is started"):
        assert rank.move(event)
        assert not rank.joined


def test_every_state_but_the_last_has_an_end():
    assert {state for before, _ in TRANSITIONS.values() for state in before} == {*State} - {State.LOST}
