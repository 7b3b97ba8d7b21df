"""Prompt files: one JSON object a line with ``turns`` (Spec-Bench), ``messages`` or ``prompt``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

Chat = list[dict[str, str]]


class PromptsError(ValueError):
    """The prompt file cannot be used; the message is one sentence."""


class Request(NamedTuple):
    """A line of a prompt file: the chat so far, and its ``category`` ("" where it has none)."""

    chat: Chat
    category: str


def read_requests(path: Path) -> list[Request]:
    """Requests of a file; of ``turns`` the first.

    Raises:
        PromptsError: the file is missing, empty, or a line is none of these.
    """
    try:
        # Lines end at line feeds only: JSON's strings may hold what else `splitlines` takes for an end (U+2028).
        lines = path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptsError(f"The prompt file {str(path)!r} cannot be read ({error}).") from error
    requests = [_request(line, number, path) for number, line in enumerate(lines, start=1) if line.strip()]
    if not requests:
        raise PromptsError(f"The prompt file {str(path)!r} has no prompts.")
    return requests


def thinned(requests: list[Request], limit: int | None) -> list[Request]:
    """At most ``limit`` of them, evenly over the file, so that every category stays."""
    if not limit or limit >= len(requests):
        return requests
    return [requests[i * len(requests) // limit] for i in range(limit)]


def token_ids_of(tokenizer: Any, chat: Chat) -> list[int]:
    """A chat as the model reads it, up to where its answer begins."""
    if tokenizer.chat_template is None:  # a base model: only the text
        return tokenizer("\n\n".join(message["content"] for message in chat))["input_ids"]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _request(line: str, number: int, path: Path) -> Request:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):  # no JSON, or nested deeper than any prompt
        row = None
    if isinstance(row, dict):
        category = str(row.get("category") or "")
        match row:
            case {"messages": [*messages]} if messages and all(_is_message(message) for message in messages):
                return Request(messages, category)
            case {"turns": [str(text), *_]} | {"prompt": str(text)}:
                return Request([{"role": "user", "content": text}], category)
    raise PromptsError(
        f'Line {number} of {str(path)!r} is no JSON object with "prompt", "turns" or "messages" of roles and contents.'
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
