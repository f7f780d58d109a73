"""The errors: one tree. Every error has its facts as attributes and can be sent to other processes."""

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

TEXT_LENGTH, CUT = 1 << 16, " … (this text was cut)"  # characters of an error for other ranks: a report of 500 ranks
FACTS = ("rank", "peer", "collective", "epoch", "group", "argument", "expected", "got")


class RingcommError(RuntimeError):
    """The base class of all errors: a RuntimeError, as those of torch are. An attribute that does not apply is None.

    Attributes:
        rank: The rank that failed, as numbered in the communicator that failed; the message numbers ranks alike.
        peer: The other rank of a point-to-point call.
        collective: The name of the call.
        epoch: The number of the call on its communicator.
        group: The communicator that failed, if it is not the one that raises but one that it was split from.
        argument: The argument that was refused.
        expected: What was required.
        got: What was found instead.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peer: int | None = None,
        collective: str | None = None,
        epoch: int | None = None,
        group: str | None = None,
        argument: str | None = None,
        expected: Any = None,
        got: Any = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.collective = collective
        self.epoch = epoch
        self.group = group
        self.argument = argument
        self.expected = expected
        self.got = got

    def __str__(self) -> str:
        return str(self.args[0])


class ArgumentError(RingcommError, ValueError):
    """An argument is wrong on this rank. Nothing was sent; the communicator stays usable."""


class MismatchError(RingcommError):
    """The ranks' calls differ. Raised on every rank; outputs are unchanged and the communicator stays usable."""


class CollectiveTimeout(RingcommError, TimeoutError):
    """A rank did not arrive before the deadline. The communicator is broken."""

    def __init__(self, message: str, **facts: Any) -> None:
        # Programs that start again look for these words, which the errors of torch have.
        said = "timed out" in message.partition("\n")[0].lower()  # below are reports of all ranks
        super().__init__(message if said else f"timed out: {message}", **facts)


class PeerLost(RingcommError, ConnectionError):
    """A rank died, or closed the communicator while it was needed. The communicator is broken."""


class Aborted(RingcommError):
    """A rank called `abort`, was interrupted, or an exception ended its `with` block. The communicator is broken."""


class MemoryShortage(RingcommError, MemoryError):
    """Shared memory of the host or of a GPU could not be allocated. The message has the sizes found."""


def refuse(
    what: str, expected: object, got: object, *, rank: int | None = None, collective: str | None = None
) -> ArgumentError:
    """Return the ArgumentError that names the expected and the given value."""
    message = f"{what}: expected {expected}, got {got}"
    return ArgumentError(message, rank=rank, collective=collective, argument=what, expected=expected, got=got)


def integer(what: str, value: Any, least: int = -(2**63), most: int = 2**63 - 1) -> int:
    """Return `value` as an int; raise ArgumentError if it is not an integer from `least` to `most`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise refuse(what, "an integer", repr(value)) from None
    if not least <= number <= most:
        bits = number.bit_length()
        raise refuse(what, f"an integer from {least} to {most}", number if bits <= 64 else f"one of {bits} bits")
    return number


def unknown(what: str, name: object, known: Iterable[str]) -> ArgumentError:
    """Return the ArgumentError for an unknown name. It suggests the nearest known one."""
    import difflib  # imported only where a name is wrong

    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return ArgumentError(f"unknown {what} {name!r}; {hint}", expected=known, got=str(name))


def describe_ancestor(size: int) -> str:
    return f"the communicator of {size} ranks that this one was split from"


def encode_error(error: RingcommError, most: int | None = None) -> str:
    """Return an error with its facts as ASCII text, to be sent to other ranks; of at most `most` bytes if given."""
    facts = _facts(error)

    def encoded(message: str) -> str:
        return json.dumps([type(error).__name__, message, facts], default=str)

    message = str(error)
    if len(message) > TEXT_LENGTH:
        message = message[: TEXT_LENGTH - len(CUT)] + CUT
    if most is None or len(encoded(message)) <= most:
        return encoded(message)
    facts = {name: fact for name, fact in facts.items() if len(json.dumps(fact, default=str)) <= most // 4}
    while message and len(encoded(message + CUT)) > most:
        message = message[: len(message) * 9 // 10]
    return encoded(message + CUT)


def decode_error(text: str | bytes) -> RingcommError:
    """Return the error that another rank has encoded."""
    name, message, facts = json.loads(text)
    kinds = {kind.__name__: kind for kind in RingcommError.__subclasses__()}
    return kinds.get(name, RingcommError)(message, **facts)


def describe_error(error: BaseException | None) -> str:
    """Return `Kind: message` of any error, or `Kind` without a message, as valid UTF-8; an empty string for None."""
    if error is None:
        return ""
    kind = next(each.__name__ for each in type(error).__mro__ if each.__name__[0] != "_")  # NumPy's are private
    try:
        return f"{kind}: {error}".removesuffix(": ").encode(errors="backslashreplace").decode()
    except Exception:  # from its __str__
        return kind


def failure_on(rank: int, error: Exception, collective: str | None = None) -> RingcommError:
    """Return the error that the other ranks raise for an error of any kind on `rank`.

    It names that rank. A loss names none: what was lost may be the launcher.
    """
    failed = None if isinstance(error, PeerLost) else rank
    if isinstance(error, RingcommError):
        return type(error)(f"rank {rank}: {error}", **{"collective": collective, **_facts(error), "rank": failed})
    kind = MemoryShortage if isinstance(error, MemoryError) else RingcommError
    return kind(f"rank {rank}: {describe_error(error)}", rank=failed, collective=collective)


def raise_first_failure(
    failures: Iterable[str], rank: int, error: Exception | None, collective: str | None = None
) -> None:
    """Raise this rank's `error`, else the first of `failures`: of each rank, its `failure_on` encoded, or ""."""
    if isinstance(error, RingcommError):
        if error.rank is None and not isinstance(error, PeerLost):
            error.rank = rank
        raise error
    if error:
        raise failure_on(rank, error, collective) from error
    for text in failures:
        if text:
            raise decode_error(text)


def _facts(error: RingcommError) -> dict[str, Any]:
    return {name: fact for name, fact in vars(error).items() if name in FACTS and fact is not None}
