"""Answers of two engines in bfloat16, equal but for rounding."""

from collections.abc import Callable

import torch
from engine_process import Answer, Engine

# Logits of the tiny models stay below 32, where bfloat16 has steps of 1/8, so that rounding one moves it by 1/16 at
# most. A log-probability is a logit less the logits' log-sum, which moves no further than the logits, and so is the
# difference of two tokens' log-probabilities. Between two computations that is four roundings, and what the roundings
# of hidden states before it add is allowed to be as much again.
ROUNDING = 2 * 4 / 16
# Roundings fall either way, and few are as large as they can be: on average over many, an eighth of that is left. With
# AMX vLLM's attention rounds the softmax's weights, too, so that a sixth is allowed.
MEAN_ROUNDING = ROUNDING / (6 if torch.cpu._is_amx_tile_supported() else 8)

Generate = Callable[[list[int], list[list[int]], list[int]], list[Answer]]


def generates(engine: Engine, keys: dict) -> Generate:
    """``assert_close``'s way to ask an engine, with these sampling parameters."""
    return lambda _, texts, lengths: engine.generate(texts, [{**keys, "max_tokens": length} for length in lengths])


def assert_close(theirs: list[Answer], prompts: list[list[int]], generate: Generate) -> None:
    """Greedy texts and their log-probabilities are the reference's but for rounding.

    Where two tokens were as good as one another, the engine goes on from the reference's token, so that all of every
    text is compared.

    Args:
        theirs: the reference's answers, with two logprobs or more.
        generate: asks the engine that is compared with it, given places of prompts, these prompts extended by the
            reference's text so far, and how many tokens are left.
    """
    apart: list[float] = []
    done, unfinished = [0] * len(prompts), list(range(len(prompts)))
    while unfinished:
        texts = [prompts[i] + theirs[i].tokens[: done[i]] for i in unfinished]
        lengths = [len(theirs[i].tokens) - done[i] for i in unfinished]
        for i, ours in zip(unfinished, generate(unfinished, texts, lengths), strict=True):
            if done[i] == 0:
                both = [answer.prompt_logprobs or [None] for answer in (theirs[i], ours)]
                apart += [gap for a, b in list(zip(*both, strict=True))[1:] for gap in _gaps(a, b)]
            done[i] += _same_tokens(theirs[i], ours, done[i], apart)
        unfinished = [i for i in unfinished if done[i] < len(theirs[i].tokens)]
    worst, mean = max(apart), sum(apart) / len(apart)
    print(f"log-probabilities differ by {worst:.3f} at most and {mean:.4f} on average")
    assert worst < ROUNDING and mean < MEAN_ROUNDING, (worst, mean)


def _same_tokens(theirs: Answer, ours: Answer, start: int, apart: list[float]) -> int:
    """How many tokens of the reference's text from ``start`` on are settled: up to a tie, or all."""
    expected, got = theirs.completions[0], ours.completions[0]
    assert len(got.tokens) == len(expected.tokens) - start
    for place, token in enumerate(got.tokens):
        there, here = expected.logprobs[start + place], got.logprobs[place]
        apart += _gaps(there, here)
        if token != expected.tokens[start + place]:
            # A token that the reference does not list lies below all those that it does.
            best = there[expected.tokens[start + place]]
            assert best - there.get(token, min(there.values())) < ROUNDING
            return place + 1
    return len(got.tokens)


def _gaps(there: dict[int, float], here: dict[int, float]) -> list[float]:
    """How far apart the log-probabilities of a place lie."""
    return [abs(there[token] - here[token]) for token in there.keys() & here.keys()]
