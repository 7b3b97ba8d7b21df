"""Two tensor-parallel ranks with Model Runner V2: the tokens of one, and as many accepted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import interpreter
import pytest
from engine_process import run
from patience import SECONDS
from v2_engine import OPTIONS, TRITON

pytestmark = pytest.mark.slow
E2E = Path(__file__).parents[1]
PROGRAM = E2E / "parallel_run.py"
GSD = {"num_speculative_tokens": 8, "max_depth": 3}


@pytest.fixture(scope="module")
def asked(random_prompts):
    """Six requests, greedy and seeded."""
    greedy = {"max_tokens": 10, "temperature": 0.0, "ignore_eos": True}
    params = [greedy if index % 2 else {**greedy, "temperature": 0.8, "seed": index} for index in range(6)]
    return random_prompts(6, 5, 20), params


@pytest.fixture(scope="module")
def run_ranks(tiny_pair, asked, tmp_path_factory):
    """Runs them on an engine of so many ranks."""
    prompts, params = asked
    config = {**GSD, "method": "gsd", "model": str(tiny_pair.draft)}

    def run(size: int) -> dict:
        folder = tmp_path_factory.mktemp("run")
        job = {
            "target": str(tiny_pair.target), "config": config, "prompts": prompts, "params": params,
            "engine": {
                **OPTIONS, "tensor_parallel_size": size, "distributed_executor_backend": "mp" if size > 1 else "uni",
            },
        }  # fmt: skip
        (folder / "job.json").write_text(json.dumps(job))
        path = [E2E / "v2/ranks", E2E / "v2", TRITON, os.environ.get("PYTHONPATH")]
        variables = {
            **os.environ,
            **interpreter.SETTINGS,
            "PYTHONPATH": os.pathsep.join(str(folder) for folder in path if folder),
            "VLLM_CPU_OMP_THREADS_BIND": "|".join([f"0-{os.cpu_count() - 1}"] * size),
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",  # there is no driver that it could compile for
        }
        command = [sys.executable, PROGRAM, folder / "job.json", folder / "result.json"]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads((folder / "result.json").read_text())

    return run


def test_ranks_agree(run_ranks, start_v2, asked):
    one, two = start_v2(GSD), run_ranks(2)
    assert two["tokens"] == run(one, *asked) == run(start_v2(None), *asked)
    assert two["accepted"] == one.metrics()["spec_decode_num_accepted_tokens"] > 0
