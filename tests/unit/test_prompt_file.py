"""Prompt files: every valid JSON line is read, and invalid lines give one clear sentence."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest

from vllm_gsd.tools.errors import ToolError
from vllm_gsd.tools.prompt_file import read_requests, thinned, token_ids_of

SCRIPTS = Path(__file__).parents[2] / "scripts"
CHECK_LOSSLESS = SCRIPTS / "check_lossless"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "prompts.jsonl"


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_only_line_feeds_end_a_line(file, separator):
    """JSON allows these characters within a string, but Python's ``splitlines`` would split at them."""
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
    with pytest.raises(ToolError, match=r"Line 2 of .* is not a JSON object"):
        read_requests(file)


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "cut off: \ud83d"},
        {"turns": ["\ude00"]},
        {"messages": [{"role": "user", "content": "\ud83d"}]},
        {"prompt": 3},
        {"turns": [None]},
    ],
)
def test_what_no_tokenizer_can_read_is_no_prompt(file, line):
    """JSON may hold half of a surrogate pair, as where a program has cut a text within an emoji."""
    file.write_text(json.dumps({"prompt": "a whole \U0001f600"}) + "\n" + json.dumps(line))
    with pytest.raises(ToolError, match=r"Line 2 of .* of valid Unicode text\.$"):
        read_requests(file)


def test_prompts_without_tokens_and_chats_that_a_template_refuses():
    def refuse(chat, **_):
        raise jinja2.TemplateError("roles must alternate")

    class Tokenizer(SimpleNamespace):
        def __call__(self, text, **_):
            return {"input_ids": list(text.encode())}

    base, strict = Tokenizer(chat_template=None), Tokenizer(chat_template="x", apply_chat_template=refuse)
    chat = [{"role": "user", "content": "é"}]
    assert token_ids_of(base, chat) == list("é".encode())
    with pytest.raises(ToolError, match=r'"content": "" *\}\] has no tokens, but must have at least one'):
        token_ids_of(base, [{"role": "user", "content": ""}])
    with pytest.raises(ToolError, match=r'template refuses the prompt .*"é".* \(roles must alternate\)\.$'):
        token_ids_of(strict, chat)


@pytest.mark.parametrize(
    ("limit", "chosen"), [(None, range(12)), (40, range(12)), (4, [0, 3, 6, 9]), (5, [0, 2, 4, 7, 9])]
)
def test_thinned_requests_are_spread_evenly(limit, chosen):
    assert thinned(list(range(12)), limit) == list(chosen)


def test_check_lossless_starts_its_engines_anew_and_compares_all_prompts(file, tmp_path, monkeypatch, capsys):
    """Results of earlier runs, perhaps with other code or prompts, are not reused."""
    file.write_text("\n".join(json.dumps({"prompt": str(number)}) for number in range(12)))
    main, started, compared = runpy.run_path(str(CHECK_LOSSLESS))["main"], [], []

    def engine(command, **_):
        started.append(command[command.index("--method") + 1])
        tokens = [[len(started)]] * 12  # the engines of each run and method answer differently
        answer = {"tokens": tokens, "generated": 12, "tokens_per_step": 1.0, "tokens_per_second": [1.0]}
        Path(command[command.index("--out") + 1]).write_text(json.dumps(answer))

    monkeypatch.setattr("subprocess.run", engine)
    transformers = {"compare_with_transformers": lambda answers, _: compared.append(answers) or {"different": []}}
    main.__globals__.update(transformers)
    for _ in range(2):
        with pytest.raises(SystemExit):
            main(file, out=tmp_path / "out", batches="1")
        assert json.loads(capsys.readouterr().out)["batch 1"]["different"] == list(range(12))
    assert started == ["plain", "gsd"] * 2
    assert compared == [[(str(number), [run]) for number in range(12)] for run in (2, 4)]


@pytest.mark.parametrize("kind", ["code", "retrieval"])
def test_prompts_are_made_again_from_their_seed(file, kind):
    def made(*args: str) -> str:
        command = [sys.executable, SCRIPTS / "make_prompts", kind, *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    file.write_text(made("100"))
    prompts = [request.chat[0]["content"] for request in read_requests(file)]
    assert len(set(prompts)) == 100
    assert made("100") == file.read_text() != made("100", "--seed", "1")
    assert min(map(len, prompts)) > 300
