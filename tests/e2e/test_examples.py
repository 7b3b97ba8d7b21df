"""The programs in ``examples/`` run as they stand on the built-in pair; those for clients share one server."""

import ast
import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import dashboard
import pytest
import yaml
from forking_server import ENVIRONMENT
from patience import SECONDS
from serve_process import VLLM, serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def server(preforked, tmp_path_factory):
    program, given = runpy.run_path(str(EXAMPLES / "serve.py")), ["--adapters"]
    arguments = program["arguments"](given)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in program["environment"](given).items():
            patch.setenv(name, value)
        options = {"command": (preforked, VLLM), "max_model_len": 1024}
        with serving(*arguments[:1], tmp_path_factory.mktemp("examples"), *arguments[1:], **options) as server:
            server.wait()
            yield server


def run(*command, python=sys.executable, **environment) -> str:
    """What a program prints."""
    done = subprocess.run(
        [python, *command],
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
    if "shared" in runpy.run_path(str(EXAMPLES / "serve.py"))["arguments"]([])[2]:
        assert int(counts[1][3]) > 0


def test_lora(client):
    without, adapted = re.fullmatch(r"\S+: (.*)mine: (.*)", client("lora.py"), re.DOTALL).groups()
    assert without.strip() != adapted.strip()


def test_notebook(server, monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed; scripts/setup does it")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed; scripts/setup does it")
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(EXAMPLES / "client/tour.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=SECONDS, kernel_name="python3").execute()
    printed, drawn = notebook.cells[3].outputs, notebook.cells[5].outputs
    assert float(re.search(r"([\d.]+) tokens per step", printed[0].text).group(1)) > 1
    assert any("image/png" in output.get("data", {}) for output in drawn)


def test_offline(preforked):
    # With a budget, the number of tokens per step does not depend on how busy this machine is.
    told = run(EXAMPLES / "offline.py", "--eager", "--max-tokens", "16", "--budget", "16", python=preforked)
    assert float(re.search(r"([\d.]+) per request and step\n$", told).group(1)) > 1.5


def test_metrics_of_the_dashboard_exist(server, client):
    """Every metric of panels and rules is one of the server's; the others of ours are documented."""
    client("streaming.py")
    served = set(re.findall(r"^(vllm:\w+)", server.get("/metrics"), re.MULTILINE))
    documented = (ROOT / "docs/reference/metrics.md").read_text()
    for name in dashboard.metrics_named() - served:
        assert f"`{name.removesuffix('_total')}`" in documented, name
    # Every one of our metrics is on the dashboard, but for those that are told at start-up only.
    ours = {name.removesuffix("_total") for name in re.findall(r"`(vllm:gsd_\w+)`", documented)}
    shown = re.sub(r"_(total|bucket|sum|count)\b", "", " ".join(dashboard.metrics_named()))
    assert ours - set(shown.split()) <= {"vllm:gsd_cudagraphs_captured", "vllm:gsd_draft_nodes"}


@pytest.mark.skipif(not dashboard.PROMETHEUS, reason="Prometheus is not installed (Debian's package prometheus)")
def test_prometheus_answers_every_panel(server, client, tmp_path):
    for command in (["check", "rules", "gsd.rules.yml"], ["check", "config", "prometheus.yml"]):
        subprocess.run([dashboard.PROMTOOL, *command], cwd=dashboard.FOLDER, check=True, timeout=SECONDS)
    with dashboard.prometheus(tmp_path, server.url) as query:
        client("streaming.py")
        time.sleep(2.5)  # two more scrapes
        for title, expression in dashboard.expressions().items():
            samples = query(expression)  # an expression with a mistake raises an error
            if title[0].isupper() and "gsd_fallbacks" not in expression and not title.startswith("Gsd"):
                assert samples, f"{title}: {expression} has no samples"
        (sample,) = query("gsd:tokens_per_step")
        assert 1 < float(sample["value"][1]) < 17
        # A scrape between the last step and the one that forgets its requests makes a rule pending until the next.
        until = time.monotonic() + SECONDS
        while query("ALERTS"):
            assert time.monotonic() < until, query("ALERTS")
            time.sleep(1)


def test_dashboard_is_one_that_grafana_reads():
    """Panels have different ids, lie side by side without overlap, and take the dashboard's data source."""
    panels = dashboard.DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = set()
    for panel in panels:
        x, y, width, height = (panel["gridPos"][name] for name in "xywh")
        taken = {(x + i, y + j) for i in range(width) for j in range(height)}
        assert x + width <= 24 and not taken & cells
        cells |= taken
    assert {panel["datasource"]["uid"] for panel in dashboard.PANELS} == {"${datasource}"}
    assert dashboard.DASHBOARD["schemaVersion"] >= 36
    composed = yaml.safe_load((dashboard.FOLDER / "docker-compose.yml").read_text())["services"]
    for service in composed.values():
        for volume in service.get("volumes", []):
            assert (dashboard.FOLDER / volume.split(":")[0]).is_file()
    built = composed["vllm"]["build"]
    assert (dashboard.FOLDER / built["context"] / built["dockerfile"]).is_file()
