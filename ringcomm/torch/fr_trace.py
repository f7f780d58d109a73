"""`python -m ringcomm.torch.fr_trace FOLDER`: torch's fr_trace for what its FlightRecorderHook has recorded.

The hook serves every backend from torch 2.14 on, but records `c10d:allreduce` where fr_trace reads `gloo:all_reduce`,
an array that is read and written as an input only, and no peer of a message, which is left out here.
"""

import math
import sys
from pathlib import Path
from typing import Any

from torch.distributed.flight_recorder import fr_trace

__all__ = ["main", "readable"]

tool: Any = fr_trace  # which exports nothing but main

MESSAGES = "c10d:send", "c10d:recv"
NAMES = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}

Entry = dict[str, Any]


def main() -> None:
    """Run fr_trace with the arguments of the command line."""
    folder = next((each for each in sys.argv[1:] if not each.startswith("-")), "")
    if not (folder and Path(folder).is_dir() and any(Path(folder).iterdir())):
        sys.exit(
            f"python -m ringcomm.torch.fr_trace FOLDER: expected a folder with the record of each rank, got {folder!r}"
        )
    theirs = tool.read_dir

    def read_dir(args: Any) -> Any:
        details, version = theirs(args)
        for rank in details.values():
            rank["entries"] = [readable(entry) for entry in rank["entries"] if entry["profiling_name"] not in MESSAGES]
        return details, version

    tool.read_dir = read_dir
    tool.main()


def readable(entry: Entry) -> Entry:
    """Return a collective of the hook as fr_trace reads it, each side as one array, and any other entry as it is."""
    recorder, _, name = entry["profiling_name"].partition(":")
    if recorder != "c10d":
        return entry
    inputs = _one_array(entry["input_sizes"]), entry["input_dtypes"][:1]
    outputs = _one_array(entry["output_sizes"]), entry["output_dtypes"][:1]
    if not outputs[0]:
        outputs = inputs
    sides = {
        "input_sizes": inputs[0],
        "input_dtypes": inputs[1],
        "output_sizes": outputs[0],
        "output_dtypes": outputs[1],
    }
    return entry | sides | {"profiling_name": f"gloo:{NAMES.get(name, name)}"}


def _one_array(shapes: list[list[int]]) -> list[list[int]]:
    return [[sum(map(math.prod, shapes))]] if shapes else []


if __name__ == "__main__":
    main()
