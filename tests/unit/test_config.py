"""Valid and wrong speculative configs. A wrong one must give the user one sentence that names the key."""

import json
import os
import time
from pathlib import Path

import pytest

from vllm_gsd.config import GSDConfig, GSDConfigError, check_draft_model, is_gsd
from vllm_gsd.tools.models import DRAFT_MODEL

MINIMAL = {"method": "gsd", "model": "draft"}


def with_keys(**keys):
    return {**MINIMAL, **keys}


def without_draft(**keys):
    return {"method": "gsd", "model": None, **keys}


def refusal(value) -> str:
    with pytest.raises(GSDConfigError) as caught:
        GSDConfig.load(value)
    return str(caught.value)


def assert_one_sentence(message: str) -> None:
    assert "\n" not in message
    assert message.endswith(".")
    assert not message.endswith("..")
    assert len(message) < 500
    assert message[0].isupper() or message[0] == '"'


# Wrong keys, and what the sentence must contain: the key, the given value, and the allowed values.
WRONG_KEYS = [
    (with_keys(method="gds"), ['"method"', '"gds"', '"gsd"']),
    (with_keys(method="GSD"), ['"method"', '"GSD"', '"gsd"']),
    (with_keys(method="ngram", prompt_lookup_max=4), ['"method"', '"ngram"', '"gsd"']),
    (with_keys(method=None), ['"method"', "null", '"gsd"']),
    (with_keys(method=["gsd"]), ['"method"', '["gsd"]', '"gsd"']),
    ({"model": "draft"}, ['"method" is missing', '"gsd"']),
    ({"methd": "gsd", "model": "draft"}, ['"methd"', '"method"']),
    ({"method": "gsd"}, ['"model" is missing', "null"]),
    (with_keys(model=""), ['"model" is ""', "null"]),
    (with_keys(model="  "), ['"model" is "  "', "null"]),
    (with_keys(model=3), ['"model" is 3', "null"]),
    (with_keys(model=True), ['"model" is true', "null"]),
    (with_keys(model=["draft"]), ['"model" is ["draft"]', "null"]),
    (with_keys(modle="x"), ['"modle"', 'nearest is "model"']),
    (with_keys(topk=3), ['"topk"', 'nearest is "top_k"']),
    (with_keys(zzz=3), ['"zzz"', "num_speculative_tokens", "preset"]),
    (with_keys(quantization="fp8"), ['"quantization"', "num_speculative_tokens"]),
    ({**MINIMAL, "max-depth": 3, "max_depth": 3}, ['"max_depth"', "once"]),
    ({**MINIMAL, 3: 3}, ["3", "strings"]),
    (with_keys(num_speculative_tokens=0), ['"num_speculative_tokens" is 0', "from 1 to 256"]),
    (with_keys(num_speculative_tokens=257), ['"num_speculative_tokens" is 257', "from 1 to 256"]),
    (with_keys(num_speculative_tokens="16"), ['"num_speculative_tokens" is "16"', "whole number"]),
    (with_keys(num_speculative_tokens=16.0), ['"num_speculative_tokens" is 16.0', "whole number"]),
    (with_keys(num_speculative_tokens=True), ['"num_speculative_tokens" is true', "whole number"]),
    (with_keys(num_speculative_tokens=None), ['"num_speculative_tokens" is null', "whole number"]),
    (with_keys(num_speculative_tokens=10**5000), ['"num_speculative_tokens"', "from 1 to 256"]),
    (with_keys(max_depth=0), ['"max_depth" is 0', "from 1 to 32"]),
    (with_keys(max_depth=33), ['"max_depth" is 33', "from 1 to 32"]),
    (with_keys(max_depth=[6]), ['"max_depth" is [6]', "from 1 to 32"]),
    (with_keys(top_k=-1), ['"top_k" is -1', "from 1 to 32"]),
    (with_keys(top_k=33), ['"top_k" is 33', "from 1 to 32"]),
    (with_keys(theta_prob=1.1), ['"theta_prob" is 1.1', "from 0 to 1"]),
    (with_keys(theta_prob=-0.1), ['"theta_prob" is -0.1', "from 0 to 1"]),
    (with_keys(theta_prob="0.2"), ['"theta_prob" is "0.2"', "from 0 to 1"]),
    (with_keys(theta_prob=float("nan")), ['"theta_prob" is NaN', "from 0 to 1"]),
    (with_keys(theta_sib=float("inf")), ['"theta_sib" is Infinity', "from 0 to 1"]),
    (with_keys(theta_sib=True), ['"theta_sib" is true', "from 0 to 1"]),
    (with_keys(theta_sib={"a": 1}), ['"theta_sib" is {"a": 1}', "from 0 to 1"]),
    (with_keys(merge_ngram=17), ['"merge_ngram" is 17', "from 0 to 16"]),
    (with_keys(merge_ngram=-1), ['"merge_ngram" is -1', "from 0 to 16"]),
    (with_keys(merge_ngram=False), ['"merge_ngram" is false', "from 0 to 16"]),
    (with_keys(sources=[]), ['"sources" is empty', '"draft"', '"ngram"']),
    (with_keys(sources="draft"), ['"sources" is "draft"', "list"]),
    (with_keys(sources=None), ['"sources" is null', "list"]),
    (with_keys(sources=["draft", "eagle"]), ['"sources" is ["draft", "eagle"]', "list"]),
    (with_keys(sources=["draft", "draft"]), ['"sources" is ["draft", "draft"]', "once"]),
    (with_keys(shared_responses=5), ['"shared_responses" is 5', 'add "shared"']),
    (with_keys(shared_responses=0), ['"shared_responses" is 0', "from 1"]),
    (with_keys(sources=["ngram"]), ['"sources" is ["ngram"]', '"model"', '"draft"', "null"]),
    (without_draft(sources=["draft", "ngram"]), ['"sources"', '"draft"', '"model" is null']),
    (with_keys(budget=0), ['"budget" is 0', '"auto"', "from 1"]),
    (with_keys(budget=17), ['"budget" is 17', '"auto"', "here 16"]),
    (with_keys(budget=True), ['"budget" is true', '"auto"']),
    (with_keys(budget="full"), ['"budget" is "full"', '"auto"']),
    (with_keys(budget=None), ['"budget" is null', '"auto"']),
    (with_keys(draft_tensor_parallel_size=0), ['"draft_tensor_parallel_size" is 0', "at least 1"]),
    (with_keys(draft_tensor_parallel_size="1"), ['"draft_tensor_parallel_size" is "1"', "at least 1"]),
    (with_keys(draft_vocab_size=31), ['"draft_vocab_size" is 31', "at least 32"]),
    (without_draft(draft_vocab_size=32), ['"draft_vocab_size" is 32', "name a model"]),
    (without_draft(draft_tensor_parallel_size=1), ['"draft_tensor_parallel_size" is 1', "name a model"]),
    (with_keys(preset="fast"), ['"preset" is "fast"', '"paper"']),
    (with_keys(preset=["paper"]), ['"preset" is ["paper"]', '"paper"']),
    (with_keys(tree_attention="flash"), ['"tree_attention" is "flash"', '"kernel", "flash_prefix" or "xformers"']),
    (with_keys(trace=""), ['"trace" is ""', "the path of a file"]),
    (with_keys(trace=True), ['"trace" is true', "the path of a file"]),
    (without_draft(sources=[], trace="file"), ['"trace" is "file"', '"sources" is empty']),
    (with_keys(cpu_kernels="on"), ['"cpu_kernels" is "on"', '"auto" or "off"']),
    (with_keys(cpu_kernels=False), ['"cpu_kernels" is false', '"auto" or "off"']),
    (with_keys(cpu_kernels=None), ['"cpu_kernels" is null', '"auto" or "off"']),
    (without_draft(sources=[], cpu_kernels="off"), ['"cpu_kernels" is "off"', '"sources" is empty', "leave"]),
    (without_draft(sources=[], num_speculative_tokens=4), ['"num_speculative_tokens" is 4', '"sources" is empty']),
    (without_draft(sources=[], preset="paper"), ['"preset" is "paper"', '"sources" is empty']),
    (with_keys(top_k="x" * 10_000_000), ['"top_k"', "from 1 to 32"]),
    (with_keys(top_k="a\nb\u2028c"), [r'"a\nb\u2028c"', "from 1 to 32"]),
    (with_keys(top_k=object), ['"top_k"', "from 1 to 32"]),
]


@pytest.mark.parametrize(("keys", "parts"), WRONG_KEYS, ids=lambda value: None)
def test_wrong_keys(keys, parts):
    message = refusal(keys)
    assert_one_sentence(message)
    for part in parts:
        assert part in message


# Mistakes that only files or inline JSON can have.
WRONG_TEXTS = [
    (b"", ["is empty", "JSON object"]),
    (b" \n\t", ["is empty", "JSON object"]),
    (b"method: gsd\nmodel: x\n", ["is not JSON", "line 1"]),
    (b'{"method": "gsd", }', ["is not JSON", "line 1"]),
    (b'{"method": "gsd",\n "model": "x"', ["is not JSON", "line 2"]),
    (b'[{"method": "gsd"}]', ["holds [", "JSON object"]),
    (b'"gsd"', ['holds "gsd"', "JSON object"]),
    (b"null", ["holds null", "JSON object"]),
    (b'{"method": "gsd", "model": "x", "model": "y"}', ['"model" is given twice', "once"]),
    (b'{"method": "gsd", "model": "x", "top_k": 3, "top-k": 4}', ['"top_k"', "once"]),
    (b'{"method": "gsd", "model": "x", "theta_prob": NaN}', ["NaN", "finite"]),
    (b'{"method": "gsd", "model": "x", "theta_prob": -Infinity}', ["-Infinity", "finite"]),
    (b'{"method": "gsd", "model": "x", "theta_prob": 1e999}', ['"theta_prob" is Infinity', "from 0 to 1"]),
    (b'{"method": "gsd", "model": "x", "top_k": ' + b"1" * 5000 + b"}", ["5000 digits", "more than 7"]),
    (b"[" * 100_000, ["nested too deeply"]),
    ('{"method": "gsd", "model": "entwürfe"}'.encode("latin-1"), ["is not UTF-8", "JSON file"]),
    ('{"method": "gsd", "model": "x"}'.encode("utf-16"), ["is not UTF-8", "JSON file"]),
    (bytes(range(256)) * 40_000, ["is larger than 1048576 bytes", "small JSON file"]),
    (b'{"method": "gsd", "model": "x"}' + b" " * 10_000_000, ["is larger than", "small JSON file"]),
]


@pytest.mark.parametrize(("text", "parts"), WRONG_TEXTS, ids=lambda value: None)
def test_wrong_files(tmp_path, text, parts):
    file = tmp_path / "gsd.json"
    file.write_bytes(text)
    started = time.monotonic()
    message = refusal(file)
    assert time.monotonic() - started < 1
    assert_one_sentence(message)
    for part in [*parts, "gsd.json"]:
        assert part in message


# Inline text is read as JSON only if it begins like JSON. The shell limits its length.
WRONG_INLINE = [
    (text.decode(), parts)
    for text, parts in WRONG_TEXTS
    if text[:1] in b'{["' and text.isascii() and len(text) < 1_000_000
]


@pytest.mark.parametrize(("inline", "parts"), WRONG_INLINE, ids=lambda value: None)
def test_wrong_inline_json(inline, parts):
    message = refusal(inline)
    assert_one_sentence(message)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("missing.json", ["missing.json", "does not exist", "JSON"]),
        ("folder", ["folder", "is a directory", "JSON file"]),
        ("a" * 10_000, ["cannot be read", "JSON file"]),
        ("x\0y", ["JSON"]),
        ("line\nbreak", [r"line\nbreak", "does not exist"]),
        ("/dev/zero", ["/dev/zero", "not a regular file"]),
    ],
)
def test_wrong_paths(tmp_path, monkeypatch, path, parts):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for value in (path, Path(path)):
        message = refusal(value)
        assert_one_sentence(message)
        for part in parts:
            assert part in message


def test_unreadable_file(tmp_path, monkeypatch):
    file = tmp_path / "gsd.json"
    file.write_text(json.dumps(MINIMAL))

    # chmod would not help, because tests may run as root, who may read everything.
    def refuse(self, mode):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    message = refusal(file)
    assert_one_sentence(message)
    assert "gsd.json" in message
    assert "Permission denied" in message


@pytest.mark.parametrize("value", [None, 3, [], [MINIMAL], "", b"{}", object()])
def test_wrong_kinds_of_value(value):
    assert_one_sentence(refusal(value))


@pytest.mark.parametrize("garbage", ["x" * 10_000_000, "{" * 10_000_000, "[" * 10_000_000, '"' * 10_000_000])
def test_garbage_is_refused_fast(garbage):
    started = time.monotonic()
    assert_one_sentence(refusal(garbage))
    assert time.monotonic() - started < 1


def test_the_first_of_several_mistakes_is_told():
    message = refusal(with_keys(max_depth=0, top_k="x", sources=[]))
    assert '"max_depth"' in message
    assert "top_k" not in message


def test_defaults():
    config = GSDConfig.load(MINIMAL)
    assert config.model_dump() == {
        "method": "gsd",
        "model": "draft",
        "num_speculative_tokens": 16,
        "max_depth": 6,
        "top_k": 8,
        "theta_prob": 0.02,
        "theta_sib": 0.03,
        "merge_ngram": 2,
        "sources": ("draft", "ngram"),
        "shared_responses": 1000,
        "budget": "auto",
        "draft_tensor_parallel_size": None,
        "draft_vocab_size": None,
        "preset": None,
        "tree_attention": "kernel",
        "cpu_kernels": "auto",
        "trace": None,
    }


def test_every_key_can_be_set():
    keys = {
        "method": "gsd",
        "model": "org/draft",
        "num_speculative_tokens": 256,
        "max_depth": 32,
        "top_k": 1,
        "theta_prob": 0,
        "theta_sib": 1,
        "merge_ngram": 0,
        "sources": ["ngram", "draft", "shared"],
        "shared_responses": 5,
        "budget": 256,
        "draft_tensor_parallel_size": 1,
        "draft_vocab_size": 32,
        "preset": "paper",
        "tree_attention": "kernel",
        "cpu_kernels": "auto",
        "trace": "trace.jsonl",
    }
    config = GSDConfig.load(keys)
    assert {**config.model_dump(), "sources": list(config.sources)} == keys


def test_kernels_without_speculation():
    config = GSDConfig.load(without_draft(sources=[]))
    assert not config.speculates and GSDConfig.load(without_draft()).speculates
    assert GSDConfig.model_validate(config.model_dump(mode="json")) == config  # vLLM passes it on as JSON


def test_the_same_config_from_all_kinds_of_value(tmp_path):
    keys = with_keys(top_k=2, sources=["draft", "ngram"])
    file = tmp_path / "gsd.json"
    file.write_text(json.dumps(keys), "utf-8-sig")  # with the byte-order mark that some editors write
    values = [file, str(file), json.dumps(keys), "\n " + json.dumps(keys), keys]
    assert {GSDConfig.load(value) for value in values} == {GSDConfig.load(keys)}


def test_dashes_mean_underscores():
    assert GSDConfig.load({**MINIMAL, "max-depth": 3, "theta-sib": 0.5}) == GSDConfig.load(
        with_keys(max_depth=3, theta_sib=0.5)
    )


def test_no_model_means_ngrams():
    assert GSDConfig.load(without_draft()).sources == ("ngram",)


def test_paper_preset_yields_to_the_user():
    paper = GSDConfig.load(with_keys(preset="paper"))
    assert (paper.top_k, paper.theta_prob, paper.theta_sib) == (4, 0.2, 0.3)
    own = GSDConfig.load(with_keys(preset="paper", top_k=2, theta_sib=0.1))
    assert (own.top_k, own.theta_prob, own.theta_sib) == (2, 0.2, 0.1)


@pytest.mark.parametrize("keys", [MINIMAL, without_draft(), with_keys(preset="paper", top_k=2), with_keys(budget=3)])
def test_survives_the_way_through_json(keys):
    config = GSDConfig.load(keys)
    assert GSDConfig.load(json.loads(config.model_dump_json())) == config


def test_frozen_and_input_untouched():
    keys = with_keys(preset="paper", sources=["draft"])
    before = json.dumps(keys)
    config = GSDConfig.load(keys)
    assert json.dumps(keys) == before
    with pytest.raises(ValueError, match="frozen"):
        config.top_k = 3


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        "",
        {},
        {"model": "draft", "num_speculative_tokens": 4},
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4},
        {"method": "draft_model", "model": "gsd"},
        {"method": "eagle3", "top_k": 3},
        {"method": "mtp"},
        {"method": "gdn"},
        {"method": "gdn", "model": "draft", "num_speculative_tokens": 4},
        {"method": "gs", "model": "draft"},
        {"method": "sgd"},
        {"model": "gsd"},
        '{"method": "ngram"',
        '{"method": "ngram", "method": "suffix"}',
        "[1, 2]",
    ],
)
def test_other_configs_are_left_to_vllm(value):
    assert not is_gsd(value)


def test_ours_is_recognised(tmp_path):
    file = tmp_path / "gsd.json"
    file.write_text(json.dumps(MINIMAL))
    # A gsd config with mistakes is still recognised. Loading it then reports them.
    for value in (MINIMAL, with_keys(top_k="x"), json.dumps(MINIMAL), file, str(file)):
        assert is_gsd(value)


@pytest.mark.parametrize(
    "value",
    [
        with_keys(method="GSD"),
        with_keys(method=" gsd "),
        with_keys(method="gds", top_k=3),
        with_keys(method="G-S-D"),
        with_keys(method="gs", theta_sib=0.1),
        {"model": "draft", "theta_prob": 0.1},
        {"model": "draft", "theta-prob": 0.1},
        {"method": 3, "model": "draft", "merge_ngram": 2},
        {"methd": "gsd", "model": "draft"},
        '{"method": "gsd", "model": "draft"',
        "missing.json",
    ],
)
def test_what_was_meant_for_us_is_not_passed_on(value):
    with pytest.raises(GSDConfigError) as caught:
        is_gsd(value)
    assert_one_sentence(str(caught.value))


def write_model(folder: Path, vocab_size=3, vocab=None, added=(), config=None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config or json.dumps({"vocab_size": vocab_size}))
    if vocab is not None:
        tokenizer = {"model": {"vocab": vocab}, "added_tokens": list(added)}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def draft_refusal(draft, size, target=None) -> str:
    with pytest.raises(GSDConfigError) as caught:
        check_draft_model(GSDConfig.load(with_keys(model=str(draft))), size, target)
    message = str(caught.value)
    assert_one_sentence(message)
    assert '"model"' in message
    return message


def test_built_in_draft_fits_itself():
    check_draft_model(GSDConfig.load(with_keys(model=str(DRAFT_MODEL))), 49152, DRAFT_MODEL)
    check_draft_model(GSDConfig.load(without_draft()), 49152, DRAFT_MODEL)


def test_missing_drafts(tmp_path, monkeypatch):
    assert "does not exist" in draft_refusal(tmp_path / "nowhere", 3)
    assert "without config.json" in draft_refusal(tmp_path, 3)
    (tmp_path / "draft.gguf").write_bytes(b"GGUF")
    assert "is not a folder" in draft_refusal(tmp_path / "draft.gguf", 3)
    assert "does not exist" in draft_refusal("s3://bucket/draft", 3)
    assert "does not exist" in draft_refusal("./draft", 3)


def test_a_draft_that_may_not_be_read(tmp_path, monkeypatch):
    # chmod would not help, because tests may run as root, who may enter everything.
    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refuse)
    assert "may not be read by this user" in draft_refusal(tmp_path, 3)


def test_hub_id_that_cannot_be_had(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "could not be read from the hub" in draft_refusal("some/draft-that-is-not-there", 3)


def test_a_cache_of_the_hub_that_cannot_be_written_is_named(monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied", "/cache/models--some--draft")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    assert "Permission denied: '/cache/models--some--draft'" in draft_refusal("some/draft", 3)


@pytest.mark.parametrize("config", ["", "{", "[]", "{}", '{"vocab_size": "many"}', '{"text_config": {}}'])
def test_broken_config_of_the_draft(tmp_path, config):
    assert "vocab_size" in draft_refusal(write_model(tmp_path / "draft", config=config or " "), 3)


def test_vocabulary_of_another_size(tmp_path):
    message = draft_refusal(write_model(tmp_path / "draft", vocab_size=5), 3)
    assert "5 tokens" in message
    assert "target's 3" in message


def test_vocabulary_inside_text_config(tmp_path):
    draft = write_model(tmp_path / "draft", config='{"text_config": {"vocab_size": 3}}')
    check_draft_model(GSDConfig.load(with_keys(model=str(draft))), 3)


def test_tokenizers_are_compared(tmp_path):
    target = write_model(tmp_path / "target", vocab={"a": 0, "b": 1}, added=[{"content": "c", "id": 2}])
    same = write_model(tmp_path / "same", vocab={"b": 1, "a": 0, "c": 2})
    unigram = write_model(tmp_path / "unigram", vocab=[["a", -1.0], ["b", -2.0], ["c", -3.0]])
    other = write_model(tmp_path / "other", vocab={"a": 1, "b": 0, "c": 2})
    without = write_model(tmp_path / "without")
    for draft in (same, unigram, without):
        check_draft_model(GSDConfig.load(with_keys(model=str(draft))), 3, str(target))
    assert "other ids" in draft_refusal(other, 3, str(target))
    (other / "tokenizer.json").write_text("{")
    assert "not readable" in draft_refusal(other, 3, os.fspath(target))
