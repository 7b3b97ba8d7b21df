"""The random requests of a soak: each has one of the kinds below and independently drawn sampling options."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}, "hourly": {"type": "boolean"}},
    "required": ["city", "days", "hourly"],
    "additionalProperties": False,
}
ANSWERS = ["yes, always", "yes, sometimes", "never"]
CLOCK = r"(0|1)[0-9]:[0-5][0-9]"
# Enough tokens for the grammars above if every character is a token.
GRAMMAR_TOKENS = 64
# The probabilities that a client waits for its answer, aborts it, or drops its connection.
FATES = {"answered": 0.78, "aborted": 0.16, "vanished": 0.06}


@dataclass(frozen=True)
class Load:
    """One request."""

    kind: str
    fate: str  # a key of ``FATES``
    chat: bool  # chat or completions endpoint
    body: dict[str, Any]  # body of the HTTP request, including the model's name
    patience: float  # when the client gives up, relative to the usual time of an answer

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))


Keys = dict[str, Any]


def _stop(rng: random.Random, longest: int) -> Keys:
    keys: Keys = {"stop": rng.sample(["1", "e", " w4", " w30", "z"], 2), "stop_token_ids": [rng.randrange(40, 400)]}
    return {**keys, "include_stop_str_in_output": rng.random() < 0.5}


def _bounded(rng: random.Random, longest: int) -> Keys:
    most = rng.randint(2, longest)
    return {"max_tokens": most, "min_tokens": rng.randint(1, most), "ignore_eos": rng.random() < 0.5}


def _schema(rng: random.Random, longest: int) -> Keys:
    described = {"name": "weather", "schema": WEATHER}
    return {"max_tokens": GRAMMAR_TOKENS, "response_format": {"type": "json_schema", "json_schema": described}}


def _grammar(rng: random.Random, longest: int) -> Keys:
    return {"max_tokens": GRAMMAR_TOKENS, "structured_outputs": rng.choice([{"choice": ANSWERS}, {"regex": CLOCK}])}


def _tokens(rng: random.Random, longest: int) -> Keys:
    """Options that name tokens. Low ids exist in every vocabulary."""
    if rng.random() < 0.5:
        return {"logit_bias": {str(rng.randrange(400)): rng.uniform(-50, 5) for _ in range(4)}}
    return {"allowed_token_ids": sorted(rng.sample(range(40, 400), 30))}


# For each kind: a function that draws its keys, and the endpoint (True: chat, False: completions, None: either).
KINDS: dict[str, tuple[Callable[[random.Random, int], Keys], bool | None]] = {
    "plain": (lambda rng, longest: {}, None),
    "stop": (_stop, None),
    "bounded": (_bounded, None),
    "json schema": (_schema, True),
    "grammar": (_grammar, None),
    "named tokens": (_tokens, None),
    "bad words": (lambda rng, longest: {"bad_words": rng.sample(["w7", "w8", "w9", "a b"], 2)}, None),
    "several": (lambda rng, longest: {"n": rng.randint(2, 4), "temperature": 1.0}, None),
    "chat logprobs": (lambda rng, longest: {"logprobs": True, "top_logprobs": rng.randint(0, 5)}, True),
    "logprobs": (lambda rng, longest: {"logprobs": rng.randint(1, 5)}, False),
    "echo": (lambda rng, longest: {"logprobs": rng.randint(1, 5), "echo": True}, False),
    "prompt logprobs": (lambda rng, longest: {"prompt_logprobs": rng.randint(0, 3), "stream": False}, None),
    "opted out": (lambda rng, longest: {"vllm_xargs": {"gsd": False}}, None),
    "salted": (lambda rng, longest: {"cache_salt": rng.choice(["one", "two"])}, None),
    "LoRA": (lambda rng, longest: {}, None),
}

# On CPUs, vLLM 0.32 crashes on prompt logprobs with LoRA: its LoRA logits layer accepts only the rows that are sampled.
NOT_BESIDE_LORA = ("prompt logprobs", "echo")


def kinds(lora: bool) -> list[str]:
    """The kinds of requests for a server with or without LoRA adapters."""
    return [kind for kind in KINDS if (kind not in NOT_BESIDE_LORA if lora else kind != "LoRA")]


def draw_load(seed: int, number: int, model: str, adapters: list[str], longest: int, words: int = 64) -> Load:
    """Request ``number`` of a soak, from 1. The kinds take turns, and the first of each waits for its answer.

    Args:
        adapters: names of LoRA adapters, possibly none.
        longest: maximum tokens of an answer, unless its kind needs a certain number.
        words: maximum words of a prompt.
    """
    rng = random.Random(f"{seed}/{number}")
    drawn = kinds(bool(adapters))
    kind = drawn[number % len(drawn)]
    keys_of, chat = KINDS[kind]
    keys = {"max_tokens": rng.randint(1, longest), "stream": rng.random() < 0.6, **keys_of(rng, longest)}
    chat = rng.random() < 0.5 if chat is None else chat
    if keys["stream"]:
        keys["stream_options"] = {"include_usage": True}
    prompt = _prompt(rng, words)
    keys |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    keys |= {"model": rng.choice(adapters) if kind == "LoRA" else model, "return_token_ids": True}
    fate = rng.choices(list(FATES), list(FATES.values()))[0] if number > len(drawn) else "answered"
    return Load(kind, fate, chat, {**_sampling(rng), **keys}, rng.random())


def _prompt(rng: random.Random, most: int) -> str:
    """Random words. Most prompts share a prefix with others, of whole or partial blocks."""
    shared = random.Random(rng.randrange(6))
    words = (
        [f"w{shared.randrange(200, 400)}" for _ in range(shared.randint(most // 6, most * 5 // 8))]
        if rng.random() < 0.7
        else []
    )
    return " ".join([*words, *(f"w{rng.randrange(200, 400)}" for _ in range(rng.randint(2, most * 3 // 8)))])


def _sampling(rng: random.Random) -> Keys:
    if rng.random() < 0.35:
        return {"temperature": 0}
    keys: Keys = {"temperature": rng.choice([0.3, 0.7, 1.0, 1.3])}
    others: Keys = {
        "seed": rng.randrange(1000),
        "top_p": rng.uniform(0.5, 1),
        "top_k": rng.randint(1, 50),
        "min_p": rng.uniform(0, 0.2),
        "presence_penalty": rng.uniform(-1, 1),
        "frequency_penalty": rng.uniform(-1, 1),
        "repetition_penalty": rng.uniform(0.8, 1.3),
    }
    return keys | {name: value for name, value in others.items() if rng.random() < 0.4}


def fits_grammar(body: Keys, text: str) -> bool:
    """Whether a whole text matches ``structured_outputs``."""
    wanted = body["structured_outputs"]
    return text in wanted["choice"] if "choice" in wanted else re.fullmatch(wanted["regex"], text) is not None
