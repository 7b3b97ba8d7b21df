"""Every request feature on Model Runner V1: it runs on graphs and equals plain vLLM, alone and in a batch.

``v2/test_v2_features.py`` tests the same list on V2. ``test_structured_*`` test long structured output.
"""

import pytest
from engine_process import Engine, draft_every_level
from request_features import (
    CHANGE_SAMPLED,
    FEATURES,
    MODES,
    NEVER_CHANGE,
    asked,
    asked_with_mode,
    assert_on_graph,
    assert_same,
)

LENGTH = 40
SEEDS = range(50, 58)
GREEDY = {"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True}
ENGINE = {
    "logits_processors": ["custom_processor:NoStutterProcessor"],
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}


@pytest.fixture(scope="module")
def plain(engine_pool, text_pair):
    return engine_pool.engine("plain", lambda: Engine(text_pair.target, None, **ENGINE))


@pytest.fixture(scope="module")
def gsd(engine_pool, text_pair):
    config = {"method": "gsd", "model": str(text_pair.draft)}
    return engine_pool.engine("gsd", lambda: Engine(text_pair.target, config, [draft_every_level], **ENGINE))


@pytest.fixture(scope="module")
def free(plain, prompts):
    """Greedy texts without any feature."""
    return [answer.completions[0] for answer in plain.generate(prompts, GREEDY)]


@pytest.fixture(scope="module")
def free_seeded(plain, prompts, free):
    """Seeded texts without any feature."""
    params = [asked("nothing", text, LENGTH, seed) for text, seed in zip(free, SEEDS, strict=True)]
    return [answer.completions[0] for answer in plain.generate(prompts, params)]


@pytest.mark.parametrize("feature", FEATURES)
def test_equal_and_on_the_graph(plain, gsd, prompts, free, free_seeded, feature):
    """Eight requests at once, then one alone, both greedy and seeded; unless exempt, the feature changes some text."""
    before, answers = gsd.metrics(), []
    for index, (seeds, usual) in enumerate((([None] * 8, free), (SEEDS, free_seeded))):
        params = [asked(feature, text, LENGTH, seed) for text, seed in zip(free, seeds, strict=True)]
        expected = plain.generate(prompts, params)
        ours = gsd.generate(prompts, params)
        assert_same(ours, expected)
        (alone,) = gsd.generate(prompts[index : index + 1], params[index])
        assert_same([alone], [expected[index]])
        answers += [*ours, alone]
        changed = [one.completions[0].text != text.text for one, text in zip(expected, usual, strict=True)]
        assert any(changed) or feature in NEVER_CHANGE or (usual is free and feature in CHANGE_SAMPLED)
    assert_on_graph(before, gsd.metrics(), answers)


def test_all_of_them_in_one_batch(plain, gsd, prompts, free):
    """All features except logprob_token_ids: with it, vLLM's V1 hides the top logprobs of other requests."""
    features = [feature for feature in FEATURES if feature != "logprob_token_ids"]
    params = [asked(feature, free[i % 8], 20 + i, (None, 80)[i % 2]) for i, feature in enumerate(features)]
    some = [prompts[i % 8] for i in range(len(params))]
    before = gsd.metrics()
    ours = gsd.generate(some, params)
    assert_same(ours, plain.generate(some, params))
    assert_on_graph(before, gsd.metrics(), ours)


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_logprobs(start_engine, prompts, mode):
    plain, gsd = start_engine(None, logprobs_mode=mode), start_engine({}, logprobs_mode=mode)
    params = [asked_with_mode(index, LENGTH) for index in range(len(prompts))]
    before = gsd.metrics()
    ours = gsd.generate(prompts, params)
    assert_same(ours, plain.generate(prompts, params))
    assert_on_graph(before, gsd.metrics(), ours)
    for i in range(4):
        alone = gsd.generate(prompts[i : i + 1], params[i : i + 1])
        assert_same(alone, plain.generate(prompts[i : i + 1], params[i : i + 1]))
        assert all(len(one.logprobs) == len(one.tokens) for one in alone[0].completions)
