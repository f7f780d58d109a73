"""Outcomes of another project's tests: a process appends each to a file, which has them even if a later test kills it.

With `-p outcomes`, pytest writes the file that SUITE_OUTCOMES names, and runs only tests which that file does not have.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # which only pytest itself imports
    import pytest

PASSED, FAILED, ABSENT, SKIPPED, UNFINISHED = "passed", "failed", "left out", "skipped", "not finished"
THE_FILE = "the file"  # in place of a test: what happens to a file before its tests run

Outcome = tuple[str, str]  # one of these kinds, and why
Outcomes = dict[str, Outcome]  # by test


def write(path: Path, test: str, kind: str, reason: str = "") -> None:
    with path.open("a") as file:
        file.write(json.dumps((test, kind, reason)) + "\n")


def read(path: Path) -> Outcomes:
    """Return what a process has written; of a test that has ended, the later line is its outcome."""
    return dict(_lines(path)) if path.exists() else {}


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _lines(path: Path) -> Iterator[tuple[str, Outcome]]:
    for line in path.read_text().splitlines():
        test, kind, reason = json.loads(line)
        yield test, (kind, reason)


# --- pytest -----------------------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Writer(Path(os.environ["SUITE_OUTCOMES"])))


class _Writer:
    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        known = read(self._path)
        items[:] = [item for item in items if _name(item.nodeid) not in known]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            write(self._path, _name(report.nodeid), report.outcome, _reason(report))

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        left = isinstance(excinfo.value, SystemExit) and not excinfo.value.code  # how a file leaves its tests out
        write(self._path, THE_FILE, SKIPPED if left else FAILED, excinfo.exconly())

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        write(self._path, _name(nodeid), UNFINISHED)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test has three reports: before, of and after its call. It passes if all do, and so do its subtests.
        test = _name(report.nodeid)
        if (report.when == "call" or not report.passed) and read(self._path)[test][0] != FAILED:
            write(self._path, test, report.outcome, _reason(report))

    def pytest_sessionfinish(self) -> None:
        self._path.with_suffix(".ended").touch()


def _name(node: str) -> str:
    return node.partition("::")[2].replace("::", ".") or THE_FILE


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
