"""The transport between hosts, over TCP; inside a host the ranks share memory."""

from ringcomm.transports.network.start import NEEDS_STORE, connect, serves

__all__ = ["NEEDS_STORE", "connect", "serves"]
