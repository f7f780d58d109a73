"""Run mpi4py's own tests on the mpi4py front, on 1, 2, 3 and 5 ranks; print the table of docs/mpi4py.md.

    python benchmarks/mpi4py_suite.py [-n RANKS ...] [--write] [test_file.py | test_file.Class.test ...]

Fetches the source distribution of mpi4py from PyPI into the cache folder of ringcomm, once: pip needs some minutes to
read its metadata. Each file of its `test/` runs in a job of its own. A test passes if it passes on all ranks, and fails
if it fails on one or does not finish. It is left out if it skips itself, or if it calls something that the front
refuses with NotImplementedError; the table has the reasons. LEFT_OUT and WITHIN_FILES do not run. Exits with 1 if a
test fails.
"""

import argparse
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import unittest
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from suites.outcomes import ABSENT, FAILED, PASSED, SKIPPED, Outcome, Outcomes, read, row, write

VERSION = "4.1.2"
RANKS = (1, 2, 3, 5)
TIMEOUT = 180.0  # seconds for a file
LEFT_OUT = {
    "intercommunicators": ("cco_buf_inter", "cco_obj_inter", "cco_vec_inter", "comm_inter"),
    "dynamic processes": ("dynproc", "spawn"),
    "files": ("file", "io"),
    "one-sided windows": ("rma", "rma_nb", "win"),
    "sessions": ("session",),
    "partitioned messages": ("p2p_buf_part",),
    "fault tolerance of MPI 5": ("ulfm",),
    "the C interface of MPI": ("cffi", "ctypes", "mpiabi", "mpiapi"),
    "mpi4py.util": ("util_dtlib", "util_pkl5", "util_pool", "util_sync"),
    "the files of the package mpi4py": ("package",),
    "signatures in docstrings, which Cython writes": ("doc",),
}
# Classes and tests of other files that do not run.
WITHIN_FILES = {
    "test_msgspec.TestMessageRMA": "one-sided windows",  # passes without them, since it catches NotImplementedError
    "test_objmodel.TestObjModel.testConstants": "memoryview(MPI.BOTTOM)",  # only C code can make it
}
# What the front refuses, and why tests skip themselves, in plain words.
REASONS = {
    r"mpi-win\b.*|Win": "one-sided windows",
    r"mpi-file|File": "files",
    r"mpi-session|Session": "sessions",
    r"mpi-ext32": "Pack_external",
    r"mpi-world-size<(\d)": r"needs \1 ranks",
    r"cython|_sizeof|_addressof|_handleof|mpi4py.get_include": "the C interface of MPI",
    r"mpi4py.profile.*": "mpi4py.profile",
    r"Op": "Op.toint of user-defined operations",
    r"cupy|numba|dill": r"needs \g<0>",
}
WORST_FIRST = (FAILED, ABSENT, SKIPPED, PASSED)
BEGIN, END = "<!-- suite: benchmarks/mpi4py_suite.py -->\n", "<!-- end of suite -->\n"
PAGE = Path(__file__).parents[1] / "docs" / "mpi4py.md"


# --- The program of a rank --------------------------------------------------------------------------------------------


class RankResult(unittest.TestResult):
    """Appends the outcome of each test that ends to a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._trouble: dict[str, Outcome] = {}

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().stopTest(test)
        write(self._path, test.id(), *self._trouble.pop(test.id(), (PASSED, "")))

    def addError(self, test: unittest.TestCase, err: object) -> None:  # noqa: N802
        self._add(test, err)

    def addFailure(self, test: unittest.TestCase, err: object) -> None:  # noqa: N802
        self._add(test, err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: object) -> None:  # noqa: ARG002, N802
        if err is not None:
            self._add(test, err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self._trouble.setdefault(test.id(), (SKIPPED, reason))

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self._trouble[test.id()] = FAILED, "unexpected success"

    def _add(self, test: Any, err: Any) -> None:
        kind, error, _ = err
        absent = issubclass(kind, NotImplementedError)
        found = (ABSENT, str(error)) if absent else (FAILED, f"{kind.__name__}: {error}")
        if self._trouble.get(test.id(), (PASSED, ""))[0] != FAILED:
            self._trouble[test.id()] = found
        if not isinstance(test, unittest.TestCase):  # the set-up of a class or module, whose tests do not run
            write(self._path, test.id(), *self._trouble.pop(test.id()))


def run_rank(folder: Path, output: Path, names: list[str]) -> None:
    """Run tests, and write their outcomes."""
    for module in ("cupy", "numba"):  # as the suite does unless it is asked for them
        sys.modules[module] = None  # type: ignore[assignment]
    sys.path.insert(0, str(folder))
    from mpi4py import MPI

    tests = unittest.defaultTestLoader.loadTestsFromNames(names)
    path = output.with_suffix(f".{MPI.COMM_WORLD.rank}")
    result = RankResult(path)
    chosen = unittest.TestSuite()
    for test in each_test(tests):
        reason = next((why for name, why in WITHIN_FILES.items() if test.id().startswith(name)), None)
        if reason is None:
            chosen.addTest(test)
        write(path, test.id(), *((FAILED, "did not finish") if reason is None else (ABSENT, reason)))
    chosen.run(result)


def each_test(tests: Iterable[unittest.TestCase | unittest.TestSuite]) -> Iterator[unittest.TestCase]:
    for test in tests:
        if isinstance(test, unittest.TestSuite):
            yield from each_test(test)
        else:
            yield test


# --- The jobs ---------------------------------------------------------------------------------------------------------


def fetch() -> Path:
    """Return the folder of mpi4py's tests."""
    from ringcomm.config import cache_folder

    folder = cache_folder() / "mpi4py"
    if not (folder / f"mpi4py-{VERSION}").exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:"]
        subprocess.run([*command, f"--dest={folder}", f"mpi4py=={VERSION}"], check=True)
        with tarfile.open(folder / f"mpi4py-{VERSION}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return folder / f"mpi4py-{VERSION}" / "test"


def run_tests(folder: Path, names: list[str], ranks: int) -> Outcomes:
    """Run tests in a job; return the worst outcome of each on all ranks."""
    with tempfile.TemporaryDirectory() as temporary:
        output = Path(temporary, "outcomes")
        command = [sys.executable, "-m", "ringcomm", "run", "--mpi4py", "-n", str(ranks), "--", __file__]
        job = subprocess.Popen(
            [*command, "--folder", str(folder), "--output", str(output), *names],
            cwd=temporary,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            trouble = job.communicate(timeout=TIMEOUT)[1]
        except subprocess.TimeoutExpired:
            job.send_signal(signal.SIGTERM)
            trouble = job.communicate()[1] + f"\nended after {TIMEOUT:g} s"
        found: Outcomes = {}
        for rank in range(ranks):
            mine = read(output.with_suffix(f".{rank}"))
            for test, outcome in mine.items() or [(f"rank {rank}", (FAILED, trouble.strip()))]:
                known = found.get(test, outcome)
                found[test] = min(known, outcome, key=lambda each: WORST_FIRST.index(each[0]))
    return found


# --- The table --------------------------------------------------------------------------------------------------------


def table(found: dict[str, dict[int, Outcomes]]) -> str:
    sizes = sorted({ranks for each in found.values() for ranks in each})
    lines = [row("file", *(f"{ranks} rank{'s' * (ranks > 1)}" for ranks in sizes), "left out")]
    lines.append("|---" * (len(sizes) + 2) + "|")
    total: dict[int, Counter[str]] = defaultdict(Counter)
    for name, by_ranks in found.items():
        counts = {ranks: Counter(kind for kind, _ in outcomes.values()) for ranks, outcomes in by_ranks.items()}
        for ranks, count in counts.items():
            total[ranks] += count
        lines.append(row(f"`{name}`", *(cell(counts[ranks]) for ranks in sizes), reasons(by_ranks)))
    lines.append(row("all", *(cell(total[ranks]) for ranks in sizes), ""))
    for reason, names in LEFT_OUT.items():
        files = ", ".join(f"`test_{name}`" for name in names)
        lines.append(row(files, *["–"] * len(sizes), f"{reason}: not run"))
    return "\n".join(lines) + "\n"


def cell(count: Counter[str]) -> str:
    return f"{count[PASSED]} / {count[FAILED]} / {count[ABSENT] + count[SKIPPED]}"


def reasons(by_ranks: dict[int, Outcomes]) -> str:
    """Return why tests are left out, the most frequent reason first."""
    found: Counter[str] = Counter()
    for outcomes in by_ranks.values():
        for kind, reason in outcomes.values():
            if kind in (ABSENT, SKIPPED):
                found[plain(re.split(" is not supported|:", reason)[0].strip())] += 1  # after this: what to use instead
    return "; ".join(reason.replace("|", "\\|") for reason, _ in found.most_common())


def plain(reason: str) -> str:
    """Return a reason in the words of REASONS, else as the test has it."""
    for pattern, words in REASONS.items():
        if match := re.fullmatch(pattern, reason):
            return match.expand(words)
    return reason


def page(text: str, figures: str) -> str:
    """Return the text of the page with this table."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + figures + "\n" + END + rest.partition(END)[2]


def main(names: list[str], sizes: list[int], write: bool) -> int:
    folder = fetch()
    left_out = {f"test_{name}" for files in LEFT_OUT.values() for name in files}
    chosen = [name.removesuffix(".py") for name in names] or [
        path.stem for path in sorted(folder.glob("test_*.py")) if path.stem not in left_out
    ]
    found: dict[str, dict[int, Outcomes]] = {name: {} for name in chosen}
    for name in chosen:
        for ranks in sizes:
            found[name][ranks] = outcomes = run_tests(folder, [name], ranks)
            failed = {test: reason for test, (kind, reason) in outcomes.items() if kind == FAILED}
            print(f"{name} on {ranks} ranks: {len(failed)} of {len(outcomes)} failed", file=sys.stderr, flush=True)
            for test, reason in failed.items():
                print(f"    {test}: {reason}", file=sys.stderr, flush=True)
    made = table(found)
    print(made)
    if write:
        PAGE.write_text(page(PAGE.read_text(), made))
    return any(kind == FAILED for each in found.values() for outcomes in each.values() for kind, _ in outcomes.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="files, classes or tests; default: all")
    parser.add_argument("-n", type=int, nargs="+", default=[*RANKS], metavar="RANKS", help="numbers of ranks")
    parser.add_argument("--write", action="store_true", help="write the table into docs/mpi4py.md")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # these two: this process is a rank
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.output:
        run_rank(arguments.folder, arguments.output, arguments.names)
    else:
        sys.exit(main(arguments.names, arguments.n, arguments.write))
