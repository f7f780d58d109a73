"""A fast path that takes no call, so that the general path makes all."""

from types import SimpleNamespace

from ringcomm.transports.fast_path import FastPath


def _not_supported(*_):
    return NotImplemented


NO_FAST_PATH = SimpleNamespace(**dict.fromkeys((name for name in dir(FastPath) if name[0] != "_"), _not_supported))
