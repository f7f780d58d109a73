"""What a secret of a job must be, whoever gives it."""

import os

from ringcomm.errors import ArgumentError

__all__ = ["MAKE_ONE", "check_length"]

MIN_BYTES = 32
MAKE_ONE = "openssl rand -hex 32"


def check_length(secret: str, source: str, hint: str) -> None:
    """Raise ArgumentError if somebody could guess this secret."""
    if len(os.fsencode(secret)) < MIN_BYTES:
        raise ArgumentError(f"the secret in {source} has fewer than {MIN_BYTES} bytes: {hint}")
