"""A short run of ``scripts/check_structured``: every grammar once greedily and once sampled."""

import json
import subprocess
from pathlib import Path

import pytest
from patience import SECONDS

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_structured"


@pytest.mark.slow
def test_every_answer_is_valid_and_the_graph_was_used(built_in_pair, preforked):
    # The budget is fixed because on a busy machine the planner may decide that no graph pays.
    command = [preforked, str(SCRIPT), "--requests", "50", "--gsd", json.dumps({"budget": 16})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["crashes"] == []
    assert [fault for group in report["groups"].values() for fault in group["faults"]] == []
    assert done.returncode == 0
    assert report["grammars"] >= 20
    assert report["valid"] == report["requests"] == 50
    assert report["fallbacks"] == {}
    for name, group in report["groups"].items():
        assert group["tokens_per_step"] > (1.3 if name.startswith("json") else 1.1), name
