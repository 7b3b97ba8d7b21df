"""A run of ``vllm-gsd distill``: where it resumes, what ends with it, and what it writes at the end."""

import asyncio
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from distill_world import files
from safetensors.numpy import save_file

from vllm_gsd.tools.distill import answers, engine, run, states
from vllm_gsd.tools.distill.card import write_card
from vllm_gsd.tools.distill.checks import check_run
from vllm_gsd.tools.distill.data import load_answers
from vllm_gsd.tools.distill.options import Options
from vllm_gsd.tools.errors import ToolError


def test_two_runs_do_not_share_a_work_folder(target, tmp_path):
    (tmp_path / "work").mkdir()
    with (tmp_path / "work" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ToolError, match="Another run is working in"):
            run.distill(Options(target=str(target)), tmp_path / "out", tmp_path / "work")
    assert (tmp_path / "work" / "options.json").exists()


def runs(process: str) -> bool:
    """Whether a process runs. One that has ended may stay in the table of processes."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_killed_run_leaves_no_process(tmp_path):
    """It would write into the same folder as the run that resumes."""
    program = "from vllm_gsd.tools.distill.run import _in_own_process; import time; _in_own_process(time.sleep, 600)"
    killed = subprocess.Popen([sys.executable, "-c", program])
    children = Path(f"/proc/{killed.pid}/task/{killed.pid}/children")
    deadline = time.monotonic() + 120
    while len(working := children.read_text().split()) < 2 and time.monotonic() < deadline:  # one tracks resources
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    while any(map(runs, working)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(working) == 2 and not any(map(runs, working))


def test_an_engine_ends_with_a_killed_run():
    """An engine that measures a draft would take time from the run that resumes."""
    engine = "from vllm_gsd.tools.process import end_with_parent as end; end(); print(flush=True); input()"
    program = (
        "import subprocess, sys; from subprocess import PIPE\n"
        f"process = subprocess.Popen([sys.executable, '-c', {engine!r}], stdin=sys.stdin, stdout=PIPE)\n"
        "process.stdout.read(1); print(process.pid, flush=True); process.wait()"
    )
    killed = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process = killed.stdout.readline().strip()
    assert runs(process)
    killed.kill()
    killed.wait()
    deadline = time.monotonic() + 60
    while runs(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(process)


def test_a_measured_gain_is_kept(target, work, tmp_path, monkeypatch):
    """Three engines take minutes. They are started again only with or without torch.compile."""
    (tmp_path / "work" / "trained").mkdir(parents=True)
    (tmp_path / "work" / "results.json").write_text("{}")
    measured = []
    monkeypatch.setattr(run, "_in_own_process", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(engine, "compare", lambda *arguments: measured.append(arguments[4]) or {"ratio_to_plain": 1.5})
    monkeypatch.setattr(run, "_finish", lambda *_: None)
    for eager in (False, False, True):
        options = Options(target=str(target), data=str(work), eager=eager)
        assert run.distill(options, tmp_path / "out", tmp_path / "work") == {"ratio_to_plain": 1.5}
    assert measured == [False, True]


def test_options_can_be_corrected_until_there_are_answers(target, tmp_path, monkeypatch):
    """The answers' own stage refuses options, too, when it has counted tokens or started the target."""

    def refuse(options, work, minutes):
        raise ToolError(f"--longest is {options.longest}")

    monkeypatch.setattr(run, "make_answers", refuse)
    monkeypatch.setattr(run, "_in_own_process", lambda function, *arguments: function(*arguments))
    (tmp_path / "work" / "answers").mkdir(parents=True)
    for longest in (16, 17):
        with pytest.raises(ToolError, match=f"--longest is {longest}"):
            run.distill(Options(target=str(target), longest=longest), tmp_path / "out", tmp_path / "work")
    (tmp_path / "work" / "answers" / "00000.parquet").touch()
    with pytest.raises(ToolError, match="--longest is 18"):
        run.distill(Options(target=str(target), longest=18), tmp_path / "out", tmp_path / "work")
    with pytest.raises(ToolError, match="holds a run with other options"):
        run.distill(Options(target=str(target), longest=19), tmp_path / "out", tmp_path / "work")


def test_a_killed_process_and_a_target_that_does_not_start_are_sentences(target, monkeypatch):
    import vllm

    with pytest.raises(ToolError, match="A process of the run was killed"):
        run._in_own_process(os._exit, 1)
    with pytest.raises(ToolError, match="free the disk or the GPU's memory and start the command again"):
        run._in_own_process(save_file, {}, "/dev/null/x")  # as on a full disk
    with pytest.raises(ToolError, match="free the disk or the GPU's memory and start the command again"):
        run._in_own_process(torch.save, torch.zeros(1 << 20), "/dev/full")
    with pytest.raises(ToolError, match=r"^2 GiB asked; free the disk or the GPU's memory"):
        run._in_own_process(exec, "import torch; raise torch.OutOfMemoryError('2 GiB asked.')")
    with pytest.raises(RuntimeError, match="no running event loop"):
        run._in_own_process(asyncio.get_running_loop)
    monkeypatch.setattr(vllm, "LLM", lambda *_, **__: int("too long"))
    with pytest.raises(ToolError, match=r"does not start for 129 tokens, one more than --longest \(ValueError"):
        answers.start_target(Options(target=str(target), longest=128, max_tokens=100), seed=0)


def test_a_command_that_is_not_unicode_loses_no_draft(tmp_path):
    """A file of requests may have such a name."""
    numbers = dict.fromkeys(("answers", "tokens", "steps", "batch", "trained", "vocab_size"), 1)
    said = {"target": "t", "name": "d", "kind": "lm", "prompts": "to caf\udce9", "command": "vllm-gsd"}
    write_card(tmp_path, said, numbers)
    assert "to caf? |" in (tmp_path / "README.md").read_text("utf-8")


def test_the_card_tells_whose_requests_were_answered(target, work, tmp_path):
    """With ``--data`` that is in the other run's options. Of a language model no chains are measured."""
    results = {"top_4": [0.5], "chain": 0.25, "steps": 9, "batch": 8, "trained": 7, "vocab_size": 256}
    results |= {"ratio_to_plain": 1.5, "ratio_to_off": 1.25}
    (tmp_path / "trained").mkdir()
    data, cards = tmp_path / "data", []
    data.mkdir()
    for made_by, top_1 in (({"prompts": "mine/MY.jsonl"}, [0.25]), ({"prompts": None}, [0.3, 0.2])):
        (data / "options.json").write_text(json.dumps(made_by))
        options, out = Options(target=str(target), data=str(data)), tmp_path / f"out{len(top_1)}"
        found = {**results, "top_1": top_1, "top_4": results["top_4"] * len(top_1)}
        run._finish(options, data, tmp_path, out, load_answers(files(work), 640), found)
        cards.append((out / "README.md").read_text())
    assert "tokens), to MY.jsonl |" in cards[0] and "tokens of its chain" not in cards[0]
    assert "to templates and its own requests |" in cards[1] and "| tokens of its chain" in cards[1]
    assert "of which the graph's gain: speed over the same engine without it | 1.25 |" in cards[1]
    begun = Options(target=str(target), data=str(data), init="drafts/first")
    run._finish(begun, data, tmp_path, tmp_path / "begun", load_answers(files(work), 640), found)
    assert "own requests; begun from the draft 'first', whose" in (tmp_path / "begun" / "README.md").read_text()


@pytest.mark.parametrize("own", ["work", "disk.partial"])
def test_a_draft_is_made_where_a_link_points(target, work, tmp_path, monkeypatch, own):
    """The draft has been trained before; only the folder is made here. Other folders stay, whatever their names."""
    monkeypatch.setattr(run, "_in_own_process", lambda function, *arguments: function(*arguments))
    for folder in (f"{own}/trained", "disk"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "draft").symlink_to(tmp_path / "disk")
    results = {"top_1": [0.2], "top_4": [0.5], "chain": 0.2, "steps": 9, "batch": 8, "trained": 7, "vocab_size": 256}
    (tmp_path / own / "results.json").write_text(json.dumps(results))
    monkeypatch.chdir(target)
    options = Options(target=".", data=str(work), engine=False)
    assert run.distill(options, tmp_path / "draft", tmp_path / own) == results
    assert (tmp_path / "draft").is_symlink()
    assert f"# A draft model for {target.name}\n" in (tmp_path / "draft" / "README.md").read_text()
    assert {file.name for file in tmp_path.iterdir()} == {"draft", "disk", own}


@pytest.mark.parametrize("kind", ["answers", "states"])
@pytest.mark.parametrize("size", [0, 500])
def test_damaged_data_is_named(target, work, tmp_path, monkeypatch, kind, size):
    monkeypatch.setattr(run, "_in_own_process", lambda function, *arguments: function(*arguments))
    shutil.copytree(work, tmp_path / "data")
    file = min((tmp_path / "data" / kind).iterdir())
    file.write_bytes(file.read_bytes()[:size])
    options = Options(target=str(target), data=str(tmp_path / "data"), engine=False)
    with pytest.raises(ToolError, match=rf"'.*/{file.name}' (cannot be read|is damaged) .*\.$"):
        run.distill(options, tmp_path / "out", tmp_path / "work")


@pytest.mark.parametrize("rows", [{"input_ids": [1, 2]}, {"input_ids": [None, [1, 2]]}, {"texts": ["a", "b"]}])
def test_files_of_something_else_are_no_answers(tmp_path, rows):
    file = tmp_path / "00000.parquet"
    Dataset.from_dict({**rows, "prompt_len": [1, 1]}).to_parquet(str(file))
    with pytest.raises(ToolError, match=r"00000\.parquet' cannot be read as a file of answers"):
        load_answers([file], 640)


def test_answers_that_appear_later_are_found(target, tmp_path, monkeypatch):
    """A later run finds answers that were added. If none fits, it makes no student and can be corrected."""
    data, options, places = tmp_path / "data", {"target": str(target)}, (tmp_path / "out", tmp_path / "work")
    monkeypatch.setattr(run, "_in_own_process", lambda function, *arguments: function(*arguments))
    with pytest.raises(ToolError, match="has no answers"):
        run.distill(Options(**options, data=str(data)), *places)
    (data / "answers").mkdir(parents=True)
    (data / "options.json").write_text(json.dumps({"target": str(target)}))
    rows = [{"input_ids": [1] * 20, "prompt_len": 15, "text": ""}]
    Dataset.from_list(rows).to_parquet(str(data / "answers" / "00000.parquet"))
    states.write_missing(target, files(data), data / "states")
    for longest in (15, 16):
        (data / "answers" / f"later-{longest}.parquet").hardlink_to(data / "answers" / "00000.parquet")
        with pytest.raises(ToolError, match=f"--longest is {longest}, but no request"):
            run.distill(Options(**options, data=str(data), longest=longest), *places)
    check_run(Options(**options, data=str(data), longest=20), *places)
    assert not (tmp_path / "work" / "files.json").exists()
