"""Request features beside plain sampling: served as plain vLLM serves them, with the graph where that is possible."""

import pytest
from engine_process import Params, run

GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
SEEDED = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True}
FEATURES = {
    "repetition-penalty": {"repetition_penalty": 1.4},
    "presence-penalty": {"presence_penalty": 1.5},
    "frequency-penalty": {"frequency_penalty": 0.8},
    "all-penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.3},
    "min-p": {"min_p": 0.3},
    "logit-bias": {"logit_bias": {**dict.fromkeys(range(5, 40), 1.5), 7: -100.0}},
    "min-p-and-logit-bias": {"min_p": 0.15, "logit_bias": {9: 2.0, 11: 2.0}},
    "allowed-token-ids": {"allowed_token_ids": list(range(5, 60))},
}


def with_seeds(keys, count):
    return [{**SEEDED, **keys, "seed": 7 + i} for i in range(count)]


def accepted(engine):
    return engine.metrics()["spec_decode_num_accepted_tokens"]


@pytest.mark.parametrize("feature", FEATURES)
def test_parameters_that_change_logits(plain, gsd, prompts, feature):
    keys = FEATURES[feature]
    before = accepted(gsd)
    seeded = with_seeds(keys, len(prompts))
    assert run(plain, prompts, seeded) != run(plain, prompts, with_seeds({}, len(prompts)))  # it does something here
    for params in ({**GREEDY, **keys}, seeded):
        expected = run(plain, prompts, params)
        assert run(gsd, prompts, params) == expected
    assert accepted(gsd) > before


def test_bad_words_of_one_and_more_tokens(plain, gsd, prompts):
    """Whether a longer bad word ends at a node depends on the path to it."""
    free = run(plain, prompts, GREEDY)
    params = []
    for tokens in free:
        words = [tokens[3:4], tokens[10:12], tokens[20:23]]
        params.append(Params(GREEDY, bad_words_token_ids=words))
    expected = run(plain, prompts, params)
    assert all(new != old for new, old in zip(expected, free, strict=True))
    before = accepted(gsd)
    assert run(gsd, prompts, params) == expected
    assert accepted(gsd) > before


def test_min_tokens_hold_back_stop_tokens(plain, gsd, prompts):
    free = run(plain, prompts, GREEDY)
    before = accepted(gsd)
    for min_tokens in (0, 9, 10, 25, 40):
        params = [{**GREEDY, "stop_token_ids": [tokens[8], tokens[12]], "min_tokens": min_tokens} for tokens in free]
        expected = run(plain, prompts, params)
        assert run(gsd, prompts, params) == expected
        assert min(map(len, expected)) >= min_tokens
    assert accepted(gsd) > before


def test_min_tokens_with_sampling_and_penalties(plain, gsd, prompts):
    params = [
        {**keys, "min_tokens": 5 * i, "stop_token_ids": list(range(5, 200)), "presence_penalty": 0.2 * (i % 3)}
        for i, keys in enumerate(with_seeds({}, len(prompts)))
    ]
    expected = run(plain, prompts, params)
    assert len({len(tokens) for tokens in expected}) > 3
    assert run(gsd, prompts, params) == expected


def test_everything_in_one_batch(plain, gsd, random_prompts):
    prompts = random_prompts(16, seed=5)
    keys = [*FEATURES.values(), {"logprobs": 2}, {"min_tokens": 20, "stop_token_ids": list(range(5, 300))}, {}]
    seeded = with_seeds({}, 16)
    params = [
        {**(seeded[i] if i % 2 else GREEDY), **keys[i // 2], "max_tokens": 10 + 3 * i} for i in range(len(prompts))
    ]
    expected = run(plain, prompts, params)
    assert run(gsd, prompts, params) == expected


def assert_same_logprobs(ours, theirs):
    assert len(ours) == len(theirs)
    for our_place, their_place in zip(ours, theirs, strict=True):
        if their_place is None:
            assert our_place is None
            continue
        assert our_place.keys() == their_place.keys()
        for token, logprob in their_place.items():
            assert our_place[token] == pytest.approx(logprob, abs=1e-4)


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("sampled", [False, True])
def test_logprobs(plain, gsd, prompts, count, sampled):
    params = with_seeds({"logprobs": count}, len(prompts)) if sampled else {**GREEDY, "logprobs": count}
    before = accepted(gsd)
    theirs, ours = plain.generate(prompts, params), gsd.generate(prompts, params)
    for our, their in zip(ours, theirs, strict=True):
        assert our.tokens == their.tokens
        assert len(our.completions[0].logprobs) == len(our.tokens)
        assert_same_logprobs(our.completions[0].logprobs, their.completions[0].logprobs)
    assert accepted(gsd) > before


def test_logprobs_of_some_requests_of_a_batch(plain, gsd, prompts):
    params = [{**GREEDY, "logprobs": i} if i % 3 == 0 else GREEDY for i in range(len(prompts))]
    theirs, ours = plain.generate(prompts, params), gsd.generate(prompts, params)
    for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        assert our.tokens == their.tokens
        if i % 3 == 0:
            assert_same_logprobs(our.completions[0].logprobs, their.completions[0].logprobs)
        else:
            assert our.completions[0].logprobs is None


def test_logprobs_of_a_text_that_stops_in_the_middle_of_a_path(plain, gsd, prompts):
    free = run(plain, prompts, GREEDY)
    params = [{**GREEDY, "logprobs": 2, "stop_token_ids": [tokens[9], tokens[17]]} for tokens in free]
    for our, their in zip(gsd.generate(prompts, params), plain.generate(prompts, params), strict=True):
        assert our.tokens == their.tokens
        assert_same_logprobs(our.completions[0].logprobs, their.completions[0].logprobs)


def test_prompt_logprobs(plain, gsd, prompts):
    params = {**GREEDY, "prompt_logprobs": 2, "logprobs": 1}
    theirs, ours = plain.generate(prompts, params), gsd.generate(prompts, params)
    for our, their in zip(ours, theirs, strict=True):
        assert our.tokens == their.tokens
        assert_same_logprobs(our.prompt_logprobs, their.prompt_logprobs)
        assert_same_logprobs(our.completions[0].logprobs, their.completions[0].logprobs)


def test_several_completions_of_a_prompt(plain, gsd, prompts):
    params = {**SEEDED, "n": 3, "seed": 11}
    theirs, ours = plain.generate(prompts[:4], params), gsd.generate(prompts[:4], params)
    for our, their in zip(ours, theirs, strict=True):
        assert [one.tokens for one in our.completions] == [one.tokens for one in their.completions]
        assert len({tuple(one.tokens) for one in our.completions}) == 3


def test_unseeded_sampling_differs_between_runs_and_is_served(gsd, prompts):
    first, second = run(gsd, prompts, SEEDED), run(gsd, prompts, SEEDED)
    assert first != second
    assert all(len(tokens) == 40 for tokens in first + second)


def test_custom_logits_processors_read_their_own_path(start_engine, prompts):
    options = {"logits_processors": ["custom_processor:NoStutterProcessor"]}
    plain, gsd = start_engine(None, **options), start_engine({}, **options)
    free = run(plain, prompts, GREEDY)
    params = [{**GREEDY, "extra_args": {"no_stutter": 1 + i}} if i % 4 else GREEDY for i in range(len(prompts))]
    expected = run(plain, prompts, params)
    assert expected != free
    before = accepted(gsd)
    assert run(gsd, prompts, params) == expected
    seeded = [{**keys, **params[i]} for i, keys in enumerate(with_seeds({}, len(prompts)))]
    seeded = [{**keys, "temperature": 1.0} for keys in seeded]
    assert run(gsd, prompts, seeded) == run(plain, prompts, seeded)
    assert accepted(gsd) > before


@pytest.mark.parametrize("kind", ["AutomatonProcessor", "BatchAutomatonProcessor"])
def test_custom_logits_processors_whose_state_goes_on_with_every_call(start_engine, prompts, kind):
    """Walks of a batch are of unlike lengths, and so are texts: requests leave the batch, others take their place."""
    options = {"logits_processors": [f"custom_processor:{kind}"]}
    plain, gsd = start_engine(None, **options), start_engine({}, **options)
    many, before = prompts * 2, accepted(gsd)
    for keys in ([GREEDY] * len(many), with_seeds({}, len(many))):
        params = [
            {**one, "max_tokens": 8 + 3 * i, **({"extra_args": {"automaton": 1 + i}} if i % 4 else {})}
            for i, one in enumerate(keys)
        ]
        expected = run(plain, many, params)
        assert expected != run(plain, many, [{**one, "extra_args": {}} for one in params])
        assert run(gsd, many, params) == expected
        alone = [run(gsd, [prompt], one)[0] for prompt, one in zip(many[1:3], params[1:3], strict=True)]
        assert alone == expected[1:3]
    assert accepted(gsd) > before
