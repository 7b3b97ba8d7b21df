"""``vllm-gsd distill`` on a tiny target: it resumes after being killed at any stage; vLLM and gsd load its drafts."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from engine_probes import drafts_of_steps
from engine_process import Engine
from patience import SECONDS
from tiny_pair import build_tiny_pair

from vllm_gsd.tools.distill.data import load_answers
from vllm_gsd.tools.distill.hardware import found_hardware
from vllm_gsd.tools.distill.states import StoredStates, write_missing

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
VLLM_GSD = [str(Path(sys.executable).with_name("vllm-gsd"))]
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
CHAIN = {"sources": ["draft"], "top_k": 1, "max_depth": 3, "num_speculative_tokens": 3, "budget": 3}
# The tests generate from the training prompts, because a draft cannot predict a random target's answers to others.
PROMPTS = [[(7 * i + j) % 500 for j in range(12)] for i in range(40)]
CHAIN |= {"theta_prob": 0.0, "theta_sib": 0.0, "merge_ngram": 0}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A target with three layers, because EAGLE-3 heads read three."""
    return build_tiny_pair(tmp_path_factory.mktemp("three layers"), num_hidden_layers=3).target


@pytest.fixture(scope="module")
def command(target, preforked, tmp_path_factory):
    """The ``vllm-gsd distill`` command, without ``--out``."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"prompt": " ".join(f"w{token}" for token in prompt)} for prompt in PROMPTS]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    return [
        preforked, *VLLM_GSD, "distill", "--target", str(target), "--prompts", str(prompts), "--max-tokens", "32",
        "--vocab-size", "400", "--epochs", "8",
    ]  # fmt: skip


def kill_once(command, path, pattern):
    """Run the command until a file matches the pattern, then kill all its processes and wait until they have ended."""
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + SECONDS
    while not list(path.glob(pattern)):
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()  # stderr closes when the last process that holds it ends


@pytest.fixture(scope="module")
def head(command, target, tmp_path_factory):
    """An EAGLE-3 head from a run that was killed at every stage, and the results that the last run printed."""
    folder = tmp_path_factory.mktemp("head")
    work = folder / "draft.work"
    command = [*command, "--kind", "eagle3", "--eager", "--out", str(folder / "draft")]
    written = {}
    for stage in ("answers/*.parquet", "states/*.safetensors", "checkpoints/checkpoint-*/trainer_state.json"):
        kill_once(command, work, stage)
        written |= {file: file.stat().st_mtime_ns for name in ("answers", "states") for file in work.glob(f"{name}/*")}
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Others are what a killed run had not finished.
    kept = {file: time_ns for file, time_ns in written.items() if file.suffix in (".parquet", ".safetensors")}
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    assert len({file.suffix for file in kept}) == 2
    answers = sorted(work.glob("answers/*.parquet"))
    write_missing(target, answers, folder / "again", dtype=found_hardware().dtype)
    data = load_answers(answers, 640)
    assert len(data) == len(PROMPTS)
    for stored, expected in zip(StoredStates(work / "states")(data), StoredStates(folder / "again")(data), strict=True):
        torch.testing.assert_close(stored[:-1], expected[:-1], rtol=0.1, atol=0.1)
    return folder / "draft", json.loads(done.stdout)


def test_an_eagle3_head(head, target):
    """The draft has a model card, and vLLM's own method and gsd draft the same chains with it."""
    draft, results = head
    assert results["draft"] == str(draft)
    assert all(0 <= best <= four <= 1 for best, four in zip(results["top_1"], results["top_4"], strict=True))
    assert results["chain"] >= 0 and results["tokens_per_step"] >= 1
    assert results["ratio_to_plain"] > 0 and results["ratio_to_off"] > 0
    card = (draft / "README.md").read_text()
    assert "vllm-gsd distill" in card and "400\nmost frequent" in card
    steps = []
    for config in ({"method": "eagle3", "num_speculative_tokens": 3}, {"method": "gsd", **CHAIN}):
        engine = Engine(target, {**config, "model": str(draft)}, skip_tokenizer_init=True)
        tokens, chains = engine.call(drafts_of_steps, PROMPTS[1], 40)
        steps.append((tokens, [(count, drafts[: 40 - count - 1]) for count, drafts in chains if 0 < count < 40]))
        engine.close()
    assert steps[0] == steps[1] and steps[0][1]


@pytest.fixture(scope="module")
def of_same_answers(command, head):
    """A function that trains another draft on the answers collected for the head."""

    def make(out, *options):
        own = command[: command.index("--prompts")]
        data = str(head[0].with_name("draft.work"))
        done = subprocess.run([*own, "--data", data, "--no-engine", "--out", str(out), *options], capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)

    return make


def test_a_block_of_the_same_answers(of_same_answers, target, tmp_path):
    made = of_same_answers(tmp_path / "first", "--vocab-size", "400", "--depth", "4", "--rank", "16", "--epochs", "20")
    assert len(made["top_1"]) == 4
    again = of_same_answers(
        tmp_path / "draft", "--init", str(tmp_path / "first"), "--minutes", "0.05", "--epochs", "1000"
    )
    assert 1 <= again["steps"] < 1000 * 39 / again["batch"]  # --minutes ended training early
    prompts, texts = PROMPTS[1:5], []
    for config in (None, {"method": "gsd", "model": str(tmp_path / "draft"), "sources": ["draft"], "budget": 16}):
        engine = Engine(target, config, skip_tokenizer_init=True)
        texts.append([answer.tokens for answer in engine.generate(prompts, [GREEDY] * 4)])
        if config is not None:
            assert engine.metrics()["gsd_nodes_accepted_native"] > 5
        engine.close()
    assert texts[0] == texts[1]


def test_a_language_model_of_the_same_answers(of_same_answers, target, tmp_path):
    """vLLM's own method and gsd draft with it."""
    from transformers import AutoModelForCausalLM

    made = of_same_answers(tmp_path / "draft", "--kind", "lm", "--layers", "2", "--epochs", "10")
    assert len(made["top_1"]) == 1
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "draft").config.num_hidden_layers == 2
    texts = []
    for config in (None, {"method": "draft_model", "num_speculative_tokens": 3}, {"method": "gsd", **CHAIN}):
        model = None if config is None else {**config, "model": str(tmp_path / "draft")}
        engine = Engine(target, model, skip_tokenizer_init=True)
        texts.append([answer.tokens for answer in engine.generate(PROMPTS[1:5], [GREEDY] * 4)])
        if config is not None:
            assert engine.metrics()["spec_decode_num_accepted_tokens"] > 5
        engine.close()
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (["--kind", "eagle"], "must be one of dspark, eagle3, lm"),
        (["--kind", "lm", "--rank", "8"], "has no --rank"),
        (["--prompts", "nowhere"], "cannot be read"),
        (["--target", "nowhere"], "config.json"),
    ],
)
def test_refusals(command, extra, sentence, tmp_path):
    done = subprocess.run([*command, "--out", str(tmp_path / "draft"), *extra], capture_output=True, text=True)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_other_options_need_another_work_folder(command, tmp_path):
    work = tmp_path / "draft.work"
    work.mkdir()
    (work / "options.json").write_text('{"answers": 3}')
    done = subprocess.run([*command, "--out", str(tmp_path / "draft")], capture_output=True, text=True)
    assert done.returncode == 1
    assert "other options" in done.stderr
