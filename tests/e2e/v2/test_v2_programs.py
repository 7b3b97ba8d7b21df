"""Programs that start engines on Model Runner V2: ``vllm serve`` with two engines, ``vllm run-batch``, a killed rank.

Greedy answers are compared with those of plain vLLM on V1, which is much faster here.
"""

import contextlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import jsonschema
import pytest
from engine_process import Engine
from patience import SECONDS
from serve_process import VLLM, serving
from test_batch_api import QUESTIONS, keys_of, run_batch
from test_killed import check_killed
from test_serve_features import REQUESTS, SCHEMAS, assert_same, choices, post
from test_streaming_input import run_sessions
from v2_engine import variables_of_programs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * SECONDS)]
V2 = "Using V2 Model Runner"  # a message in vLLM's log
GSD = {"method": "gsd", "num_speculative_tokens": 8, "max_depth": 3, "budget": 8}
SMALL = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 1 << 24}
PARSERS = {
    "tool_call_parser": "hermes",
    "reasoning_parser": "deepseek_v3",
    "structured_outputs_config": '{"backend": "xgrammar", "disable_any_whitespace": true}',
}
# Names of REQUESTS, and whether the answer is streamed.
SENT = [
    ("chat", True), ("logprobs", False), ("stop", True), ("tool required", True), ("thoughts and json", False),
    ("echo", False), ("choice", True),
]  # fmt: skip


def ask(server, **more) -> list[list[dict]]:
    """Send all requests at once and return the answers. Those without a grammar are short."""

    def answer(name: str, stream: bool) -> list[dict]:
        endpoint, keys = REQUESTS[name]
        short = {} if "tool" in name or "json" in name else {"max_tokens": 16}
        return choices(post(server, endpoint, {**keys, **short, "stream": stream}))

    with ThreadPoolExecutor(len(SENT)) as pool:
        return list(pool.map(answer, *zip(*SENT, strict=True)))


def test_served_by_two_engines(text_pair, preforked, preforked_v2, tmp_path):
    """Chats, tool calls, reasoning and echo equal plain vLLM's, and both engines serve requests."""
    for name in ("plain", "gsd"):
        (tmp_path / name).mkdir()
    (tmp_path / "gsd.json").write_text(json.dumps({**GSD, "model": str(text_pair.draft)}))
    flags, options = ["--enable-auto-tool-choice"], {**SMALL, **PARSERS}
    with serving(text_pair.target, tmp_path / "plain", *flags, command=(preforked, VLLM), **options) as server:
        server.wait()
        expected = ask(server)
    options |= {"data_parallel_size": 2, "api_server_count": 1, "speculative_config": tmp_path / "gsd.json"}
    with (
        mock.patch.dict(os.environ, variables_of_programs()),
        serving(text_pair.target, tmp_path / "gsd", *flags, command=(preforked_v2, VLLM), **options) as server,
    ):
        server.wait()
        answers = ask(server)
        assert V2 in server.log.read_text()
        lines = server.get("/metrics").splitlines()
    assert_same(answers, expected)
    (call,) = answers[[name for name, _ in SENT].index("tool required")][0]["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    for engine in "01":
        counted = [line for line in lines if "spec_decode_num_accepted_tokens_total{" in line]
        (own,) = [line for line in counted if f'engine="{engine}"' in line]
        assert float(own.rsplit(" ", 1)[1]) > 0
    assert not any(line.startswith("vllm:gsd_fallbacks_total{") for line in lines)


def test_run_batch(text_pair, preforked_v2, tmp_path):
    """Two greedy questions, one of them with a grammar."""
    numbers = (0, 1)
    with contextlib.closing(Engine(text_pair.target)) as engine:
        plain = engine.generate([QUESTIONS[index] for index in numbers], [keys_of(index) for index in numbers])
    with mock.patch.dict(os.environ, variables_of_programs()):
        answers = run_batch(text_pair, (preforked_v2, VLLM), numbers, tmp_path, logged=V2, **SMALL)
    for index, answer in zip(numbers, plain, strict=True):
        assert answers[index] == [(one.text, one.finish_reason) for one in answer.completions]


def test_sessions_of_streaming_input(tiny_pair, preforked_v2):
    """Later chunks of a session are drafted for and follow the text that was emitted."""
    with mock.patch.dict(os.environ, variables_of_programs()):
        plain, ours = (run_sessions(tiny_pair, preforked_v2, gsd) for gsd in (False, True))
    assert ours.pop("accepted") > plain.pop("accepted") == 0
    assert ours == plain


def test_killed_rank(tiny_pair, preforked_v2, tmp_path):
    config = {**GSD, "model": str(tiny_pair.draft)}
    engine = {**SMALL, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    job = {"target": str(tiny_pair.target), "config": config, "engine": engine}
    check_killed(job, 1, tmp_path, variables_of_programs(), (preforked_v2,))
