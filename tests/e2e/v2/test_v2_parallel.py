"""Two tensor-parallel ranks with Model Runner V2, in processes or on Ray nodes: the tokens of one, the same graphs."""

import json
import os
import subprocess
from pathlib import Path

import interpreter
import pytest
from engine_process import run
from patience import SECONDS
from ray_cluster import ray_cluster
from tiny_blocks import build_tiny_block
from v2_engine import OPTIONS, TRITON

E2E = Path(__file__).parents[1]
PROGRAM = E2E / "parallel_run.py"
# A number as budget leaves costs out; ranks that are to plan get planted ones, see ``parallel_run.watch_v2``.
GSD = {"method": "gsd", "num_speculative_tokens": 8, "max_depth": 3, "budget": 8}
# Kinds of drafts, by what their ranks run over. The long form has those of the variable over both: "eagle3", "lm",
# "dspark", "dflash2" or "dflash".
CHOSEN = os.environ.get("GSD_TEST_KINDS")
KINDS = {"mp": ["eagle3"], "ray": ["dspark"]} if CHOSEN is None else dict.fromkeys(("mp", "ray"), CHOSEN.split(","))
STEPS = int(os.environ.get("GSD_TEST_STEPS", 8))  # of which the ranks' graphs are compared; 500 take minutes
SECONDS_A_STEP = 5  # to wait at most
pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * SECONDS + 2 * SECONDS_A_STEP * STEPS)]


@pytest.fixture(scope="module")
def asked(random_prompts):
    """Four requests, greedy and seeded."""
    greedy = {"max_tokens": 10, "temperature": 0.0, "ignore_eos": True}
    params = [greedy if index % 2 else {**greedy, "temperature": 0.8, "seed": index} for index in range(4)]
    return random_prompts(4, 5, 20, seed=3), params


def variables() -> dict[str, str]:
    """The environment of ranks, which find the interpreter by their path."""
    path = [E2E / "v2/ranks", E2E / "v2", E2E.parent, TRITON, os.environ.get("PYTHONPATH")]
    return {
        **interpreter.SETTINGS,
        "PYTHONPATH": os.pathsep.join(str(folder) for folder in path if folder),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join([f"0-{os.cpu_count() - 1}"] * 2),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # there is no driver that it could compile for
    }


@pytest.fixture(scope="module")
def run_ranks(tiny_pair, asked, preforked_v2, tmp_path_factory):
    """Runs them on an engine of two ranks with this draft, which plan what to verify or verify everything."""
    prompts, params = asked

    def run(draft: Path, planned: bool, over: str = "mp", **environment: str) -> dict:
        folder = tmp_path_factory.mktemp("run")
        job = {
            "target": str(tiny_pair.target), "config": {**GSD, "model": str(draft)},
            "prompts": prompts, "params": params, "disturb": True, "planned": planned, "steps": STEPS,
            "engine": {**OPTIONS, "tensor_parallel_size": 2, "distributed_executor_backend": over},
        }  # fmt: skip
        (folder / "job.json").write_text(json.dumps(job))
        command = [preforked_v2, PROGRAM, folder / "job.json", folder / "result.json"]
        environment = {**os.environ, **variables(), **environment}
        timeout = SECONDS + SECONDS_A_STEP * STEPS
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, done.stderr[-4000:]
        result = json.loads((folder / "result.json").read_text())
        first, second = result["hashes"]
        assert first == second and len(first) >= STEPS
        assert len(set(first)) > 0.8 * len(first)
        return result

    return run


@pytest.fixture(scope="module")
def expected(start_v2, asked):
    """One rank, plain."""
    return run(start_v2(None), *asked)


@pytest.fixture(scope="module")
def drafts(tiny_pair, tiny_eagle3, tmp_path_factory):
    """Those that draft levels, a language model and an EAGLE-3 head, and those that draft blocks."""
    folder = tmp_path_factory.mktemp("draft")
    blocks = {
        kind: build_tiny_block(kind, tiny_pair.target, folder / kind, trimmed=kind == "dspark")
        for kind in {*KINDS["mp"], *KINDS["ray"]} - {"eagle3", "lm"}
    }
    return {"eagle3": tiny_eagle3 / "llama", "lm": tiny_pair.draft, **blocks}


def check(two: dict, expected: list[list[int]], kind: str) -> None:
    assert two["tokens"] == expected
    assert two["accepted"] > 0 or kind.startswith("dflash")  # blocks are random but for DSpark's bias


@pytest.mark.parametrize("kind", KINDS["mp"])
def test_ranks_agree(run_ranks, drafts, expected, kind):
    """The second rank has noise in its draft. It would draft other graphs than the first one's candidates give."""
    check(run_ranks(drafts[kind], planned=kind == "eagle3"), expected, kind)


@pytest.mark.parametrize("kind", KINDS["ray"])
def test_ranks_agree_over_ray(run_ranks, drafts, expected, kind):
    """The same with one rank on each of two nodes.

    The job names the environment of its workers. Were it the nodes' own, each of Ray's many processes would import
    Triton, and on a busy machine no node would start within the thirty seconds that Ray gives it.
    """
    with ray_cluster(nodes=2) as cluster:
        two = run_ranks(drafts[kind], kind == "eagle3", "ray", **cluster.environment(**variables()))
    check(two, expected, kind)
