"""Every request feature that the README says works on graphs: equal to plain vLLM alone and in a batch, and on a graph.

Equal are tokens, reasons to end, logprobs and prompt logprobs; on a graph means accepted drafts, more than 1.1 tokens
per target step and no fallback. Structured output has files of its own, ``test_structured_*``.
"""

import pytest
from engine_process import Answer, Params

GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
SEEDED = {"temperature": 0.7, "max_tokens": 40, "ignore_eos": True}
ENGINE = {"logits_processors": ["custom_processor:NoStutterProcessor"]}
# What a request asks for beside the keys above, sometimes by the greedy text that it would have otherwise.
FEATURES = {
    "greedy": lambda free: GREEDY,
    "temperature": lambda free: SEEDED,
    "top_k": lambda free: {**SEEDED, "top_k": 20},
    "top_p": lambda free: {**SEEDED, "top_p": 0.8},
    "min_p": lambda free: {**SEEDED, "min_p": 0.1},
    "logit_bias": lambda free: {**GREEDY, "logit_bias": {free[4]: -100.0, free[9]: -100.0, 11: 2.0}},
    "repetition_penalty": lambda free: {**GREEDY, "repetition_penalty": 1.3},
    "presence_penalty": lambda free: {**SEEDED, "presence_penalty": 1.0},
    "frequency_penalty": lambda free: {**GREEDY, "frequency_penalty": 0.6},
    "bad_words": lambda free: Params(GREEDY, bad_words_token_ids=[free[3:4], free[10:12], free[20:23]]),
    "allowed_token_ids": lambda free: {**GREEDY, "allowed_token_ids": list(range(5, 200))},
    "min_tokens": lambda free: {**GREEDY, "min_tokens": 20, "stop_token_ids": [free[5], free[30]]},
    "stop_token_ids": lambda free: {**GREEDY, "stop_token_ids": [free[25]]},
    "eos": lambda free: {**SEEDED, "ignore_eos": False},
    "max_tokens": lambda free: {**GREEDY, "max_tokens": 13 + free[0] % 20},
    "logprobs": lambda free: {**GREEDY, "logprobs": 3},
    "prompt_logprobs": lambda free: {**SEEDED, "prompt_logprobs": 2},
    "n": lambda free: {**SEEDED, "n": 3},
    "custom_processor": lambda free: {**GREEDY, "extra_args": {"no_stutter": 4}},
}


@pytest.fixture(scope="module")
def free(plain, prompts):
    """Greedy texts with nothing else asked for."""
    return [answer.tokens for answer in plain.generate(prompts, GREEDY)]


def with_seed(params, seed) -> Params:
    params = params if isinstance(params, Params) else Params(params)
    return Params({**params.keys, "seed": seed}, params.bad_words_token_ids)


def assert_same_logprobs(ours, theirs):
    assert (ours is None) == (theirs is None)
    for our_place, their_place in zip(ours or [], theirs or [], strict=True):
        assert our_place == (None if their_place is None else pytest.approx(their_place, abs=1e-4))


def assert_same(ours: list[Answer], theirs: list[Answer]):
    for our, their in zip(ours, theirs, strict=True):
        assert_same_logprobs(our.prompt_logprobs, their.prompt_logprobs)
        for one, other in zip(our.completions, their.completions, strict=True):
            assert one.tokens == other.tokens
            assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
            assert_same_logprobs(one.logprobs, other.logprobs)


def assert_on_graph(before, after, answers: list[Answer]):
    """Every request of a run went on a graph and gained by it."""
    counts = {name: value - before.get(name, 0) for name, value in after.items() if isinstance(value, int)}
    assert sum(value for name, value in counts.items() if name.startswith("gsd_fallbacks")) == 0
    assert counts["spec_decode_num_accepted_tokens"] > 0
    tokens = sum(len(one.tokens) for answer in answers for one in answer.completions)
    assert tokens / counts["gsd_target_steps"] > 1.1


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("feature", FEATURES)
def test_equal_and_on_the_graph(plain, gsd, prompts, free, feature, batch):
    params = [with_seed(FEATURES[feature](text), 50 + i) for i, text in enumerate(free)]
    groups = [slice(0, 8)] if batch == 8 else [slice(i, i + 1) for i in range(3)]
    before, answers = gsd.metrics(), []
    for group in groups:
        ours = gsd.generate(prompts[group], params[group])
        assert_same(ours, plain.generate(prompts[group], params[group]))
        answers += ours
    assert_on_graph(before, gsd.metrics(), answers)


def test_all_of_them_in_one_batch(plain, gsd, prompts, free):
    asked = [with_seed(feature(text), 80) for feature, text in zip(FEATURES.values(), free * 3, strict=False)]
    params = [Params({**p.keys, "max_tokens": 20 + i}, p.bad_words_token_ids) for i, p in enumerate(asked)]
    some = (prompts * 3)[: len(params)]
    before = gsd.metrics()
    ours = gsd.generate(some, params)
    assert_same(ours, plain.generate(some, params))
    assert_on_graph(before, gsd.metrics(), ours)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_modes_of_logprobs(start_engine, prompts, mode):
    plain, gsd = start_engine(None, logprobs_mode=mode), start_engine({}, logprobs_mode=mode)
    keys = [GREEDY, {**SEEDED, "top_k": 20}, {**GREEDY, "presence_penalty": 1.0}, {**SEEDED, "logit_bias": {9: 2.0}}]
    params = [
        Params({**keys[i % 4], "seed": i, "logprobs": 3, "prompt_logprobs": 2 if i % 3 == 0 else None})
        for i in range(len(prompts))
    ]
    before = gsd.metrics()
    ours = gsd.generate(prompts, params)
    assert_same(ours, plain.generate(prompts, params))
    assert_on_graph(before, gsd.metrics(), ours)
    for i in range(4):
        alone = gsd.generate(prompts[i : i + 1], params[i : i + 1])
        assert_same(alone, plain.generate(prompts[i : i + 1], params[i : i + 1]))
        assert all(len(one.logprobs) == len(one.tokens) for one in alone[0].completions)
