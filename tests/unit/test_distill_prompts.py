"""Requests that the target answers for ``vllm-gsd distill``."""

import json

import pytest

from vllm_gsd.tools.distill import prompts
from vllm_gsd.tools.prompt_file import PromptsError


def test_the_first_round_is_varied_and_the_same_for_a_seed():
    chats = prompts.first_round(400, 3)
    assert chats == prompts.first_round(400, 3) != prompts.first_round(400, 4)
    assert len({json.dumps(chat) for chat in chats}) == 400
    # A larger count begins with the same requests, so a longer run can continue a shorter one.
    assert prompts.first_round(500, 3)[:400] == chats
    assert not any("{" in chat[0]["content"] for chat in chats)


def test_the_second_round_is_about_answers():
    answers = [([{"role": "user", "content": "x"}], f"Sentence {i}. " * 40) for i in range(20)]
    chats = prompts.second_round(200, 5, answers)
    assert len(chats) == 200
    assert sum("Sentence" in json.dumps(chat) for chat in chats) > 190
    assert {len(chat) for chat in chats} == {1, 3}  # some continue the chat


def test_without_answers_worth_quoting():
    assert len(prompts.second_round(10, 0, [([], "short")])) == 10


def test_from_file(tmp_path):
    file = tmp_path / "prompts.jsonl"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rows = [{"prompt": "a"}, {"turns": ["b", "c"]}, {"messages": chat}]
    file.write_text("\n\n".join(map(json.dumps, rows)))
    user = [[{"role": "user", "content": text}] for text in "ab"]
    assert prompts.from_file(file) == [*user, chat]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1]", '{"prompt": 3}', '{"turns": []}', '{"messages": [{"role": "user"}]}', '{"messages": []}'],
)
def test_bad_files(tmp_path, text):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(PromptsError, match=r"prompts\.jsonl"):
        prompts.from_file(file)


def test_missing_file(tmp_path):
    with pytest.raises(PromptsError, match="cannot be read"):
        prompts.from_file(tmp_path / "none")
