"""Varied requests for distillation, from the templates in ``templates.json``.

Those of ``second`` have a ``{passage}`` to summarise, translate, rewrite or answer questions about. It is filled with
what the target has answered, so the package ships no texts.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

from vllm_gsd.tools.prompt_file import Chat

TEMPLATES: dict[str, Any] = json.loads((Path(__file__).parent / "templates.json").read_text("utf-8"))
_SLOT = re.compile(r"\{(\w+)\}")
# The share of requests about answers that continue a chat instead of quoting its answer.
FOLLOW_UPS = 0.15
# The fewest characters of an answer that is worth a request about it.
LONG_ENOUGH = 200


def new(rng: random.Random, count: int) -> list[Chat]:
    """Requests that need no passage, evenly over the categories."""
    return [_filled(rng, "first", number) for number in range(count)]


def about(rng: random.Random, count: int, answered: list[tuple[Chat, str]]) -> list[Chat]:
    """Requests about answers: they quote a passage of one or continue its chat, once. None if all answers are short."""
    long_enough = [(chat, answer) for chat, answer in answered if len(chat) == 1 and len(answer) >= LONG_ENOUGH]
    found = []
    for number in range(count if long_enough else 0):
        chat, answer = rng.choice(long_enough)
        if rng.random() < FOLLOW_UPS:
            again = {"role": "user", "content": rng.choice(TEMPLATES["follow_ups"])}
            found.append([*chat, {"role": "assistant", "content": answer}, again])
        else:
            found.append(_filled(rng, "second", number, answer))
    return found


def _filled(rng: random.Random, templates: str, number: int, answer: str = "") -> Chat:
    """A request from one of the templates. Its number chooses the category; passages are the answer's."""

    def value(name: str) -> str:
        if name == "passage":
            return _passage(rng, answer)
        if name == "number":
            return str(rng.choice([rng.randint(2, 20), rng.randint(2, 99), 5 * rng.randint(3, 60)]))
        text = filled(rng.choice(TEMPLATES["slots"][name]))
        return text[0].upper() + text[1:] if text.endswith(".") else text

    def filled(text: str) -> str:
        return _SLOT.sub(lambda match: value(match[1]), text)

    categories = list(TEMPLATES[templates].values())
    return [{"role": "user", "content": filled(rng.choice(categories[number % len(categories)]))}]


def _passage(rng: random.Random, answer: str) -> str:
    """A random span of the answer's sentences or lines."""
    pieces = re.split(r"(?<=[.!?])\s+|\n+", answer)
    start = rng.randrange(max(1, len(pieces) // 2))
    return " ".join(piece.strip() for piece in pieces[start : start + rng.randint(2, 14)] if piece.strip())
