"""Zero the machine code of all other architectures in libnccl.so.2, so that it compresses to a tenth.

python benchmarks/gpu/trim_nccl.py LIBRARY TRIMMED 90

The sections hold containers of nvcc ("fatbins"): a header, then entries with their own headers and payloads.
"""

import struct
import sys
from pathlib import Path

__all__ = ["trim"]

SECTIONS = (".nv_fatbin", "__nv_relfatbin")
MAGIC = 0xBA55ED50
ELF = 2  # the kind of an entry that holds machine code; others hold PTX


def trim(data: bytearray, architecture: int) -> tuple[int, int]:
    """Zero them in place; return the bytes of payload that are kept, and those that are zeroed."""
    kept = zeroed = 0
    for at, end in sections(data):
        while at + 16 <= end:
            magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
            if magic != MAGIC:
                at += 8
                continue
            entry, at = at + header, at + header + size
            while entry < at:
                kind, _, entry_header, payload = struct.unpack_from("<HHIQ", data, entry)
                (built_for,) = struct.unpack_from("<I", data, entry + 28)
                begin = entry + entry_header
                if kind == ELF and built_for == architecture:
                    kept += payload
                else:
                    zeroed += payload
                    data[begin : begin + payload] = bytes(payload)
                entry = begin + payload
            if entry != at or at > end:
                raise ValueError(f"entries end at {entry:#x}, their container at {at:#x}: an unknown format")
    return kept, zeroed


def sections(data: bytearray) -> list[tuple[int, int]]:
    """Return the bytes of the sections that hold containers."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, number, names_index = struct.unpack_from("<HHH", data, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(number)]
    names = rows[names_index][4]

    def name(offset: int) -> str:
        return data[names + offset : data.index(0, names + offset)].decode()

    return [(row[4], row[4] + row[5]) for row in rows if name(row[0]) in SECTIONS]


if __name__ == "__main__":
    library, trimmed, architecture = sys.argv[1:]
    code = bytearray(Path(library).read_bytes())
    kept, zeroed = trim(code, int(architecture))
    if not kept:
        sys.exit(f"{library} has no code for sm_{architecture}")
    Path(trimmed).write_bytes(code)
    print(f"kept {kept:,} bytes for sm_{architecture}, zeroed {zeroed:,}")
