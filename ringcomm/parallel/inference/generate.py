"""The decode loop."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

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
    end: int | None = None,
    sampling: Sampling | None = None,
) -> list[list[int]]:
    """Return the new tokens of each prompt.

    All ranks of `tp` call it with the same arguments and get the same tokens, those of `stream_tokens`.
    """
    sequences: list[list[int]] = [[] for _ in prompts]
    for tokens in stream_tokens(decoder, prompts, max_new_tokens, end=end, sampling=sampling):
        for sequence, token in zip(sequences, tokens, strict=True):
            if token is not None:
                sequence.append(token)
    return sequences


def stream_tokens(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    end: int | None = None,
    sampling: Sampling | None = None,
) -> Iterator[list[int | None]]:
    """Yield the next token of each prompt, step by step; None for a sequence that has ended.

    All ranks of `tp` call it with the same arguments and get the same tokens, as long as all ask for them.

    Communication in each step: that of the `Decoder`, and an all-gather of two numbers for each prompt; with
    `sampling`, of V/t logits, or of `top_k` and their tokens, and a broadcast of the tokens.

    Args:
        decoder: the model
        prompts: tokens, of any numbers
        max_new_tokens: the most tokens for each prompt
        end: the token that ends a sequence, as its last; None: none does
        sampling: how tokens are drawn; None: the most probable ones are taken

    Raises:
        ArgumentError: there is no prompt, or one without tokens; the longest prompt and the new tokens, without the
            last, do not fit into the `context` of the model; or as a `Decoder`.
    """
    if not (prompts and all(map(len, prompts))):
        raise refuse("prompts", "one or more, with one or more tokens each", [*map(len, prompts)])
    steps, longest, device = integer("max_new_tokens", max_new_tokens, 1), max(map(len, prompts)), decoder.device
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    ids = torch.tensor([[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts], device=device)
    cache = decoder.cache(len(prompts), longest + steps - 1, padding if padding.any() else None)
    choose: Callable[[torch.Tensor, Axis], torch.Tensor] = most_probable
    if sampling:
        vocab_size, random = decoder.config.vocab_size, sampling.generator(device)
        choose = partial(sampling.draw, vocab_size=vocab_size, random=random)
    has_ended = [False] * len(prompts)
    for _ in range(steps):
        chosen = choose(decoder(ids, cache), decoder.tp)
        tokens = [None if ended else token for ended, token in zip(has_ended, chosen.tolist(), strict=True)]
        yield tokens
        has_ended = [token in (None, end) for token in tokens] if end is not None else has_ended
        if all(has_ended):
            return
        ids = chosen[:, None]
