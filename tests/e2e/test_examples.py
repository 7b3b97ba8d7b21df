"""The programs in ``examples/`` run as they stand on the built-in pair; those for clients share one server."""

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from engine_process import ENVIRONMENT
from patience import SECONDS
from serve_process import serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    arguments = runpy.run_path(str(EXAMPLES / "serve.py"))["arguments"]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        with serving(*arguments[:1], tmp_path_factory.mktemp("examples"), *arguments[1:], max_model_len=1024) as server:
            server.wait()
            yield server


def run(*command, **environment) -> str:
    """What a program prints."""
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, **ENVIRONMENT, **environment},
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


@pytest.fixture
def client(server):
    return lambda name: run(EXAMPLES / "client" / name, OPENAI_BASE_URL=f"{server.url}/v1")


def test_streaming(client):
    tokens, pieces = map(int, re.search(r"(\d+) tokens in (\d+) pieces\n$", client("streaming.py")).groups())
    assert 1 < pieces < tokens


def test_json_schema(client):
    answer = ast.literal_eval(client("json_schema.py"))
    assert set(answer) == {"name", "continent", "coast"}


def test_tools(client):
    first, second, *_ = client("tools.py").splitlines()
    assert re.fullmatch(r"get_weather\(\{'city': '(Oslo|Rome)'\}\) = .+ degrees", first)
    assert second


def test_code_edits(client):
    counts = re.findall(r": (\d+) tokens in (\d+) steps; copied (\d+) .*, (\d+) from other", client("code_edits.py"))
    for tokens, steps, *_ in counts:
        assert int(tokens) > 1.5 * int(steps)
    if "shared" in runpy.run_path(str(EXAMPLES / "serve.py"))["arguments"]()[2]:
        assert int(counts[1][3]) > 0


def test_lora(client):
    without, adapted = re.fullmatch(r"\S+: (.*)mine: (.*)", client("lora.py"), re.DOTALL).groups()
    assert without.strip() != adapted.strip()


def test_notebook(server, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(EXAMPLES / "client/tour.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=SECONDS, kernel_name="python3").execute()
    printed, drawn = notebook.cells[3].outputs, notebook.cells[5].outputs
    assert float(re.search(r"([\d.]+) tokens per step", printed[0].text).group(1)) > 1
    assert any("image/png" in output.get("data", {}) for output in drawn)


def test_offline():
    told = run(EXAMPLES / "offline.py", "--eager", "--max-tokens", "16")
    assert float(re.search(r"([\d.]+) per request and step\n$", told).group(1)) > 1.1
