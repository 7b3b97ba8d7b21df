"""``vllm-gsd distill`` on the tiny target: killed at every stage it goes on, and its draft works at once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from patience import SECONDS
from vllm_gsd.tools.distill.hidden_states import Features, write_features

from vllm_gsd.tools.distill.train import load_answers

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
VLLM_GSD = [str(Path(sys.executable).with_name("vllm-gsd"))]


@pytest.fixture
def command(tiny_pair, preforked, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": " ".join(f"w{(7 * i + j) % 500}" for j in range(12))} for i in range(40)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    return [
        preforked, *VLLM_GSD, "distill", "--target", str(tiny_pair.target), "--out", str(tmp_path / "draft"),
        "--prompts", str(prompts), "--max-tokens", "16", "--params", "300000", "--vocab-size", "400", "--epochs", "40",
    ]  # fmt: skip


def kill_once(command, path, pattern):
    """Run until a file like that is there, then kill the command and all it started."""
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + SECONDS
    while not list(path.glob(pattern)):
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_killed_at_any_stage_it_goes_on(command, tmp_path, tiny_pair, start_engine, random_prompts):
    work = tmp_path / "draft.work"
    size = command.index("--params")
    command[size : size + 2] = ["--eagle", "--eager"]
    written = {}
    for stage in ("features/*[0-9].npy", "answers/*.parquet", "checkpoints/checkpoint-*/trainer_state.json"):
        kill_once(command[1:], work, stage)  # not forked from a process that would outlive it
        if stage.startswith("answers"):  # hidden states come with the answers, and are made where they are missing
            answers = list(work.glob("answers/*.parquet"))
            (work / "features").rename(tmp_path / "with-answers")
        written |= {
            file: file.stat().st_mtime_ns for name in ("answers", "features") for file in work.glob(f"{name}/*")
        }
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kept = {file: time_ns for file, time_ns in written.items() if ".partial" not in file.name}
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    assert {file.suffix for file in kept} == {".parquet", ".npy"}
    again = write_features(tiny_pair.target, answers, tmp_path / "again")
    for row in load_answers(answers, 640):
        expected = again.of(row)[:-1]
        for folder in (tmp_path / "with-answers", work / "features"):
            np.testing.assert_allclose(Features(folder).of(row)[:-1], expected, rtol=0.1, atol=0.1)
    results = json.loads(done.stdout.splitlines()[-1])
    draft = tmp_path / "draft"
    assert results["draft"] == str(draft)
    assert 0 <= results["top_1"] <= results["top_4"] <= 1
    assert results["tokens_per_step"] >= 1
    assert results["speed_up"] > 0
    card = (draft / "README.md").read_text()
    assert "vllm-gsd distill" in card
    assert "400 most frequent" in card

    prompts, params = random_prompts(4), [{"temperature": 0.0, "max_tokens": 24}] * 4
    plain = start_engine(None).generate(prompts, params)
    graph = start_engine({"model": str(draft), "budget": 16, "sources": ["draft"]})
    assert graph.generate(prompts, params) == plain
    assert graph.metrics()["gsd_nodes_verified"] > 0


def test_goes_on_with_a_draft_in_the_time_given(command, tmp_path, tiny_pair):
    size = command.index("--params")
    command[size : size + 2] = ["--init", str(tiny_pair.draft), "--minutes", "0.05", "--no-engine"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps = json.loads((tmp_path / "draft.work" / "steps.json").read_text())["steps"]
    assert 1 <= steps < 40 * 39 // 8  # 40 passes over the answers take longer than a second
    assert "trained on" in (tmp_path / "draft" / "README.md").read_text()


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (["--cost", "0.1"], "exclude each other"),
        (["--params", "10"], "10 parameters"),
        (["--layers", "a"], "--layers"),
        (["--prompts", "nowhere"], "cannot be read"),
        (["--target", "nowhere"], "config.json"),
    ],
)
def test_refusals(command, extra, sentence):
    done = subprocess.run([*command, *extra], capture_output=True, text=True)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_other_options_need_another_work_folder(command, tmp_path):
    work = tmp_path / "draft.work"
    work.mkdir()
    (work / "options.json").write_text('{"answers": 3}')
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "other options" in done.stderr
