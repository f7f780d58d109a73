"""Writes the files of a trace by hand, so that each number is known, and runs `ringcomm trace`."""

import json
import struct

import numpy as np

from ringcomm.commands.cli import main
from ringcomm.trace.files import CLOCK, ENTRY, MARK, WAIT, checksums
from ringcomm.trace.recorder import DROPPED, HEADER_BYTES, PIECE_BYTES, VERSION, checksum
from ringcomm.types import COLLECTIVES, DTYPES

TICKS = 3_000_000  # in a millisecond


def entry(signature, start, end, /, **facts):
    row = np.zeros((), ENTRY)
    row["signature"], row["start"], row["end"], row["late"] = signature, start * TICKS, end * TICKS, -1
    for name, value in facts.items():
        row[name] = value
    return summed(row.tobytes())


def summed(data):
    """Return an entry with its checksum."""
    row = np.frombuffer(data, ENTRY).copy()
    row["checksum"] = checksums(row)
    return row.tobytes()


def call(name, start, end, waited=0, **facts):
    """Return an entry; times in ms. Arrays are of float32."""
    signature = COLLECTIVES[name].code | DTYPES["float32"] << 8
    return entry(signature, start, end, waited=waited * TICKS, waited_256=waited * TICKS // 256, **facts)


def wait(start, end):
    return entry(WAIT, start, end)


def mark(name, at):
    return summed(struct.pack("<3Q40s", MARK, at * TICKS, at * TICKS + 1, name.encode()))


def clock(at, ns):
    return entry(CLOCK, at, at + 1e-6, count=ns)


def write(folder, rank, *entries, host="h", behind=0, clocks=(0, 1000), dropped=0, **facts):
    """Write the file of one of two ranks. The clock of its host is `behind`, in ms."""
    facts = {"group": "77", "rank": rank, "size": 2, "job_rank": rank, "pid": rank + 100, **facts}
    facts = {"job": "one", "job_size": facts["size"], "process": f"ns {facts['pid']} 1", **facts}
    facts |= {"version": VERSION, "host": host, "memcpy": 1e-3}
    facts["checksum"] = checksum(facts)
    header = json.dumps(facts).encode().ljust(DROPPED.start) + struct.pack("<Q", dropped)
    assert len(header) == HEADER_BYTES
    looks = [clock(at, int((at + 10_000 - behind) * 1e6)) for at in clocks]
    piece = b"".join([*looks[:1], *entries, *looks[1:]]).ljust(PIECE_BYTES, b"\0")
    number = len([*folder.glob("*.trace")])
    (folder / f"{number}.trace").write_bytes(header + piece)


def run(capsys, *arguments):
    assert main(["trace", *map(str, arguments)]) == 0
    return capsys.readouterr().out
