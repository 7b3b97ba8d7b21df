"""The parts of the scripts for GPU machines that run without a GPU."""

import importlib.machinery
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def script(name, *arguments, **environment):
    return subprocess.run(
        [sys.executable, REPOSITORY / "scripts" / name, *arguments],
        capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
    )  # fmt: skip


def test_gpu_check_says_what_is_missing():
    done = script("gpu_check")
    assert done.returncode == 2
    sentence = done.stderr.strip()
    assert sentence.startswith("gpu_check: ") and sentence.endswith(".") and "\n" not in sentence
    assert "no GPU was found" in sentence
    assert not done.stdout


@pytest.fixture(scope="module")
def plan():
    done = script("gpu_e2e", "--dry-run", "--target", "TARGET", "--draft", "DRAFT", "--batches", "1", "8")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_gpu_e2e_plans_every_combination(plan):
    names = [run["name"] for run in plan["runs"]]
    assert len(set(names)) == len(names) == 4 * 2 * 2 * 6 + 4
    for part in (
        "7b",
        "8b",
        "13b",
        "70b",
        "eager",
        "CUDA graphs",
        "plain",
        "draft_model K=4",
        "gsd 64 nodes",
        "lossless",
    ):
        assert any(part in name for name in names)
    for run in plan["runs"]:
        speculative = run["speculative"] or {"model": "DRAFT"}
        assert run["target"] in plan["models"] or run["target"] == "TARGET"
        assert speculative["model"] in plan["models"] or speculative["model"] == "DRAFT"


def test_gpu_e2e_configs_are_valid(plan):
    from vllm_gsd.config import GSDConfig

    configs = [run["speculative"] for run in plan["runs"] if (run["speculative"] or {}).get("method") == "gsd"]
    assert configs
    for config in configs:
        assert GSDConfig.load(config).budget == config["budget"]


def test_gpu_e2e_shapes_are_what_they_are_called(plan):
    billions = {name: count / 1e9 for name, count in plan["parameters"].items()}
    assert 6.5 < billions["target-7b"] < 7 and 12.5 < billions["target-13b"] < 13.5
    assert billions["target-70b"] * 2 < 72 * 1.08 and plan["models"]["target-70b"]["num_hidden_layers"] < 80
    whole = script("gpu_e2e", "--dry-run", "--shapes", "70b", "--memory-gib", "200")
    assert 68e9 < json.loads(whole.stdout)["parameters"]["target-70b"] < 70e9


def test_gpu_e2e_says_what_is_missing():
    done = script("gpu_e2e")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("gpu_e2e: ") and done.stderr.count("\n") == 1 and "no GPU was found" in done.stderr
    assert script("gpu_e2e", "--target", "TARGET").returncode == 2


def test_gpu_all_runs_every_part():
    """The plans of its parts are valid, and the page names what was not measured."""
    commands = json.loads(script("gpu_all", "--dry-run").stdout)
    titles = "Kernels", "Losslessness of the built-in pair", "Steps in the shapes of 8B", "Speed of the built-in pair"
    assert tuple(commands) == titles
    for command in list(commands.values())[1:3]:
        names = [run["name"] for run in json.loads(script("gpu_e2e", "--dry-run", *command[2:]).stdout)["runs"]]
        assert names
    assert {name.split(", ")[1] for name in names} == {"batch 1", "batch 8", "batch 32"}
    assert {name.split(", ")[3] for name in names} == {"plain", "eagle K=4", "gsd 16 nodes"}
    loader = importlib.machinery.SourceFileLoader("gpu_all", str(REPOSITORY / "scripts/gpu_all"))
    gpu_all = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_all", loader))
    loader.exec_module(gpu_all)
    results = {title: gpu_all.run([sys.executable, "-c", "print(7)"], limit) for title, limit in (("A", 60), ("B", 0))}
    page = gpu_all.page("a GPU", results)
    assert "a: right; b: not yet measured" in page
    assert re.search(r"## A\n\nright, \d+ s\.\n\n```\n7\n```", page)
    assert gpu_all.run([sys.executable, "-c", "while 1: pass"], 0.5)[0] == "not finished in time"


def test_launches_and_gaps(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from gpu_e2e_engine import launches_and_gaps

    calls = ["cudaGraphLaunch", "cudaLaunchKernel", "cuLaunchKernelEx", "aten::add", "cudaMemcpyAsync"]
    counts = launches_and_gaps(calls, [(0, 4), (2, 5), (10, 20)], 2)
    assert counts == {"launches": 1.5, "replays": 0.5, "idle": 0.25}


@pytest.mark.parametrize("name", ["gpu_check", "gpu_e2e", "gpu_all"])
def test_help(name):
    done = script(name, "--help")
    assert done.returncode == 0 and "Exit code 0" in done.stdout


def test_gpu_e2e_compares(plan, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    from gpu_e2e_plan import compare, print_tables

    entry = {"kind": "time"}
    runs = [{**entry, "name": f"7b, {method}", "method": method} for method in ("plain", "gsd 8 nodes", "gsd 16 nodes")]
    runs += [{"kind": "lossless", "name": f"lossless, {method}", "method": method} for method in ("plain", "gsd")]
    results = {
        "7b, plain": [{"milliseconds_per_step": 10.0}, {"milliseconds_per_step": 20.0}],
        "7b, gsd 8 nodes": [
            {"milliseconds_per_step": 12.0, "draft_ms": 2.0},
            {"milliseconds_per_step": 22.0, "draft_ms": 4},
        ],
        "7b, gsd 16 nodes": [{"error": "out of memory"}],
        "lossless, plain": [{"tokens": [[1, 2], [3]], "milliseconds_per_step": 1.0}],
        "lossless, gsd": [{"tokens": [[1, 2], [4]], "milliseconds_per_step": 1.0}],
    }
    report = {"results": results, **compare({"runs": runs}, results)}
    assert report["medians"]["7b, gsd 8 nodes"] == pytest.approx(
        {"milliseconds_per_step": 17.0, "draft_ms": 3.0, "of_plain": 1.15}
    )
    assert report["failed"] == ["7b, gsd 16 nodes"]
    assert report["different"] == ["lossless, gsd: 1 of 2 texts differ from plain vLLM's"]
    print_tables(report)
    assert "FAILED 7b, gsd 16 nodes: out of memory" in capsys.readouterr().out
