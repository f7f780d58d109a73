"""The hierarchy of errors.py, and the errors of native failures."""

import pickle

import pytest

import ringcomm
from ringcomm import errors, native

LEAVES = [getattr(errors, name) for name in errors.__all__ if name != "RingcommError"]


@pytest.mark.parametrize("kind", LEAVES)
def test_an_error_can_be_pickled(kind):
    facts = {"rank": 1, "peer": 2, "collective": "send", "epoch": 3, "group": "world", "argument": "out"}
    facts |= {"expected": "a", "got": "b"}
    error = kind("what happened", **facts)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert vars(copy) == vars(error) == facts


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (ringcomm.ArgumentError, ValueError),
        (ringcomm.CollectiveTimeout, TimeoutError),
        (ringcomm.PeerLost, ConnectionError),
        (ringcomm.MemoryShortage, MemoryError),
    ],
)
def test_an_error_is_also_the_builtin_error_of_its_kind(kind, builtin):
    assert issubclass(kind, ringcomm.RingcommError)
    assert issubclass(kind, builtin)
    assert issubclass(kind, RuntimeError)  # which programs that retry catch


def test_the_text_of_a_timeout_says_so_once():
    error = ringcomm.CollectiveTimeout("rank 1 of 2 did not arrive within 3 s")
    assert str(error) == "timed out: rank 1 of 2 did not arrive within 3 s"
    assert str(errors.decode_error(errors.encode_error(error))) == str(error)
    text = "rank 3 waited 3 s\nrank 2: all_reduce, timed out after 3 s"  # in its first line
    assert str(ringcomm.CollectiveTimeout(text)) == f"timed out: {text}"
    assert str(ringcomm.CollectiveTimeout("wait timed out\nrank 2")) == "wait timed out\nrank 2"


def test_facts_default_to_none():
    assert set(vars(ringcomm.Aborted("stop")).values()) == {None}


def test_a_refusal_shows_what_was_expected_and_given():
    error = errors.refuse("out", "4 elements", "3 elements")
    assert str(error) == "out: expected 4 elements, got 3 elements"
    assert (error.argument, error.expected, error.got) == ("out", "4 elements", "3 elements")


def test_a_native_failure_becomes_its_error_with_its_message():
    with pytest.raises(ringcomm.ArgumentError, match="no kernels 'sse9'"):
        native.check(native.lib.rc_kernels_select(b"sse9"))


def test_a_refusal_of_the_core_names_the_argument():
    with pytest.raises(ringcomm.ArgumentError) as refused:
        native.check(
            native.lib.rc_world_open(-1, 3, 2, native.NULL, native.NULL, 0, native.NULL, native.NULL, native.NULL)
        )
    assert refused.value.argument == str(refused.value).split(":")[0].split(" ")[0] == "rank"


def test_every_native_status_has_an_error():
    statuses = native.ffi.typeof("enum rc_status").relements
    no_errors = ("RC_OK", "RC_UNPREPARED")  # the transport prepares the call, and makes it again
    assert {code for name, code in statuses.items() if name not in no_errors} == set(native._ERRORS)


@pytest.mark.parametrize(("timeout", "limit"), [(None, -1.0), (0, 0.0), (2, 2.0), (float("inf"), float("inf"))])
def test_a_timeout_is_seconds(timeout, limit):
    assert native.seconds(timeout) == limit


def test_an_error_reaches_other_ranks_with_all_its_facts():
    error = ringcomm.MismatchError(
        "no", rank=1, peer=2, collective="recv", epoch=7, expected="int8 x 1", got="int8 x 2"
    )
    again = errors.decode_error(errors.encode_error(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def encoded(rank, error):
    return errors.encode_error(errors.failure_on(rank, error, "split"))


class Mute(Exception):
    def __str__(self):
        raise ValueError


class Short(MemoryError):
    pass


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ringcomm.PeerLost("gone"), ringcomm.PeerLost, "rank 3: gone"),
        (Short("no more"), ringcomm.MemoryShortage, "rank 3: Short: no more"),
        (KeyError("x"), ringcomm.RingcommError, "rank 3: KeyError: 'x'"),
        (OSError("file \udcff"), ringcomm.RingcommError, r"rank 3: OSError: file \udcff"),
        (Mute(), ringcomm.RingcommError, "rank 3: Mute"),
    ],
)
def test_a_failure_on_one_rank_is_raised_on_all(error, kind, words):
    failures = ["", "", "", encoded(3, error), encoded(4, KeyError("another"))]
    with pytest.raises(kind) as elsewhere:
        errors.raise_first_failure(failures, 1, None, "split")
    assert type(elsewhere.value) is kind
    culprit = None if kind is ringcomm.PeerLost else 3  # rank 3 runs
    assert (str(elsewhere.value), elsewhere.value.rank, elsewhere.value.collective) == (words, culprit, "split")
    assert elsewhere.value.__cause__ is None
    with pytest.raises(kind) as here:
        errors.raise_first_failure(failures, 3, error, "split")
    assert here.value is error or here.value.__cause__ is error
    assert here.value.rank == culprit


def test_a_rank_that_also_fails_raises_its_own_error():
    error = KeyError("another")
    with pytest.raises(ringcomm.RingcommError, match="rank 4: KeyError: 'another'") as here:
        errors.raise_first_failure(["", "", "", encoded(3, ringcomm.PeerLost("gone")), encoded(4, error)], 4, error)
    assert here.value.__cause__ is error


def test_nothing_is_raised_without_a_failure():
    errors.raise_first_failure([""] * 4, 0, None)


def test_a_failure_keeps_its_facts_on_all_ranks():
    error = ringcomm.ArgumentError("no", argument="count", expected="1", got="2")
    with pytest.raises(ringcomm.ArgumentError) as elsewhere:
        errors.raise_first_failure(["", encoded(1, error)], 0, None)
    facts = vars(elsewhere.value)
    assert {name: fact for name, fact in facts.items() if fact is not None} == {
        "argument": "count", "expected": "1", "got": "2", "rank": 1, "collective": "split"
    }  # fmt: skip


@pytest.mark.parametrize("text", ["x" * 5000, "\udcff" * 5000, '"' * 5000])
@pytest.mark.parametrize("got", ["short", "y" * 5000])
def test_an_encoded_error_is_no_longer_than_it_may_be(text, got):
    encoded = errors.encode_error(ringcomm.MismatchError(text, rank=1, got=got), 960)
    assert len(encoded) <= 960
    again = errors.decode_error(encoded)
    assert (again.rank, again.got) == (1, got if got == "short" else None)
    assert str(again).endswith(" … (this text was cut)")
    assert text.startswith(str(again).removesuffix(" … (this text was cut)"))
