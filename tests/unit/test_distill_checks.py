"""What ``vllm-gsd distill`` refuses before it begins."""

import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
from distill_world import CONFIG, student
from typer.testing import CliRunner

from vllm_gsd.tools.cli.main import app
from vllm_gsd.tools.distill import answers, checks, run
from vllm_gsd.tools.distill.checks import check_run
from vllm_gsd.tools.distill.options import Options
from vllm_gsd.tools.distill.target import check_target
from vllm_gsd.tools.errors import ToolError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "eagle"}, "must be one of dspark, eagle3, lm"),
        ({"kind": "lm", "rank": 8}, "lm has no --rank"),
        ({"kind": "eagle3", "vocab_size": 300, "init": "x"}, "the draft keeps its own --vocab-size; leave it out"),
        ({"kind": "eagle3", "layers": 1, "init": "x"}, "eagle3 has no --layers"),
        ({"kind": "lm", "layers": 6, "init": "TARGET"}, "--layers is 6, but --init .* has only 5 to keep"),
        ({"prompts": "a", "data": "b"}, "no new answers for --prompts"),
        ({"init": "TARGET"}, "language model, but --kind is dspark"),
        ({"data": "nowhere"}, "has no answers"),
        ({"data": "x", "answers": 8192}, "no new answers for --answers; leave it out"),
        ({"data": "x", "max_tokens": 256}, "no new answers for --max-tokens"),
        ({"kind": "lm", "width": 128}, "--width is 128, but must be at most the target's hidden size, 64"),
        ({"rank": 65}, "--rank is 65, but must be at most the target's hidden size, 64"),
        ({"kind": "lm", "width": 100}, "--width is 100, but must be a multiple of 32"),
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


@pytest.mark.parametrize(
    "option", [("--epochs", "0"), ("--minutes", "-5"), ("--learning-rate", "nan"), ("--depth", "33")]
)
def test_numbers_that_the_command_refuses(option):
    done = CliRunner().invoke(app, ["distill", "--target", "nowhere", "--out", "out", *option])
    assert done.exit_code == 2 and f"Invalid value for '{option[0]}'" in " ".join(done.stderr.split())


@pytest.mark.parametrize(("out", "work"), [("out", "out"), ("out", "out/work"), ("work/trained", "work")])
def test_results_are_not_kept_where_the_draft_goes(target, tmp_path, out, work):
    with pytest.raises(ToolError, match="must not contain each other; give another folder"):
        run.distill(Options(target=str(target)), tmp_path / out, tmp_path / work)
    assert not (tmp_path / out).exists()


def test_the_folder_in_which_the_command_runs_is_an_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["distill", "--target", "nowhere", "--out", "."])
    assert done.exit_code == 1 and "give a folder, not a hub id" in done.stderr


def test_the_root_is_no_output(target):
    done = CliRunner().invoke(app, ["distill", "--target", str(target), "--out", "/"])
    assert done.exit_code == 1 and "--out '/' is not empty; give a new folder" in " ".join(done.stderr.split())


def test_a_run_whose_engine_fails_goes_on_without(target, tmp_path):
    places = tmp_path / "out", tmp_path / "work"
    check_run(Options(target=str(target)), *places)
    check_run(Options(target=str(target), engine=False, eager=True), *places)
    with pytest.raises(ToolError, match=r"holds a run with other options \(--layers, --learning-rate\)"):
        check_run(Options(target=str(target), layers=2, learning_rate=0.5), *places)


def test_a_run_resumes_from_another_folder_but_not_with_other_requests(target, tmp_path, monkeypatch):
    places, file = (tmp_path / "out", tmp_path / "work"), tmp_path / "requests.jsonl"
    file.write_text(json.dumps({"prompt": "Name a river."}))
    check_run(Options(target=str(target), prompts=str(file)), *places)
    monkeypatch.chdir(tmp_path)
    check_run(Options(target=os.path.relpath(target), prompts=file.name), *places)
    file.write_text(json.dumps({"prompt": "Name a lake."}))
    with pytest.raises(ToolError, match=r"holds a run with other options \(the content of --prompts\)"):
        check_run(Options(target=str(target), prompts=str(file)), *places)


def test_a_run_of_an_earlier_version_is_refused_by_what_differs(target, tmp_path):
    places, file = (tmp_path / "out", tmp_path / "work"), tmp_path / "work" / "options.json"
    check_run(Options(target=str(target)), *places)
    stored = json.loads(file.read_text())
    del stored["rank"]
    file.write_text(json.dumps({"cost": None, **stored}))
    with pytest.raises(ToolError, match=r"other options \(--cost, --rank\); give another --work"):
        check_run(Options(target=str(target)), *places)


def test_a_draft_for_another_target_is_not_continued(target, tmp_path):
    (tmp_path / "draft").mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 400}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    options = Options(target=str(target), kind="lm", init=str(tmp_path / "draft"))
    with pytest.raises(
        ToolError, match=r"--init is .* has 400 tokens in its vocabulary, but must have the target's 300"
    ):
        check_run(options, tmp_path / "out", tmp_path / "work")


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        (None, "is not in the format of speculators"),
        ([1, 2, 3], r'does not fit, because of "eagle_aux_hidden_state_layer_ids" in its config.json'),
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
        check_run(options, tmp_path / "out", tmp_path / "work")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, []),
        ({"sample_from_anchor": False, "markov_rank": 0}, ["sample_from_anchor", "markov_rank"]),
        ({"enable_confidence_head": True}, ["enable_confidence_head"]),
        ({"transformer_layer_config": {"layer_types": ["sliding_attention"]}}, ["layer_types"]),
        ({"transformer_layer_config": {"use_sliding_window": True}}, ["use_sliding_window"]),
        ({"transformer_layer_config": {"attention_bias": True, "num_hidden_layers": 1}}, []),
        ({"transformer_layer_config": {"attention_bias": True, "num_hidden_layers": 2}}, ["attention_bias"]),
    ],
)
def test_blocks_that_training_cannot_go_on_with(target, tmp_path, monkeypatch, changed, named):
    student("dspark", target).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key, value in changed.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(checks, "check_draft", lambda *_: None)  # engines refuse some of them, too
    keys = ", ".join(f'"{name}"' for name in named)
    with pytest.raises(ToolError, match=f"because of {keys} in its config") if named else nullcontext():
        options = Options(target=str(target), init=str(tmp_path), layers=1)
        checks._check_draft("init", options, check_target(target))


def test_what_cannot_teach(target, tmp_path):
    student("dspark", target, depth=6).save(tmp_path / "teacher")
    places, teacher = (tmp_path / "out", tmp_path / "work"), str(tmp_path / "teacher")
    with pytest.raises(ToolError, match=r"--teacher .* has blocks of 6 tokens, but the draft's have 4"):
        check_run(Options(target=str(target), teacher=teacher, depth=4), *places)
    with pytest.raises(ToolError, match=r"--teacher .* is of kind language model, but --kind is dspark"):
        check_run(Options(target=str(target), teacher=str(target)), *places)
    with pytest.raises(ToolError, match="A draft of kind lm has no --teacher; leave it out"):
        Options(target=str(target), kind="lm", teacher=teacher)
    check_run(Options(target=str(target), teacher=teacher, init=teacher), *places)


def test_answers_of_another_target(target, work, tmp_path):
    other, data = tmp_path / "other", tmp_path / "data"
    shutil.copytree(target, other)
    shutil.copytree(work, data)
    check_run(Options(target=str(target), data=str(data)), tmp_path / "out", tmp_path / "work")
    with pytest.raises(
        ToolError, match=rf"holds a run with other options .* with --data '{data}' for the same answers"
    ):
        check_run(Options(target=str(target), data=str(data), depth=2), tmp_path / "out", tmp_path / "work")
    with pytest.raises(ToolError, match="has answers of"):
        check_run(Options(target=str(other), data=str(data)), tmp_path / "out", tmp_path / "new")
    (data / "options.json").unlink()
    with pytest.raises(ToolError, match=r"has no options\.json; give the work folder of another run"):
        check_run(Options(target=str(target), data=str(data)), tmp_path / "out", tmp_path / "new")


def test_a_result_that_was_cut_off_is_named(target, tmp_path):
    """Without power a file may lose its content although it was written before it got its name."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "options.json").touch()
    with pytest.raises(ToolError, match=r"options\.json' is damaged \(.*\); delete it"):
        check_run(Options(target=str(target)), tmp_path / "out", tmp_path / "work")


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
        check_run(Options(target=str(tmp_path), kind="eagle3"), tmp_path / "out", tmp_path / "work")


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
    (requests := tmp_path / "requests.jsonl").write_text('{"prompt": "Name a river."}')
    with pytest.raises(ToolError, match=r"The tokenizer of .* cannot be loaded \("):
        answers._given(Options(target=str(tmp_path), prompts=str(requests)))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ToolError, match="reads 3 layers, but the target has only 2"):
        run.distill(Options(target=str(tmp_path), kind="eagle3"), tmp_path / "out", tmp_path / "work")
