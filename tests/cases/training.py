"""The programs of examples/ that train, inside the warm processes of harness.run, which have imported torch."""

import io
import os
import re
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

EXAMPLES = Path(__file__).parents[2] / "examples"
GPT = ["train_gpt.py", "--steps=20", "--hidden=32", "--batch=8", "--context=32", "--micro-batches=2"]
TEXT = ["ddp_text.py", "--steps=40", "--batch=4", "--width=64"]
# One of Gloo's threads can hold the last reference to its group, or wait for the GIL while the group is destroyed: the
# process ends, or hangs. Groups therefore live as long as the process.
KEPT_GROUPS = []


def train(_, program, *options):
    """Run a program in this rank; return what it prints."""
    printed = io.StringIO()
    with redirect_stdout(printed), patch.object(sys, "argv", [program, *options]):
        runpy.run_path(str(EXAMPLES / program), run_name="__main__")
    return printed.getvalue()


def train_together(comm, program, *options):
    """Run a program as torchrun does, in ranks that torchrun has not started."""
    import torch.distributed as dist

    from harness.torch_world import shared_store

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    init_process_group = dist.init_process_group

    def start(backend, **options):
        init_process_group(backend, store=shared_store(comm), rank=comm.rank, world_size=comm.size, **options)
        KEPT_GROUPS.append(dist.group.WORLD)

    launched = {"RANK": str(comm.rank), **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(comm.size))}
    with patch.dict(os.environ, launched), patch.object(dist, "init_process_group", start):
        return train(comm, program, *options)


def refusal(comm, program, *options):
    """Run a program that refuses its options; return the last line that it says."""
    import torch.distributed as dist

    said = io.StringIO()
    try:
        with redirect_stderr(said):
            train_together(comm, program, *options)
    except SystemExit as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        return error.code if isinstance(error.code, str) else said.getvalue().splitlines()[-1]
    raise AssertionError("nothing was refused")


def losses(printed):
    """Return the loss of each step that was printed."""
    found = re.findall(r"^step (\d+)(?:/\d+)?: loss ([\d.]+), .*[\d,]+ tokens/s", printed, re.MULTILINE)
    assert found, printed
    return {int(step): float(loss) for step, loss in found}
