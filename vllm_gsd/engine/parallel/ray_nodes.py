"""Checks the nodes of a Ray cluster before ranks start on them."""

from importlib.metadata import version

import ray
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vllm_gsd.config import GSDConfigError


def check_nodes(placement_group: PlacementGroup) -> None:
    """Check that every node of the placement group has this version of the plugin.

    Raises:
        GSDConfigError: names the first node that does not.
    """

    # Ray pickles a nested function by value. It would pickle a module-level function by name, which needs the plugin.
    def versions() -> tuple[str, str]:
        import importlib.metadata

        try:
            import vllm_gsd  # noqa: F401
        except ImportError as error:
            return "", f"{type(error).__name__}: {error}"
        return importlib.metadata.version("vllm-gsd"), ""

    nodes = sorted(set(placement_group_table(placement_group)["bundles_to_node_id"].values()))
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    asked = [
        ray.remote(versions)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote()
        for node in nodes
    ]
    ours = version("vllm-gsd")
    for node, (theirs, problem) in zip(nodes, ray.get(asked), strict=True):
        if theirs != ours:
            has = f"has vllm-gsd {theirs}" if theirs else f"cannot import vllm-gsd ({problem})"
            raise GSDConfigError(
                f"The Ray node {addresses[node]} {has}; install vllm-gsd {ours}, which the engine has, on all nodes."
            )
