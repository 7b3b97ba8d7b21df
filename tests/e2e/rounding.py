"""Answers of two engines in bfloat16, equal but for rounding."""

# How far two computations of a log-probability in bfloat16 may lie apart in the tiny models, whose logits reach 20.
ROUNDING = 0.5


def assert_close(all_theirs, all_ours):
    """Log-probabilities are equal but for rounding; so are texts, until two tokens are as good as one another."""
    for theirs, ours in zip(all_theirs, all_ours, strict=True):
        prompts = (answer.prompt_logprobs or [None] for answer in (theirs, ours))
        for expected, got in list(zip(*prompts, strict=True))[1:]:
            assert all(abs(got[token] - expected[token]) < ROUNDING for token in got.keys() & expected.keys())
        expected, got = theirs.completions[0], ours.completions[0]
        same = next((i for i, (a, b) in enumerate(zip(expected.tokens, got.tokens)) if a != b), None)  # noqa: B905
        if same is not None:
            first, second = sorted(expected.logprobs[same].values(), reverse=True)[:2]
            assert first - second < ROUNDING
        for a, b in list(zip(expected.logprobs, got.logprobs, strict=True))[:same]:
            assert all(abs(a[token] - b[token]) < ROUNDING for token in a.keys() & b.keys())
