"""What can go wrong. One tree; every error carries its facts as attributes, and travels between processes."""

import difflib
import json
import operator
from collections.abc import Iterable
from typing import Any

__all__ = [
    "Aborted",
    "ArgumentError",
    "CollectiveTimeout",
    "MemoryShortage",
    "MismatchError",
    "PeerLost",
    "RingcommError",
]

FACTS = ("rank", "peer", "collective", "epoch", "expected", "got")


class RingcommError(Exception):
    """The root of the tree.

    Attributes, each None where it says nothing:
        rank: the rank that failed, in the numbering of the communicator that raised
        peer: the other side of a point-to-point call
        collective: the name of the call
        epoch: the number of the call on its communicator
        expected, got: both sides of what does not fit
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peer: int | None = None,
        collective: str | None = None,
        epoch: int | None = None,
        expected: Any = None,
        got: Any = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.collective = collective
        self.epoch = epoch
        self.expected = expected
        self.got = got

    def __str__(self) -> str:
        return str(self.args[0])


class ArgumentError(RingcommError, ValueError):
    """The call makes no sense on this rank. Nothing was sent; the communicator stays usable."""


class MismatchError(RingcommError):
    """The ranks called different things. Raised on every rank, outputs untouched; the communicator stays usable."""


class CollectiveTimeout(RingcommError, TimeoutError):
    """A rank did not arrive before the deadline. The communicator is broken."""


class PeerLost(RingcommError, ConnectionError):
    """A rank died or closed while it was still needed. The communicator is broken."""


class Aborted(RingcommError):
    """A rank called `abort`, left its `with` block by an exception or was interrupted. The communicator is broken."""


class MemoryShortage(RingcommError, MemoryError):
    """Memory to share, of the host or of a GPU, could not be had; the message has the figures of that moment."""


def refuse(
    what: str, expected: object, got: object, *, rank: int | None = None, collective: str | None = None
) -> ArgumentError:
    """Return the error that shows both sides."""
    message = f"{what}: expected {expected}, got {got}"
    return ArgumentError(message, rank=rank, collective=collective, expected=expected, got=got)


def integer(what: str, value: Any, least: int = -(2**63), most: int = 2**63 - 1) -> int:
    """Return `value` as an int, or refuse what is none, or none of 64 bits."""
    try:
        number = operator.index(value)
    except TypeError:
        raise refuse(what, "an integer", repr(value)) from None
    if not least <= number <= most:
        bits = number.bit_length()
        raise refuse(what, f"an integer from {least} to {most}", number if bits <= 64 else f"one of {bits} bits")
    return number


def unknown(what: str, name: object, known: Iterable[str]) -> ArgumentError:
    """Return the error for a name nobody knows, with the nearest one that is known."""
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return ArgumentError(f"unknown {what} {name!r}; {hint}", expected=known, got=str(name))


def packed(error: RingcommError) -> str:
    """Return an error as text, with its facts, for other ranks."""
    facts = {name: fact for name, fact in vars(error).items() if name in FACTS and fact is not None}
    return json.dumps([type(error).__name__, str(error)[:4096], facts], default=str)


def unpacked(text: str | bytes) -> RingcommError:
    """Return the error that another rank has packed."""
    name, message, facts = json.loads(text)
    return _kind(name)(message, **facts)


def in_words(error: BaseException | None) -> str:
    """Return `Kind: message` of any error, as UTF-8 can carry it; nothing of none."""
    if error is None:
        return ""
    short = isinstance(error, MemoryError) and not isinstance(error, RingcommError)
    kind = "MemoryError" if short else type(error).__name__
    try:
        return f"{kind}: {error}".encode(errors="backslashreplace").decode()
    except Exception:  # from its __str__
        return kind


def raise_told(words: Iterable[str], rank: int, error: Exception | None, collective: str | None = None) -> None:
    """Raise what has failed on any rank, given that of all `in_words`: `error` of this `rank`, or the first other."""
    if isinstance(error, RingcommError):
        error.rank = rank if error.rank is None else error.rank
        raise error
    for other, text in enumerate(words):
        if text and (error is None or other == rank):
            name, _, message = text.partition(": ")
            kind = _kind(name)
            told = text if kind is RingcommError else message
            raise kind(f"rank {other}: {told}", rank=other, collective=collective) from error


def _kind(name: str) -> type[RingcommError]:
    kinds = {kind.__name__: kind for kind in RingcommError.__subclasses__()} | {"MemoryError": MemoryShortage}
    return kinds.get(name, RingcommError)
