"""Every request feature that works on graphs, for the tests of both model runners, and how to compare the answers.

Each feature is requested greedily and with seeds. Some requests depend on the greedy text that the prompt has without
the feature. The engine needs a tokenizer, such as that of ``text_pair``.
"""

from collections.abc import Callable

import pytest
from engine_process import Answer, Completion, Params

DATE = {"regex": r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"}
RECORD = {
    "type": "object",
    "properties": {"alive": {"type": "boolean"}},
    "required": ["alive"],
    "additionalProperties": False,
}
EBNF = 'root ::= "ab" [0-9] [0-9] ("z" | "yz")'


def grammar(constraint: dict, **keys) -> dict:
    return {"structured_outputs": constraint, "ignore_eos": False, "max_tokens": 16, **keys}


def stop_string(free: Completion) -> str:
    """A piece of the text that begins within a token and ends within another."""
    return free.text[len(free.text) // 2 :][:4]


# Each maps the greedy text without the feature and the number of tokens to sampling parameters.
FEATURES: dict[str, Callable[[Completion, int], dict]] = {
    "nothing": lambda free, length: {},
    "temperature": lambda free, length: {"temperature": 1.3},
    "top_k": lambda free, length: {"top_k": 20},
    "top_p": lambda free, length: {"top_p": 0.8},
    "min_p": lambda free, length: {"min_p": 0.1},
    "logit_bias": lambda free, length: {
        "logit_bias": {free.tokens[1]: -100.0, free.tokens[length // 4]: -100.0, 11: 2}
    },
    "min_p and logit_bias": lambda free, length: {"min_p": 0.15, "logit_bias": {9: 2.0, 11: 2.0}},
    "repetition_penalty": lambda free, length: {"repetition_penalty": 1.4},
    "presence_penalty": lambda free, length: {"presence_penalty": 1.5},
    "frequency_penalty": lambda free, length: {"frequency_penalty": 0.8},
    "all penalties": lambda free, length: {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.3,
    },
    # Whether a longer bad word ends at a node depends on the path to it.
    "bad_words": lambda free, length: {
        "bad_words_token_ids": [free.tokens[1:2], free.tokens[length // 4 :][:2], free.tokens[length // 2 :][:3]]
    },
    "allowed_token_ids": lambda free, length: {"allowed_token_ids": list(range(5, 200))},
    "min_tokens": lambda free, length: {
        "min_tokens": length // 2,
        "stop_token_ids": [free.tokens[length // 8], free.tokens[3 * length // 4]],
    },
    "stop_token_ids": lambda free, length: {"stop_token_ids": [free.tokens[5 * length // 8]]},
    "stop": lambda free, length: {"stop": [stop_string(free)]},
    "include_stop_str_in_output": lambda free, length: {
        "stop": [stop_string(free)],
        "include_stop_str_in_output": True,
    },
    # With only four tokens allowed and repetition rewarded, the text soon repeats itself.
    "repetition_detection": lambda free, length: {
        "allowed_token_ids": [9, 11, 12, 14],
        "frequency_penalty": -1.0,
        "repetition_detection": {"max_pattern_size": 2, "min_count": max(length // 8, 2)},
    },
    "eos": lambda free, length: {"ignore_eos": False},
    "max_tokens": lambda free, length: {"max_tokens": length - 1 - free.tokens[0] % (length // 2)},
    "logprobs of sampled tokens": lambda free, length: {"logprobs": 0},
    "logprobs": lambda free, length: {"logprobs": 3, "stop_token_ids": [free.tokens[3 * length // 4]]},
    "logprob_token_ids": lambda free, length: {"logprob_token_ids": [*free.tokens[:2], 11]},
    "flat_logprobs": lambda free, length: {"flat_logprobs": True, "logprobs": 2, "prompt_logprobs": 1},
    "prompt_logprobs": lambda free, length: {"prompt_logprobs": 2, "logprobs": 1},
    "n": lambda free, length: {"n": 3},
    "regex": lambda free, length: grammar(DATE),
    "regex and penalty": lambda free, length: grammar(DATE, presence_penalty=0.4, logprobs=1),
    "choice": lambda free, length: grammar({"choice": ["certainly yes", "certainly not", "maybe"]}),
    "json": lambda free, length: grammar({"json": RECORD}, top_k=50),
    "json_object": lambda free, length: grammar({"json_object": True}),
    "EBNF": lambda free, length: grammar({"grammar": EBNF}),
    # The V1 tests' processor reads one key, the V2 tests' processor the other.
    "custom processor": lambda free, length: {"extra_args": {"no_stutter": 4, "automaton": 3}},
}
# The first change no text, or only one that contains a certain token. The second change no greedy text.
NEVER_CHANGE = {
    "nothing", "eos", "prompt_logprobs", "n", "logprobs of sampled tokens", "logprob_token_ids", "flat_logprobs",
}  # fmt: skip
CHANGE_SAMPLED = {"temperature", "top_k", "top_p", "min_p"}


def asked(feature: str, free: Completion, length: int, seed: int | None) -> Params:
    """Parameters that request a feature; greedy without a seed.

    ``free`` is the prompt's greedy text without the feature, of at least ``length`` tokens.
    """
    keys = {
        "temperature": 0.7,
        "seed": seed,
        "max_tokens": length,
        "ignore_eos": True,
        **FEATURES[feature](free, length),
    }
    if seed is None:
        keys["temperature"] = 0
        if "n" in keys:
            keys["n"] = 1  # vLLM refuses several greedy completions
    return Params(keys, keys.pop("bad_words_token_ids", None))


def assert_same_logprobs(ours, theirs, within: float = 1e-4):
    assert (ours is None) == (theirs is None)
    for our_place, their_place in zip(ours or [], theirs or [], strict=True):
        assert our_place == (None if their_place is None else pytest.approx(their_place, abs=within))


def assert_same(ours: list[Answer], theirs: list[Answer], within: float = 1e-4):
    """Compare tokens, texts, finish and stop reasons exactly, and logprobs up to a difference of ``within``."""
    for our, their in zip(ours, theirs, strict=True):
        assert_same_logprobs(our.prompt_logprobs, their.prompt_logprobs, within)
        for one, other in zip(our.completions, their.completions, strict=True):
            assert (one.tokens, one.text) == (other.tokens, other.text)
            assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
            assert_same_logprobs(one.logprobs, other.logprobs, within)


def assert_on_graph(before: dict, after: dict, answers: list[Answer]):
    """Check that no request of a run fell back to plain decoding, and that graphs saved target steps."""
    counts = {name: value - before.get(name, 0) for name, value in after.items() if isinstance(value, int)}
    assert sum(value for name, value in counts.items() if name.startswith("gsd_fallbacks")) == 0
    assert counts["spec_decode_num_accepted_tokens"] > 0
    # With asynchronous scheduling, some verified nodes belong to requests that have just ended.
    assert 0 < counts["spec_decode_num_draft_tokens"] <= counts["gsd_nodes_verified"]
    tokens = sum(len(one.tokens) for answer in answers for one in answer.completions)
    assert tokens / counts["gsd_target_steps"] > 1.1


# Values of logprobs_mode.
MODES = ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]


def asked_with_mode(index: int, length: int) -> Params:
    """The ``index``-th request for logprobs: in turn greedy, with top-k, with a penalty, and with a bias."""
    keys = [{"temperature": 0}, {"top_k": 20}, {"temperature": 0, "presence_penalty": 1.0}, {"logit_bias": {9: 2.0}}]
    rest = {"seed": index, "logprobs": 3, "prompt_logprobs": 2 if index % 3 == 0 else None, "max_tokens": length}
    return Params({"temperature": 0.7, "ignore_eos": True, **keys[index % 4], **rest})
