"""Requests that the target answers for ``vllm-gsd distill``, and how many of them fit into the time limit."""

import json
from types import SimpleNamespace

import pytest

from vllm_gsd.tools.distill import answers, generate, prompts
from vllm_gsd.tools.distill.options import Options
from vllm_gsd.tools.errors import ToolError
from vllm_gsd.tools.prompt_file import read_requests


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


@pytest.mark.parametrize(
    ("count", "first", "own", "second"),
    [(1, 1, 0, 0), (2, 1, 1, 0), (1000, 1, 500, 300), (64, 64, 0, 0), (96, 64, 32, 0), (640, 64, 320, 192)],
)
def test_what_was_timed_belongs_to_the_first_round(count, first, own, second):
    assert answers.later_rounds(count, first) == (own, second)


def test_a_resumed_run_makes_up_other_requests(tmp_path, monkeypatch):
    """It would make up the same ones again, since the engine begins with its seed."""
    words(monkeypatch)
    seeds: list[int] = []
    monkeypatch.setattr(generate, "start_target", lambda *_, seed, **__: seeds.append(seed))
    monkeypatch.setattr(generate, "answer", lambda llm, chats, *_, **__: llm() or [""] * len(chats))
    for made_up in range(2):
        answers.make_answers(Options(target="t", answers=1, seed=5), tmp_path, None)
        (tmp_path / f"own.{made_up}.json").touch()
    assert seeds == [5, 6]


@pytest.mark.parametrize(("given", "name", "later"), [({}, "first", 1.5), ({"prompts": "file"}, "file", 1.0)])
def test_as_many_answers_as_there_is_time_for(tmp_path, monkeypatch, given, name, later):
    now = [0.0]
    monkeypatch.setattr(answers.time, "perf_counter", lambda: now[0])
    leftover = generate.shard_path(tmp_path / "answers", name, 0)
    leftover.parent.mkdir()
    leftover.write_text("from a run that was killed")

    def takes(seconds, chats=()):
        assert not leftover.exists() and len(chats) in (0, generate.SHARD)
        now[0] += seconds

    asked = prompts.first_round(300, 0)
    for _ in range(2):  # decided once
        planned = answers.planned_answers(
            Options(target="t", **given), tmp_path, 8, asked, lambda: takes(100), lambda chats: takes(40, chats)
        )
        # 480 seconds, where later shards of templates take 1.5 times as long as the first.
        assert planned == generate.SHARD * (1 + int((480 - 140) / (40 * later)))
    assert now == [140.0]
    assert answers.planned_answers(Options(target="t", answers=7), tmp_path, None, [], None, None) == 7


def words(monkeypatch):
    """Make every word a token."""
    tokenizer = SimpleNamespace(from_pretrained=lambda _: None)
    monkeypatch.setattr("transformers.AutoTokenizer", tokenizer)
    monkeypatch.setattr(generate, "token_ids_of", lambda _, chat: chat[-1]["content"].split())


def test_requests_without_room_for_an_answer_are_not_asked(tmp_path, monkeypatch, caplog):
    """Requests without room for two tokens, the shortest useful answer, are left out. Others are answered in time."""
    words(monkeypatch)
    file, asked = tmp_path / "prompts.jsonl", []
    texts = ["w " * length + str(number) for number, length in enumerate([5, 14, 13, 30, 2, 3])]
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    monkeypatch.setattr(generate, "answer", lambda llm, chats, *rest, **_: asked.append(chats))
    monkeypatch.setattr(generate, "start_target", lambda *_, **__: None)
    options = Options(target="t", prompts=str(file), longest=16)
    answers.make_answers(options, tmp_path, None)
    first = [chat[0]["content"] for chat in asked[-1]]
    assert sorted(first) == sorted(texts[i] for i in (0, 2, 4, 5))
    assert first != [texts[i] for i in (0, 2, 4, 5)]  # in random order, since fewer may be asked
    assert "2 of 6 requests are left out" in caplog.text
    monkeypatch.setattr(generate, "SHARD", 1)
    seconds = iter([0.0, 10.0, 20.0])
    monkeypatch.setattr(answers.time, "perf_counter", lambda: next(seconds))
    answers.make_answers(Options(target="t", prompts=str(file), longest=16, batch=1), tmp_path, 0.5)
    assert [[chat[0]["content"] for chat in chats] for chats in asked[1:]] == [first[:1], first[:2]]
    # 30 seconds: 10 for the start and 10 for each request


@pytest.mark.parametrize("given", [{}, {"prompts": "prompts.jsonl"}])
def test_no_request_leaves_room_for_an_answer(tmp_path, monkeypatch, given):
    """If no request fits, the command fails before the target starts."""
    words(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "w " * 16}))
    monkeypatch.setattr(generate, "start_target", lambda *_, **__: pytest.fail("it starts"))
    monkeypatch.setattr(prompts, "first_round", lambda count, seed: [[{"role": "user", "content": "w " * 20}]] * count)
    with pytest.raises(ToolError, match="--longest is 16, but all"):
        answers.make_answers(Options(target="t", longest=16, **given), tmp_path, None)
