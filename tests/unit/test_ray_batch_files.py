"""Files of ``examples/ray/batch.py``: it resumes its own, and leaves others as they are."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
ANSWERS = [{"id": "a", "text": "one\u2028two", "tokens": 2}, {"id": 7, "text": "three", "tokens": 1}]
LINES = "".join(json.dumps(answer) + "\n" for answer in ANSWERS)


@pytest.fixture(scope="module")
def batch():
    file = Path(__file__).parents[2] / "examples/ray/batch.py"
    spec = importlib.util.spec_from_file_location("batch_example", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("rest", ["", "{", '{"id": "b", "te', '{"id": '])
def test_resumes_its_own(batch, tmp_path, rest):
    out = tmp_path / "answers.jsonl"
    out.write_text(LINES + rest)
    assert batch.answered(out) == {"a", 7}
    assert out.read_text() == LINES


def test_nothing_yet(batch, tmp_path):
    assert batch.answered(tmp_path / "answers.jsonl") == set()


@pytest.mark.parametrize(
    "content",
    [
        b"my only copy, without a line feed",
        b"two lines\nof text",
        b'{"id": 1, "prompt": "these are the prompts"}\n{"id": 2, "pro',
        LINES.encode() + b"and then a remark",
        LINES.encode() + b"[1, 2]\n",
        LINES.encode() + b"[" * 100_000 + b"\n",
        b"\x89PNG\r\n\x1a\n\xff",
    ],
    ids=["text", "lines", "prompts", "remark", "list", "nested", "picture"],
)
def test_leaves_others_as_they_are(batch, tmp_path, content):
    out = tmp_path / "other"
    out.write_bytes(content)
    with pytest.raises(SystemExit, match=r"other.*\.$"):
        batch.answered(out)
    assert out.read_bytes() == content


def test_prompts(batch, tmp_path, monkeypatch):
    """Wrong prompts are refused before anything else is looked at or started."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    out.write_text(LINES + "{")
    prompts.write_text('{"id": 1, "prompt": "one"}\n{"id": 2}\n')
    words = ["--target", "t", "--gsd", "g", "--prompts", str(prompts), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["batch.py", *words])
    with pytest.raises(SystemExit, match=r"Line 2 of .*prompts\.jsonl is no JSON object with id and prompt"):
        batch.main()
    assert out.read_text() == LINES + "{"
