"""Compares answers of two bfloat16 engines, which may differ only by rounding."""

from collections.abc import Callable

import torch
from engine_process import Answer, Engine

# Logits of the tiny models stay below 32, where adjacent bfloat16 numbers are 1/8 apart, so rounding moves a logit by
# 1/16 at most. A log-probability is a logit minus the logits' log-sum-exp, which moves no further than the logits. That
# makes two roundings in each engine and four between two engines. The rounding of hidden states may add as much again.
ROUNDING = 2 * 4 / 16
# Rounding errors have either sign, and few are as large as possible: on average, an eighth of the bound remains. With
# AMX, vLLM's attention also rounds the softmax weights, so the tests allow a sixth.
MEAN_ROUNDING = ROUNDING / (6 if torch.cpu._is_amx_tile_supported() else 8)

Generate = Callable[[list[int], list[list[int]], list[int]], list[Answer]]


def generates(engine: Engine, keys: dict) -> Generate:
    """Make the ``generate`` argument of ``assert_close`` from an engine and sampling parameters."""
    return lambda _, texts, lengths: engine.generate(texts, [{**keys, "max_tokens": length} for length in lengths])


def assert_close(theirs: list[Answer], prompts: list[list[int]], generate: Generate) -> None:
    """Check that greedy texts and their log-probabilities differ from the reference's only by rounding.

    Where two tokens are tied up to rounding, the engine continues from the reference's token, so that every text is
    compared to its end.

    Args:
        theirs: the reference's answers, with at least two logprobs.
        generate: generates with the engine under test, given the indices of prompts, these prompts extended by the
            reference's text so far, and the numbers of tokens that are left.
    """
    gaps: list[float] = []
    done, unfinished = [0] * len(prompts), list(range(len(prompts)))
    while unfinished:
        texts = [prompts[i] + theirs[i].tokens[: done[i]] for i in unfinished]
        lengths = [len(theirs[i].tokens) - done[i] for i in unfinished]
        for i, ours in zip(unfinished, generate(unfinished, texts, lengths), strict=True):
            if done[i] == 0:
                both = [answer.prompt_logprobs or [None] for answer in (theirs[i], ours)]
                gaps += [gap for a, b in list(zip(*both, strict=True))[1:] for gap in _gaps(a, b)]
            done[i] += _same_tokens(theirs[i], ours, done[i], gaps)
        unfinished = [i for i in unfinished if done[i] < len(theirs[i].tokens)]
    worst, mean = max(gaps), sum(gaps) / len(gaps)
    print(f"log-probabilities differ by {worst:.3f} at most and {mean:.4f} on average")
    assert worst < ROUNDING and mean < MEAN_ROUNDING, (worst, mean)


def _same_tokens(theirs: Answer, ours: Answer, start: int, gaps: list[float]) -> int:
    """The number of reference tokens from ``start`` that have been compared: up to the first tie, or all."""
    expected, got = theirs.completions[0], ours.completions[0]
    assert len(got.tokens) == len(expected.tokens) - start
    for place, token in enumerate(got.tokens):
        reference, logprobs = expected.logprobs[start + place], got.logprobs[place]
        gaps += _gaps(reference, logprobs)
        if token != expected.tokens[start + place]:
            # A token that the reference does not list is less probable than all that it lists.
            best = reference[expected.tokens[start + place]]
            assert best - reference.get(token, min(reference.values())) < ROUNDING
            return place + 1
    return len(got.tokens)


def _gaps(theirs: dict[int, float], ours: dict[int, float]) -> list[float]:
    """Absolute differences of the log-probabilities at one position."""
    return [abs(theirs[token] - ours[token]) for token in theirs.keys() & ours.keys()]
