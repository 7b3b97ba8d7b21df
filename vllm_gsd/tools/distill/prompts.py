"""Varied requests for distillation, from the templates in ``templates.json``.

Requests come in two rounds. The templates of the second round have a ``{passage}`` to summarise, translate, rewrite or
answer questions about. It is filled with what the target wrote in the first round, so the package ships no texts.
"""

import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from vllm_gsd.tools.prompt_file import Chat

TEMPLATES = Path(__file__).parent / "templates.json"
_SLOT = re.compile(r"\{(\w+)\}")
# The share of second-round requests that continue a chat of the first round instead of quoting its answer.
FOLLOW_UPS = 0.15


def first_round(count: int, seed: int) -> list[Chat]:
    """Requests that need no passage, evenly over the categories, without repetition if the templates allow it."""
    return _distinct(count, _fill(random.Random(seed), "first"))


def second_round(count: int, seed: int, answered: list[tuple[Chat, str]]) -> list[Chat]:
    """Requests about the target's own texts: they quote passages of ``answered`` or continue its chats."""
    rng = random.Random(seed)
    long_enough = [(chat, answer) for chat, answer in answered if len(answer) > 200]
    if not long_enough:
        return first_round(count, seed)
    follow_ups = json.loads(TEMPLATES.read_text("utf-8"))["follow_ups"]

    def requests() -> Iterator[Chat]:
        templates = _fill(rng, "second", lambda: _passage(rng, long_enough))
        while True:
            if rng.random() < FOLLOW_UPS:
                chat, answer = rng.choice(long_enough)
                again = {"role": "user", "content": rng.choice(follow_ups)}
                yield [*chat, {"role": "assistant", "content": answer}, again]
            else:
                yield next(templates)

    return _distinct(count, requests())


def _distinct(count: int, requests: Iterator[Chat]) -> list[Chat]:
    """``count`` distinct requests, or fewer if the templates yield no more."""
    chosen: dict[str, Chat] = {}
    for chat in itertools.islice(requests, 20 * count):
        chosen.setdefault(json.dumps(chat), chat)
        if len(chosen) == count:
            break
    return list(chosen.values())


def _fill(rng: random.Random, round_name: str, passage=None) -> Iterator[Chat]:
    """Endless requests of a round, cycling through the categories."""
    data = json.loads(TEMPLATES.read_text("utf-8"))
    slots: dict[str, list[str]] = data["slots"]

    def value(name: str) -> str:
        if name == "passage":
            return passage()
        if name == "number":
            return str(rng.choice([rng.randint(2, 20), rng.randint(2, 99), 5 * rng.randint(3, 60)]))
        text = filled(rng.choice(slots[name]))
        return text[0].upper() + text[1:] if text.endswith(".") else text

    def filled(text: str) -> str:
        return _SLOT.sub(lambda match: value(match[1]), text)

    while True:
        for templates in data[round_name].values():
            yield [{"role": "user", "content": filled(rng.choice(templates))}]


def _passage(rng: random.Random, answered: list[tuple[Chat, str]]) -> str:
    """A random span of sentences or lines of an answer."""
    answer = rng.choice(answered)[1]
    pieces = re.split(r"(?<=[.!?])\s+|\n+", answer)
    start = rng.randrange(max(1, len(pieces) // 2))
    return " ".join(piece.strip() for piece in pieces[start : start + rng.randint(2, 14)] if piece.strip())
