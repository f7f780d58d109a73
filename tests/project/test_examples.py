"""The programs in examples/ run and give the documented results."""

import os
import re
import runpy
import subprocess
import sys
from contextlib import closing
from functools import cache
from unittest.mock import patch

import pytest

import harness
from cases.training import EXAMPLES, GPT, TEXT, losses, refusal, train, train_together
from harness.nodes import Job, finish
from ringcomm.bench.machine import gpus


def program(program, *options, ranks=1):
    """Run a program with torchrun, or alone; return what it prints."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    run = subprocess.run(
        [sys.executable, *(torchrun if ranks > 1 else []), str(EXAMPLES / program), *options],
        capture_output=True,
        text=True,
        timeout=3 * harness.OPERATION,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def threads_after(comm, *arguments):
    """Run a program whose user has set the number of threads; return what it leaves."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with patch.dict(os.environ, {"OMP_NUM_THREADS": "3"}):
            train_together(comm, *arguments)
        return torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("arguments", [GPT, TEXT], ids=["gpt", "text"])
def test_programs_leave_the_number_of_threads_to_the_user(arguments):
    assert harness.run(threads_after, 1, *arguments, "--steps=1") == [3]


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("", "--dp=2 --zero=2"),
        ("", "--dp=2 --zero=3"),
        ("--experts=4 --micro-batches=4", "--dp=2 --zero=3 --micro-batches=2"),
        ("", "--dp=2 --zero=1 --offload=."),
        ("", "--cp=2"),
        ("", "--cp=2 --context-parallel=ulysses"),
        ("", "--tp=2 --recompute=sharded"),
        ("", "--pp=2 --schedule=zb-h1"),
        ("", "--pp=2 --schedule=zbv"),
        ("--kv-heads=2 --ffn=48", "--tp=2 --sequence-parallel --recompute=selective"),
        ("--experts=4 --micro-batches=4", "--dp=2 --ep=2 --micro-batches=2"),  # the same tokens in a call
    ],
)
def test_every_option_has_the_losses_of_one_process(model, options):
    together = harness.run(train_together, 2, *GPT, "--steps=3", *f"{model} {options}".split())[0]
    assert losses(together) == pytest.approx(losses_alone(model), abs=2e-4)


@cache
def losses_alone(model):
    found = losses(harness.run(train, 1, *GPT, "--steps=3", *model.split())[0])
    assert [*found] == [1, 2, 3]
    return found


def skipped(_):
    """Return what a step of stage 3 answers to a gradient that is not finite, and whether it changed a parameter."""
    import torch

    program = runpy.run_path(str(EXAMPLES / "train_gpt.py"))
    torch.distributed.init_process_group("ringcomm", store=torch.distributed.HashStore(), rank=0, world_size=1)
    grid = program["Grid"]()
    (chunk,) = program["gpt_stages"](program["GPTConfig"](8, 4, 1, 4, 1), grid)
    trainer = program["FullySharded"]([chunk], grid, torch.optim.SGD, torch.float32)
    found = []
    for value in (float("inf"), 1.0):
        before = [parameter.to_local().clone() for parameter in chunk.parameters()]
        for parameter in chunk.parameters():
            parameter.grad = torch.full_like(parameter, value)
        answer, after = trainer.step(1.0), [parameter.to_local() for parameter in chunk.parameters()]
        found.append((answer is None, all(map(torch.equal, before, after))))
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.slow
def test_stage_3_skips_a_step_whose_gradients_are_not_finite():
    assert harness.run(skipped, 1) == [[(True, True), (False, False)]]


def threads(comm, ranks):
    """Return how many threads the program has alone, if torchrun has started `ranks` on the machine."""
    import torch

    with patch.dict(os.environ, LOCAL_WORLD_SIZE=str(ranks)), patch.object(torch, "get_num_threads", lambda: 6):
        del os.environ["OMP_NUM_THREADS"]
        train(comm, *GPT, "--steps=1")
    return torch.get_num_threads()


@pytest.mark.slow
def test_the_ranks_of_a_machine_divide_its_cores():
    assert [harness.run(threads, 1, ranks) for ranks in (1, 2, 12)] == [[6], [3], [1]]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_wrong_folders_and_numbers_are_refused_in_a_sentence(tmp_path):
    missing, folder = str(tmp_path / "missing"), str(tmp_path / "checkpoint")
    (text,) = harness.run(refusal, 1, *GPT, "--offload", missing)
    assert text == f"train_gpt.py: error: --offload: expected a folder that exists, got {missing}"
    file = tmp_path / "file"
    file.touch()
    for options, expected in {
        "--dp=0": "argument --dp: expected at least 1, got 0",
        "--dp=2 --cp=2": "--dp, --tp, --pp, --cp: expected a product of 1, the number of ranks, got 4",
        "--batch=9": "--batch: expected a multiple of --dp · --accumulate · --micro-batches = 2, got 9",
        "--zero=3 --chunks=2 --schedule=zbv": "--zero 3: expected --dp and --pp .* got --chunks 2 --schedule zbv",
        "--context=1000000": r"--context: expected at most \d+, got 1000000",
        f"--save={file}": f"--save: expected a folder, got {file} .*",
    }.items():
        (text,) = harness.run(refusal, 1, *GPT, *options.split())
        assert re.fullmatch(f"train_gpt.py: error: {expected}", text)
    harness.run(train_together, 1, *GPT, "--steps=1", "--layers=1", "--save", folder)
    (text,) = harness.run(refusal, 1, *GPT, "--layers=2", "--resume", folder)
    start = f"--resume: checkpoint {folder}: expected the 32 parameters of this model, got 18, "
    assert re.fullmatch(re.escape(start) + r"without blocks\.1\.\S+ and 13 more", text)
    texts = harness.run(refusal, 2, "parameter_server.py", "--servers=2")
    assert texts == ["parameter_server.py: error: --servers: expected 1 to 1 of 2 ranks, got 2"] * 2


def trained_elastic(folder, ranks, *options):
    """Train on so many ranks of each simulated host; return the loss and what was written."""
    with closing(Job(folder, len(ranks))) as job:
        path = str(EXAMPLES / "train_elastic.py")
        starts = [(n, number, path, "--respawn=100") for n, number in enumerate(ranks)]
        hosts = [job.start(*each, arguments=("--steps=20", *options), host_id=str(each[0])) for each in starts]
        ended = [finish(each) for each in hosts]
    text = "".join("\n".join([*out, err]) for _, out, err in ended)
    assert [status for status, _, _ in ended] == [0] * len(ranks), text
    (loss,) = re.findall(r"\] 20 steps, 240 sequences, loss (.+)", text)
    return float(loss), text


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_training_on_ranks_that_die_and_come_back_loses_no_step(tmp_path):
    loss, text = trained_elastic(tmp_path, (1, 1), "--kill-every=0.05")
    assert "was killed by SIGALRM; restarted" in text
    assert "frame #0" not in text  # the stack of a C++ error
    assert loss == pytest.approx(trained_elastic(tmp_path, (1,), "--kill-every=0")[0], abs=1e-3)


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


def served(ranks, *options):
    """Run the program that serves a small random Llama; return its exit status, and what it prints."""
    sizes = ["--layers=2", "--hidden=64", "--heads=8", "--kv-heads=2", "--inner=96", "--vocab=101", "--context=64"]
    command = [sys.executable, "-m", "ringcomm", "run", "-n", str(ranks), EXAMPLES / "serve_llama.py", *sizes, *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=harness.OPERATION)
    return run.returncode, run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_llama_on_several_ranks_says_what_it_says_on_one():
    options = "--dtype=float32", "--prompt=3 1 4", "--prompt=15", "--new-tokens=20"
    for more in ((), ("--temperature=0.8", "--top-k=20", "--top-p=0.9")):
        printed = {ranks: served(ranks, *options, *more) for ranks in (1, 2, 4)}
        assert [status for status, _ in printed.values()] == [0, 0, 0], printed
        said = [re.findall(r"^\[0\] (\d.* -> .*)$", text, re.MULTILINE) for _, text in printed.values()]
        assert said[0] == said[1] == said[2]
        assert [len(line.split()) for line in said[0]] == [3 + 1 + 20, 1 + 1 + 20]
        for ranks, (_, text) in printed.items():
            assert re.search(rf"^\[0\] 70,592 parameters in float32 on {ranks} ranks$", text, re.MULTILINE), text
            assert re.search(r"^\[0\] decode: [\d,.]+ tokens/s, [\d.]+ ms a step$", text, re.MULTILINE), text
    status, text = served(2, "--prompt=3 101")
    assert status != 0
    assert "serve_llama.py: error: token ids: expected numbers from 0 to 100, got some from 3 to 101" in text
    for option in ("--top-k=5", "--top-p=0.5"):
        status, text = served(1, option)
        assert status != 0
        assert "serve_llama.py: error: --top-k, --top-p: expected with a --temperature above 0, got none" in text
    prompt = f"--prompt={' '.join('1' * 64)}"  # as long as the context: there is one new token
    status, text = served(1, prompt, "--new-tokens=1")
    assert status == 0, text
