"""``vllm serve`` with a gsd.json: streamed chat completions equal plain vLLM's; metrics; a clean shutdown."""

import asyncio
import json
import signal

import psutil
import pytest
from patience import SECONDS
from serve_process import VLLM, serving

MAX_TOKENS = 24
QUESTIONS = [
    "Repeat after me: one two three one two three one two three one two three.",
    "Say the word apple ten times.",
    *[f"Name {count} {things}." for count in ("two", "three") for things in ("animals", "colours", "rivers", "fruits")],
    *[f"What is {number} plus {number}?" for number in range(1, 7)],
]


@pytest.fixture(scope="module")
def expected(start_built_in):
    """Plain vLLM's completions, computed before the server starts."""
    params = {"temperature": 0, "max_tokens": MAX_TOKENS}
    answers = start_built_in(gsd=False).generate(QUESTIONS, params)
    return [answer.completions[0] for answer in answers]


@pytest.fixture(scope="module")
def server(expected, built_in_pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    config = {"method": "gsd", "model": str(built_in_pair.draft), "sources": ["draft", "ngram"], "budget": 16}
    (folder / "gsd.json").write_text(json.dumps(config))
    with serving(built_in_pair.target, folder, command=[VLLM], speculative_config=folder / "gsd.json") as server:
        server.wait()
        yield server


async def ask(client, question: str, **keys):
    """A streamed answer: its text, its number of nonempty pieces, and its finish reason."""
    stream = await client.chat.completions.create(
        model="target",
        messages=[{"role": "user", "content": question}],
        stream=True,
        temperature=0,
        **{"max_tokens": MAX_TOKENS, **keys},
    )
    pieces, reason = [], None
    async for chunk in stream:
        pieces.append(chunk.choices[0].delta.content or "")
        reason = chunk.choices[0].finish_reason or reason
    return "".join(pieces), len([piece for piece in pieces if piece]), reason


def ask_all(server, questions, **keys):
    """Send all questions at once and return the answers."""
    from openai import AsyncOpenAI

    async def gather():
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=SECONDS) as client:
            return await asyncio.gather(*[ask(client, question, **keys) for question in questions])

    return asyncio.run(gather())


def test_streamed_chats_at_once(server, expected):
    answers = ask_all(server, QUESTIONS)
    assert [(text, reason) for text, _, reason in answers] == [(one.text, one.finish_reason) for one in expected]
    assert max(pieces for _, pieces, _ in answers) > 3  # answers are streamed in several pieces


def test_one_chat_at_a_time(server, expected):
    for question, one in list(zip(QUESTIONS, expected, strict=True))[:3]:
        assert ask_all(server, [question])[0][0] == one.text


def test_opting_out_over_http(server, expected):
    assert "vllm:gsd_fallbacks_total{" not in server.get("/metrics")
    text, _, _ = ask_all(server, QUESTIONS[:1], extra_body={"vllm_xargs": {"gsd": False}})[0]
    assert text == expected[0].text
    assert server.counter("vllm:gsd_fallbacks") == 1


def test_a_trace_is_refused(server, expected):
    from openai import APIError

    with pytest.raises(APIError, match="this server allows no traces"):
        ask_all(server, QUESTIONS[:1], extra_body={"vllm_xargs": {"gsd_trace": True}})


def test_clients_that_hang_up(server, expected):
    """Requests of clients that disconnect are aborted, and the answers to the others do not change."""
    from openai import AsyncOpenAI

    async def hang_up(client):
        messages = [{"role": "user", "content": "Write a very long story."}]
        stream = await client.chat.completions.create(model="target", messages=messages, stream=True, max_tokens=400)
        await anext(stream)
        await stream.close()

    async def gather():
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=SECONDS) as client:
            return await asyncio.gather(
                *[ask(client, question) for question in QUESTIONS[:4]], *[hang_up(client) for _ in range(4)]
            )

    answers = asyncio.run(gather())
    assert [answer[0] for answer in answers[:4]] == [one.text for one in expected[:4]]


def test_metrics(server):
    for name in ("gsd_target_steps", "gsd_nodes_verified", "gsd_draft_forwards", "gsd_verify_seconds"):
        assert server.counter(f"vllm:{name}") > 0
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert server.counter(f"vllm:spec_decode_{name}") > 0
    assert "vllm:gsd_accepted_length_bucket{" in server.get("/metrics")


def test_interrupt_ends_every_process(server):
    """Keep this test last in the file, because it stops the server."""
    family = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    assert len(family) > 1
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(SECONDS) in (0, -signal.SIGINT, 128 + signal.SIGINT)
    _, alive = psutil.wait_procs(family[1:], timeout=SECONDS)
    assert alive == []
    assert "Application shutdown complete" in server.log.read_text()
