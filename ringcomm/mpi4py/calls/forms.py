"""The three methods that are made from each collective: blocking, nonblocking and persistent."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from ringcomm.mpi4py.base.errors import FAILURES, handled
from ringcomm.mpi4py.base.info import Info
from ringcomm.mpi4py.base.integers import integral
from ringcomm.mpi4py.requests.operations import DONE, PendingOperation, Persistent
from ringcomm.mpi4py.requests.prequest import Prequest
from ringcomm.mpi4py.requests.request import Request

__all__ = ["CheckedCollective", "forms"]


class CheckedCollective(NamedTuple):
    """A collective whose arguments are checked.

    `start` takes whether to return at once, with a Work; `finish` takes the result of ringcomm's call.
    """

    start: Callable[[bool], Any]
    finish: Callable[[Any], object] | None = None


def forms(
    describe: Callable[..., CheckedCollective],
) -> tuple[Callable[..., None], Callable[..., Request], Callable[..., Prequest]]:
    """Return the blocking, the nonblocking and the persistent method."""

    describe = integral(describe)

    def blocking(self: Any, *args: Any, **kwargs: Any) -> None:
        context = self._object
        try:
            call = describe(context, *args, **kwargs)
            result = call.start(False)
            if call.finish:
                call.finish(result)
        except FAILURES as error:
            context.fail(error)

    def started(context: Any, call: CheckedCollective) -> PendingOperation:
        return PendingOperation(context, call.start(True) or DONE, call.finish)

    @handled
    def nonblocking(self: Any, *args: Any, **kwargs: Any) -> Request:
        context = self._object
        return Request._of(started(context, describe(context, *args, **kwargs)))

    @handled
    def persistent(self: Any, *args: Any, info: Info | None = None, **kwargs: Any) -> Prequest:  # noqa: ARG001 (no hint is known)
        context = self._object
        if args and isinstance(args[-1], Info):
            args = args[:-1]
        call = describe(context, *args, **kwargs)
        return Prequest._of(Persistent(context, lambda: started(context, call)))

    name = describe.__name__
    signature = inspect.signature(describe)
    parameters = [
        inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY),
        *list(signature.parameters.values())[1:],
    ]
    for form, its_name, what in (
        (blocking, name.capitalize(), ""),
        (nonblocking, f"I{name}", "Start a nonblocking call: "),
        (persistent, f"{name.capitalize()}_init", "Prepare calls that can be started again and again: "),
    ):
        form.__name__, form.__qualname__ = its_name, f"Comm.{its_name}"
        form.__doc__ = what + (describe.__doc__ or "")
        form.__signature__ = inspect.Signature(parameters)  # type: ignore[union-attr]  # each form is a function
    return blocking, nonblocking, persistent
