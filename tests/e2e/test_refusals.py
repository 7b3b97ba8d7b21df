"""``vllm serve`` refuses wrong speculative configs with one clear sentence and an exit code, before loading weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forking_server import ENVIRONMENT
from patience import SECONDS

BINARY = bytes(range(256)) * 10
# File name: (its content, or None for no file, and what the sentence must contain).
FILES = {
    "missing.json": (None, ["does not exist", "JSON file"]),
    "empty.json": (b"", ["is empty", "JSON object"]),
    "yaml.json": (b"method: gsd\nmodel: x\n", ["is not JSON", "line 1"]),
    "cut.json": (b'{"method": "gsd",\n "model"', ["is not JSON", "line 2"]),
    "list.json": (b'[{"method": "gsd", "model": "x"}]', ["holds [", "JSON object"]),
    "string.json": (b'"gsd"', ['holds "gsd"', "JSON object"]),
    "binary.json": (BINARY, ["is not UTF-8", "JSON file"]),
    "utf16.json": ('{"method": "gsd", "model": "x"}'.encode("utf-16"), ["is not UTF-8", "JSON file"]),
    "garbage.json": (BINARY * 4096, ["is larger than 1048576 bytes", "small JSON file"]),
    "twice.json": (b'{"method": "gsd", "model": "x", "model": "y"}', ['"model" is given twice', "once"]),
    "both-dashes.json": (b'{"method": "gsd", "model": null, "top_k": 3, "top-k": 4}', ['"top_k"', "once"]),
    "nan.json": (b'{"method": "gsd", "model": "x", "theta_sib": NaN}', ["NaN", "finite"]),
    "infinity.json": (b'{"method": "gsd", "model": "x", "theta_sib": 1e999}', ['"theta_sib"', "from 0 to 1"]),
}
# Keys that are added to a good config or replace its keys. MISSING removes a key.
MISSING = object()
KEYS = {
    "unknown key": ({"temperature": 1}, ['"temperature"', "num_speculative_tokens", "preset"]),
    "misspelt key": ({"max_dept": 3}, ['"max_dept"', 'nearest is "max_depth"']),
    "upstream's key": ({"quantization": "fp8"}, ['"quantization"', "num_speculative_tokens"]),
    "misspelt method": ({"method": "gds", "max_depth": 3}, ['"method" is "gds"', 'must be "gsd"']),
    "shouted method": ({"method": "GSD"}, ['"method" is "GSD"', 'must be "gsd"']),
    "no method": ({"method": MISSING, "theta_sib": 0.2}, ['"method" is missing', '"gsd"']),
    "no model": ({"model": MISSING}, ['"model" is missing', "path or hub id", "null"]),
    "model is empty": ({"model": ""}, ['"model" is ""', "path or hub id"]),
    "model is a number": ({"model": 7}, ['"model" is 7', "path or hub id"]),
    "string for a number": ({"num_speculative_tokens": "16"}, ['is "16"', "whole number from 1 to 256"]),
    "float for an integer": ({"top_k": 2.5}, ['"top_k" is 2.5', "whole number from 1 to 32"]),
    "null for a number": ({"max_depth": None}, ['"max_depth" is null', "from 1 to 32"]),
    "object for a number": ({"theta_prob": {}}, ['"theta_prob" is {}', "from 0 to 1"]),
    "too many nodes": ({"num_speculative_tokens": 257}, ["is 257", "from 1 to 256"]),
    "no nodes": ({"num_speculative_tokens": 0}, ["is 0", "from 1 to 256"]),
    "threshold above 1": ({"theta_prob": 1.5}, ['"theta_prob" is 1.5', "from 0 to 1"]),
    "negative merging": ({"merge_ngram": -1}, ['"merge_ngram" is -1', "from 0 to 16"]),
    "unknown source": ({"sources": ["draft", "eagle"]}, ['"sources"', "eagle", '"ngram"']),
    "source as a string": ({"sources": "ngram"}, ['"sources" is "ngram"', "a list"]),
    "no sources": ({"sources": []}, ['"sources" is empty', '"draft", "ngram" and "shared"']),
    "source without model": ({"model": None, "sources": ["draft"]}, ['"sources"', '"model" is null']),
    "unknown preset": ({"preset": "fast"}, ['"preset" is "fast"', '"paper"']),
    "negative budget": ({"budget": -4}, ['"budget" is -4', '"auto"', "here 16"]),
    "budget above all nodes": ({"budget": 40}, ['"budget" is 40', "here 16"]),
    "parallel size 0": ({"draft_tensor_parallel_size": 0}, ["is 0", "at least 1"]),
    "parallel size 2": ({"draft_tensor_parallel_size": 2}, ["2", "set it to 1"]),
    "draft vocabulary": ({"draft_vocab_size": 32000}, ["32000", "at most 512"]),
    "tree attention": ({"tree_attention": "xformers"}, ["on the CPU", "leave it out"]),
}
# Draft model: what the sentence must contain besides "model" and the folder's name.
DRAFTS = {
    "nowhere": ["does not exist", "a folder or a hub id"],
    "no-config": ["without config.json", "Hugging Face model"],
    "broken-config": ["config.json", "vocab_size"],
    "more-words": ["600 tokens", "512"],
    "other-words": ["tokens other ids", "same tokenizer"],
    "nobody/no-such-model": ["not a local folder", "the hub"],
}
# Engine arguments that gsd does not support, with a good config.
ARGUMENTS = {
    "--pipeline-parallel-size 2": ["pipeline parallelism (size 2)", "set --pipeline-parallel-size to 1"],
    "--enable-lora --max-num-seqs 8 --max-num-batched-tokens 100": [
        "--max-num-batched-tokens is 100",
        "at least 136",
        "--max-num-seqs (8)",
    ],
    "--data-parallel-size 2 --data-parallel-backend ray": ['--data-parallel-backend "ray"', 'leave it at "mp"'],
    "--kv-sharing-fast-prefill": ["fast prefill of layers that share KV", "leave --kv-sharing-fast-prefill off"],
    '--watermark-config {"algorithm":"gumbel","key":"7"}': ["watermarking", "leave --watermark-config out"],
    "--async-scheduling": ["--async-scheduling with Model Runner V1", "leave it out"],
    "--dtype float32 --kv-cache-dtype float16": [
        "(float16) than the model's (torch.float32)",
        '--kv-cache-dtype to "auto"',
    ],
    "--kv-offloading-size 1": ["KV connectors", "leave --kv-transfer-config and --kv-offloading-size out"],
    "--worker-cls x.Y": ['--worker-cls is "x.Y"', "leave it"],
    "--scheduler-cls x.Y": ["--scheduler-cls is x.Y", "leave it out"],
    "--spec-method ngram": ["--spec-method", "into the gsd config"],
}
INLINE = {
    '{"method": "gsd", "model": null, "top_k": 0}': ['"top_k" is 0', "from 1 to 32"],
    '{"method": "gsd", "model": }': ["is not JSON", "column 28"],
    '["gsd"]': ['holds ["gsd"]', "JSON object"],
    "gsd": ['"gsd" does not exist', "JSON file"],
}


@pytest.fixture(scope="module")
def drafts(tiny_pair, tmp_path_factory):
    """A folder of drafts that exist but cannot be used."""
    folder = tmp_path_factory.mktemp("drafts")
    for name in DRAFTS:
        if name not in ("nowhere", "nobody/no-such-model"):
            (folder / name).mkdir()
    config = json.loads((tiny_pair.draft / "config.json").read_text())
    words = json.loads((tiny_pair.draft / "tokenizer.json").read_text())
    (folder / "broken-config/config.json").write_text('{"model_type": "llama"}')
    (folder / "more-words/config.json").write_text(json.dumps({**config, "vocab_size": 600}))
    (folder / "other-words/config.json").write_text(json.dumps(config))
    words["model"]["vocab"].update(w7=8, w8=7)
    (folder / "other-words/tokenizer.json").write_text(json.dumps(words))
    return folder


@pytest.fixture(scope="module")
def command_lines(tiny_pair, tiny_blocks, drafts, tmp_path_factory):
    """Arguments of ``vllm serve`` by case."""
    folder = tmp_path_factory.mktemp("configs")

    def line(file: Path | str, *further: str) -> list[str]:
        return [str(tiny_pair.target), "--speculative-config", str(file), *further]

    def line_with_keys(name: str, keys: dict, *further: str) -> list[str]:
        keys = {"method": "gsd", "model": str(tiny_pair.draft), **keys}
        file = folder / f"{name.replace('/', '-')}.json"
        file.write_text(json.dumps({key: value for key, value in keys.items() if value is not MISSING}))
        return line(file, *further)

    for name, (content, _) in FILES.items():
        if content is not None:
            (folder / name).write_bytes(content)
    models = {name: name if "/" in name else str(drafts / name) for name in DRAFTS}
    return {
        "good": line_with_keys("good", {}),
        "good with LoRA": line_with_keys("good", {}, "--enable-lora"),
        "good over Ray": line_with_keys(
            "good", {}, "--distributed-executor-backend", "ray", "--tensor-parallel-size", "2"
        ),
        "good twice": line_with_keys("good", {}, "--data-parallel-size", "2"),
        "good inline": line(json.dumps({"method": "gsd", "model": str(tiny_pair.draft)})),
        "no config": line("null"),
        "directory": line(folder),
        **{name: line(folder / name) for name in FILES},
        **{name: line_with_keys(name, keys) for name, (keys, _) in KEYS.items()},
        **{name: line_with_keys(name, {"model": model}) for name, model in models.items()},
        **{name: line_with_keys("good", {}, *name.split()) for name in ARGUMENTS},
        **{text: line(text) for text in INLINE},
        "a draft to serve": [str(tiny_blocks["dflash of speculators"]), *line_with_keys("good", {})[1:]],
    }


@pytest.fixture(scope="module")
def environment():
    """Environment variables that disable the network and all log messages below errors."""
    return {**os.environ, **ENVIRONMENT}


@pytest.fixture(scope="module")
def answers(command_lines, environment, preforked):
    """[exit code, message] for each case."""
    script = Path(__file__).parent / "cli_refusals.py"
    done = subprocess.run(
        [preforked, script],
        input=json.dumps(list(command_lines.values())),
        capture_output=True,
        text=True,
        env=environment,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(command_lines, json.loads(done.stdout), strict=True))


def sentence(message: str) -> str:
    """The sentence for the user, after argparse's usage line and the program's name."""
    usage, _, last = message.strip().rpartition("error: ")
    assert usage.count("\n") <= 1 and "Traceback" not in message
    text = last.removeprefix("argument --speculative-config/-sc: ")
    assert "\n" not in text
    assert text.endswith(".") and not text.endswith("..")
    assert 20 < len(text) < 500
    assert text[0].isupper() or text[0] in '"g-'  # it may begin with a key, "gsd" or an option
    return text


# Errors found only with the target's config at hand. Their sentence names the key, not the file.
LATER = {
    "parallel size 2": '"draft_tensor_parallel_size"',
    "draft vocabulary": '"draft_vocab_size"',
    "tree attention": '"tree_attention"',
}
CASES = {
    "directory": ["configs", "is a directory", "JSON file"],
    **{name: [name, *parts] for name, (_, parts) in FILES.items()},
    **{name: [LATER.get(name, f"{name}.json"), *p] for name, (_, p) in KEYS.items()},
    **{name: ['"model" is', name, *parts] for name, parts in DRAFTS.items()},
    **ARGUMENTS,
    **INLINE,
    "a draft to serve": ["dflash of speculators", "serve its target", 'as "model" in the gsd config'],
}


@pytest.mark.parametrize("case", CASES)
def test_refused(answers, case):
    code, message = answers[case]
    assert code, message
    text = sentence(message)
    for part in CASES[case]:
        assert part in text


@pytest.mark.parametrize("case", ["good", "good inline", "good with LoRA", "good over Ray", "good twice", "no config"])
def test_accepted(answers, case):
    assert answers[case] == [0, ""]


@pytest.mark.parametrize("case", ["unknown key", "missing.json", "more-words", "--pipeline-parallel-size 2"])
def test_command_line(command_lines, environment, preforked, case):
    """The real command prints only the sentence and starts no engine."""
    vllm = Path(sys.executable).parent / "vllm"
    done = subprocess.run(
        [preforked, vllm, "serve", *command_lines[case]],
        capture_output=True,
        text=True,
        env=environment,
        timeout=SECONDS,
    )
    assert done.returncode in (1, 2)
    lines = [line for line in done.stderr.splitlines() if "error: " in line]
    assert len(lines) == 1
    text = sentence(lines[0])
    for part in CASES[case]:
        assert part in text
    for trace in ("Traceback", "EngineCore", "Loading"):
        assert trace not in done.stdout + done.stderr
