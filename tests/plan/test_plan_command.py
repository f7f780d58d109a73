"""`ringcomm plan`: what it prints, draws and refuses."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from ringcomm.commands.cli import main
from ringcomm.plan.model.devices import device

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
    for schedule, least, most in (("1f1b", 1, 1), ("interleaved", 2, 48), ("zb-h1", 1, 1), ("zbv", 2, 2)):
        fixed = ["--schedule", schedule, "--tp", "8", "--micro-batch", "4"]
        found = json.loads(plan(capsys, *CLUSTER, *fixed, "--json", "--best", "3"))["plans"]
        assert {each["schedule"] for each in found} == {schedule}
        assert all(least <= each["chunks"] <= most for each in found)
    alone = [*ONE[:-2], "--recompute", "none", "--sequence-parallel", "--schedule"]
    v_shaped, h1, plain = (
        json.loads(plan(capsys, *CLUSTER, *[x for x in alone if x not in ("--chunks", "1")], each, "--json"))["plans"][
            0
        ]
        for each in ("zbv", "zb-h1", "1f1b")
    )
    assert v_shaped["breakdown"]["bubble"] < h1["breakdown"]["bubble"] < plain["breakdown"]["bubble"]
    assert (v_shaped["chunks"], h1["chunks"]) == (2, 1)


def test_a_search_shows_the_best_why_the_others_lose_and_how_to_run(capsys):
    printed = plan(capsys, *CLUSTER)
    assert "39.1 B parameters" in printed
    assert len(re.findall(r"^ +\d+ +\d+ .* GiB ", printed, re.MULTILINE)) == 10
    assert len(re.findall(r"^ +\d+ takes [\d.]+% longer, [\d.]+ m?s: \w+ \+", printed, re.MULTILINE)) == 9
    assert "fit into the 76.0 GiB of a GPU's 80.0 GiB that CUDA, NCCL and the allocator leave" in printed
    assert "512 × a100-80gb, 8 to a node; fused attention without dropout, as the command below runs it" in printed
    assert "reach are fitted to 55 measured runs with unfused attention" in printed
    assert (
        "how sure: predictions of measured steps were off by 6% in the mean; layouts 1 to 10 differ by less" in printed
    )
    assert re.search(r"^ +gemm: matrix products of the layers$", printed, re.MULTILINE)
    assert re.search(r"^ +zero 0: does not fit, [\d.]+ GiB too large$", printed, re.MULTILINE)
    assert re.search(r"^ +recompute full: [\d.]+% longer, [\d.]+ s: recompute \+", printed, re.MULTILINE)
    assert "    1 with pp 2, dp 128: does not fit, 5.1 GiB too large; with zero 2: as long" in printed
    unmeasured = plan(capsys, *CLUSTER, "--device", "h200", "--cp", "1", "--chunks", "1")
    assert "those of h100-80gb, not measured" in unmeasured
    assert "how sure: no prediction for h200 was compared with a measured step" in unmeasured
    for total, terms in re.findall(r"longer, ([\d.]+ m?s): (.*)$", printed, re.MULTILINE):
        explained = sum(in_seconds(re.search(r"[+-][\d.]+ m?s$", term)[0]) for term in terms.split(", "))
        assert explained == pytest.approx(in_seconds(total), abs=0.01)
    assert "not divisible: 64 heads by tp 128, 256, 512; 48 layers by pp 32, 64, 128 and 2 more" in printed
    assert re.search(r"^Grid\(dp=\d+, tp=\d+, pp=\d+\)$", printed, re.MULTILINE)
    assert "examples/train_gpt.py" in printed


def test_a_layout_that_is_given_is_priced_with_the_parts_of_its_time_and_memory(capsys):
    printed = plan(capsys, *CLUSTER, *ONE)
    for part in ("gemm", "recompute", "bubble", "dp", "optimizer", "parameters", "activations"):
        assert re.search(rf"^{part} +[\d.]+ \w+ +[\d.]+%", printed, re.MULTILINE), part
    assert "does not fit" not in printed
    cramped = plan(capsys, *CLUSTER, "--attention", "unfused", *[word.replace("full", "none") for word in ONE])
    assert re.search(r"does not fit: [\d.]+ GiB more than the 76.0 GiB of a GPU", cramped)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_docs_show_what_the_command_prints(capsys):
    text = (ROOT / "docs" / "plan.md").read_text()
    added = re.search(r"Add `(.*?)`", text)[1].split()
    *first, last = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    for shown, options in (("".join(first), []), (last, added)):
        printed = plan(capsys, *CLUSTER, *options)
        assert [line for line in shown.splitlines() if line not in printed] == []
    experts = re.search(r"shape of Mixtral.*?`(--layers.*?)`", text, re.DOTALL)[1].split()
    printed = plan(capsys, "--gpus", "64", "--device", "h100-80gb", *experts)
    shown = re.search(r"```console\n(    tp.*?)```", text, re.DOTALL)[1].splitlines()
    assert [line for line in [*shown, "Grid(dp=32, tp=1, pp=2, ep=8)"] if line not in printed] == []
    given = ["--tp", "2", "--pp", "4", "--dp", "64", "--micro-batch", "4", "--sequence-parallel", "--zero", "1"]
    (zbv,) = json.loads(plan(capsys, *CLUSTER, *given, "--schedule", "zbv", "--json"))["plans"]
    assert f"the same grid is the fastest, in {zbv['seconds']:.3f} s" in " ".join(text.split())
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
    assert {each["fits"] for each in found["near"]} == {True, False}
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
        "--tp 8 --pp 2 --dp 32 --micro-batch 4 --gated --experts 8 --top-k 1 --ep 4",
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
        experts = (True, 8, 1, 4) if "--experts" in more else (False, 0, 2, 1)
        assert (chosen.gated, chosen.experts, chosen.top_k, chosen.ep) == experts
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


def test_attention_is_fused_without_dropout_unless_it_is_asked_for(capsys):
    unfused, fused = (
        json.loads(plan(capsys, *CLUSTER, *ONE, "--attention", each, "--json"))["plans"][0]
        for each in ("unfused", "fused")
    )
    assert fused["breakdown"]["attention"] < unfused["breakdown"]["attention"] / 2
    assert json.loads(plan(capsys, *CLUSTER, *ONE, "--json"))["plans"][0] == fused
    found = plan(capsys, *CLUSTER, *ONE, "--attention", "unfused")
    assert "unfused attention with dropout, as in Megatron-LM of 2022; the command below runs neither" in found


NAME = "a name of letters, digits, - and _"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "8"], "the following options are required: --layers, --hidden, --heads, --batch"),
        ([*CLUSTER, "--device", "a100-80g"], "unknown device 'a100-80g'; did you mean 'a100-80gb'?"),
        ([*CLUSTER, "--device", "this"], "this-512 was not measured: ringcomm plan --measure --gpus 512"),
        ([*CLUSTER, "--device", "this-2"], "--gpus: expected 2, as this-2 was measured, got 512"),
        ([*CLUSTER, "--tp", "3"], "--tp: expected a divisor of heads = 64 (nearest: 2 or 4), got 3"),
        ([*CLUSTER, *ONE, "--dp", "16"], "--gpus: expected tp 8 · pp 2 · dp 16 · cp 1 = 256, got 512"),
        ([*CLUSTER, *ONE, "--schedule", "interleaved"], "--schedule: expected 1f1b, with chunks 1, got interleaved"),
        ([*CLUSTER, "--kv-heads", "6"], "--kv-heads: expected a divisor of heads = 64 (nearest: 4 or 8), got 6"),
        ([*CLUSTER, "--micro-batch", "5"], "--micro-batch: expected a divisor of batch/dp = "),
        ([*CLUSTER, "--zero", "3", "--tp", "2"], "--zero 3: expected tp 1, cp 1, ep 1 and chunks 1, got tp 2, "),
        (
            [*CLUSTER, *ONE, "--tp", "1", "--dp", "256", "--micro-batch", "1", "--sequence-parallel"],
            "--sequence-parallel: expected tp > 1, got tp 1",
        ),
        ([*CLUSTER, "--batch", "1000000007"], "--batch: expected an integer from 1 to 1000000000, got 1000000007"),
        ([*CLUSTER, "--top-k", "2"], "--top-k: expected --experts beside it, got 2"),
        ([*CLUSTER, "--ep", "2"], "--ep: expected --experts beside it, got 2"),
        ([*CLUSTER, "--experts", "8", "--top-k", "9"], "--top-k: expected at most experts = 8, got 9"),
        ([*CLUSTER, "--experts", "6", "--ep", "4"], "--ep: expected a divisor of"),
        ([*CLUSTER, "--save", "mine"], "--save: expected with --calibrate, which fits the device that is saved"),
        ([*CLUSTER, *ONE, "--best", "3"], "--best: expected a search, got one layout, by --tp, --pp, --dp, "),
        (["--measure"], "--measure: expected --gpus, the number of ranks"),
        (
            ["--measure", "--gpus", "2", "--layers", "4", "--json"],
            "--measure: expected only --gpus beside it, got --layers, --json",
        ),
        (["--calibrate", "missing.csv"], "missing.csv: expected a CSV file in UTF-8, got No such file or directory"),
        (["--calibrate", "runs.csv", "--json"], "--recompute, --sequence-parallel, --save beside it, got --json"),
        (["--calibrate", "runs.csv", "--device", "this"], "--device: expected this-N, as --measure has named it, got"),
        *(
            (
                ["--calibrate", "runs.csv", "--save", bad],
                f"--save: expected a name of letters, digits, - and _, got {bad!r}",
            )
            for bad in ("my cluster", 'a"b', "a.b", "")
        ),
        *(
            (["--calibrate", "runs.csv", "--save", bad], f"200, b200, this and this-N, got {bad}")
            for bad in ("h100-80gb", "this", "this-4")
        ),
    ],
)
def test_bad_input_gets_a_sentence(arguments, words, capsys):
    assert main(["plan", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_measurement_that_could_not_be_used_does_not_start(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("ringcomm.plan.measure.launch", None)
    (tmp_path / "devices.toml").write_text("[device")
    measured, fitted = ["--measure", "--gpus", "2"], ["--calibrate", "missing.csv", "--save", "mine"]
    for tuning, commands, words in (
        ("", (measured, fitted), "no file for devices: RINGCOMM_TUNING is empty"),
        ("none.json", (measured,), "RINGCOMM_TUNING: expected a file that ringcomm tune has written, or nothing, got "),
        (str(tmp_path / "tuning.json"), (measured, fitted), "devices.toml is damaged"),
    ):
        monkeypatch.setenv("RINGCOMM_TUNING", tuning)
        for command in commands:
            assert main(["plan", *command]) == 2
            assert words in capsys.readouterr().err


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
