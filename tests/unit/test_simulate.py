"""``scripts/simulate_step``: its roofline model fits measured tables, and its results are plausible."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from made_up_trace import lines, records

from vllm_gsd.tools.models import built_in_pair
from vllm_gsd.tools.plan.acceptance import Acceptance
from vllm_gsd.tools.plan.shapes import read_shapes

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from step_model import Gpu, recorded_acceptance, reduced, simulate

REPOSITORY = Path(__file__).parents[2]
TABLE = re.compile(r"^\*\*(.+?)\*\* .*?\n\n\| rows \| (.+?) \|\n.*?\n\| linear \| (.+?) \|$", re.M)
CPUS = {cpu: (rows, times) for cpu, rows, times in TABLE.findall((REPOSITORY / "docs/cpu-kernels.md").read_text())}


def numbers(cells: str) -> np.ndarray:
    return np.array([float(cell) for cell in cells.split("|")])


def test_the_docs_have_the_tables_of_four_cpus():
    assert len(CPUS) == 4


@pytest.mark.parametrize("cpu", CPUS)
def test_forwards_are_those_measured_on_cpus(cpu):
    """A machine's bandwidth and arithmetic rate explain its whole table within 15%."""
    rows, measured = map(numbers, CPUS[cpu])
    shapes = read_shapes(built_in_pair().target)
    at = 2 * shapes.parameters
    reads = at / measured[0] * np.linspace(0.8, 1.1, 31)
    computes = at * rows[-1] / measured[-1] * np.linspace(0.8, 1.2, 41)
    worst = min(
        np.abs(np.array([sum(Gpu(read, compute).forward(shapes, each).values()) for each in rows]) / measured - 1).max()
        for read in reads for compute in computes
    )  # fmt: skip
    assert worst < 0.15
    assert len(rows) == 11


@pytest.fixture(scope="module")
def simulated():
    rows = simulate(["h100", "b200"], ["8b", "70b"], [1, 8, 32, 128], recorded_acceptance())["rows"]
    return {(row["gpu"], row["model"], row["method"], row["batch"]): row for row in rows}


def test_a_plain_step_takes_what_was_estimated(simulated):
    """A plain 8B step on an H100 takes about 7 ms and is bound by reading the weights."""
    plain = simulated["h100", "8b", "plain", 1]
    assert 6.5 <= plain["step_ms"] <= 7.2 and plain["binds"] == "weights" and plain["tokens_a_step"] == 1


def test_graphs_are_worth_most_for_few_requests(simulated):
    for gpu, model in (("h100", "8b"), ("b200", "70b")):
        gsd, plain = ([simulated[gpu, model, method, n]["tokens_per_second"] for n in (1, 8, 32, 128)]
                      for method in ("gsd", "plain"))  # fmt: skip
        gains = [ours / theirs for ours, theirs in zip(gsd, plain, strict=True)]
        assert gains[0] > 1.2 and min(gains) >= 1 - 1e-9
        assert gains[-1] < gains[0]
        assert gsd[0] >= simulated[gpu, model, "eagle", 1]["tokens_per_second"]


def test_the_command(tmp_path):
    """The command reads acceptance from a trace. Every row names its bottleneck, and its parts add up."""
    (tmp_path / "trace.jsonl").write_text(lines(records(40)))
    command = [sys.executable, REPOSITORY / "scripts/simulate_step", "--trace", tmp_path / "trace.jsonl"]
    done = subprocess.run([*command, "--gpus", "h200", "--models", "8b", "--batches", "1", "4", "--out", tmp_path],
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "compared with a GPU" in done.stdout and (tmp_path / "simulate.png").stat().st_size > 1000
    rows = json.loads((tmp_path / "simulate.json").read_text())["rows"]
    assert len(rows) == 3 * 2
    for row in rows:
        assert sum(row["parts_ms"].values()) == pytest.approx(row["step_ms"]) and row["binds"] in row["parts_ms"]
        took = row["batch"] * row["tokens_a_step"] / row["step_ms"]
        assert row["tokens_per_second"] == pytest.approx(1e3 * took)
    done = subprocess.run([*command[:2], "--reduce", tmp_path / "x"], capture_output=True, text=True)
    assert done.returncode == 2 and "needs --trace" in done.stderr and "Traceback" not in done.stderr
    assert isinstance(recorded_acceptance(tmp_path / "trace.jsonl"), Acceptance)
    assert reduced(tmp_path / "trace.jsonl")["top_k"] >= 1
