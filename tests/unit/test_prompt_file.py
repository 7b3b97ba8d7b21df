"""Prompt files: every valid JSON line is read, and invalid lines give one clear sentence."""

import json

import pytest

from vllm_gsd.tools.prompt_file import PromptsError, read_requests


@pytest.fixture
def file(tmp_path):
    return tmp_path / "prompts.jsonl"


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_only_line_feeds_end_a_line(file, separator):
    """JSON allows all of these within a string, and Python's ``splitlines`` splits at them."""
    text = f"one{separator}two"
    file.write_text(
        json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n" + json.dumps({"prompt": "three"}), "utf-8"
    )
    assert [request.chat[0]["content"] for request in read_requests(file)] == [text, "three"]


def test_byte_order_mark(file):
    file.write_text(json.dumps({"prompt": "one"}), "utf-8-sig")
    assert read_requests(file)[0].chat == [{"role": "user", "content": "one"}]


@pytest.mark.parametrize("line", ["[" * 100_000, '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}"])
def test_deep_nesting_is_no_prompt(file, line):
    file.write_text('{"prompt": "one"}\n' + line)
    with pytest.raises(PromptsError, match=r"Line 2 of .* is no JSON object"):
        read_requests(file)
