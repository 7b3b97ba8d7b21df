"""Prompt files: one JSON object per line with ``turns`` (Spec-Bench), ``messages`` or ``prompt``."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import jinja2

from vllm_gsd.tools.errors import ToolError

Chat = list[dict[str, str]]
Prompt = Chat | list[int]  # a chat, or its token ids
Item = TypeVar("Item")


class Request(NamedTuple):
    """A line of a prompt file: the chat so far, and its ``category`` ("" if it has none)."""

    chat: Chat
    category: str = ""


def read_requests(path: Path) -> list[Request]:
    """The requests of a file. Of ``turns``, only the first is used.

    Raises:
        ToolError: the file is missing or empty, or a line is malformed.
    """
    try:
        # Not `splitlines`: JSON strings may contain U+2028, at which it splits.
        lines = path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ToolError(f"The prompt file {str(path)!r} cannot be read ({error}).") from error
    requests = [_request(line, number, path) for number, line in enumerate(lines, start=1) if line.strip()]
    if not requests:
        raise ToolError(f"The prompt file {str(path)!r} has no prompts.")
    return requests


def thinned(requests: list[Item], limit: int | None) -> list[Item]:
    """At most ``limit`` requests, spread evenly over the file so that every category remains."""
    if not limit or limit >= len(requests):
        return requests
    return [requests[i * len(requests) // limit] for i in range(limit)]


def token_ids_of(tokenizer: Any, chat: Prompt) -> list[int]:
    """The token ids of a prompt, up to where the model's answer begins. Token ids are returned unchanged.

    Raises:
        ToolError: the prompt has no tokens, or the model's chat template refuses it.
    """
    if chat and isinstance(chat[0], int):
        return chat
    chat = cast(Chat, chat)
    if tokenizer.chat_template is None:  # a base model gets the plain text
        ids = tokenizer("\n\n".join(message["content"] for message in chat))["input_ids"]
    else:
        try:
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        except jinja2.TemplateError as error:
            raise ToolError(f"The model's chat template refuses the prompt {_start(chat)} ({error}).") from error
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:  # vLLM refuses it
        raise ToolError(f"The prompt {_start(chat)} has no tokens, but must have at least one.")
    return ids


def _start(chat: Chat) -> str:
    """A chat for a message, cut off."""
    return json.dumps(chat, ensure_ascii=False)[:120]


def _request(line: str, number: int, path: Path) -> Request:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, or nested too deeply to parse
        row = None
    if isinstance(row, dict):
        category = str(row.get("category") or "")
        match row:
            case {"messages": [*messages]} if messages and all(_is_message(message) for message in messages):
                return Request(messages, category)
            case {"turns": [str(text), *_]} | {"prompt": str(text)} if _is_text(text):
                return Request([{"role": "user", "content": text}], category)
    raise ToolError(
        f'Line {number} of {str(path)!r} is not a JSON object with "prompt", "turns" or "messages" (with roles and '
        "contents) of valid Unicode text."
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(_is_text(message.get(key)) for key in ("role", "content"))


def _is_text(value: Any) -> bool:
    # JSON can hold half of a surrogate pair, which tokenizers refuse.
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)
