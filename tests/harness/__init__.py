"""How tests run code on ranks, and what tests must not leave behind.

`run(fn, size, *args)` calls `fn(comm, *args)` on the ranks of a world that serves many tests, as does a test that is
marked with ranks (docs/testing.md). `world(ranks, launcher)` is one that the test may break. `mpi_world` and
`torch_world` run code under MPI and in groups of torch.distributed; `jobs.run_job` runs a program under `ringcomm run`.

Deadlines lie inside each other: an operation (OPERATION), a job (JOB), the test (`timeout` in pyproject.toml), the dump
of all stacks.
"""

from harness.pools import JOB, OPERATION, WORLDS, run
from harness.worlds import world

__all__ = ["JOB", "OPERATION", "WORLDS", "run", "world"]
