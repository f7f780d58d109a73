"""`ringcomm plan`: what it prints, draws and refuses."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from ringcomm.commands.cli import main
from ringcomm.plan.devices import Accelerator, device, names, save

ROOT = Path(__file__).parents[2]
MODEL = ["--layers", "48", "--hidden", "8192", "--heads", "64", "--batch", "1536"]
CLUSTER = ["--gpus", "512", "--device", "a100-80gb", *MODEL]
ONE = ["--tp", "8", "--pp", "2", "--dp", "32", "--micro-batch", "4", "--chunks", "1", "--recompute", "full"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("RINGCOMM_TUNING", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def plan(capsys, *arguments):
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def in_seconds(text):
    number, unit = text.split()
    return float(number) * {"s": 1, "ms": 1e-3}[unit]


def test_the_schedule_is_searched_or_fixed(capsys):
    for schedule in ("1f1b", "interleaved"):
        found = json.loads(plan(capsys, *CLUSTER, "--schedule", schedule, "--json", "--best", "3"))["plans"]
        assert {each["schedule"] for each in found} == {schedule}
        assert all((each["chunks"] > 1) == (schedule == "interleaved") for each in found)


def test_a_search_shows_the_best_why_the_others_lose_and_how_to_run(capsys):
    printed = plan(capsys, *CLUSTER)
    assert "39.1 B parameters" in printed
    assert len(re.findall(r"^ +\d+ +\d+ .* GB ", printed, re.MULTILINE)) == 10
    assert len(re.findall(r"^ +\d+ takes [\d.]+% longer, [\d.]+ m?s: \w+ \+", printed, re.MULTILINE)) == 9
    assert "81.6 GB of 85.9 GB, of which 4.3 GB are kept free" in printed
    for total, terms in re.findall(r"longer, ([\d.]+ m?s): (.*)$", printed, re.MULTILINE):
        explained = sum(in_seconds(term.split(" ", 1)[1]) for term in terms.split(", "))
        assert explained == pytest.approx(in_seconds(total), abs=0.01)
    assert "not divisible: 48 layers by pp 32, 64, 128, 256, 512" in printed
    assert re.search(r"^Grid\(dp=\d+, tp=\d+, pp=\d+\)$", printed, re.MULTILINE)
    assert "examples/train_gpt.py" in printed


def test_a_layout_that_is_given_is_priced_with_the_parts_of_its_time_and_memory(capsys):
    printed = plan(capsys, *CLUSTER, *ONE)
    for part in ("gemm", "recompute", "bubble", "dp", "optimizer", "parameters", "activations"):
        assert re.search(rf"^{part} +[\d.]+ \w+ +[\d.]+%", printed, re.MULTILINE), part
    assert "does not fit" not in printed
    cramped = plan(capsys, *CLUSTER, *[word.replace("full", "none") for word in ONE])
    assert re.search(r"does not fit: [\d.]+ GB more than the 81.6 GB of a GPU", cramped)


def test_the_docs_show_what_the_command_prints(capsys):
    text = (ROOT / "docs" / "plan.md").read_text()
    added = re.search(r"Add `(.*?)`", text)[1].split()
    for shown, options in zip(re.findall(r"```text\n(.*?)```", text, re.DOTALL), ([], added), strict=True):
        printed = plan(capsys, *CLUSTER, *options)
        assert [line for line in shown.splitlines() if line not in printed] == []
    command, error = re.search(r"^\$ ringcomm (plan .*)\n(.*)\n", text, re.MULTILINE).groups()
    assert main(command.split()) == 2
    assert capsys.readouterr().err == f"{error}\n"


def test_json_has_the_same_for_programs(capsys):
    found = json.loads(plan(capsys, *CLUSTER, *ONE, "--json"))
    (layout,) = found["plans"]
    assert layout["seconds"] == pytest.approx(sum(layout["breakdown"].values()))
    assert layout["bytes_per_gpu"] == pytest.approx(sum(layout["memory"].values()))
    assert layout["tflops_per_gpu"] == pytest.approx(312 * layout["utilization"])
    assert (layout["schedule"], found["rejected"]) == ("1f1b", [])
    assert (layout["tp"], layout["recompute"], layout["zero"], layout["fits"]) == (8, "full", 0, True)
    assert layout["grid"] == "Grid(dp=32, tp=8, pp=2)"
    assert found["model"]["parameters"] == pytest.approx(39.1e9, rel=1e-3)
    found = json.loads(plan(capsys, *CLUSTER, "--tp", "8", "--json", "--best", "3"))
    assert [each["tp"] for each in found["plans"]] == [8, 8, 8]
    assert found["legal"] > found["fitting"] > 0
    assert {"reason": "not divisible", "pp": 32} in found["rejected"]
    found = json.loads(plan(capsys, *CLUSTER, "--zero", "0", "--recompute", "full", "--chunks", "1", "--json"))
    short = {(each["tp"], each["pp"]): each["bytes"] for each in found["rejected"] if each["reason"] == "memory"}
    assert short
    assert min(short.values()) > 0


def test_the_command_is_one_of_the_example(capsys):
    options = runpy.run_path(str(ROOT / "examples" / "train_gpt.py"))["parser"]()
    for more in (
        "--tp 8 --pp 2 --dp 32 --micro-batch 4 --recompute full",
        "--tp 4 --pp 4 --dp 32 --micro-batch 3 --chunks 12 --sequence-parallel --zero 2",
        "--tp 1 --pp 1 --dp 512 --micro-batch 1 --zero 3",
        "--tp 4 --pp 8 --dp 8 --micro-batch 1 --cp 2",
        "--tp 8 --pp 2 --dp 32 --micro-batch 4 --recompute full --kv-heads 8 --ffn 16384",
    ):
        (layout,) = json.loads(plan(capsys, *CLUSTER, *more.split(), "--json"))["plans"]
        before, _, after = layout["command"].partition(" examples/train_gpt.py ")
        assert before == "torchrun --nnodes 64 --rdzv-backend c10d --rdzv-endpoint HOST:PORT --nproc-per-node 8"
        chosen = options.parse_args(after.split())
        assert (chosen.tp, chosen.pp, chosen.dp) == (layout["tp"], layout["pp"], layout["dp"])
        assert chosen.micro_batches == 1536 // layout["dp"] // layout["micro_batch"]
        assert (chosen.schedule, chosen.chunks or 1) == (
            "interleaved" if layout["chunks"] > 1 else "1f1b",
            layout["chunks"],
        )
        assert (chosen.kv_heads, chosen.ffn) == ((8, 16384) if "--ffn" in more else (None, None))
        assert (chosen.zero, chosen.sequence_parallel) == (layout["zero"], layout["sequence_parallel"])


def test_a_search_and_a_price_need_no_torch():
    text = f"""if True:
        import sys
        sys.modules["torch"] = None
        from ringcomm.commands.cli import main
        sys.exit(main(["plan", *{[*CLUSTER, *ONE]}]) or main(["plan", "--measure", "--gpus", "2"]))
    """
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=50)
    assert run.returncode == 2
    assert run.stderr == "ringcomm plan: --measure needs torch: pip install 'ringcomm[torch]'\n"
    assert "Grid(dp=32, tp=8, pp=2)" in run.stdout


def test_a_picture_shows_the_step_and_the_memory(capsys, tmp_path):
    plan(capsys, *CLUSTER, "--tp", "8", "--pp", "4", "--chunks", "2", "--plot", str(tmp_path / "plan.svg"))
    picture = (tmp_path / "plan.svg").read_text()
    assert picture.count("<path") > 4 * 2 * 2 * 10


def test_attention_may_be_fused_on_any_device(capsys):
    unfused, fused = (
        json.loads(plan(capsys, *CLUSTER, *ONE, "--attention", each, "--json"))["plans"][0]
        for each in ("unfused", "fused")
    )
    assert fused["breakdown"]["attention"] < unfused["breakdown"]["attention"] / 2
    assert json.loads(plan(capsys, *CLUSTER, *ONE, "--json"))["plans"][0] == unfused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "8"], "the following options are required: --layers, --hidden, --heads, --batch"),
        ([*CLUSTER, "--device", "a100-80g"], "unknown device 'a100-80g'; did you mean 'a100-80gb'?"),
        ([*CLUSTER, "--device", "this"], "this-512 was not measured: ringcomm plan --measure --gpus 512"),
        ([*CLUSTER, "--tp", "3"], "tp: expected a divisor of heads = 64 (nearest: 2 or 4), got 3"),
        ([*CLUSTER, *ONE, "--dp", "16"], "gpus: expected tp 8 · pp 2 · dp 16 · cp 1 = 256, got 512"),
        ([*CLUSTER, *ONE, "--schedule", "interleaved"], "schedule: expected 1f1b, with 1 chunks, got interleaved"),
        (
            [*CLUSTER, "--plot", "missing/plan.svg"],
            "--plot: expected a file in a folder that exists, got missing/plan.svg",
        ),
        ([*CLUSTER, "--kv-heads", "6"], "kv_heads: expected a divisor of heads = 64 (nearest: 4 or 8), got 6"),
        (["--measure"], "--measure: expected --gpus, the number of ranks"),
        (["--calibrate", "missing.csv"], "No such file or directory: 'missing.csv'"),
    ],
)
def test_bad_input_gets_a_sentence(arguments, words, capsys):
    assert main(["plan", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_every_built_in_device_is_complete():
    assert names() == ["a100-80gb", "a100-40gb", "h100-80gb", "h200", "b200"]
    for name in names():
        found = device(name)
        assert isinstance(found, Accelerator)
        assert 0 < found.calibration.gemm <= 1
    assert device("h200").memory / device("h100-80gb").memory == pytest.approx(131 / 80)
    assert device("a100-40gb").flops == device("a100-80gb").flops


def test_a_device_that_is_saved_is_found_again():
    first = device("h200")
    save(first, "mine")
    save(device("a100-80gb"), "other")
    found = device("mine")
    assert {**vars(found), "name": ""} == {**vars(first), "name": ""}
    assert names()[-2:] == ["mine", "other"]


@pytest.mark.slow
def test_this_machine_is_measured(capsys):
    assert "this-2: " in plan(capsys, "--measure", "--gpus", "2")
    found = device("this-2")
    assert found.flops > 1e8
    assert found.bandwidth > 1e8
    assert found.node == 2
    small = ["--layers", "4", "--hidden", "128", "--heads", "4", "--vocab", "100", "--seq", "64", "--batch", "16"]
    printed = plan(capsys, "--gpus", "2", "--device", "this", *small)
    assert "torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --precision float32 " in printed
