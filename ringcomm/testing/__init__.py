"""Tests of programs that use ringcomm, and of what extends it.

`run` calls a function on ranks that wait for it; so do tests with `@pytest.mark.ranks(4)`, see docs/testing.md.
`check_transport` is the contract of a transport as a test, `prove` that of an algorithm.
"""

from ringcomm.algorithms.proof import prove
from ringcomm.testing.conformance import check_rank, check_transport
from ringcomm.testing.ranks import run
from ringcomm.testing.threads import connect_threads, run_threads

__all__ = ["check_rank", "check_transport", "connect_threads", "prove", "run", "run_threads"]
