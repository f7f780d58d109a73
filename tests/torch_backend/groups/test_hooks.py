"""The hooks of torch 2.14 before and after calls and before an abort, and the flight recorder that sits on them."""

import logging
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import harness
from harness import torch_world
from harness.failures import raised
from ringcomm import Aborted, ArgumentError, CollectiveTimeout, MismatchError
from ringcomm.torch import fr_trace

c10d = torch._C._distributed_c10d
CPU = torch.device("cpu")


def hooked(group, log):
    """Note the calls of all hooks of a group."""
    group.register_pre_hook(1, lambda args: log.append(("pre", args.name.name, args.op_id)))
    group.register_post_hook(1, lambda args: log.append(("post", args.name.name, args.op_id)))
    group.register_abort_hook(1, lambda: log.append("abort"))


@torch_world.through_cpp
@torch_world.on(2)
def test_hooks_run_before_and_after_each_call_that_was_made_in_order():
    group, log = dist.new_group(timeout=timedelta(seconds=0.3)), []
    hooked(group, log)
    rank, x = dist.get_rank(), torch.ones(3)
    dist.all_reduce(x, group=group)
    dist.broadcast(x, 1, group=group, async_op=True).wait()
    raised(MismatchError, lambda: dist.all_reduce(torch.ones(3 + rank), group=group))
    raised(ArgumentError, lambda: dist.all_reduce(x, dist.ReduceOp.BAND, group=group))  # is not made
    if rank == 0:
        raised(CollectiveTimeout, lambda: dist.all_reduce(x, group=group))
    else:
        raised(CollectiveTimeout, lambda: dist.recv(x, 0, group=group))
    made = [("ALLREDUCE", 0), ("BROADCAST", 1), ("ALLREDUCE", 2)]
    expected = [(when, *call) for call in made for when in ("pre", "post")]
    last = (
        [("pre", "ALLREDUCE", 4), "abort", ("post", "ALLREDUCE", 4)]  # it blocks
        if rank == 0
        else [("pre", "RECV", 4), ("post", "RECV", 4), "abort"]  # its work is waited for
    )
    assert log == [*expected, ("pre", "ALLREDUCE", 3), *last]


@torch_world.through_cpp
@torch_world.on(2)
def test_a_hook_before_a_call_may_refuse_it():
    group = dist.new_group()
    hook = c10d.NanCheckHook.attach(group)
    with pytest.raises(RuntimeError, match="NaN found in input tensor"):
        dist.all_reduce(torch.tensor([float("nan")]), group=group)
    hook.remove()
    dist.all_reduce(x := torch.ones(2), group=group)
    assert x.tolist() == [2.0] * 2


@torch_world.on(2)
def test_abort_hooks_run_once_in_order_and_one_that_raises_is_named():
    group, log, lines = dist.new_group(), [], []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    backend = group._get_backend(CPU)
    backend.registerAbortHook(7, lambda: log.append("first"))
    backend.registerAbortHook(3, lambda: 1 / 0)
    backend.registerAbortHook(5, lambda: log.append("last"))
    backend.registerAbortHook(4, lambda: log.append("not any more"))
    backend.unregisterAbortHook(4)
    logger = logging.getLogger("ringcomm")
    logger.addHandler(handler)
    try:
        if dist.get_rank() == 0:
            backend.abort()
        else:
            raised(Aborted, lambda: dist.all_reduce(torch.ones(1), group=group))
        raised(Aborted, lambda: dist.all_reduce(torch.ones(1), group=group))
    finally:
        logger.removeHandler(handler)
    assert log == ["first", "last"]
    (line,) = lines
    assert line == f"the abort hook 3 of the group {group.group_name!r} raised ZeroDivisionError('division by zero')"


# --- The flight recorder ----------------------------------------------------------------------------------------------


def recorded(folder):
    """Make calls, for the last of which rank 2 is late; the abort hook saves the record of each rank."""
    group, rank = dist.new_group(timeout=timedelta(seconds=0.5)), dist.get_rank()
    recorder = c10d.FlightRecorderHook.attach(group)
    group.register_abort_hook(1, lambda: Path(folder, f"rank_{rank}").write_bytes(c10d._dump_fr_trace()))
    x, out = torch.ones(4), torch.empty(16)
    dist.all_reduce(x, group=group)
    dist.all_gather_into_tensor(out, x, group=group)
    dist.all_gather([torch.empty(4) for _ in range(4)], x, group=group)
    dist.reduce_scatter_tensor(x, out, group=group)
    dist.scatter(x, [x.clone() for _ in range(4)] if rank == 0 else None, 0, group=group)
    dist.barrier(group=group)
    if rank == 0:
        dist.send(x, 1, group=group)
    elif rank == 1:
        dist.recv(x, 0, group=group)
    if rank != 2:
        raised(CollectiveTimeout, lambda: dist.all_reduce(torch.ones(8), group=group))
    dist.barrier()
    if rank == 2:
        group.abort()
    recorder.remove()


@torch_world.through_cpp
def test_torchs_tool_names_the_late_rank(tmp_path):
    with harness.world(4) as pool:  # of processes that have recorded nothing
        pool.run(torch_world.within, ("ringcomm", harness.OPERATION, recorded, (str(tmp_path),)))
    command = [sys.executable, "-m", "ringcomm.torch.fr_trace", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Not all ranks joining collective") == 1, done.stderr
    assert "collective: gloo:all_reduce\nmissing ranks: {2}\n" in done.stderr


def test_a_recorded_collective_has_one_array_on_each_side():
    entry = {
        "profiling_name": "c10d:allgather",
        "input_sizes": [[2, 3]],
        "input_dtypes": ["Float"],
        "output_sizes": [[2, 3], [2, 3]],
        "output_dtypes": ["Float", "Float"],
        "is_p2p": False,
    }
    sides = {"input_sizes": [[6]], "output_sizes": [[12]], "output_dtypes": ["Float"]}
    assert fr_trace.readable(entry) == entry | sides | {"profiling_name": "gloo:all_gather"}
    assert fr_trace.readable(own := entry | {"profiling_name": "gloo:send 0->1"}) is own
    in_place = entry | {"profiling_name": "c10d:broadcast", "output_sizes": [], "output_dtypes": []}
    assert fr_trace.readable(in_place)["output_sizes"] == [[6]]
