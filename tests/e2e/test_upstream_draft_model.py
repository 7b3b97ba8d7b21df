"""vLLM's own ``draft_model``, as compared in the README: features it refuses, and those it serves like plain vLLM."""

import pytest
from engine_process import Engine, EngineError, run

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "max_tokens": 8}
SERVED = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "allowed tokens": {"allowed_token_ids": list(range(5, 60))},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
}


@pytest.fixture(scope="module")
def config(tiny_pair):
    return {"method": "draft_model", "model": str(tiny_pair.draft), "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def draft_model(tiny_pair, config):
    engine = Engine(tiny_pair.target, config, skip_tokenizer_init=True)
    yield engine
    engine.close()


@pytest.mark.parametrize("feature", SERVED)
def test_served(plain, draft_model, prompts, feature):
    params = {**GREEDY, **SERVED[feature]}
    assert run(draft_model, prompts, params) == run(plain, prompts, params)


def test_min_tokens_are_overshot(plain, draft_model, prompts):
    """Stop tokens stay forbidden for the rest of a step after ``min_tokens`` is reached."""
    params = {**GREEDY, "min_tokens": 12, "stop_token_ids": list(range(5, 300))}
    theirs, expected = run(draft_model, prompts, params), run(plain, prompts, params)
    assert theirs != expected
    assert sum(map(len, theirs)) > sum(map(len, expected))


def test_seeds_do_not_give_the_output_of_plain_vllm(plain, draft_model, prompts):
    params = {**SAMPLED, "seed": 5, "max_tokens": 24, "ignore_eos": True}
    assert run(draft_model, prompts, params) != run(plain, prompts, params)


@pytest.mark.parametrize("keys", [{"min_p": 0.1}, {"logit_bias": {7: -1.0}}], ids=["min_p", "logit_bias"])
def test_refused_per_request(gsd, draft_model, prompts, keys):
    with pytest.raises(EngineError, match="not yet supported with speculative decoding"):
        draft_model.generate(prompts, {**SAMPLED, **keys})
    assert all(run(gsd, prompts, {**SAMPLED, **keys}))


def test_logits_processors_refused_at_start(tiny_pair, config):
    processors = ["custom_processor:NoStutterProcessor"]
    with pytest.raises(EngineError, match="not supported when speculative decoding is enabled"):
        Engine(tiny_pair.target, config, skip_tokenizer_init=True, logits_processors=processors)
