"""A run of ``vllm-gsd distill``: what it refuses, where it resumes, and what it writes at the end."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from distill_world import CONFIG, files, student
from safetensors.numpy import save_file
from typer.testing import CliRunner

from vllm_gsd.tools.cli.main import app
from vllm_gsd.tools.distill import engine, generate, run, states
from vllm_gsd.tools.distill.card import write_card
from vllm_gsd.tools.distill.data import load_answers
from vllm_gsd.tools.distill.options import Options
from vllm_gsd.tools.distill.target import check_target
from vllm_gsd.tools.errors import ToolError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "eagle"}, "must be one of dspark, eagle3, lm"),
        ({"kind": "lm", "rank": 8}, "lm has no --rank"),
        ({"kind": "eagle3", "vocab_size": 300, "init": "x"}, "draft's own --vocab-size"),
        ({"prompts": "a", "data": "b"}, "exclude each other"),
        ({"init": "TARGET"}, "language model, but --kind is dspark"),
        ({"data": "nowhere"}, "has no answers"),
        ({"data": "x", "answers": 8192}, "leave --answers out"),
        ({"data": "x", "max_tokens": 256}, "leave --max-tokens out"),
        ({"data": "x", "batch": 96}, "leave --batch out"),
        ({"kind": "lm", "width": 128}, "--width is 128, but must be at most the target's hidden size, 64"),
        ({"rank": 65}, "--rank is 65, but must be at most the target's hidden size, 64"),
        ({"kind": "lm", "width": 100}, "--width is 100, but must be a multiple of 32"),
        ({"depth": 9, "max_tokens": 8}, "--depth is 9, but --max-tokens allows answers of only 8 tokens"),
        ({"depth": 16, "longest": 16}, "--depth is 16, but --longest allows answers of only 15 tokens"),
        ({"depth": 16, "longest": 16, "data": "x"}, "--depth is 16, but --longest allows answers of only 15 tokens"),
        ({"epochs": 0.0}, "--epochs is 0, but must be above 0"),
        ({"minutes": -5.0}, "--minutes is -5, but must be above 0"),
        ({"learning_rate": float("nan")}, "--learning-rate is nan, but must be above 0"),
        ({"kind": "lm", "init": "nowhere"}, "not a folder with a config.json"),
        ({"prompts": "nowhere"}, "cannot be read"),
    ],
)
def test_what_does_not_go_together(target, tmp_path, options, message):
    """Mistakes are refused before anything is written, so that the user can correct them."""
    options = {key: str(target) if value == "TARGET" else value for key, value in options.items()}
    with pytest.raises(ToolError, match=message):
        run.distill(Options(target=str(target), **options), tmp_path / "out", tmp_path / "work")
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(("out", "work"), [("out", "out"), ("out", "out/work"), ("work/trained", "work")])
def test_results_are_not_kept_where_the_draft_goes(target, tmp_path, out, work):
    with pytest.raises(ToolError, match="must not contain each other; give another folder"):
        run.distill(Options(target=str(target)), tmp_path / out, tmp_path / work)
    assert not (tmp_path / out).exists()


def test_two_runs_do_not_share_a_work_folder(target, tmp_path):
    (tmp_path / "work").mkdir()
    with run._only_run(tmp_path / "work"), pytest.raises(ToolError, match="Another run is working in"):
        run.distill(Options(target=str(target)), tmp_path / "out", tmp_path / "work")


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


def test_the_folder_in_which_the_command_runs_is_an_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["distill", "--target", "nowhere", "--out", "."])
    assert done.exit_code == 1 and "give a folder, not a hub id" in done.stderr


def test_the_root_is_no_output(target):
    done = CliRunner().invoke(app, ["distill", "--target", str(target), "--out", "/"])
    assert done.exit_code == 1 and "--out '/' is not empty; give a new folder" in " ".join(done.stderr.split())


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
    (tmp_path / "work" / "answers" / "first-00000.parquet").touch()
    with pytest.raises(ToolError, match="--longest is 18"):
        run.distill(Options(target=str(target), longest=18), tmp_path / "out", tmp_path / "work")
    with pytest.raises(ToolError, match="holds a run with other options"):
        run.distill(Options(target=str(target), longest=19), tmp_path / "out", tmp_path / "work")


def test_a_run_whose_engine_fails_goes_on_without(target, tmp_path):
    places = tmp_path / "out", tmp_path / "work"
    run._check(Options(target=str(target)), *places)
    run._check(Options(target=str(target), engine=False, eager=True), *places)
    with pytest.raises(ToolError, match=r"holds a run with other options \(--layers, --learning-rate\)"):
        run._check(Options(target=str(target), layers=2, learning_rate=0.5), *places)


def test_a_run_resumes_from_another_folder_but_not_with_other_requests(target, tmp_path, monkeypatch):
    places, file = (tmp_path / "out", tmp_path / "work"), tmp_path / "requests.jsonl"
    file.write_text(json.dumps({"prompt": "Name a river."}))
    run._check(Options(target=str(target), prompts=str(file)), *places)
    monkeypatch.chdir(tmp_path)
    run._check(Options(target=os.path.relpath(target), prompts=file.name), *places)
    file.write_text(json.dumps({"prompt": "Name a lake."}))
    with pytest.raises(ToolError, match=r"holds a run with other options \(the content of --prompts\)"):
        run._check(Options(target=str(target), prompts=str(file)), *places)


def test_a_run_of_an_earlier_version_is_refused_by_what_differs(target, tmp_path):
    places, file = (tmp_path / "out", tmp_path / "work"), tmp_path / "work" / "options.json"
    run._check(Options(target=str(target)), *places)
    stored = json.loads(file.read_text())
    del stored["rank"]
    file.write_text(json.dumps({"cost": None, **stored}))
    with pytest.raises(ToolError, match=r"other options \(--cost, --rank\); give another --work"):
        run._check(Options(target=str(target)), *places)


def test_a_killed_process_and_a_target_that_does_not_start_are_sentences(target, monkeypatch):
    import vllm

    with pytest.raises(ToolError, match="A process of the run was killed"):
        run._in_own_process(os._exit, 1)
    with pytest.raises(ToolError, match=r"Tensors could not be read or written \(.*; start the command again"):
        run._in_own_process(save_file, {}, "/dev/null/x")  # as on a full disk
    with pytest.raises(ToolError, match=r"Tensors could not be read or written \(.*\); start the command again"):
        run._in_own_process(torch.save, torch.zeros(1 << 20), "/dev/full")
    with pytest.raises(ToolError, match=r"The GPU's memory ran out \(2 GiB asked\); .* lower --longest\.$"):
        run._in_own_process(exec, "import torch; raise torch.OutOfMemoryError('2 GiB asked.')")
    with pytest.raises(RuntimeError, match="no running event loop"):
        run._in_own_process(asyncio.get_running_loop)
    monkeypatch.setattr(vllm, "LLM", lambda *_, **__: int("too long"))
    with pytest.raises(ToolError, match=r"does not start for 99 tokens, which is --longest and .*ValueError"):
        generate.start_target(str(target), max_model_len=99, batch=1, eager=True)


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
    (data / "own.json").write_text('["Name a river."]')
    for made_by, top_1 in (({"prompts": "mine/MY.jsonl"}, [0.25]), ({"prompts": None}, [0.3, 0.2])):
        (data / "options.json").write_text(json.dumps(made_by))
        options, out = Options(target=str(target), data=str(data)), tmp_path / f"out{len(top_1)}"
        found = {**results, "top_1": top_1, "top_4": results["top_4"] * len(top_1)}
        run._finish(options, data, tmp_path, out, load_answers(files(work), 640), found)
        cards.append((out / "README.md").read_text())
    assert "tokens), to MY.jsonl |" in cards[0] and "tokens of its chain" not in cards[0]
    assert "to templates and its own requests |" in cards[1] and "| tokens of its chain" in cards[1]
    assert "of which the graph's gain: speed over the same engine without it | 1.25 |" in cards[1]
    (data / "own.json").write_text("[]")
    assert run._learned_from(options, data) == "to templates"
    (data / "options.json").unlink()
    begun = Options(target=str(target), data=str(data), init="drafts/first")
    assert run._learned_from(begun, data).startswith("to requests that are not known; begun from the draft 'first'")


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


def test_a_draft_for_another_target_is_not_continued(target, tmp_path):
    (tmp_path / "draft").mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 400}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    options = Options(target=str(target), kind="lm", init=str(tmp_path / "draft"))
    with pytest.raises(
        ToolError, match=r"--init is .* has 400 tokens in its vocabulary, but must have the target's 300"
    ):
        run._check(options, tmp_path / "out", tmp_path / "work")


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        (None, "is not in the format of speculators"),
        ([1, 2, 3], r"reads the target's layers \[1, 2, 3\], but drafts are trained on \[2, 4, 5\]"),
        ([2, 4, 5], None),
    ],
)
def test_heads_that_training_cannot_go_on_with(target, tmp_path, layers, sentence):
    """The states are those of certain layers, and a head that was made for others would learn from the wrong ones."""
    layer = {**CONFIG, "model_type": "llama", "num_hidden_layers": 1}
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 256, **layer}
    if layers is not None:
        about = {"algorithm": "eagle3", "verifier": {"name_or_path": None, "architectures": ["LlamaForCausalLM"]}}
        config = {
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "speculators_config": about,
            "transformer_layer_config": layer,
            "draft_vocab_size": 256,
            "eagle_aux_hidden_state_layer_ids": layers,
        }
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    options = Options(target=str(target), kind="eagle3", init=str(tmp_path / "head"))
    with pytest.raises(ToolError, match=sentence) if sentence else nullcontext():
        run._check(options, tmp_path / "out", tmp_path / "work")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, []),
        ({"sample_from_anchor": False, "markov_rank": 0}, ["sample_from_anchor", "markov_rank"]),
        ({"enable_confidence_head": True}, ["enable_confidence_head"]),
        ({"transformer_layer_config": {"layer_types": ["sliding_attention"]}}, ["layer_types"]),
        ({"transformer_layer_config": {"use_sliding_window": True}}, ["use_sliding_window"]),
    ],
)
def test_blocks_that_training_cannot_go_on_with(target, tmp_path, monkeypatch, changed, named):
    student("dspark", target).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert run._untrained({**config, **changed}) == [f'"{name}"' for name in named]
    monkeypatch.setattr(run, "read_config", lambda folder: {**config, **changed})
    options = Options(target=str(target), init=str(tmp_path))
    with pytest.raises(ToolError, match=f"because of .*{named[-1]}.* in its config") if named else nullcontext():
        run._check_init(str(tmp_path), options, check_target(target))


@pytest.mark.parametrize("noted", [True, False])
def test_answers_of_another_target(target, work, tmp_path, noted):
    """Another target's answers are recognised by that run's options, or else by the shape of its states."""
    other, data = tmp_path / "other", tmp_path / "data"
    shutil.copytree(target, other)
    shutil.copytree(work, data)
    if noted:
        (data / "options.json").write_text(json.dumps({"target": str(target)}))
        message = "has answers of"
    else:
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(config | {"hidden_size": 96}))
        message = "has states of 3 layers of size 64, but .* has 3 of size 96"
    run._check(Options(target=str(target), data=str(data)), tmp_path / "out", tmp_path / "work")
    with pytest.raises(ToolError, match=message):
        run._check(Options(target=str(other), data=str(data)), tmp_path / "out", tmp_path / "new")


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


@pytest.mark.parametrize("rows", [{"input_ids": [1, 2]}, {"input_ids": [None, [1, 2]]}, {"input_ids": []}])
def test_files_of_something_else_are_no_answers(tmp_path, rows):
    file = tmp_path / "first-00000.parquet"
    Dataset.from_dict({**rows, "prompt_len": [1] * len(rows["input_ids"])}).to_parquet(str(file))
    with pytest.raises(ToolError, match=r"first-00000\.parquet' cannot be read as a file of answers"):
        load_answers([file], 640)


def test_states_of_another_shape_are_damaged(tmp_path):
    save_file({"states": np.zeros((2, 2), np.float32)}, tmp_path / "first-00000.safetensors")
    with pytest.raises(ToolError, match="is damaged"):
        states.stored_shape(tmp_path / "first-00000.safetensors")


def test_a_result_that_was_cut_off_is_named(target, tmp_path):
    """Without power a file may lose its content although it was written before it got its name."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "options.json").touch()
    with pytest.raises(ToolError, match=r"options\.json' is damaged \(.*\); delete it"):
        run._check(Options(target=str(target)), tmp_path / "out", tmp_path / "work")


def test_answers_that_appear_later_are_found(target, tmp_path, monkeypatch):
    """A later run finds answers that were added. If none fits, it makes no student and can be corrected."""
    data, options, places = tmp_path / "data", {"target": str(target)}, (tmp_path / "out", tmp_path / "work")
    monkeypatch.setattr(run, "_in_own_process", lambda function, *arguments: function(*arguments))
    with pytest.raises(ToolError, match="has no answers"):
        run.distill(Options(**options, data=str(data)), *places)
    (data / "answers").mkdir(parents=True)
    rows = [{"input_ids": [1] * 20, "prompt_len": 15, "text": ""}]
    Dataset.from_list(rows).to_parquet(str(data / "answers" / "first-00000.parquet"))
    states.write_missing(target, files(data), data / "states")
    for longest in (15, 16):
        (data / "answers" / f"later-{longest}.parquet").hardlink_to(data / "answers" / "first-00000.parquet")
        with pytest.raises(ToolError, match=f"--longest is {longest}, but no request"):
            run.distill(Options(**options, data=str(data), longest=longest), *places)
    run._check(Options(**options, data=str(data), longest=20), *places)
    assert not (tmp_path / "work" / "files.json").exists()


@pytest.mark.parametrize("name", ["file", "file/out"])
def test_a_file_in_the_way_is_named_before_the_work(target, tmp_path, name):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ToolError, match=r"--out .*file.*\.$"):
        run.distill(Options(target=str(target)), tmp_path / name, tmp_path / "work")
    with pytest.raises(ToolError, match=r'--work is ".*file", but must be a folder'):
        run.distill(Options(target=str(target)), tmp_path / "out", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_hidden_layers": None}, '"num_hidden_layers" is null'),
        ({"hidden_size": "64"}, '"hidden_size" is "64"'),
        ({"vocab_size": 0}, '"vocab_size" is 0'),
        ({"num_attention_heads": 0}, '"num_attention_heads" is 0'),
        # Qwen3 has such heads, but transformers makes no such Llama.
        (
            {"num_attention_heads": 7},
            "the hidden size must be a multiple of its attention heads, but the target has 64 and 7",
        ),
    ],
)
def test_targets_of_sizes_that_training_cannot_use(target, tmp_path, keys, message):
    config = json.loads((target / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "qwen3"} | keys))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ToolError, match=message):
        run._check(Options(target=str(tmp_path), kind="eagle3"), tmp_path / "out", tmp_path / "work")


def test_targets(target, tmp_path):
    with pytest.raises(ToolError, match="give a folder, not a hub id"):
        check_target(Path("some/model"))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ToolError, match="'gpt2'"):
        check_target(tmp_path)
    shallow = {**json.loads((target / "config.json").read_text()), "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(shallow))
    (tmp_path / "weights.safetensors").touch()  # vLLM would load it, but the student's training would not
    with pytest.raises(ToolError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        check_target(tmp_path)
    with pytest.raises(ToolError, match=r"The tokenizer of .* cannot be loaded \("):
        generate.fitting(str(tmp_path), [], 9)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ToolError, match="reads 3 layers, but the target has only 2"):
        run.distill(Options(target=str(tmp_path), kind="eagle3"), tmp_path / "out", tmp_path / "work")
