"""``examples/ray/batch.py``: killed on its way and started again, it answers each of 500 prompts exactly once.

One more prompt is too long, which stops no other.
"""

import json
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from forking_server import ENVIRONMENT
from patience import SECONDS
from ray_cluster import ray_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
PROGRAM = Path(__file__).parents[2] / "examples/ray/batch.py"
UNFINISHED = Path(__file__).with_name("unfinished_run.py")
PROMPTS = 500
KILLED_AFTER = 50  # answers
MOST_BEFORE = 400  # the first job gives no more answers, however late a busy machine lets the test kill it
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def cluster():
    # The engine is a child of an actor, and has the variables of the node. Its rank needs no process of its own.
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    with ray_cluster(nodes=1, **variables) as cluster:
        yield cluster


@pytest.fixture
def command(tiny_pair, preforked, tmp_path, random_prompts):
    """The job's command line; its prompts are words of the tiny pair's vocabulary."""
    prompts = [" ".join(f"w{token}" for token in prompt) for prompt in random_prompts(PROMPTS, longest=20)]
    lines = [json.dumps({"id": number, "prompt": prompt}) for number, prompt in enumerate(prompts)]
    lines.append(json.dumps({"id": "too long", "prompt": "w1 " * 600}))
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    (tmp_path / "gsd.json").write_text(json.dumps({"method": "gsd", "model": str(tiny_pair.draft)}))
    engine = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 32,
        "kv_cache_memory_bytes": 1 << 27,
    }
    options = {
        "target": tiny_pair.target,
        "gsd": tmp_path / "gsd.json",
        "prompts": tmp_path / "prompts.jsonl",
        "out": tmp_path / "answers.jsonl",
        "batch-size": 25,
        "max-tokens": MAX_TOKENS,
        "engine": json.dumps(engine),
    }
    return [preforked, PROGRAM, *[str(word) for name, value in options.items() for word in (f"--{name}", value)]]


def start(command, cluster, log: Path) -> subprocess.Popen:
    """The job's process, its own and the engine's log going to a file."""
    environment = {**os.environ, **ENVIRONMENT, **cluster.environment()}
    with log.open("wb") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)


def answers(out: Path) -> list[str]:
    """Whole lines of the job's output."""
    return out.read_text().split("\n")[:-1] if out.exists() else []


def test_killed_and_resumed(command, cluster, tmp_path, tiny_pair):
    out = tmp_path / "answers.jsonl"
    pid = tmp_path / "pid"
    python, *job = command
    first = start([python, UNFINISHED, pid, str(MOST_BEFORE), *job], cluster, tmp_path / "first")
    try:
        until = time.monotonic() + SECONDS
        while len(answers(out)) < KILLED_AFTER:
            assert first.poll() is None and time.monotonic() < until, (tmp_path / "first").read_text()[-5000:]
            time.sleep(0.02)
        os.kill(int(pid.read_text()), signal.SIGKILL)
        assert first.wait(SECONDS) == 128 + signal.SIGKILL
    finally:
        first.kill()
    before = answers(out)
    assert KILLED_AFTER <= len(before) <= MOST_BEFORE
    with out.open("a") as stream:
        stream.write('{"id": 499, "te')  # as if it had been killed while writing
    second = start(command, cluster, tmp_path / "second")
    assert second.wait(SECONDS) == 1, (tmp_path / "second").read_text()[-5000:]
    assert answers(out)[: len(before)] == before
    counts = Counter(json.loads(line)["id"] for line in answers(out))
    assert counts == dict.fromkeys(range(PROMPTS), 1)
    said = (tmp_path / "second").read_text()
    assert f"{PROMPTS}/{PROMPTS + 1}" in said  # the progress bar
    assert f"1 of {PROMPTS + 1} prompts have no answer, such as id 'too long': " in said
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(prompts.read_text().splitlines(keepends=True)[:PROMPTS]))
    third = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **ENVIRONMENT})
    assert f"All {PROMPTS} prompts have their answers." in third.stdout
