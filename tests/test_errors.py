"""The tree of errors.py, and what native failures become."""

import pickle

import pytest

import ringcomm
from ringcomm import errors, native

LEAVES = [getattr(errors, name) for name in errors.__all__ if name != "RingcommError"]


@pytest.mark.parametrize("kind", LEAVES)
def test_an_error_survives_the_way_between_processes(kind):
    error = kind("what happened", rank=1, peer=2, collective="send", epoch=3, expected="a", got="b")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == "what happened"
    assert vars(copy) == vars(error) == {
        "rank": 1, "peer": 2, "collective": "send", "epoch": 3, "expected": "a", "got": "b"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (ringcomm.ArgumentError, ValueError),
        (ringcomm.CollectiveTimeout, TimeoutError),
        (ringcomm.PeerLost, ConnectionError),
        (ringcomm.MemoryShortage, MemoryError),
    ],
)
def test_an_error_is_also_what_python_calls_it(kind, builtin):
    assert issubclass(kind, ringcomm.RingcommError)
    assert issubclass(kind, builtin)


def test_facts_that_say_nothing_are_none():
    assert set(vars(ringcomm.Aborted("stop")).values()) == {None}


def test_refusing_shows_both_sides():
    error = errors.refuse("out", "4 elements", "3 elements")
    assert str(error) == "out: expected 4 elements, got 3 elements"
    assert (error.expected, error.got) == ("4 elements", "3 elements")


def test_a_native_failure_becomes_its_error_with_its_words():
    with pytest.raises(ringcomm.ArgumentError, match="no kernels 'sse9'"):
        native.check(native.lib.rc_kernels_select(b"sse9"))


def test_every_native_status_has_an_error():
    statuses = native.ffi.typeof("enum rc_status").relements
    assert {code for name, code in statuses.items() if name != "RC_OK"} == set(native._ERRORS)


def test_success_raises_nothing():
    native.check(native.lib.RC_OK)


@pytest.mark.parametrize(("timeout", "limit"), [(None, -1.0), (0, 0.0), (2, 2.0), (float("inf"), float("inf"))])
def test_a_timeout_is_seconds(timeout, limit):
    assert native.seconds(timeout) == limit


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_timeout_that_is_no_time_is_refused(timeout):
    with pytest.raises(ringcomm.ArgumentError, match="timeout: expected seconds >= 0"):
        native.seconds(timeout)


def test_an_error_reaches_other_ranks_with_all_its_facts():
    error = ringcomm.MismatchError(
        "no", rank=1, peer=2, collective="recv", epoch=7, expected="int8 x 1", got="int8 x 2"
    )
    again = errors.unpacked(errors.packed(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


class Mute(Exception):
    def __str__(self):
        raise ValueError


class Short(MemoryError):
    pass


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ringcomm.PeerLost("gone"), ringcomm.PeerLost, "rank 3: gone"),
        (Short("no more"), ringcomm.MemoryShortage, "rank 3: no more"),
        (KeyError("x"), ringcomm.RingcommError, "rank 3: KeyError: 'x'"),
        (OSError("file \udcff"), ringcomm.RingcommError, r"rank 3: OSError: file \udcff"),
        (Mute(), ringcomm.RingcommError, "rank 3: Mute"),
    ],
)
def test_what_fails_on_one_rank_is_raised_on_all(error, kind, words):
    all_words = ["", "", "", errors.in_words(error), "KeyError: 'another'"]
    with pytest.raises(kind) as elsewhere:
        errors.raise_told(all_words, 1, None, "split")
    assert type(elsewhere.value) is kind
    assert (str(elsewhere.value), elsewhere.value.rank, elsewhere.value.collective) == (words, 3, "split")
    assert elsewhere.value.__cause__ is None
    with pytest.raises(kind) as here:
        errors.raise_told(all_words, 3, error, "split")
    assert here.value is error or here.value.__cause__ is error
    assert here.value.rank == 3


def test_a_rank_that_fails_as_well_says_why_it_did():
    error = KeyError("another")
    with pytest.raises(ringcomm.RingcommError, match="rank 4: KeyError: 'another'") as here:
        errors.raise_told(["", "", "", "PeerLost: gone", errors.in_words(error)], 4, error)
    assert here.value.__cause__ is error


def test_nothing_is_raised_where_nothing_has_failed():
    errors.raise_told([errors.in_words(None)] * 4, 0, None)
