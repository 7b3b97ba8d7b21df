"""Grammars together with all other features; a separate file because engines live until the end of their file."""

from request_features import assert_same
from test_structured_output import REQUESTS, SUM_REQUEST


def test_grammars_among_all_other_features(start_built_in):
    """Half of the batch has grammars, and the other half uses other features."""
    options = {"logits_processors": ["custom_processor:NoStutterProcessor"]}
    plain, gsd = start_built_in(gsd=False, **options), start_built_in(gsd=True, **options)
    others = [
        {"temperature": 0},
        {"top_p": 0.8, "top_k": 50, "temperature": 0.8},
        {"min_p": 0.1, "temperature": 1.0},
        {"logit_bias": {1: -100.0, 260: 2.0}, "temperature": 0},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3, "temperature": 0.5},
        {"bad_words": ["one", "two"], "temperature": 0},
        {"logprobs": 2, "prompt_logprobs": 1, "temperature": 0},
        {"n": 2, "min_tokens": 10, "temperature": 0.7},
        {"stop": ["ten", "."], "temperature": 0},
        {"extra_args": {"no_stutter": 3}, "temperature": 0},
    ]
    grammars = [*REQUESTS, SUM_REQUEST] * 2
    prompts, params = [], []
    for i, (keys, (grammar, prompt, _)) in enumerate(zip(others, grammars, strict=True)):
        prompts += ["Count from one to ten.", prompt]
        params += [
            {**keys, "seed": i, "max_tokens": 24},
            {"temperature": i % 2, "seed": i, "max_tokens": 64, "structured_outputs": grammar, "min_p": 0.05 * (i % 3)},
        ]
    before = gsd.metrics()
    theirs, ours = plain.generate(prompts, params), gsd.generate(prompts, params)
    assert_same(ours, theirs)
    for (_, _, check), our in zip(grammars, ours[1::2], strict=True):
        check(our.completions[0].text)
    after = gsd.metrics()
    assert not any(name.startswith("gsd_fallbacks") for name in after)
    (stopped,) = ours[2 * 8].completions
    assert stopped.finish_reason == "stop" and stopped.stop_reason in others[8]["stop"]
    accepted = "spec_decode_num_accepted_tokens"
    assert after[accepted] > before.get(accepted, 0)
