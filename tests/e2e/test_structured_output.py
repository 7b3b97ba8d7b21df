"""Structured output on graphs with every backend is valid, equals plain vLLM's, and takes fewer steps."""

import json
import re

import jsonschema
import pytest
from engine_process import scheduler

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"enum": ["apple", "banana", "cherry"]}, "minItems": 2, "maxItems": 4}
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
CHOICE = ["certainly yes", "certainly not", "maybe"]
# Keys of StructuredOutputsParams, a prompt, and a check that raises for an invalid text.
REQUESTS = [
    ({"json": json.dumps(PERSON)}, "Describe a person as JSON.", lambda t: jsonschema.validate(json.loads(t), PERSON)),
    ({"json": json.dumps(LIST)}, "List some fruit as JSON.", lambda t: jsonschema.validate(json.loads(t), LIST)),
    ({"regex": DATE}, "When did it happen?", lambda t: re.fullmatch(DATE, t).group()),
    ({"choice": CHOICE}, "Will it rain?", lambda t: CHOICE.index(t)),
]
SUM = 'root ::= number (" + " number){1,3} " = " number\nnumber ::= [0-9]{1,3}'
SUM_REQUEST = ({"grammar": SUM}, "Add some numbers.", lambda t: re.fullmatch(r"\d+( \+ \d+)+ = \d+", t).group())
FREE = ({}, "Count from one to ten.", lambda t: t[0])
BACKENDS = ["xgrammar", "guidance", "outlines"]  # lm-format-enforcer cannot be imported with vLLM 0.32


def use_backend(llm, backend: str) -> None:
    """Make the engine compile grammars as if it had been started with that backend."""
    llm.llm_engine.vllm_config.structured_outputs_config.backend = backend
    scheduler(llm).structured_output_manager.backend = None


def engines_with(start_built_in, backend: str):
    """Plain vLLM and gsd, which compile grammars with that backend."""
    engines = start_built_in(gsd=False), start_built_in(gsd=True)
    for engine in engines:
        engine.call(use_backend, backend)
    return engines


@pytest.mark.parametrize("backend", BACKENDS)
def test_valid_equal_and_faster(start_built_in, backend):
    plain, gsd = engines_with(start_built_in, backend)
    requests = [*REQUESTS, *([SUM_REQUEST] if backend == "xgrammar" else []), FREE]
    prompts = [prompt for _, prompt, _ in requests] * 2
    params = [
        {"temperature": temperature, "seed": 3 + i, "max_tokens": 64 if keys else 16, "structured_outputs": keys}
        for temperature in (0, 1)
        for i, (keys, _, _) in enumerate(requests)
    ]
    before = gsd.metrics()
    theirs, ours = plain.generate(prompts, params), gsd.generate(prompts, params)
    assert [our.tokens for our in ours] == [their.tokens for their in theirs]
    for our, (_, _, check) in zip(ours, requests * 2, strict=True):
        check(our.completions[0].text)
    after = gsd.metrics()
    assert not any(name.startswith("gsd_fallbacks") for name in after)
    assert after["gsd_nodes_invalid"] > before["gsd_nodes_invalid"]
    tokens = sum(len(our.tokens) for our in ours)
    assert tokens / (after["gsd_target_steps"] - before["gsd_target_steps"]) > 1.1


def test_stops_and_penalties_beside_a_grammar(start_built_in):
    plain, gsd = engines_with(start_built_in, "auto")
    keys = {"json": json.dumps(PERSON)}
    params = [
        {"temperature": 0, "max_tokens": 7, "structured_outputs": keys},
        {"temperature": 0, "max_tokens": 40, "stop": ['"age"'], "structured_outputs": keys},
        {"temperature": 1, "seed": 1, "max_tokens": 64, "presence_penalty": 0.7, "structured_outputs": keys},
        {"temperature": 1, "seed": 2, "max_tokens": 64, "logprobs": 2, "structured_outputs": keys, "n": 2},
    ]
    prompts = ["Describe a person as JSON."] * len(params)
    for our, their in zip(gsd.generate(prompts, params), plain.generate(prompts, params), strict=True):
        for one, other in zip(our.completions, their.completions, strict=True):
            assert (one.tokens, one.finish_reason, one.stop_reason) == (
                other.tokens,
                other.finish_reason,
                other.stop_reason,
            )
