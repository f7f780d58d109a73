"""The hooks that torch calls, from 2.14 on, before a group is aborted: they may save what led to a failure."""

import logging
from collections.abc import Callable

__all__ = ["AbortHooks"]

log = logging.getLogger("ringcomm")


class AbortHooks:
    """Those of a group. Each runs once: when the group is aborted, or when a call has found it broken."""

    _name: str  # of the group

    def __init__(self) -> None:
        self._hooks: dict[int, Callable[[], object]] = {}

    def registerAbortHook(self, hook_id: int, hook: Callable[[], object]) -> None:
        self._hooks[hook_id] = hook

    def unregisterAbortHook(self, hook_id: int) -> None:
        self._hooks.pop(hook_id, None)

    def _run_abort_hooks(self) -> None:
        """Call the hooks in the order of their registration. One that raises is named in a warning."""
        while number := next(iter(self._hooks), None):  # each is taken by one of the threads that find a failure
            try:
                if hook := self._hooks.pop(number, None):
                    hook()
            except Exception as error:  # that of the group matters more
                log.warning("the abort hook %d of the group %r raised %r", number, self._name, error)
