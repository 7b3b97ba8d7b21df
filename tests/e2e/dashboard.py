"""The Prometheus expressions in ``examples/observability``, and a real Prometheus to evaluate them."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import yaml
from patience import SECONDS
from serve_process import free_port

FOLDER = Path(__file__).parents[2] / "examples/observability"
DASHBOARD = json.loads((FOLDER / "grafana/gsd.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
# scripts/setup unpacks Debian's package of Prometheus there.
PATH = os.pathsep.join([os.environ["PATH"], str(Path(sys.executable).parents[1] / "prometheus/usr/bin")])
PROMETHEUS, PROMTOOL = (shutil.which(name, path=PATH) for name in ("prometheus", "promtool"))


def expressions() -> dict[str, str]:
    """The expressions of panels and rules by title, with Grafana's variables filled in."""
    by_title = {
        f"{panel['title']}: {target['legendFormat']}": target["expr"] for panel in PANELS for target in panel["targets"]
    }
    for group in yaml.safe_load((FOLDER / "gsd.rules.yml").read_text())["groups"]:
        by_title |= {rule.get("record") or rule["alert"]: rule["expr"] for rule in group["rules"]}
    return {title: expr.replace("$__rate_interval", "1m").replace("$model", ".*") for title, expr in by_title.items()}


def metrics_named() -> set[str]:
    """The vLLM metrics in all expressions, with Prometheus' suffixes."""
    return {name for expr in expressions().values() for name in re.findall(r"vllm:\w+", expr)}


@contextlib.contextmanager
def prometheus(folder: Path, server_url: str):
    """A Prometheus with the example's rules that scrapes a server every second; yields ``query(expression)``."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(FOLDER / name) for name in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [server_url.removeprefix("http://")]
    (folder / "prometheus.yml").write_text(yaml.dump(config))
    address = f"127.0.0.1:{free_port()}"
    options = {"config.file": "prometheus.yml", "storage.tsdb.path": "data", "web.listen-address": address}
    command = [PROMETHEUS, *(f"--{name}={value}" for name, value in options.items())]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)

    def query(expression: str) -> list[dict]:
        """Evaluate an expression now and return its samples."""
        url = f"http://{address}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            return json.load(answer)["data"]["result"]

    try:
        until = time.monotonic() + SECONDS
        while True:
            with contextlib.suppress(OSError):
                if query("count_over_time(vllm:gsd_target_steps_total[1m]) > 2"):
                    break
            assert process.poll() is None and time.monotonic() < until, (folder / "log").read_text()[-3000:]
            time.sleep(0.3)
        yield query
    finally:
        process.terminate()
        process.wait()
