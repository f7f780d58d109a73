"""The programs in examples/ run and give the documented results."""

import os
import re
import subprocess
import sys

import pytest

import harness
from ringcomm.bench.machine import gpus
from training import EXAMPLES, GPT, TEXT, losses, train_together


def program(program, *options, ranks=1):
    """Run a program with torchrun, or alone; return what it prints."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    run = subprocess.run(
        [sys.executable, *(torchrun if ranks > 1 else []), str(EXAMPLES / program), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3 * harness.OPERATION,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_transformer_trained_on_text_reaches_the_same_loss_on_both_backends():
    printed = program(*TEXT, ranks=2)
    assert "2 ranks on ringcomm" in printed
    ours = losses(printed)
    on_gloo = losses(harness.run(train_together, 2, *TEXT, "--backend=gloo")[0])
    assert ours == pytest.approx(on_gloo, rel=1e-3)
    assert [*ours] == [20, 40]
    assert ours[40] < ours[20] < 4.6  # it learns: log(103) is 4.63


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_gpt_on_four_processes_has_the_losses_of_one_also_after_a_checkpoint(tmp_path):
    def together(*options):
        return losses(harness.run(train_together, 4, *GPT, *options)[0])

    alone = losses(program(*GPT, "--plot", str(tmp_path / "loss.png")))
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [*alone] == [*range(2, 21, 2)]
    assert alone[20] < alone[2] < 4.6  # it learns: log(103) is 4.63
    folder = str(tmp_path / "checkpoint")
    begun = together("--dp", "2", "--tp", "2", "--zero", "1", "--steps", "10", "--save", folder)
    assert {step: begun[step] for step in range(2, 11, 2)} == pytest.approx(up_to(10, alone), abs=2e-4)
    other = ["--tp", "2", "--pp", "2", "--schedule", "interleaved", "--chunks", "2", "--sequence-parallel"]
    rest = together(*other, "--backend", "gloo", "--resume", folder)
    assert up_to(10, alone) | rest == pytest.approx(alone, abs=2e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not gpus(), reason="no CUDA device")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("grid", ["--dp 2", "--dp 2 --zero 1", "--tp 2 --sequence-parallel", "--pp 2"])
def test_a_gpt_on_gpus_has_the_losses_of_a_cpu(grid):
    alone, together = program(*GPT), program(*GPT, "--device", "cuda", *grid.split(), ranks=2)
    assert losses(together) == pytest.approx(losses(alone), rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not gpus(), reason="no CUDA device")
@pytest.mark.timeout(180)
def test_a_transformer_trained_on_gpus_has_the_losses_of_cpus():
    ours = losses(program(*TEXT, "--device", "cuda", ranks=2))
    assert ours == pytest.approx(losses(program(*TEXT, ranks=2)), rel=1e-3)


def up_to(last, losses):
    return {step: loss for step, loss in losses.items() if step <= last}


@pytest.mark.slow
@pytest.mark.parametrize(("staleness", "tolerance"), [(0, 1e-3), (3, 0.02)])
def test_parameter_servers_reach_the_accuracy_of_one_process(staleness, tolerance):
    program = "parameter_server.py", "--steps=100", "--staleness", str(staleness)
    printed = "".join(harness.run(train_together, 4, *program))
    together, alone = map(float, re.findall(r"accuracy ([\d.]+)$", printed, re.MULTILINE))
    assert alone > 0.7
    assert together == pytest.approx(alone, abs=tolerance)


@pytest.mark.slow
def test_the_sum_of_arrays_on_gpus_is_correct_on_the_emulated_device():
    command = [sys.executable, "-m", "ringcomm", "run", "-n", "2", EXAMPLES / "gpu_allreduce.py", "--emulated"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=harness.OPERATION)
    assert run.returncode == 0, run.stderr
    assert sorted(re.findall(r"(\d) of 2 on the emulated device$", run.stdout, re.MULTILINE)) == ["1", "2"]
    assert re.search(r"all_reduce of 65,536 bytes: [\d.,]+ us, bus bandwidth [\d.e-]+ GB/s$", run.stdout, re.MULTILINE)
