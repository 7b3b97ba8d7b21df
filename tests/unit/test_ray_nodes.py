"""The message for Ray nodes without this plugin, and the threads of a rank."""

from importlib.metadata import version
from types import SimpleNamespace
from unittest import mock

import pytest

from vllm_gsd.config import GSDConfigError
from vllm_gsd.engine.parallel import ray_executor, ray_nodes

OURS = version("vllm-gsd")


@pytest.fixture
def nodes(monkeypatch):
    """Two nodes. A test appends their answers: (version, problem)."""
    answers: list[tuple[str, str]] = []
    ray = mock.MagicMock()
    ray.nodes.return_value = [{"NodeID": name, "NodeManagerAddress": f"10.0.0.{name}"} for name in "12"]
    ray.get.return_value = answers
    monkeypatch.setattr(ray_nodes, "ray", ray)
    monkeypatch.setattr(ray_nodes, "placement_group_table", lambda group: {"bundles_to_node_id": {0: "1", 1: "2"}})
    monkeypatch.setattr(ray_nodes, "NodeAffinitySchedulingStrategy", mock.Mock())
    return answers


def test_all_have_it(nodes):
    nodes += [(OURS, ""), (OURS, "")]
    ray_nodes.check_nodes(None)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (("", "ImportError: no"), f"10.0.0.2 cannot import vllm-gsd (ImportError: no); install vllm-gsd {OURS}"),
        (("0.0.1", ""), f"10.0.0.2 has vllm-gsd 0.0.1; install vllm-gsd {OURS}"),
    ],
)
def test_one_has_not(nodes, answer, message):
    nodes += [(OURS, ""), answer]
    with pytest.raises(GSDConfigError) as refused:
        ray_nodes.check_nodes(None)
    assert message in str(refused.value)


@pytest.mark.parametrize(("given", "threads"), [(None, 4), ("", 4), ("3", 3), ("3,2", 3)])
def test_threads_of_a_rank(monkeypatch, given, threads):
    """Two ranks share a node of eight cores."""
    chosen, cpus = [], [SimpleNamespace(numa_node=0, physical_core=core) for core in range(8)]
    monkeypatch.setattr(ray_executor, "get_allowed_cpu_list", lambda: cpus)
    monkeypatch.setattr(ray_executor.torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(ray_executor, "ray", mock.MagicMock())
    monkeypatch.setattr(ray_executor, "ray_ranks", mock.Mock())
    monkeypatch.setattr(ray_executor.ray_executor_v2.RayWorkerProc, "initialize_worker", lambda *_: None)
    environment = {} if given is None else {"OMP_NUM_THREADS": given}
    rank = ray_executor.CPURayWorkerProc.__new__(ray_executor.CPURayWorkerProc)
    rank.initialize_worker(0, {}, "", environment, assigned_physical_gpu_ids=[0, 1])
    assert chosen == [threads]
