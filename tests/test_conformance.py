"""The contract of a transport between processes and in groups; test_testing.py has it between threads."""

import pytest

import harness
from ringcomm.testing import CHECKS


def check_in_group(comm, name):
    check = next(check for check in CHECKS if check.__name__ == name)
    with comm.split(0, key=-comm.rank) as group:
        check(group)
    comm.barrier()  # whatever the check did to its group


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_a_group_of_processes_keeps_the_contract(name, size):
    harness.run(check_in_group, size, name)
