"""Run PyTorch's own tests of torch.distributed on Gloo and on ringcomm; print the table of docs/torch.md.

    python benchmarks/torch_suite.py PYTORCH/test/distributed [-k WORDS] [test_functional_api.py | tensor | ...]

PYTORCH is a checkout of PyTorch, best of the version that is installed. Its tests need expecttest and hypothesis. They
name Gloo, so a process of the tests gets ringcomm wherever it makes a group on Gloo, also where it names no backend;
tests that call ProcessGroupGloo itself stay on Gloo. Each file runs once on each, in a pytest of its own. A test during
which that ends, or writes nothing for a time, is not finished, and another pytest goes on behind it.

The table has a row for each file or folder that is named. "In a group" are the tests that pass on ringcomm and have
been seen to make a group; where tests share processes, that is the first of them. Exits with 1 if a test passes on Gloo
alone.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from suites.outcomes import FAILED, PASSED, SKIPPED, THE_FILE, UNFINISHED, Outcome, Outcomes, read, row, write

BACKENDS = ("gloo", "ringcomm")
NEEDED = ("torch", "pytest", "expecttest", "hypothesis", "ringcomm")
LEFT_OUT = ("nccl", "ucc", "nvshmem", "cupy", "rpc", "bin")  # of other libraries; programs that tests start
PLUGINS = Path(__file__).parent / "suites"


class Compared(NamedTuple):
    gloo: Outcomes
    ringcomm: Outcomes
    grouped: set[str]  # the tests that made a group on ringcomm, and passed

    def differences(self) -> Iterator[tuple[str, str, str]]:
        """Yield each test whose outcomes differ, and its kind of outcome on Gloo and on ringcomm."""
        for test in {**self.gloo, **self.ringcomm}:
            ended = [found.get(test, (UNFINISHED, ""))[0] for found in (self.gloo, self.ringcomm)]
            if ended[0] != ended[1]:
                yield test, ended[0], ended[1]


def compare(file: Path, words: str, timeout: float) -> Compared:
    """Run a file on both backends, and print how its tests end."""
    (gloo, _), (ringcomm, grouped) = (run_file(file, backend, words, timeout) for backend in BACKENDS)
    passed = {test for test, (kind, _) in ringcomm.items() if kind == PASSED}
    found = Compared(gloo, ringcomm, grouped & passed)
    on_gloo, on_ringcomm = counts(gloo.values()), counts(ringcomm.values())
    say(f"{file.name}: {on_gloo} on Gloo; {on_ringcomm} on ringcomm, {len(found.grouped)} in a group")
    for test, on_gloo, on_ringcomm in found.differences():
        reason = ringcomm.get(test, ("", ""))[1] or gloo.get(test, ("", ""))[1]
        say(f"    {test}: {on_gloo} on Gloo, {on_ringcomm} on ringcomm: {last_line(reason)}")
    return found


def run_file(file: Path, backend: str, words: str, timeout: float) -> tuple[Outcomes, set[str]]:
    """Return the outcomes of the tests of a file on a backend, and the tests that made a group."""
    root = next(folder for folder in file.parents if not Path(folder, "__init__.py").exists())  # of its package
    with tempfile.TemporaryDirectory() as folder:
        record, groups = Path(folder, "outcomes"), Path(folder, "groups")
        record.touch()
        groups.touch()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(PLUGINS), str(root), os.environ.get("PYTHONPATH")])),
            "SUITE_MODULE": ".".join(file.relative_to(root).with_suffix("").parts),
            "SUITE_OUTCOMES": str(record),
            "SUITE_GROUPS": str(groups),
            "SUITE_BACKEND": backend,
            "OMP_NUM_THREADS": "1",
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(int(timeout / 2)),  # of the processes that a test starts
            "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
        }
        if file.stem == "test_distributed_spawn":  # it takes these from PyTorch's run_test.py
            environment |= {"BACKEND": "gloo", "WORLD_SIZE": "3", "TEMP_DIR": folder}
            for name in ("barrier", "test_dir"):
                Path(folder, name).mkdir()
        while not record.with_suffix(".ended").exists():
            known = len(read(record))
            run_pytest(file, words, environment, record, timeout)
            if len(read(record)) == known and not record.with_suffix(".ended").exists():
                write(record, THE_FILE, UNFINISHED)
                break
        return read(record), set(groups.read_text().splitlines())


def run_pytest(file: Path, words: str, environment: dict[str, str], record: Path, timeout: float) -> None:
    """Run tests of a file until they end, or have written no outcome for that long."""
    command = [sys.executable, "-m", "pytest", "-p", "outcomes", "-p", "no:cacheprovider", "--tb=native", "-k", words]
    tests = subprocess.Popen(
        [*command, file.name],
        cwd=file.parent,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    written = -1
    try:
        while tests.poll() is None and record.stat().st_size > written:
            written = record.stat().st_size
            with suppress(subprocess.TimeoutExpired):
                tests.wait(timeout)
    finally:
        with suppress(ProcessLookupError):  # also for processes that a test has left behind
            os.killpg(tests.pid, signal.SIGKILL)
        tests.wait()


# --- The table --------------------------------------------------------------------------------------------------------


def table(found: dict[str, list[Compared]]) -> str:
    """Return a row for each name, given what was compared in its files."""
    lines = [row("tests", "files", "on Gloo", "on ringcomm", "in a group", "differ"), "|---" * 6 + "|"]
    for name, files in found.items():
        gloo = counts(outcome for file in files for outcome in file.gloo.values())
        ringcomm = counts(outcome for file in files for outcome in file.ringcomm.values())
        grouped = sum(len(file.grouped) for file in files)
        differ = sum(1 for file in files for _ in file.differences())
        lines.append(row(f"`{name}`", str(len(files)), gloo, ringcomm, str(grouped), str(differ)))
    return "\n".join(lines)


def counts(outcomes: Iterable[Outcome]) -> str:
    count = Counter(kind for kind, _ in outcomes)
    return ", ".join(f"{count[kind]} {kind}" for kind in (PASSED, SKIPPED, FAILED, UNFINISHED) if count[kind]) or "none"


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def tests_in(path: Path, folder: Path) -> list[Path]:
    """Return the files of tests that a name stands for."""
    if path.is_file():
        return [path]
    return [
        each
        for each in sorted(path.rglob("test_*.py"))
        if not any(word in part for part in each.relative_to(folder).parts for word in LEFT_OUT)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="PYTORCH/test/distributed")
    parser.add_argument("names", nargs="*", default=["."], metavar="NAME", help="files and folders in it; default: all")
    parser.add_argument("-k", default="", metavar="WORDS", help="which of their tests, as pytest has it")
    parser.add_argument("--timeout", type=float, default=300, help="for a test, in seconds; default: %(default)s")
    arguments = parser.parse_args()
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        parser.error(f"{sys.executable} has no {', '.join(missing)}: pip install {' '.join(missing)}")
    files = {name: tests_in(arguments.folder / name, arguments.folder) for name in arguments.names}
    for name, found in files.items():
        if not found:
            parser.error(f"no test_*.py at {arguments.folder / name}: expected PyTorch's folder test/distributed")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which ends the tests too
    compared = {
        name: [compare(file, arguments.k, arguments.timeout) for file in found] for name, found in files.items()
    }
    print(table(compared))
    return any(
        on_gloo == PASSED for files in compared.values() for file in files for _, on_gloo, _ in file.differences()
    )


if __name__ == "__main__":
    sys.exit(main())
