"""``vllm run-batch`` with a gsd.json: answers in a file, as plain vLLM gives them."""

import json
import re
import subprocess

import pytest
from engine_process import Engine
from patience import SECONDS
from serve_process import VLLM, server_environment

QUESTIONS = [f"Question number {index}?" for index in range(12)]
TIME = r"[0-2][0-9]:[0-5][0-9]"
GREEDY = {"temperature": 0, "max_tokens": 40}


def keys_of(index: int) -> dict:
    """Every fourth request has a grammar, every fourth a seed."""
    if index % 4 == 1:
        return {**GREEDY, "structured_outputs": {"regex": TIME}}
    return {**GREEDY, "temperature": 1.0, "seed": index, "n": 2} if index % 4 == 2 else GREEDY


@pytest.fixture(scope="module")
def expected(text_pair):
    engine = Engine(text_pair.target)
    answers = engine.generate(QUESTIONS, [keys_of(index) for index in range(len(QUESTIONS))])
    engine.close()
    return answers


def test_run_batch(text_pair, preforked, expected, tmp_path):
    lines = [
        {
            "custom_id": str(index),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "target", "messages": [{"role": "user", "content": question}], **keys_of(index)},
        }
        for index, question in enumerate(QUESTIONS)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "gsd.json").write_text(json.dumps({"method": "gsd", "model": str(text_pair.draft), "budget": 16}))
    options = {
        "-i": tmp_path / "in.jsonl",
        "-o": tmp_path / "out.jsonl",
        "--model": text_pair.target,
        "--served-model-name": "target",
        "--speculative-config": tmp_path / "gsd.json",
        "--dtype": "float32",
        "--max-model-len": 512,
        "--max-num-seqs": 16,
        "--kv-cache-memory-bytes": 1 << 27,
        "--generation-config": "vllm",
    }
    words = [str(word) for option in options.items() for word in option]
    done = subprocess.run(
        [preforked, VLLM, "run-batch", "--enforce-eager", *words],
        capture_output=True,
        text=True,
        env=server_environment(),
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert "GraphProposer" in done.stdout + done.stderr  # vLLM logs its configuration
    outputs = {int(line["custom_id"]): line for line in map(json.loads, (tmp_path / "out.jsonl").open())}
    for index, answer in enumerate(expected):
        choices = outputs[index]["response"]["body"]["choices"]
        told = [(choice["message"]["content"], choice["finish_reason"]) for choice in choices]
        assert told == [(one.text, one.finish_reason) for one in answer.completions]
        if index % 4 == 1:
            assert re.fullmatch(TIME, told[0][0])
