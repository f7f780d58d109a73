"""A store of torch.distributed that cannot be opened where the environment says is an error of one sentence."""

import re
import subprocess
import sys

import pytest

import harness

PROGRAM = """
import os, socket, ringcomm

def start(rank, port):
    place = dict(RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        ringcomm.init(config=ringcomm.Config(start_timeout=1.0))
    except ringcomm.RingcommError as error:
        print(type(error).__name__, error, flush=True)

start(0, "many")
with socket.create_server(("", 0)) as taken:
    start(0, taken.getsockname()[1])
with socket.socket() as reserved:  # nothing listens there
    reserved.bind(("127.0.0.1", 0))
    start(1, reserved.getsockname()[1])
"""


@pytest.mark.slow
def test_no_number_a_port_in_use_and_a_rank_0_that_does_not_come_are_named():
    pytest.importorskip("torch")
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=harness.JOB)
    for line, (kind, reason) in zip(
        ended.stdout.splitlines(),
        [("ArgumentError", "many"), ("ArgumentError", "port: .*"), ("CollectiveTimeout", "timed out")],
        strict=True,
    ):
        text = rf"{kind} (timed out: )?cannot open the store of torch.distributed at 127\.0\.0\.1:\w+: .*{reason}.*"
        assert re.fullmatch(text, line), ended
