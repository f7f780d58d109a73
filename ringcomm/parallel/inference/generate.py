"""The decode loop."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain

import torch

from ringcomm.errors import integer, refuse
from ringcomm.parallel.grid import Axis
from ringcomm.parallel.inference.decoder import Decoder
from ringcomm.parallel.inference.sampling import Sampling, most_probable

__all__ = ["generate", "stream_tokens"]


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    end: int | Collection[int] | None = None,
    sampling: Sampling | None = None,
) -> list[list[int]]:
    """Return the new tokens of each prompt.

    All ranks of `tp` call it with the same arguments and get the same tokens, those of `stream_tokens`.
    """
    steps = stream_tokens(decoder, prompts, max_new_tokens, end=end, sampling=sampling)
    return [[token for token in sequence if token is not None] for sequence in zip(*steps, strict=True)]


def stream_tokens(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    end: int | Collection[int] | None = None,
    sampling: Sampling | None = None,
) -> Iterator[list[int | None]]:
    """Yield the next token of each prompt, step by step; None for a sequence that has ended.

    All ranks of `tp` call it with the same arguments and get the same tokens. All must ask for each step: where a
    rank leaves the loop alone, the others wait in the next step until their deadline.

    Communication in each step: that of the `Decoder`, and an all-gather of two numbers for each prompt; with
    `sampling`, of V/t logits, or of `top_k` and their tokens, and a broadcast of the tokens.

    Args:
        decoder: the model
        prompts: the tokens of each, which may differ in number
        max_new_tokens: the most tokens for each prompt
        end: the token that ends a sequence, as its last, or several that do; None: none does
        sampling: how tokens are drawn; None: the most probable ones are taken

    Raises:
        ArgumentError: there is no prompt, or one without tokens; a token is not in the vocabulary; or the longest
            prompt and the new tokens, without the last, do not fit into the `context` of the model.
        RingcommError: on all ranks, the logits have NaN, or with `sampling` are infinite.
    """
    given, config, device = _checked(prompts), decoder.config, decoder.device
    steps, longest = integer("max_new_tokens", max_new_tokens, 1), max(map(len, given))
    if longest + steps - 1 > config.context:
        expected = f"at most {config.context} tokens without the last, the context of the model"
        raise refuse("longest prompt and max_new_tokens", expected, f"{longest} + {steps} - 1")
    several = end if isinstance(end, Collection) else [] if end is None else [end]
    ends = {integer("end token", token, 0, config.vocab_size - 1) for token in several}
    padding = torch.tensor([longest - len(prompt) for prompt in given], device=device)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in given], device=device)
    cache = decoder.cache(len(given), longest + steps - 1, padding if padding.any() else None)
    choose: Callable[[torch.Tensor, Axis], torch.Tensor] = most_probable
    if sampling:
        choose = partial(sampling.draw, vocab_size=config.vocab_size, random=sampling.generator(device))
    has_ended = [False] * len(given)
    for _ in range(steps):
        chosen = choose(decoder(ids, cache), decoder.tp)
        tokens = [None if ended else token for ended, token in zip(has_ended, chosen.tolist(), strict=True)]
        yield tokens
        has_ended = [token is None or token in ends for token in tokens]
        if all(has_ended):
            return
        ids = chosen[:, None]


def _checked(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the prompts as lists, after a check of their types and lengths."""
    for each in chain([prompts], prompts):
        if not isinstance(each, Sequence):
            raise refuse("prompts", "a sequence of sequences of tokens", type(each).__name__)
    if not (prompts and all(map(len, prompts))):
        raise refuse("prompts", "one or more, with one or more tokens each", [*map(len, prompts)])
    return [[integer("token of a prompt", token) for token in prompt] for prompt in prompts]
