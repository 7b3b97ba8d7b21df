"""Requests that the target answers for ``vllm-gsd distill``, and how many of them fit into the time limit."""

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from distill_world import files

from vllm_gsd.tools.distill import answers, made_up, prompts
from vllm_gsd.tools.distill.data import load_answers, read_columns
from vllm_gsd.tools.distill.hardware import CPU
from vllm_gsd.tools.distill.options import Options
from vllm_gsd.tools.errors import ToolError
from vllm_gsd.tools.prompt_file import read_requests


def test_requests_from_templates_are_varied_and_the_same_for_a_seed():
    chats = prompts.new(random.Random(3), 400)
    assert chats == prompts.new(random.Random(3), 400) != prompts.new(random.Random(4), 400)
    assert len({json.dumps(chat) for chat in chats}) > 380
    assert not any("{" in chat[0]["content"] for chat in chats)


def test_requests_about_answers():
    answers = [([{"role": "user", "content": "x"}], f"Sentence {i}. " * 40) for i in range(20)]
    continued = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "z"},
    ]
    chats = prompts.about(random.Random(5), 200, [*answers, (continued, "Once more. " * 40)])
    assert len(chats) == 200
    assert all("Sentence" in json.dumps(chat) for chat in chats)
    assert {len(chat) for chat in chats} == {1, 3}  # some continue the chat, once
    assert prompts.about(random.Random(0), 10, [([], "short")]) == []


def test_from_file(tmp_path):
    file = tmp_path / "prompts.jsonl"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rows = [{"prompt": "a"}, {"turns": ["b", "c"]}, {"messages": chat}]
    file.write_text("\n\n".join(map(json.dumps, rows)))
    user = [[{"role": "user", "content": text}] for text in "ab"]
    assert [request.chat for request in read_requests(file)] == [*user, chat]


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"prompt": 3}', '{"turns": []}', '{"messages": [{"role": "user"}]}', '{"messages": []}']
)
def test_bad_files(tmp_path, text):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ToolError, match=r"prompts\.jsonl"):
        read_requests(file)


def test_missing_file(tmp_path):
    with pytest.raises(ToolError, match="cannot be read"):
        read_requests(tmp_path / "none")


class Target:
    """A fake engine of the target, in which every word is a token. It answers with as many tokens as it may.

    It is asked for requests by a prompt of one token, and makes up the numbers from 0 to 2.
    """

    def __init__(self, template="template"):
        self.asked: list[list[list[int]]] = []
        self.params: list[Any] = []
        self.tokenizer = SimpleNamespace(chat_template=template)

    def get_tokenizer(self):
        return self.tokenizer

    def generate(self, asked, params, use_tqdm):
        prompts = [prompt["prompt_token_ids"] for prompt in asked]
        if isinstance(params, list):
            self.asked.append(prompts)
            self.params += params
            texts = [f"answer to {prompt[-1]}. " * 20 for prompt in prompts]
        else:
            params, texts = [params] * len(prompts), [f" request {i % 3}" for i in range(len(prompts))]
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5] * own.max_tokens, text=text)])
            for own, text in zip(params, texts, strict=True)
        ]


@pytest.fixture
def target(monkeypatch):
    """The engine that runs start, their seeds, and a token for each word."""
    found = Target()
    found.seeds = []
    monkeypatch.setattr(answers, "start_target", lambda options, seed: found.seeds.append(seed) or found)
    monkeypatch.setattr(made_up, "user_turn", lambda tokenizer: ([9], "</u>") if tokenizer.chat_template else ([], ""))
    monkeypatch.setattr("transformers.AutoTokenizer", SimpleNamespace(from_pretrained=lambda _: None))
    monkeypatch.setattr(answers, "token_ids_of", lambda _, chat: [len(word) for word in chat[-1]["content"].split()])
    monkeypatch.setattr(answers, "found_hardware", lambda: CPU._replace(at_once=8))
    return found


def chats_of(work):
    return [[json.loads(chat) for (chat,) in read_columns(file, "chat")] for file in files(work)]


def test_every_file_has_requests_of_all_kinds(target, tmp_path):
    """But the first one, which is timed. A killed run makes only the files again that are missing."""
    options = Options(target="t", answers=68, seed=5)
    answers.make_answers(options, tmp_path, None)
    made = chats_of(tmp_path)
    assert [len(chats) for chats in made] == [8] * 8 + [4] and target.seeds == [5]
    kinds = [
        [sum("request" in json.dumps(chat) and len(chat) == 1 and "answer" not in json.dumps(chat) for chat in chats),
         sum("answer to" in json.dumps(chat) for chat in chats)]
        for chats in made
    ]  # fmt: skip
    assert kinds[0] == [0, 0] and kinds[1:] == [[3, 2]] * 7 + [[2, 1]]  # of 4 made up, 3 are distinct
    assert {own.temperature for own in target.params} == {0.0, 0.8}
    rows = load_answers(files(tmp_path), 1024)
    assert len(rows) == 68 and all(len(row.input_ids) == row.prompt_len + 256 for row in rows)
    written = {file: file.read_bytes() for file in files(tmp_path)}
    files(tmp_path)[3].unlink()
    answers.make_answers(options, tmp_path, None)
    assert target.seeds == [5, 13]  # with the same seed it would make up the same requests again
    assert {file for file in files(tmp_path) if file.read_bytes() != written[file]} <= {files(tmp_path)[3]}
    answers.make_answers(options, tmp_path, None)
    assert len(target.seeds) == 2


def test_a_run_that_resumes_on_other_hardware_makes_the_same_files(target, tmp_path, monkeypatch):
    options = Options(target="t", answers=68)
    answers.make_answers(options, tmp_path, None)
    for file in files(tmp_path)[4:]:
        file.unlink()
    monkeypatch.setattr(answers, "found_hardware", lambda: CPU._replace(at_once=512))
    answers.make_answers(options, tmp_path, None)
    assert [len(chats) for chats in chats_of(tmp_path)] == [8] * 8 + [4]


def test_a_target_without_a_chat_template_makes_up_nothing(target, tmp_path):
    target.tokenizer.chat_template = None
    answers.make_answers(Options(target="t", answers=32), tmp_path, None)
    assert [len(chats) for chats in chats_of(tmp_path)] == [4] * 8
    assert not any("request 0" in json.dumps(chats) for chats in chats_of(tmp_path))


@pytest.mark.parametrize(("given", "later"), [(False, 1.5), (True, 1.0)])
def test_as_many_answers_as_there_is_time_for(target, tmp_path, monkeypatch, given, later):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"w {number}"}) for number in range(300)))
    seconds = iter([0.0, 100.0, 140.0])
    monkeypatch.setattr(answers.time, "perf_counter", lambda: next(seconds))
    leftover = tmp_path / "answers" / "00000.parquet"
    leftover.parent.mkdir()
    leftover.write_text("from a run that was killed")
    for _ in range(2):  # decided once
        answers.make_answers(Options(target="t", prompts=str(file) if given else None), tmp_path, 8)
        # 480 seconds, where files after the first, which has short requests, take 1.5 times as long.
        assert len(files(tmp_path)) == 1 + int((480 - 140) / (40 * later))
        assert {len(chats) for chats in chats_of(tmp_path)} == {8}


def test_requests_without_room_for_an_answer_are_not_asked(target, tmp_path, caplog):
    """Requests without room for two tokens, the shortest useful answer, are left out."""
    file = tmp_path / "prompts.jsonl"
    lengths = [5, 14, 13, 30, 2, 3]
    file.write_text("\n".join(json.dumps({"prompt": "w " * length + str(length)}) for length in lengths))
    answers.make_answers(Options(target="t", prompts=str(file), longest=16), tmp_path, None)
    asked = [int(chat[0]["content"].split()[-1]) for chats in chats_of(tmp_path) for chat in chats]
    assert sorted(asked) == [2, 3, 5, 13]
    assert asked != [5, 13, 2, 3]  # in random order, since fewer may be asked
    assert "2 of 6 requests are left out" in caplog.text


def test_the_targets_own_requests_are_cut_to_what_fits(target, tmp_path):
    """So are answers. Requests without room for an answer are not learned from, so theirs is one token."""
    answers.make_answers(Options(target="t", answers=64, longest=40), tmp_path, None)
    rows = [row for file in files(tmp_path) for row in read_columns(file, "input_ids", "prompt_len")]
    assert max(prompt_len for _, prompt_len in rows) == 40
    for ids, prompt_len in rows:
        assert len(ids) - prompt_len == max(1, 40 - prompt_len)
    assert len(load_answers(files(tmp_path), 40)) == sum(prompt_len <= 38 for _, prompt_len in rows)


def test_no_request_leaves_room_for_an_answer(target, tmp_path):
    """If no request fits, the command fails before the target starts."""
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "w " * 16}))
    with pytest.raises(ToolError, match="--longest is 16, but all 1 requests are too long"):
        answers.make_answers(Options(target="t", longest=16, prompts=str(tmp_path / "prompts.jsonl")), tmp_path, None)
    assert not target.seeds


def test_the_users_turn_of_a_chat_template():
    def tokenize(text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [len(text)]}

    class Tokenizer:
        chat_template = "template"
        __call__ = staticmethod(tokenize)

        def apply_chat_template(self, chat, tokenize):
            return f"<s>system\n<u>{chat[0]['content']}</u>\n<a>"

    assert made_up.user_turn(Tokenizer()) == ([len("<s>system\n<u>")], "</u>")
    assert made_up.user_turn(SimpleNamespace(chat_template=None)) == ([], "")
