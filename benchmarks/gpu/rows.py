"""One file of JSON lines for all steps of a run: each row is there as soon as it is printed."""

import json
from pathlib import Path
from typing import Any

__all__ = ["Rows"]


class Rows:
    """Prints rows, and appends them to a file if there is one."""

    def __init__(self, path: Path | None, **every: Any) -> None:
        self._path = path
        self._every = every  # of every row

    def add(self, **row: Any) -> None:
        print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps({**self._every, **row}) + "\n")
