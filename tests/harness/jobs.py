"""Jobs of `ringcomm run` on this machine: a program, started on ranks of its own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from harness import pools


def run_job(folder, ranks, text, *arguments, options=(), status=0, timeout=pools.JOB, **variables):
    """Run a program to its end; return the ended launcher, whose exit status must be this one."""
    path = Path(folder, "program.py")
    path.write_text(textwrap.dedent(text))
    command = [sys.executable, "-P", "-m", "ringcomm", "run", "-n", str(ranks), *options, path, *map(str, arguments)]
    env = os.environ | variables
    ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
    assert ended.returncode == status, ended.stdout + ended.stderr
    return ended
