"""Two kinds of clients: one waits for its answer, and the other disconnects before it arrives."""

import asyncio
import json
import time
from typing import Any
from urllib.parse import urlsplit

from openai import AsyncOpenAI

from .answers import Answer
from .loads import Load


async def ask(client: AsyncOpenAI, load: Load) -> Answer:
    """Send a request and return the whole answer.

    Raises:
        openai.APIError: the server rejected the request or failed.
    """
    body = dict(load.body)
    arguments = {name: body.pop(name) for name in ("model", "messages", "prompt", "stream") if name in body}
    create: Any = client.chat.completions.create if load.chat else client.completions.create
    answer, start = Answer(), time.perf_counter()
    response = await create(**arguments, extra_body=body)
    if not load.stream:
        _take(answer, response, load.chat)
        return answer
    async for piece in response:
        if answer.first_after is None:
            answer.first_after = time.perf_counter() - start
        _take(answer, piece, load.chat)
    return answer


def _take(answer: Answer, piece: Any, chat: bool) -> None:
    if piece.usage is not None:
        answer.prompt_tokens, answer.tokens = piece.usage.prompt_tokens, piece.usage.completion_tokens
    for part in piece.choices:
        choice = answer.choice(part.index)
        if chat:
            message = getattr(part, "delta", None) or part.message
            choice.text += message.content or ""
            if part.logprobs is not None:
                choice.logprobs += [token.logprob for token in part.logprobs.content or ()]
        else:
            choice.text += part.text
            if part.logprobs is not None:
                choice.logprobs += part.logprobs.token_logprobs or ()
        choice.tokens += (part.model_extra or {}).get("token_ids") or []
        choice.finish_reason = part.finish_reason or choice.finish_reason


async def vanish(url: str, load: Load, after: float) -> None:
    """Send a request and reset the connection after some seconds."""
    address = urlsplit(url)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    body = json.dumps(load.body).encode()
    path = "/v1/chat/completions" if load.chat else "/v1/completions"
    lines = f"POST {path} HTTP/1.1", "Host: soak", "Content-Type: application/json", f"Content-Length: {len(body)}"
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)
    await asyncio.sleep(after)
    writer.transport.abort()
