"""Hard cases of single request features on V1; ``request_features`` lists all features."""

import pytest
from engine_process import run
from request_features import assert_same_logprobs

GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
SEEDED = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True}


def with_seeds(keys, count):
    return [{**SEEDED, **keys, "seed": 7 + i} for i in range(count)]


def accepted(engine):
    return engine.metrics()["spec_decode_num_accepted_tokens"]


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
    """The state stays right although paths and texts differ in length, and requests join and leave the batch."""
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
