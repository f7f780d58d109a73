"""The function that a launch calls and its results, and how they travel between processes: pickled."""

import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ringcomm.config import Config
from ringcomm.errors import ArgumentError, RingcommError, describe_error, refuse

__all__ = [
    *("LaunchSpec", "RankResult", "failed", "pickled_failure", "pickled_result", "pickled_spec", "unpickled_result"),
]


class LaunchSpec(NamedTuple):
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    config: Config


class RankResult(NamedTuple):
    """The value of a rank and the threads it left running, or its error with time and traceback (none if it died).

    On the way to another process `error` only describes the one in `pickled_error`, which may not arrive.
    """

    rank: int
    value: Any = None
    error: Exception | None = None
    when: float = 0.0
    trace: str = ""
    threads: Sequence[str] = ()
    pickled_error: bytes = b""


def failed(rank: int, error: Exception) -> RankResult:
    return RankResult(rank, error=error, when=time.monotonic(), trace="".join(traceback.format_exception(error)))


def pickled_spec(spec: LaunchSpec, importable: bool) -> bytes:
    """Pickle by name if the ranks can import it, else by value."""
    reason = "the main program is not an importable file"
    try:
        data = pickle.dumps(spec)
        if importable or b"__main__" not in data:
            return data
    except Exception as error:  # an object may raise any error
        reason = str(error)
    try:
        import cloudpickle

        return bytes(cloudpickle.dumps(spec))
    except ImportError:
        pass
    except Exception as error:
        reason = str(error)
    raise ArgumentError(
        f"{spec.fn!r} and its arguments cannot be pickled ({reason}): define it in a module, "
        "pip install cloudpickle, or use world='threads'"
    )


def pickled_result(result: RankResult) -> bytes:
    """Pickle the result of a rank; raise ArgumentError if its value cannot be pickled."""
    try:
        return pickle.dumps(result)
    except BaseException as error:  # an object may raise anything, also SystemExit
        got = f"a {type(result.value).__name__} ({describe_error(error)})"
        raise _refuse(result.rank, "pickled", got) from None


def pickled_failure(result: RankResult) -> bytes:
    """Pickle the failure of a rank, with a description in place of an error that cannot be pickled or unpickled."""
    try:
        error = pickle.dumps(result.error)
    except BaseException:  # an object may raise anything, also SystemExit
        error = b""
    described = RingcommError(describe_error(result.error))
    return pickle.dumps(result._replace(error=described, pickled_error=error))


def unpickled_result(rank: int, data: bytes) -> RankResult:
    """Unpickle what a rank has sent. If that fails, the rank has failed."""
    try:
        result: RankResult = pickle.loads(data)
    except (Exception, SystemExit) as error:  # not KeyboardInterrupt: that is the user's
        return failed(rank, _refuse(rank, "unpickled", describe_error(error)))
    with suppress(Exception, SystemExit):
        original = pickle.loads(result.pickled_error)
        if isinstance(original, Exception):
            return result._replace(error=original)
    return result


def _refuse(rank: int, how: str, got: str) -> ArgumentError:
    return refuse(f"result of rank {rank}", f"an object that can be {how}", got, rank=rank)
