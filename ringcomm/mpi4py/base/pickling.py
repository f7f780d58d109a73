"""How objects become messages: by pickle, or functions of the program."""

import pickle as standard
from collections.abc import Callable, Iterable
from typing import Any

from ringcomm.mpi4py.base.buffer import buffer
from ringcomm.objects import Codec

__all__ = ["Pickle", "pickle"]

THRESHOLD = 256 * 1024  # bytes from which dumps_oob leaves a buffer out of the stream, as in mpi4py


class Pickle:
    """Serializes objects, by pickle unless the program gives other functions."""

    __slots__ = ("_threshold", "codec")

    codec: Codec  # for the calls of a communicator

    def __init__(
        self,
        dumps: Callable[..., bytes] | None = None,
        loads: Callable[..., Any] | None = None,
        protocol: int | None = None,
        threshold: int | None = None,
    ) -> None:
        self.codec = Codec(dumps or standard.dumps, None, loads or standard.loads)
        self.PROTOCOL, self.THRESHOLD = protocol, threshold

    @property
    def PROTOCOL(self) -> int | None:
        """The protocol; None for functions that take none. Default: the highest of pickle."""
        return self.codec.protocol

    @PROTOCOL.setter
    def PROTOCOL(self, protocol: int | None) -> None:
        default = standard.HIGHEST_PROTOCOL if self.codec.dumps is standard.dumps else None
        self.codec = self.codec._replace(protocol=default if protocol is None else protocol)

    @property
    def THRESHOLD(self) -> int:
        """The bytes from which dumps_oob leaves a buffer out of the stream."""
        return self._threshold

    @THRESHOLD.setter
    def THRESHOLD(self, threshold: int | None) -> None:
        self._threshold = THRESHOLD if threshold is None else threshold

    def dumps(self, obj: Any) -> bytes:
        """Return the bytes of an object."""
        dumps, protocol, _ = self.codec
        data: bytes = dumps(obj) if protocol is None else dumps(obj, protocol)
        return data

    def loads(self, data: Any) -> Any:
        """Return the object of bytes."""
        return self.codec.loads(data)

    def dumps_oob(self, obj: Any) -> tuple[bytes, list[buffer]]:
        """Return the bytes of an object without those of its large buffers, and these buffers."""
        buffers: list[buffer] = []

        def keep(part: Any) -> bool:
            """Return whether the buffer stays in the stream."""
            data = buffer(part)
            if data.nbytes < self._threshold:
                return True
            buffers.append(data)
            return False

        protocol = max(self.PROTOCOL or standard.HIGHEST_PROTOCOL, 5)
        return self.codec.dumps(obj, protocol, buffer_callback=keep), buffers

    def loads_oob(self, data: Any, buffers: Iterable[Any]) -> Any:
        """Return the object of what dumps_oob returned."""
        return self.codec.loads(data, buffers=buffers)


pickle = Pickle()
