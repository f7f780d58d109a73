"""The README is true: its example prints the output it shows, and its commands are those of CI."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "program", "module"),
    [(0, "sum.py", "ringcomm run"), (1, "sum_torch.py", "torchrun")],
    ids=["ringcomm", "torch"],
)
def test_an_example_prints_what_the_readme_shows(tmp_path, number, program, module):
    example, shown = blocks("python")[number], blocks("text")[number]
    (tmp_path / program).write_text(example)
    words = re.search(rf"`({module} .*?)`", README)[1].split()
    command = ["torch.distributed.run", *words[1:]] if module == "torchrun" else words
    run = subprocess.run([sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert run.returncode == 0, run.stderr
    # Under torchrun two ranks may write into one line.
    printed = re.findall(r"rank .*?(?=rank|$)", run.stdout, re.MULTILINE)
    assert sorted(printed) == shown.splitlines()


def test_there_are_two_commands_and_ci_runs_them():
    install, test = blocks("sh")
    assert install.startswith("python3 -m venv")
    assert test.strip().endswith("/pytest -n 3 --dist loadfile")
    script = (ROOT / ".ci" / "run").read_text()
    extract = re.search(r"^readme\(\).*$", script, re.MULTILINE)[0]
    for number, command in ((1, install), (2, test)):
        assert f'"$(readme sh {number})"' in script
        shell = ["bash", "-c", f"{extract}\nreadme sh {number}"]
        assert subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, check=True).stdout == command


@pytest.mark.slow
def test_the_example_of_the_gpu_page_runs_on_the_emulated_device(tmp_path):
    example = re.search(r"^```python\n(.*?)^```$", (ROOT / "docs" / "gpu.md").read_text(), re.DOTALL | re.MULTILINE)[1]
    for cupy, emulated in (
        ("import cupy\n", "from ringcomm.devices import emulated as cupy\n"),
        (", cupy.cuda.Device(comm.rank)", ""),
        ("cupy.full(1_000_000, comm.rank + 1, ", "cupy.array([comm.rank + 1] * 1000, "),
    ):
        assert cupy in example
        example = example.replace(cupy, emulated)
    (tmp_path / "sum_gpu.py").write_text(example)
    command = [sys.executable, "-m", "ringcomm", "run", "-n", "2", "sum_gpu.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.split()) == ["3.0", "3.0", "[0]", "[1]"]
