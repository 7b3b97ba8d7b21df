"""Varied requests to distil on, from the templates in ``templates.json`` or from a file.

Requests come in two rounds: the second round's templates have a ``{passage}`` (to summarise, translate, answer
questions about, rewrite), filled with what the target wrote in the first. So no text has to be shipped, and every
answer is the target's own.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Chat = list[dict[str, str]]

TEMPLATES = Path(__file__).parent / "templates.json"
_SLOT = re.compile(r"\{(\w+)\}")
# The share of second-round requests that go on with the first round's chat rather than quote its answer.
FOLLOW_UPS = 0.15


class PromptsError(ValueError):
    """The prompt file cannot be used; the message is one sentence."""


def first_round(count: int, seed: int) -> list[Chat]:
    """Requests that need no passage, equally many of each category, without repetition as far as templates go."""
    return _distinct(count, _fill(random.Random(seed), "first"))


def second_round(count: int, seed: int, answered: list[tuple[Chat, str]]) -> list[Chat]:
    """Requests about what the target wrote: passages quoted from ``answered``, and chats continued."""
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


def from_file(path: Path) -> list[Chat]:
    """Requests of a file with one JSON object a line: ``turns`` (Spec-Bench), ``messages`` or ``prompt``.

    Raises:
        PromptsError: the file is missing, empty, or a line is none of these.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptsError(f"The prompt file {str(path)!r} cannot be read ({error}).") from error
    chats = [_chat(line, number, path) for number, line in enumerate(lines, start=1) if line.strip()]
    if not chats:
        raise PromptsError(f"The prompt file {str(path)!r} has no prompts.")
    return chats


def _chat(line: str, number: int, path: Path) -> Chat:
    try:
        row: Any = json.loads(line)
    except ValueError:
        row = None
    if isinstance(row, dict):
        match row:
            case {"messages": [*messages]} if messages and all(_is_message(message) for message in messages):
                return messages
            case {"turns": [str(text), *_]} | {"prompt": str(text)}:
                return [{"role": "user", "content": text}]
    raise PromptsError(
        f'Line {number} of {str(path)!r} is no JSON object with "prompt", "turns" or "messages" of roles and contents.'
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _distinct(count: int, requests: Iterator[Chat]) -> list[Chat]:
    """``count`` different ones, or fewer where the templates have no more."""
    chosen: dict[str, Chat] = {}
    for chat in itertools.islice(requests, 20 * count):
        chosen.setdefault(json.dumps(chat), chat)
        if len(chosen) == count:
            break
    return list(chosen.values())


def _fill(rng: random.Random, round_name: str, passage=None) -> Iterator[Chat]:
    """Endless requests of a round, one category after the other."""
    data = json.loads(TEMPLATES.read_text("utf-8"))
    slots: dict[str, list[str]] = data["slots"]

    def value(name: str) -> str:
        if name == "passage":
            return passage()
        if name == "number":
            return str(rng.choice([rng.randint(2, 20), rng.randint(2, 99), 5 * rng.randint(3, 60)]))
        return rng.choice(slots[name])

    while True:
        for templates in data[round_name].values():
            text = rng.choice(templates)
            yield [{"role": "user", "content": _SLOT.sub(lambda match: value(match[1]), text)}]


def _passage(rng: random.Random, answered: list[tuple[Chat, str]]) -> str:
    """Sentences or lines of an answer, from anywhere in it, of varied length."""
    answer = rng.choice(answered)[1]
    pieces = re.split(r"(?<=[.!?])\s+|\n+", answer)
    start = rng.randrange(max(1, len(pieces) // 2))
    return " ".join(piece.strip() for piece in pieces[start : start + rng.randint(2, 14)] if piece.strip())
