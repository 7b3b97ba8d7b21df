"""With the plugin installed but no gsd config, vLLM behaves as without the plugin."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forking_server import ENVIRONMENT
from patience import SECONDS

ROOT = Path(__file__).parents[2]
# Each engine runs in its own program, because VLLM_PLUGINS and the log level are read at import.
ENGINES = {"installed": {}, "absent": {"VLLM_PLUGINS": ""}}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A link to this checkout, including its virtual environment, with the name that a clone has."""
    folder = tmp_path_factory.mktemp("clone") / "vllm_gsd"
    folder.symlink_to(ROOT)
    return folder


@pytest.fixture(scope="module")
def described(checkout, tiny_pair, random_prompts):
    """The output of ``describe_engine`` and the log, with and without the plugin. Both engines run at the same time."""
    python = (
        checkout / Path(sys.executable).relative_to(ROOT) if sys.executable.startswith(f"{ROOT}/") else sys.executable
    )
    params = [{"temperature": i % 2, "seed": i, "max_tokens": 24, "ignore_eos": i % 3 > 0} for i in range(12)]
    request = json.dumps({"model": str(tiny_pair.target), "prompts": random_prompts(12), "params": params})
    programs = {}
    for name, variables in ENGINES.items():
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "VLLM_LOGGING_LEVEL": "INFO",
            "PYTHONPATH": str(checkout),
            **variables,
        }
        programs[name] = subprocess.Popen(
            [python, checkout / "tests/e2e/describe_engine.py"],
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        programs[name].stdin.write(request)
        programs[name].stdin.close()
        programs[name].stdin = None
    described = {}
    try:
        for name, program in programs.items():
            out, log = program.communicate(timeout=SECONDS)
            assert program.returncode == 0, log
            described[name] = (json.loads(out), log)
    finally:
        for program in programs.values():
            program.kill()
    return described


@pytest.fixture(scope="module")
def installed(described):
    return described["installed"][0]


@pytest.fixture(scope="module")
def absent(described):
    return described["absent"][0]


def test_the_plugin_was_loaded_in_one_and_not_in_the_other(installed, absent):
    assert installed["plugin_loaded"]
    assert not absent["plugin_loaded"]
    assert absent["gsd_modules"] == []


def test_classes_in_use(installed, absent):
    assert installed["classes"] == absent["classes"]
    assert all(name.startswith("vllm.") for name in installed["classes"])
    for part in ("Scheduler", "CPUWorker", "CPUModelRunner", "CPUAttentionBackend"):
        assert any(name.endswith(part) for name in installed["classes"]), part


@pytest.mark.parametrize("what", ["tokens", "metrics", "lookahead", "num_blocks", "additional_config"])
def test_same_as_without_the_plugin(installed, absent, what):
    assert installed[what] == absent[what]
    assert what in ("lookahead", "additional_config") or installed[what]


def test_no_metrics_of_ours(installed):
    assert not [name for name in installed["metrics"] if "gsd" in name]


def test_neither_runtime_nor_kernels_are_imported(installed):
    """Loading the plugin stays cheap: it imports no kernels and no model runner."""
    heavy = ("vllm_gsd.method", "vllm_gsd.ops", "vllm_gsd.engine.v1", "vllm_gsd.engine.v2")
    assert not [name for name in installed["gsd_modules"] if name.startswith(heavy)]


def test_nothing_in_the_log(described, checkout):
    log = described["installed"][1]
    for folder in (checkout, ROOT, sys.prefix):  # they occur in tracebacks that vLLM logs
        log = log.replace(str(folder), "")
    assert " INFO " in log  # the log is complete
    messages = [line for line in log.splitlines() if re.search(r"\b(DEBUG|INFO|WARNING|ERROR)\b", line)]
    assert not [line for line in messages if "gsd" in line.lower()]
