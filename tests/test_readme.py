"""The README tells the truth: its example runs and prints what it says, its commands are the ones CI runs."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_the_example_prints_what_the_readme_shows(tmp_path):
    example, shown = blocks("python")[0], blocks("text")[0]
    (tmp_path / "sum.py").write_text(example)
    command = re.search(r"`(ringcomm run .*?)`", README)[1].split()
    run = subprocess.run([sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert run.returncode == 0, run.stderr
    printed = [re.sub(r"^\W*\d+\W+(?=rank)", "", line) for line in run.stdout.splitlines()]
    assert sorted(printed) == shown.splitlines()


def test_there_are_two_commands_and_ci_runs_them():
    install, test = blocks("sh")
    assert install.startswith("python3 -m venv")
    assert test.strip().endswith("pytest")
    script = (ROOT / ".ci" / "run").read_text()
    extract = re.search(r"^readme\(\).*$", script, re.MULTILINE)[0]
    for number, command in ((1, install), (2, test)):
        assert f'"$(readme sh {number})"' in script
        shell = ["bash", "-c", f"{extract}\nreadme sh {number}"]
        assert subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, check=True).stdout == command


def test_every_link_leads_to_a_file():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_its_figures_are_those_of_the_runs_that_are_kept(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    lead = importlib.import_module("lead")
    folder = ROOT / re.search(r"\]\((benchmarks/results/\S+)/all_reduce-2.png\)", README)[1]
    kept = (folder / "lead.md").read_text()
    assert kept == lead.report([lead.read(run) for run in sorted(folder.glob("run-*"))])
    table = re.findall(r"^\|.*$", README.partition("## Speed")[2].partition("\n## ")[0], re.MULTILINE)
    assert len(table) >= 4
    assert set(table) <= set(kept.splitlines())
