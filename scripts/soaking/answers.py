"""Checks an answer against the keys of its request."""

import json
import math
from dataclasses import dataclass, field
from typing import Any

import jsonschema

from .loads import Load, fits_grammar


@dataclass
class Choice:
    """One choice of an answer, assembled from the pieces of a stream."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Answer:
    """A whole answer."""

    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_tokens: int = 0
    tokens: int = 0  # of all choices, by the server's count
    first_after: float | None = None  # seconds until the first piece of a stream

    def choice(self, index: int) -> Choice:
        return self.choices.setdefault(index, Choice())


def faults(load: Load, answer: Answer, ends: set[int]) -> list[str]:
    """The faults of a whole answer, one sentence each.

    Args:
        ends: the target's end-of-text tokens.
    """
    body, result = load.body, []
    wanted = body.get("n", 1)
    if sorted(answer.choices) != list(range(wanted)):
        result.append(f"the answer has the choices {sorted(answer.choices)}, but n = {wanted}")
    if answer.tokens > wanted * body["max_tokens"]:
        result.append(f"the server counts {answer.tokens} tokens, but n = {wanted}, max_tokens = {body['max_tokens']}")
    sent = sum(len(choice.tokens) for choice in answer.choices.values())
    if sent != answer.tokens:
        result.append(f"the server counts {answer.tokens} tokens, but sent {sent}")
    for choice in answer.choices.values():
        result += _faults_of_length(body, choice)
        result += _faults_of_stops(body, choice, ends)
        result += _faults_of_form(body, choice)
        result += _faults_of_logprobs(body, choice)
    return result


def _faults_of_length(body: dict[str, Any], choice: Choice):
    count, most = len(choice.tokens), body["max_tokens"]
    if count > most:
        yield f"{count} tokens, but max_tokens is {most}"
    if choice.finish_reason not in ("stop", "length"):
        yield f"finish_reason is {choice.finish_reason}"
    if choice.finish_reason == "length" and count < most:
        yield f"finish_reason is length after {count} tokens, but max_tokens is {most}"
    if count < body.get("min_tokens", 0):
        yield f"{count} tokens, but min_tokens is {body['min_tokens']}"
    if "allowed_token_ids" in body and not set(choice.tokens) <= set(body["allowed_token_ids"]):
        yield f"tokens {choice.tokens} are not all of allowed_token_ids"


def _faults_of_stops(body: dict[str, Any], choice: Choice, ends: set[int]):
    last = set(body.get("stop_token_ids", ())) | (set() if body.get("ignore_eos") else ends)
    if last & set(choice.tokens[:-1]):
        yield f"tokens {choice.tokens} go on after one of {sorted(last)}"
    # The text ends with the stop string only if the request asks for it.
    text = choice.text[:-1] if body.get("include_stop_str_in_output") else choice.text
    yield from (
        f"text {choice.text!r} goes on after the stop {stop!r}" for stop in body.get("stop", ()) if stop in text
    )


def _faults_of_form(body: dict[str, Any], choice: Choice):
    if choice.finish_reason != "stop":
        return
    if "structured_outputs" in body and not fits_grammar(body, choice.text):
        yield f"text {choice.text!r} is not of {body['structured_outputs']}"
    if "response_format" in body:
        try:
            jsonschema.validate(json.loads(choice.text), body["response_format"]["json_schema"]["schema"])
        except (ValueError, jsonschema.ValidationError) as error:
            yield f"text {choice.text!r} is not of the schema: {str(error).splitlines()[0]}"


def _faults_of_logprobs(body: dict[str, Any], choice: Choice):
    if "logprobs" not in body:
        return
    known = [value for value in choice.logprobs if value is not None]  # the first token of an echoed prompt has none
    if len(choice.logprobs) < len(choice.tokens) or (not body.get("echo") and len(known) != len(choice.tokens)):
        yield f"{len(known)} logprobs of {len(choice.tokens)} tokens"
    if not all(math.isfinite(value) and value <= 1e-4 for value in known):
        yield f"logprobs {known} are not all finite and below 0"
