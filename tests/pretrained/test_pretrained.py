"""GPT-2 and Llama from files of transformers: the logits of their formulas on every grid, and the same files again.

tests/clients compares with transformers itself.
"""

import json
import math
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from pretrained_models import FORMULAS, GPT2, HEADS, IDS, INNER, LAYERS, LLAMA, VOCAB, H, S, drawn, gpt2, read, written

from harness import torch_world
from harness.failures import raised
from ringcomm import ArgumentError, RingcommError
from ringcomm.parallel import GPTConfig, Grid, gpt_stages, make_schedule
from ringcomm.parallel.collectives import all_gathered
from ringcomm.parallel.sharding import collect_shard_specs
from ringcomm.pretrained import load_pretrained, pretrained_config, save_pretrained
from ringcomm.pretrained.families import settings_of
from ringcomm.torch.traffic import bytes_sent, record_traffic

safetensors = pytest.importorskip("safetensors", reason="needs safetensors: pip install --group test")


def logits_of(chunks, grid, ids):
    """Return the logits of all stages of a model, on every rank."""
    x = ids
    for chunk in range(len(chunks)):
        for rank in range(grid.pp.size):
            passed = [chunks[chunk](x) if grid.pp.rank == rank else None]
            dist.broadcast_object_list(passed, grid.pp.ranks[rank], grid.pp.group)
            (x,) = passed
    return all_gathered(x, grid.tp, 2)[..., :VOCAB]


def stages(folder, grid, chunks=1):
    schedule = make_schedule("interleaved", grid.pp.size, grid.pp.size, chunks) if chunks > 1 else None
    loaded = [chunk.double() for chunk in gpt_stages(pretrained_config(folder), grid, schedule)]
    load_pretrained(folder, loaded, grid)
    return loaded


KINDS = {
    "gpt-2": GPT2,
    "gpt-2 untied": {**GPT2, "tie_word_embeddings": False, "n_inner": INNER},
    "llama": LLAMA,
    "llama tied": {**LLAMA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "llama of one kv head": {**LLAMA, "num_key_value_heads": 1},
}
LAYOUTS = [(1, 1, 1), (1, 2, 1), (1, 1, 2), (1, 4, 1), (1, 2, 2), (1, 1, 4), (2, 2, 1)]


def loaded_and_saved(folder, layout, chunks):
    grid, logits = Grid(*layout), {}
    for kind in KINDS:
        model = stages(folder / kind / "source", grid, chunks)
        with torch.no_grad():
            logits[kind] = logits_of(model, grid, IDS)
        save_pretrained(folder / kind / "target", model, grid)
    return logits


@pytest.mark.parametrize(
    ("layout", "backend"), [*((layout, "ringcomm") for layout in LAYOUTS), ((1, 2, 2), "gloo")], ids=str
)
def test_logits_are_those_of_the_formulas_and_the_same_files_are_written(tmp_path, layout, backend):
    weights = {kind: drawn(settings) for kind, settings in KINDS.items()}
    for kind, settings in KINDS.items():
        written(tmp_path / kind / "source", settings, weights[kind], count=1 if layout == (1, 1, 1) else 3)
    arguments = tmp_path, layout, 2 if layout == (1, 2, 2) else 1
    answers = torch_world.run(loaded_and_saved, math.prod(layout), *arguments, backend=backend)
    for kind, settings in KINDS.items():
        expected = FORMULAS[settings["model_type"]](weights[kind], IDS)
        for logits in answers:
            torch.testing.assert_close(logits[kind], expected, rtol=1e-12, atol=1e-12)
        source, target = tmp_path / kind / "source", tmp_path / kind / "target"
        again = read(target)
        assert again.keys() == weights[kind].keys()
        for name, x in weights[kind].items():
            assert torch.equal(again[name], x), name
        assert len([*target.glob("*.safetensors")]) == layout[2]  # one for each pipeline rank
        assert settings_of(pretrained_config(target)) == settings_of(pretrained_config(source))


@torch_world.on(4)
def test_saving_sends_the_shards_of_the_first_replica(tmp_path):
    grid = Grid(dp=2, tp=2)
    model = gpt_stages(GPTConfig(VOCAB, S, LAYERS, H, HEADS), grid)
    with record_traffic() as calls:
        save_pretrained(tmp_path, model, grid)
    sharded = sum(model[0].get_parameter(name).nbytes for name in collect_shard_specs(model[0]))  # of this rank
    assert bytes_sent(calls, grid.tp.group) == (sharded if grid.dp.rank == 0 else 0)
    assert bytes_sent(calls, grid.dp.group) == 0


@torch_world.on(2)
def test_a_rank_reads_only_its_shards(tmp_path):
    """Count the pages of the file that are in memory of this process, after a load that keeps it mapped."""
    grid = Grid(tp=2)
    tall = {**LLAMA, "num_hidden_layers": 1, "vocab_size": 1 << 18, "tie_word_embeddings": True}
    weights = {name: x for name, x in drawn(LLAMA).items() if not re.search(r"layers\.[123]|lm_head", name)}
    weights["model.embed_tokens.weight"] = torch.ones(1 << 18, H, dtype=torch.float64)
    if grid.tp.rank == 0:
        written(tmp_path / "source", tall, weights)
    dist.barrier()
    kept, opened = [], safetensors.safe_open

    class Keeps:
        def __init__(self, *arguments):
            self.file = opened(*arguments)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.__exit__(*error)

        def keys(self):
            return self.file.keys()

        def get_tensor(self, name):
            kept.append(self.file.get_tensor(name))
            return kept[-1]

    with patch.object(safetensors, "safe_open", Keeps):
        (model,) = stages(tmp_path / "source", grid)
    mapped = Path("/proc/self/smaps").read_text().split("source/model.safetensors")[1]
    resident = int(re.search(r"Rss: +(\d+) kB", mapped)[1]) << 10
    share = model.embedding.weight.nbytes
    assert share == 16 << 20
    assert share <= resident < share + (4 << 20)  # a system may map larger pages


# --- Other folders, and refusals --------------------------------------------------------------------------------------


@torch_world.on(1)
def test_the_first_files_of_gpt_2_have_short_names_masks_and_few_settings(tmp_path):
    """Load files as those of a model without its head, which also have the masks of the blocks."""
    grid, weights = Grid.alone(), drawn(GPT2)
    short = {name.removeprefix("transformer."): x for name, x in weights.items()}
    short |= {f"h.{number}.attn.bias": torch.ones(1, 1, 8, 8) for number in range(LAYERS)}
    few = {name: GPT2[name] for name in GPT2 if name.startswith("n_") or name in ("vocab_size", "model_type")}
    source = written(tmp_path / "source", {**few, "layer_norm_epsilon": 1e-3}, short)
    with torch.no_grad():
        torch.testing.assert_close(stages(source, grid)[0](IDS), gpt2(weights, IDS), rtol=1e-12, atol=1e-12)


def test_settings_become_the_fields_of_a_config(tmp_path):
    def config(**settings):
        (tmp_path / "config.json").write_text(json.dumps(settings))
        return pretrained_config(tmp_path)

    old = {name: LLAMA[name] for name in LLAMA if name not in ("rope_parameters", "num_key_value_heads", "head_dim")}
    found = config(**old)
    assert replace(found, activation=None) == GPTConfig(
        VOCAB, 8, LAYERS, H, HEADS, inner=INNER, activation=None, gated=True, bias=False, rms_norm=True, eps=1e-3,
        rotary_base=10_000.0, tied=False,
    )  # fmt: skip
    assert found.activation is F.silu
    assert config(**old, rope_theta=7.0, rope_scaling=None).rotary_base == 7.0
    assert config(**{**GPT2, "activation_function": "relu"}).activation is F.relu

    def refused(**settings):
        return str(raised(ArgumentError, lambda: config(**settings))).replace(f" in {tmp_path}/config.json", "")

    assert refused(**{**LLAMA, "model_type": "mixtral"}) == "model_type: expected gpt2 or llama, got mixtral"
    assert refused(**{**old, "rope_scaling": {"type": "linear"}}) == "type: expected default, got linear"
    assert refused(**{**LLAMA, "rope_parameters": {"rope_type": "llama3"}}).endswith("expected default, got llama3")
    assert refused(**{**LLAMA, "head_dim": 8}) == "head_dim: expected 4, got 8"
    assert refused(**LLAMA, attention_bias=True, mlp_bias=False) == "attention_bias: expected False, got True"
    assert refused(**{**GPT2, "scale_attn_weights": False}) == "scale_attn_weights: expected True, got False"
    assert refused(**{**GPT2, "activation_function": "tanhh"}).startswith("unknown activation 'tanhh'")
    assert "'heads'" in refused(**{name: GPT2[name] for name in GPT2 if name != "n_head"})
    (tmp_path / "config.json").write_text("{")
    assert re.match(r"folder: expected one with config.json, got .* \(JSONDecodeError: ", str(raised(
        ArgumentError, lambda: pretrained_config(tmp_path)
    )))  # fmt: skip


def refusals(folder):
    """Return the errors of a rank for bad folders and models, of which some have an error on one rank only."""
    grid = Grid(pp=2)
    model = stages(folder / "good", grid)
    before = [parameter.clone() for parameter in model[0].parameters()]

    def refused(call, name, chunks=model):
        error = raised(RingcommError, lambda: call(folder / name, chunks, grid))
        return f"{type(error).__name__}: {error}".replace(str(folder), "…")

    def changed(**fields):
        return gpt_stages(replace(model[0].config, **fields), grid)

    texts = [refused(load_pretrained, name) for name in ("none", "misses", "shape", "cut")]
    texts.append(refused(load_pretrained, "good", changed(inner=32)))
    texts.append(refused(save_pretrained, "good"))
    texts.append(refused(save_pretrained, "new", changed(rotary_base=None)))
    texts.append(refused(save_pretrained, "new", changed(experts=2)))
    texts.append(refused(save_pretrained, "new", changed(activation=torch.sin)))
    texts.append(refused(save_pretrained, "file"))
    with patch.dict(sys.modules, {"safetensors.torch": None}):
        texts += [refused(load_pretrained, "good"), refused(save_pretrained, "new")]
    load_pretrained(folder / "good", changed(context=4, sequence_parallel=True, dropout=0.1), grid)
    model[0].double()
    load_pretrained(folder / "good", model, grid)
    assert all(torch.equal(x, parameter) for x, parameter in zip(before, model[0].parameters(), strict=True))
    return texts


def test_other_models_and_bad_files_are_refused_on_all_ranks(tmp_path):
    weights, last = drawn(LLAMA), "model.layers.3.mlp.up_proj.weight"
    written(tmp_path / "good", LLAMA, weights)
    written(tmp_path / "misses", LLAMA, {name: weights[name] for name in weights if name != last})
    written(tmp_path / "shape", LLAMA, {**weights, last: torch.ones(INNER, H - 1)})
    written(tmp_path / "cut", LLAMA, weights)
    os.truncate(tmp_path / "cut" / "model.safetensors", 5000)
    (tmp_path / "file").touch()
    texts = torch_world.run(refusals, 2, tmp_path)
    missing = "RingcommError: pretrained weights need safetensors: pip install 'ringcomm[safetensors]'"
    expected = [
        r"ArgumentError: folder: expected one with config.json, got …/none \(FileNotFoundError: .*",
        f"ArgumentError: weights in …/misses: expected some with {last}, got {len(weights) - 1} others",
        rf"ArgumentError: shape of {last} in …/shape: expected \(24, 16\), got \(24, 15\)",
        "RingcommError: …/cut/model.safetensors: SafetensorError: .*",
        "ArgumentError: intermediate_size of the stages: expected 24, as in …/good, got 32",
        "ArgumentError: folder: expected one without weights, got one with …/good/model.safetensors",
        *(r"ArgumentError: config: expected that of a GPT-2 or a Llama, got GPTConfig\(.*" for _ in range(2)),
        "ArgumentError: activation: expected gelu_new or gelu_pytorch_tanh or gelu or relu or silu, got .*",
        "RingcommError: …/file: FileExistsError: .*",
        *(re.escape(missing) for _ in range(2)),
    ]
    for number, (pattern, *found) in enumerate(zip(expected, *texts, strict=True)):
        relayed = pattern.replace(": ", ": rank 1: ", 1) if number in (1, 2) else pattern  # it has the last stage
        for wanted, text in zip((relayed, pattern), found, strict=True):
            assert re.fullmatch(wanted, text), text
