"""A sandbox that denies system calls, by a seccomp filter.

    python tests/harness/sandbox.py sched_setaffinity,prlimit64 program argument ...

runs a program in which these calls fail with EPERM.
"""

import ctypes
import errno
import os
import struct
import sys
from pathlib import Path

__all__ = ["deny", "denying"]

NUMBERS = {
    "x86_64": {
        "setpgid": 109,
        "sched_setaffinity": 203,
        "sched_getaffinity": 204,
        "prlimit64": 302,
        "process_vm_readv": 310,
    },
    "aarch64": {
        "sched_setaffinity": 122,
        "sched_getaffinity": 123,
        "setpgid": 154,
        "prlimit64": 261,
        "process_vm_readv": 270,
    },
}[os.uname().machine]
LOAD, EQUAL, ANSWER = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
NUMBER, FIRST_ARGUMENT = 0, 16  # in struct seccomp_data


def deny(*calls: str, unless_first: int | None = None) -> None:
    """Make these calls fail in this thread from now on, except those whose first argument is `unless_first`."""
    program = []
    for call in calls:
        program += [(LOAD, 0, 0, NUMBER), (EQUAL, 0, 1 if unless_first is None else 3, NUMBERS[call])]
        if unless_first is not None:
            program += [(LOAD, 0, 0, FIRST_ARGUMENT), (EQUAL, 1, 0, unless_first)]
        program += [(ANSWER, 0, 0, REFUSE)]
    program += [(ANSWER, 0, 0, ALLOW)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(filters))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    no_new_privileges, seccomp, filter_mode = 38, 22, 2
    assert prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert prctl(seccomp, filter_mode, header, 0, 0) == 0, os.strerror(ctypes.get_errno())


def denying(*calls: str) -> list[str]:
    """Return the words before a command in which these calls fail."""
    return [sys.executable, str(Path(__file__)), ",".join(calls)]


if __name__ == "__main__":
    deny(*sys.argv[1].split(","))
    os.execvp(sys.argv[2], sys.argv[2:])
