"""The secret of a job on several hosts, by which its launchers and ranks know each other."""

import hmac
import os

from ringcomm.bootstrap.secret import MAKE_ONE, check_length
from ringcomm.config import JOB_SECRET, job_secret
from ringcomm.errors import ArgumentError
from ringcomm.machine.files import check_private

__all__ = ["find_secret"]

HINT = f"make one, for example by `{MAKE_ONE}`, and give the same to all nodes"


def find_secret(path: str | None, address: str) -> str:
    """Return the secret of the job at this address: in a file that only its owner can read, else in the environment.

    In ranks of another job the environment has the secret of that job: those of this one are made of it.
    """
    secret, is_of_another = (_read(path), False) if path else job_secret()
    source = path or JOB_SECRET
    if not secret:
        missing = f"{path} is empty" if path else f"--nnodes needs a secret in {JOB_SECRET} or --secret-file"
        raise ArgumentError(f"{missing}: {HINT}")
    check_length(secret, source, HINT)
    return hmac.digest(os.fsencode(secret), address.encode(), "sha256").hex() if is_of_another else secret


def _read(path: str) -> str:
    try:
        with open(path, errors="surrogateescape") as file:
            facts = os.fstat(file.fileno())
            secret = file.read(4096).strip()
    except OSError as error:
        raise ArgumentError(f"--secret-file: cannot read {path!r}: {error.strerror}") from None
    check_private(path, facts, "the secret")
    return secret
