"""Two tensor-parallel ranks, in processes or on Ray nodes: tokens equal one rank's, and graphs are equal on both."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from patience import SECONDS
from ray_cluster import ray_cluster
from tiny_blocks import build_tiny_block
from tiny_mtp import build_tiny_mtp

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
# All nodes are verified. The rows of the trimmed LM head are gathered from the ranks that hold them.
GRAPH = {"budget": 16, "draft_vocab_size": 480}
PROGRAM = Path(__file__).with_name("parallel_run.py")
# Numbers of steps in which the ranks' graphs are compared. A step of a draft that is sharded over Ray takes long.
STEPS = 1000
STEPS_OVER_RAY = 300


@pytest.fixture(scope="module")
def run(tiny_pair, preforked, random_prompts, tmp_path_factory):
    """Runs an engine on up to 100 mixed requests, eight at a time: greedy, seeded, penalised, short and long."""
    prompts = random_prompts(100)
    params = []
    for index in range(100):
        keys = {"max_tokens": 8 + 3 * (index % 9), "temperature": 0.0}
        if index % 2:
            keys |= {"temperature": 0.8, "seed": index, "top_p": 0.95}
        if index % 5 == 0:
            keys |= {"repetition_penalty": 1.2}
        params.append(keys)

    def run(config, size, *, target=None, environment=None, disturb=False, opt_out=False, steps=0, count=100, **engine):
        folder, target = tmp_path_factory.mktemp("run"), target or tiny_pair.target
        if config is not None:
            config = {"method": "gsd", "model": str(tiny_pair.draft), **config}
        job = {
            "target": str(target), "config": config, "prompts": prompts[:count], "params": params[:count],
            "disturb": disturb, "opt_out": opt_out, "steps": steps,
            "engine": {
                "tensor_parallel_size": size, "distributed_executor_backend": "mp" if size > 1 else "uni", **engine,
            },
        }  # fmt: skip
        (folder / "job.json").write_text(json.dumps(job))
        command = [preforked, str(PROGRAM), str(folder / "job.json"), str(folder / "result.json")]
        # vLLM requires a list of cores for each rank. All ranks share all cores.
        cores = f"0-{os.cpu_count() - 1}"
        threads = {"VLLM_CPU_OMP_THREADS_BIND": "|".join([cores] * size), "OMP_NUM_THREADS": "1"}
        variables = {**os.environ, **threads, **(environment or {})}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads((folder / "result.json").read_text())

    return run


@pytest.fixture(scope="module")
def expected(run):
    """Tokens of plain vLLM with one rank."""
    return run(None, 1)["tokens"]


@pytest.fixture(scope="module")
def one_rank(run):
    """The result of gsd with one rank."""
    return run(GRAPH, 1)


def test_a_draft_that_reads_hidden_states(run, expected, tiny_eagle):
    """The draft shares the target's embedding and LM head, which are sharded over the ranks."""
    config = {**GRAPH, "model": str(tiny_eagle), "sources": ["draft"]}
    one, two = run(config, 1, count=24), run(config, 2, count=24)
    assert one["tokens"] == two["tokens"] == expected[:24]
    assert one["accepted"] == two["accepted"] > 0
    first, second = two["hashes"]
    assert first == second


def test_an_eagle3_head(run, expected, tiny_eagle3):
    """The head's own LM head is sharded over the ranks, and each rank combines the hidden states."""
    two = run({"budget": 16, "model": str(tiny_eagle3 / "llama"), "sources": ["draft"]}, 2, count=24)
    assert two["tokens"] == expected[:24]
    assert two["accepted"] > 0
    first, second = two["hashes"]
    assert first == second


def test_an_mtp_module(run, random_prompts, tmp_path):
    """The module's layer, with experts, is sharded over the ranks, as are the embedding and LM head that it shares."""
    target = build_tiny_mtp(tmp_path / "target", "GLM", random_prompts(2))
    config = {"budget": 16, "model": str(target), "sources": ["draft"]}
    one, two = run(None, 1, target=target, count=12), run(config, 2, target=target, count=12)
    assert one["tokens"] == two["tokens"]
    assert two["accepted"] > 0
    first, second = two["hashes"]
    assert first == second


@pytest.mark.parametrize("kind", ["dspark", "dflash2", "dflash"])
def test_a_draft_of_whole_blocks(run, expected, tiny_pair, kind, tmp_path):
    """The draft's own LM head and the keys and values of its context are sharded over the ranks."""
    draft = build_tiny_block(kind, tiny_pair.target, tmp_path / "draft", trimmed=kind == "dspark")
    two = run({"budget": 16, "model": str(draft), "sources": ["draft"]}, 2, count=24)
    assert two["tokens"] == expected[:24]
    assert two["accepted"] > 0 or kind == "dflash"  # its predictions are random
    first, second = two["hashes"]
    assert first == second


def test_same_tokens_and_graphs(run, expected, one_rank):
    """Each rank has a whole draft; over Ray (``test_ray_nodes``) the draft is sharded too."""
    two = run({**GRAPH, "draft_tensor_parallel_size": 1}, 2)
    assert one_rank["tokens"] == two["tokens"] == expected
    assert one_rank["accepted"] == two["accepted"] > 0.3 * sum(map(len, expected))
    first, second = two["hashes"]
    assert first == second
    assert len(set(first)) > 0.9 * len(first)


def test_ranks_that_would_disagree(run, expected):
    """Ranks agree in spite of ties, and of other noise, thread counts and timing on the second rank."""
    result = run({"draft_tensor_parallel_size": 1}, 2, disturb=True, steps=STEPS)
    assert result["tokens"] == expected
    first, second = result["hashes"]
    assert first == second
    assert len(first) >= STEPS
    assert result["accepted"] > 0


def test_ray_nodes(run, expected, one_rank):
    """One rank runs on each of two nodes: first without graphs, then with them, then for many steps."""
    with ray_cluster(nodes=2) as cluster:
        over_ray = {"environment": cluster.environment(), "distributed_executor_backend": "ray"}
        two = run(GRAPH, 2, opt_out=True, steps=STEPS_OVER_RAY, **over_ray)
    assert two["plain_tokens"] == two["tokens"] == expected
    assert two["accepted"] == one_rank["accepted"]
    first, second = two["hashes"]
    assert first == second
    assert len(first) >= STEPS_OVER_RAY
    assert len(set(first)) > 0.9 * len(first)
