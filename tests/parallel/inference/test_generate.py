"""Generation on the ranks of a tensor axis: the tokens of one process, which computes each from the whole sequence."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)

from harness import torch_world
from harness.failures import raised
from ringcomm import ArgumentError, RingcommError
from ringcomm.parallel import Decoder, GPTConfig, Grid, Sampling, generate, gpt_stages, stream_tokens
from ringcomm.parallel.collectives import all_gathered

VOCAB = 37  # padded if sharded
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
NEW = 8
GPT2 = GPTConfig(VOCAB, context=16, layers=2, hidden=32, heads=8)
LLAMA = replace(GPT2, activation=F.silu, gated=True, bias=False, rms_norm=True, rotary_base=100.0, tied=False, inner=24)
CONFIGS = {
    "gpt-2": GPT2,
    "llama": LLAMA,
    "llama of four kv heads": replace(LLAMA, kv_heads=4),
    "llama of two kv heads": replace(LLAMA, kv_heads=2),  # which four ranks replicate
    "llama with biases": replace(LLAMA, bias=True, kv_heads=2, tied=True),
    "trained otherwise": replace(LLAMA, kv_heads=4, dropout=0.5, recompute="full", sequence_parallel=True),
}


def stages_of(config, grid, dtype=torch.float32):
    """Return the model with parameters that are the same on every grid."""
    stages = [stage.to(dtype) for stage in gpt_stages(config, grid, seed=1)]
    with torch.no_grad():
        for name, parameter in (pair for stage in stages for pair in stage.named_parameters()):
            if parameter.dim() > 1:
                parameter *= 5 if name.startswith("embedding") else 30  # so that tokens vary
            elif "bias" in name:
                parameter += 0.05
    return stages


def decoder_of(config, grid, dtype=torch.float32):
    return Decoder(stages_of(config, grid, dtype), grid)


def expected(config, prompt, new=NEW):
    """Return the tokens of one process, without a cache."""
    (model,) = stages_of(replace(config, sequence_parallel=False), Grid.alone())
    ids = [*prompt]
    with torch.no_grad():
        for _ in range(new):
            ids.append(int(model.eval()(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@torch_world.on(1, 2, 4, backends=("ringcomm", "gloo"))
@torch_world.each("name", CONFIGS)
def test_greedy_tokens_are_those_of_one_process(name):
    config, grid = CONFIGS[name], Grid(tp=dist.get_world_size())
    wanted = [expected(config, prompt) for prompt in PROMPTS]
    assert len({token for tokens in wanted for token in tokens}) > 5  # a model that says one word proves nothing
    decoder = decoder_of(config, grid)
    assert generate(decoder, PROMPTS, NEW) == wanted
    assert [generate(decoder, [prompt], NEW)[0] for prompt in PROMPTS] == wanted


@torch_world.on(2)
def test_replicas_generate_for_prompts_of_their_own():
    grid = Grid(dp=2)
    prompt = PROMPTS[grid.dp.rank]
    assert generate(decoder_of(LLAMA, grid), [prompt], NEW) == [expected(LLAMA, prompt)]


@torch_world.on(2)
@torch_world.each("name", ["gpt-2", "llama of two kv heads"])
def test_logits_are_those_of_the_model_also_if_a_prompt_comes_in_parts(name):
    config, grid = CONFIGS[name], Grid(tp=dist.get_world_size())
    ids = torch.arange(20).view(2, 10) * 7 % VOCAB
    (model,) = stages_of(config, Grid.alone(), torch.float64)
    decoder = decoder_of(config, grid, torch.float64)
    with torch.no_grad():
        wanted = [model(ids[:, :length])[:, -1] for length in (4, 9, 10)]
    padded = torch.cat([torch.zeros(2, 3, dtype=ids.dtype), ids], 1)
    for start, given, padding in ((0, ids, None), (3, padded, torch.tensor([3, 3]))):
        cache = decoder.cache(2, 13, padding)
        parts = given[:, : start + 4], given[:, start + 4 : start + 9], given[:, start + 9 :]
        for part, logits in zip(parts, wanted, strict=True):
            found = all_gathered(decoder(part, cache), grid.tp, -1)
            torch.testing.assert_close(found[:, :VOCAB], logits, rtol=1e-10, atol=1e-10)
            assert (found[:, VOCAB:] == -torch.inf).all()
        assert cache.length == start + 10


@torch_world.on(1, 2)
@torch_world.each("name", ["gpt-2", "llama of two kv heads"])
def test_logits_in_bfloat16_are_near_those_in_float64(name):
    config, grid = CONFIGS[name], Grid(tp=dist.get_world_size())
    ids = torch.arange(20).view(2, 10) * 7 % VOCAB
    model = gpt_stages(config, Grid.alone(), seed=1)[0].bfloat16().double()  # of the same weights
    decoder = Decoder([stage.bfloat16() for stage in gpt_stages(config, grid, seed=1)], grid)
    cache = decoder.cache(2, 10)
    for start, end in ((0, 9), (9, 10)):
        found = all_gathered(decoder(ids[:, start:end], cache), grid.tp, -1)[:, :VOCAB]
        assert found.dtype == torch.bfloat16
        with torch.no_grad():
            wanted = model(ids[:, :end])[:, -1]
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=0.03 * float(wanted.abs().max()))


# --- Sampling ---------------------------------------------------------------------------------------------------------


def sampled(decoder, **options):
    return generate(decoder, PROMPTS, NEW, sampling=Sampling(**options))


@torch_world.on(2, 4)
@torch_world.each("options", [{}, {"top_k": 5}, {"top_p": 0.8, "temperature": 0.7}, {"top_k": 30, "top_p": 0.9}])
def test_all_ranks_draw_the_tokens_of_one_process(options):
    grid = Grid(tp=dist.get_world_size())
    decoder, alone = (decoder_of(LLAMA, each, torch.float64) for each in (grid, Grid.alone()))
    drawn = sampled(decoder, **options, seed=5 if grid.tp.rank == 0 else 6)  # the first rank draws
    assert drawn == sampled(alone, **options, seed=5)
    assert drawn != sampled(alone, **options, seed=6)


@torch_world.on(2)
def test_few_tokens_or_little_probability_leave_the_most_probable_token():
    decoder = decoder_of(LLAMA, Grid(tp=2))
    greedy = generate(decoder, PROMPTS, NEW)
    assert sampled(decoder, top_k=1, temperature=100.0) == greedy
    assert sampled(decoder, top_p=1e-6, temperature=100.0) == greedy
    assert sampled(decoder, temperature=1e-4) == greedy
    assert sampled(decoder, temperature=100.0) != greedy


@torch_world.on(1)
def test_tokens_are_drawn_with_their_probabilities():
    tp = Grid.alone().tp
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(20_000, 4)

    def shares(**options):
        sampling = Sampling(**options)
        drawn = sampling.draw(logits, tp, vocab_size=4, random=sampling.generator(torch.device("cpu")))
        return (drawn.bincount(minlength=4) / len(drawn)).tolist()

    assert shares() == pytest.approx([0.4, 0.3, 0.2, 0.1], abs=0.02)
    assert shares(temperature=0.5) == pytest.approx([16 / 30, 9 / 30, 4 / 30, 1 / 30], abs=0.02)
    assert shares(top_k=2) == pytest.approx([4 / 7, 3 / 7, 0, 0], abs=0.02)
    assert shares(top_p=0.6) == pytest.approx([4 / 7, 3 / 7, 0, 0], abs=0.02)
    assert shares(top_p=0.8) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0], abs=0.02)
    assert shares(top_k=3, top_p=0.5) == pytest.approx([4 / 7, 3 / 7, 0, 0], abs=0.02)


@torch_world.on(2)
@torch_world.each("sampling", [None, {}, {"top_k": 3}, {"top_p": 0.5}])
def test_all_ranks_raise_if_logits_have_nan(sampling):
    grid = Grid(tp=2)
    stages = stages_of(LLAMA, grid)
    with torch.no_grad():
        if grid.tp.rank == 1:
            stages[-1].head.weight[0] = torch.nan
    decoder = Decoder(stages, grid)
    sampling = None if sampling is None else Sampling(**sampling)
    error = raised(RingcommError, lambda: generate(decoder, PROMPTS, NEW, sampling=sampling))
    assert str(error).startswith("logits of the sequences [0, 1, 2]: expected numbers of which the highest is finite")
    assert generate(decoder_of(LLAMA, grid), PROMPTS, 1)  # the group goes on


@torch_world.on(1)
def test_no_temperature_is_too_low_and_no_seed_gives_other_tokens():
    decoder = decoder_of(LLAMA, Grid.alone())
    greedy = generate(decoder, PROMPTS, NEW)
    for temperature in (1e-40, 1e-300):
        assert sampled(decoder, temperature=temperature) == greedy
    assert sampled(decoder, temperature=100.0) != sampled(decoder, temperature=100.0)


# --- Ends and refusals ------------------------------------------------------------------------------------------------


@torch_world.on(2)
def test_a_sequence_ends_with_the_end_token():
    decoder = decoder_of(LLAMA, Grid(tp=2))
    full = generate(decoder, PROMPTS, NEW)
    end = full[0][2]
    lengths = [tokens.index(end) + 1 if end in tokens else NEW for tokens in full]
    assert lengths[0] < max(lengths)  # others go on
    assert generate(decoder, PROMPTS, NEW, end=end) == [tokens[:n] for tokens, n in zip(full, lengths, strict=True)]
    steps = [*stream_tokens(decoder, PROMPTS, NEW, end=end)]
    assert [step[0] for step in steps] == full[0][: lengths[0]] + [None] * (max(lengths) - lengths[0])
    assert len([*stream_tokens(decoder, PROMPTS[:1], NEW, end=end)]) == lengths[0]  # nothing is left to decode
    ends = full[0][2], full[1][1]
    first = [next((i + 1 for i, token in enumerate(tokens) if token in ends), NEW) for tokens in full]
    assert generate(decoder, PROMPTS, NEW, end=ends) == [tokens[:n] for tokens, n in zip(full, first, strict=True)]
    assert first[1] <= 2 < lengths[1]
    assert generate(decoder, PROMPTS, NEW, end=[]) == full


@torch_world.on(2)
def test_what_does_not_fit_is_refused_and_the_model_goes_on():
    grid = Grid(tp=2)
    decoder = decoder_of(LLAMA, grid)

    def refused(call, *arguments, **options):
        return str(raised(ArgumentError, partial(call, *arguments, **options)))

    cache = decoder.cache(1, 4)
    decoder(torch.tensor([[1, 2, 3]]), cache)
    text = refused(decoder, torch.tensor([[4, 5]]), cache)
    assert text == "tokens of a sequence: expected at most 4, the capacity of the cache, got 5"
    assert cache.length == 3
    decoder(torch.tensor([[4]]), cache)
    assert refused(decoder, torch.tensor([[5]]), cache).endswith("got 5")
    for shape in ((2, 1), (1, 0), (1,)):
        text = refused(decoder, torch.ones(shape, dtype=torch.int64), decoder.cache(1, 4))
        assert text == f"shape of ids: expected (1, at least 1), got {shape}"
    for ids in (torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)):
        assert refused(decoder, ids, decoder.cache(1, 4)).startswith(
            "dtype of ids: expected torch.int64 or torch.int32"
        )
    assert refused(decoder.cache, 2, 4, torch.tensor([1])) == "shape of padding: expected (2,), got (1,)"
    assert (
        refused(decoder.cache, 1, 4, torch.tensor([1.0])) == "padding: expected a tensor of integers, got torch.float32"
    )
    assert refused(decoder.cache, 1, 4, torch.tensor([True])).endswith("got torch.bool")
    assert refused(decoder.cache, 1, 4, [1]) == "padding: expected a tensor of integers, got list"
    for number in (-20, 4):
        text = refused(decoder.cache, 1, 4, torch.tensor([number]))
        assert text == f"padding: expected numbers from 0 to 3, got [{number}]"
    padded = decoder.cache(1, 8, torch.tensor([5]))
    text = refused(decoder, torch.tensor([[1, 2, 3]]), padded)
    assert text == "padding: expected less than the 3 tokens of the first call, got 5"
    assert padded.length == 0
    decoder(torch.tensor([[0] * 5 + [1]]), padded)
    others = replace(LLAMA, layers=3), replace(LLAMA, heads=4), replace(LLAMA, kv_heads=2)
    wrong = [decoder_of(config, grid).cache(1, 4) for config in others]
    for cache in (*wrong, decoder_of(LLAMA, grid, torch.float64).cache(1, 4)):
        text = refused(decoder, torch.tensor([[1]]), cache)
        assert text.startswith("layers, heads, their size, dtype and device of the cache: expected (2, 4, 4, ")
    cache = decoder.cache(1, 4)
    assert refused(decoder, torch.tensor([[VOCAB]]), cache).startswith("token ids: expected numbers from 0 to 36")
    assert cache.length == 0
    assert "from 1 to 16, got 17" in refused(decoder.cache, 1, 17)
    text = refused(generate, decoder, PROMPTS, 13)
    assert text.startswith("longest prompt and max_new_tokens: expected at most 16 tokens without the last")
    assert text.endswith("got 5 + 13 - 1")
    assert refused(generate, decoder, torch.tensor(PROMPTS[:1]), 1).endswith("of tokens, got Tensor")
    assert refused(generate, decoder, 3, 1).endswith("of tokens, got int")
    assert refused(generate, decoder, [3], 1).endswith("of tokens, got int")
    assert refused(generate, decoder, [[1.5]], 1) == "token of a prompt: expected an integer, got 1.5"
    assert refused(generate, decoder, PROMPTS, 1, end=VOCAB).startswith("end token: expected an integer from 0 to 36")
    assert refused(generate, decoder, PROMPTS, 1, end=[2, "3"]) == "end token: expected an integer, got '3'"
    assert len(generate(decoder, PROMPTS, 12)[0]) == 12
    assert refused(generate, decoder, [], 1) == "prompts: expected one or more, with one or more tokens each, got []"
    assert refused(generate, decoder, [[1], []], 1).endswith("got [1, 0]")
    assert refused(generate, decoder, PROMPTS, 0).startswith("max_new_tokens: expected an integer from 1")
    assert refused(generate, decoder, [[VOCAB]], 1).startswith("token ids: expected numbers from 0 to 36, got")
    assert refused(Sampling, temperature=0.0).startswith("temperature: expected a positive number")
    assert refused(Sampling, top_k=0).startswith("top_k: expected an integer from 1")
    assert refused(Sampling, top_p=1.5) == "top_p: expected a number above 0 and at most 1, got 1.5"
    assert refused(Sampling, temperature="1").startswith("temperature: expected a positive number")
    assert refused(Sampling, seed=1.5) == "seed: expected an integer, got 1.5"
    assert refused(Sampling, seed=-1).startswith("seed: expected an integer from 0")


@torch_world.on(2)
def test_models_that_do_not_decode_are_refused():
    from torch.distributed.fsdp import fully_shard

    def refused(config, grid, change=lambda _: None):
        stages = gpt_stages(config, grid)
        change(stages[0])
        return str(raised(ArgumentError, lambda: Decoder(stages, grid)))

    assert refused(LLAMA, Grid(pp=2)) == "pp of a grid for inference: expected 1, got 2"
    assert refused(LLAMA, Grid(cp=2)) == "cp of a grid for inference: expected 1, got 2"
    assert refused(replace(LLAMA, experts=2), Grid(tp=2)) == "experts of a model for inference: expected 0, got 2"
    grid = Grid(dp=2)
    sharded = refused(LLAMA, grid, partial(fully_shard, mesh=grid.mesh["dp"]))
    assert sharded == "parameters of a model for inference: expected tensors, got DTensors of fully_shard"
