"""Output files of ``examples/ray/batch.py``: it resumes its own, and leaves other files unchanged."""

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
    """Wrong prompts are refused before anything else is read or started."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    out.write_text(LINES + "{")
    prompts.write_text('{"id": 1, "prompt": "one"}\n{"id": 2}\n')
    words = ["--target", "t", "--gsd", "g", "--prompts", str(prompts), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["batch.py", *words])
    with pytest.raises(SystemExit, match=r"Line 2 of .*prompts\.jsonl is not a JSON object with id and prompt"):
        batch.main()
    assert out.read_text() == LINES + "{"


GSD = {"method": "gsd", "model": None}


@pytest.mark.parametrize(
    ("files", "extra", "sentence"),
    [
        ({"prompts": None}, [], r"--prompts is .*prompts, but cannot be read as a text file"),
        ({"prompts": b"\xff"}, [], r"--prompts is .*prompts, but cannot be read as a text file"),
        ({"prompts": b'{"id": [1], "prompt": "one"}'}, [], r"Line 1 of .* has the id \[1\], but ids must be"),
        ({"prompts": b'{"id": 1, "prompt": null}'}, [], r"the prompt of id 1 is no text, but must be a string"),
        ({"prompts": b'{"id": 1, "prompt": ""}'}, [], r"the prompt of id 1 is empty, but must have text"),
        ({"prompts": b"\n"}, [], r"--prompts is .*prompts, but has no prompts"),
        ({"gsd": None}, [], r"--gsd has a mistake: .*does not exist"),
        ({"gsd": b"{"}, [], r"--gsd has a mistake: .*is not JSON"),
        ({"gsd": b'{"method": "gsd", "model": null, "top_kk": 1}'}, [], "--gsd has a mistake: .*top_kk"),
        ({}, ["--out", "/dev/null/x"], "--out is /dev/null/x, but cannot be written"),
        ({}, ["--out", "/"], "--out is /, but cannot be written"),
    ],
)
def test_mistakes_are_said_in_a_sentence(batch, tmp_path, monkeypatch, files, extra, sentence):
    contents = {"prompts": b'{"id": 1, "prompt": "one"}', "gsd": json.dumps(GSD).encode(), **files}
    words = ["--target", "t", "--out", str(tmp_path / "out")]
    for name, content in contents.items():
        words += [f"--{name}", str(tmp_path / name)]
        if content is not None:
            (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["batch.py", *words, *extra])
    with pytest.raises(SystemExit, match=sentence):
        batch.main()


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--batch-size", "0", "'0', but must be a whole number above 0"),
        ("--engines", "-1", "'-1', but must be a whole number above 0"),
        *(("--temperature", given, f"'{given}', but must be a number of at least 0") for given in ("-1", "nan", "x")),
        ("--engine", "[]", "'[]', but must be a JSON object"),
    ],
)
def test_wrong_arguments(batch, monkeypatch, capsys, option, value, sentence):
    words = ["--target", "t", "--gsd", "g", "--prompts", "p", "--out", "o", f"{option}={value}"]
    monkeypatch.setattr(sys, "argv", ["batch.py", *words])
    with pytest.raises(SystemExit):
        batch.main()
    assert sentence in capsys.readouterr().err
