"""A fast path that takes no call, so that the general path makes all."""

from types import SimpleNamespace
from unittest.mock import patch

from ringcomm.transports.fast_path import FastPath


def _not_supported(*_):
    return NotImplemented


NO_FAST_PATH = SimpleNamespace(**dict.fromkeys((name for name in dir(FastPath) if name[0] != "_"), _not_supported))


def on_path(comm, general):
    """Make a block's calls on the general path, or on the fast one. The communicator serves other tests after it."""
    return patch.object(comm, "fast_path", NO_FAST_PATH if general else comm.fast_path)
