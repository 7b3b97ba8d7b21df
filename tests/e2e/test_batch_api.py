"""``vllm run-batch`` with a gsd.json writes the same answers as plain vLLM."""

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
    """Sampling parameters of a request: every fourth has a grammar, every fourth a seed."""
    if index % 4 == 1:
        return {**GREEDY, "structured_outputs": {"regex": TIME}}
    return {**GREEDY, "temperature": 1.0, "seed": index, "n": 2} if index % 4 == 2 else GREEDY


@pytest.fixture(scope="module")
def expected(text_pair):
    engine = Engine(text_pair.target)
    answers = engine.generate(QUESTIONS, [keys_of(index) for index in range(len(QUESTIONS))])
    engine.close()
    return answers


def run_batch(
    pair, command: tuple, questions, folder, logged: str = "GraphProposer", **more
) -> dict[int, list[tuple[str, str]]]:
    """Run ``vllm run-batch`` on some questions; returns, by question number, each choice's text and finish reason.

    Args:
        command: the command that runs ``vllm``.
        questions: their numbers.
        logged: text that its log must contain; by default one of our classes, which vLLM's log names.
        more: more options of ``vllm run-batch``.
    """
    lines = [
        {
            "custom_id": str(index),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "target", "messages": [{"role": "user", "content": QUESTIONS[index]}], **keys_of(index)},
        }
        for index in questions
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "gsd.json").write_text(json.dumps({"method": "gsd", "model": str(pair.draft), "budget": 16}))
    options = {
        "input_file": folder / "in.jsonl",
        "output_file": folder / "out.jsonl",
        "model": pair.target,
        "served_model_name": "target",
        "speculative_config": folder / "gsd.json",
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 1 << 27,
        "generation_config": "vllm",
        **more,
    }
    words = [str(w) for name, value in options.items() for w in ("--" + name.replace("_", "-"), value)]
    done = subprocess.run(
        [*command, "run-batch", "--enforce-eager", *words],
        capture_output=True,
        text=True,
        env=server_environment(),
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert logged in done.stdout + done.stderr
    answers = {}
    for line in map(json.loads, (folder / "out.jsonl").open()):
        choices = line["response"]["body"]["choices"]
        answers[int(line["custom_id"])] = [(one["message"]["content"], one["finish_reason"]) for one in choices]
    return answers


def test_run_batch(text_pair, preforked, expected, tmp_path):
    outputs = run_batch(text_pair, (preforked, VLLM), range(len(QUESTIONS)), tmp_path)
    for index, answer in enumerate(expected):
        assert outputs[index] == [(one.text, one.finish_reason) for one in answer.completions]
        if index % 4 == 1:
            assert re.fullmatch(TIME, outputs[index][0][0])
