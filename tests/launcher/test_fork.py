"""A fork after init, for example by a DataLoader: the child is no rank and does not disturb its parent."""

import gc
import os
import traceback

import numpy as np
import pytest

from harness.failures import check_usable, raised
from harness.jobs import run_job
from ringcomm import ArgumentError, launch


def in_child(function):
    """Call `function` in a fork of this process; return its traceback, or "" if it returns."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = b""
        try:
            function()
        except BaseException:
            text = traceback.format_exc().encode()
        os.write(write, text[-60_000:])
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        text = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return text


def sum_of_ranks(comm):
    return int(comm.all_reduce(np.array(comm.rank)))


@pytest.mark.ranks(3, world="processes")
def test_a_forked_child_is_no_rank_and_disturbs_no_rank(comm):
    """Fork with a group, a symmetric buffer, queued collectives and messages in flight."""
    group = comm.split(0)
    buffer = group.empty(1000, "float32")
    x = np.ones(300_001)
    pending = group.recv(np.ones(1), (group.rank + 1) % group.size, async_op=True)
    works = [group.all_reduce(x, async_op=True) for _ in range(3)]
    held = [comm, group, pending, *works]

    def child():
        for call in (
            comm.barrier,
            lambda: comm.all_reduce(np.ones(1)),
            lambda: comm.all_reduce(np.ones(1), async_op=True),
            lambda: comm.send(np.ones(1), 0),
            lambda: comm.recv(np.ones(1)),
            lambda: comm.split(0),
            lambda: comm.empty(1, "int8"),
            lambda: comm.broadcast_object("x"),
            lambda: comm.abort("from the child"),
            comm.check,
            comm.report,
            group.barrier,
            pending.wait,
        ):
            assert "after a fork" in str(raised(ArgumentError, call))
        with pytest.raises(ValueError, match="in the block"), group:
            raise ValueError("in the block")
        group.close()
        buffer[:] = buffer + 0  # the memory is still mapped
        while held:
            del held[-1]
        gc.collect()
        sums = launch(sum_of_ranks, 3, world="threads")  # its own world
        assert sums == [3, 3, 3]

    failure = in_child(child)
    assert not failure, failure
    group.send(np.ones(1), (group.rank - 1) % group.size)
    pending.wait()
    for work in works:
        work.wait()
    assert (x == group.size**3).all()
    buffer[:] = 1
    group.all_reduce(buffer)
    assert (buffer == group.size).all()
    group.barrier()
    check_usable(group)
    group.close()
    check_usable(comm)


PROGRAM = """
import os, sys
import numpy as np, ringcomm

def work():
    assert comm.rank >= 0
    try:
        comm.barrier()
    except ringcomm.ArgumentError as error:
        os.write(1, b"refused\\n")  # one write: children print at the same time

with ringcomm.init(timeout=20) as comm:
    x = comm.empty(1000, "float32")
    work_of_parent = comm.recv(np.ones(1), 1 - comm.rank, async_op=True)
    if sys.argv[1] == "exit":
        pid = os.fork()
        if pid == 0:
            work()
            sys.exit(0)  # leaves the block by an exception and runs the exit handlers
        assert os.waitpid(pid, 0)[1] == 0
    else:
        import torch
        class Squares(torch.utils.data.Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, index):
                if index == 0:
                    work()
                return index * index
        loader = torch.utils.data.DataLoader(Squares(), num_workers=2, multiprocessing_context="fork")
        for _ in range(2):
            total = torch.stack(list(loader)).sum().reshape(1)
            comm.all_reduce(total)
            assert total.item() == 2 * 140
    x[:] = comm.rank
    comm.all_reduce(x)
    assert (x == 1).all()
    comm.send(np.ones(1), 1 - comm.rank)
    work_of_parent.wait()
    comm.barrier()
print("done", comm.rank, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "refusals"), [("exit", 1), ("loader", 2)])
def test_children_that_exit_normally_do_not_disturb_the_ranks(how, refusals, tmp_path):
    if how == "loader":
        pytest.importorskip("torch")
    ended = run_job(tmp_path, 2, PROGRAM, how, options=("--bind=none",))
    assert ended.stderr == ""
    for rank in range(2):
        lines = [line for line in ended.stdout.splitlines() if line.startswith(f"[{rank}]")]
        assert lines == [f"[{rank}] refused"] * refusals + [f"[{rank}] done {rank}"]
