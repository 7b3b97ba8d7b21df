"""The message for Ray nodes without this plugin."""

from importlib.metadata import version
from unittest import mock

import pytest

from vllm_gsd.config import GSDConfigError
from vllm_gsd.engine.parallel import ray_nodes

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
