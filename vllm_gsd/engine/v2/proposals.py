"""Proposed graphs on the device, by request slot."""

from collections.abc import Mapping

import numpy as np
import torch

from vllm_gsd.engine.verify.draft_tree import FlatTree
from vllm_gsd.engine.verify.staging import send
from vllm_gsd.method.constants import NONE
from vllm_gsd.ops.flatten.api import DeviceTrees


class Proposals:
    """The latest proposed graph, of at most ``num_nodes`` nodes, for each of V2's request slots."""

    def __init__(self, num_slots: int, num_nodes: int, device: torch.device) -> None:
        self.trees = empty_trees(num_slots, num_nodes, device)
        # Whether the graph in a slot was proposed for the request that has the slot now; kept on the host.
        self.fresh = np.zeros(num_slots, np.bool_)

    def store(self, slots: torch.Tensor, trees: DeviceTrees) -> None:
        """Store the graphs of the requests in ``slots``, int64 [num_requests] on the device."""
        for kept, new in zip(self.trees, trees, strict=True):
            kept[slots] = new

    def drop(self, slots: np.ndarray | int) -> None:
        """Discard the proposals for these slots."""
        self.fresh[slots] = False


def empty_trees(count: int, num_nodes: int, device: torch.device) -> DeviceTrees:
    """``count`` graphs without nodes, with room for ``num_nodes`` nodes each."""
    shape = (count, 1 + num_nodes)
    whole = torch.zeros(shape, dtype=torch.int64, device=device)
    real = torch.zeros(shape, device=device)
    return DeviceTrees(
        token=whole,
        parent=torch.full_like(whole, NONE),
        depth=whole.clone(),
        origin=whole.clone(),
        via_merge=torch.zeros(shape, dtype=torch.bool, device=device),
        survival=real,
        value=real.clone(),
        size=torch.zeros(count, dtype=torch.int64, device=device),
    )


def to_device(trees: list[FlatTree], values: list[np.ndarray], num_nodes: int, device: torch.device) -> DeviceTrees:
    """Copy graphs that were grown on the host to the device, padded to ``num_nodes`` nodes.

    ``values`` has the calibrated probabilities of their places, float32.
    """
    shape = len(trees), 1 + num_nodes
    whole = np.zeros((5, *shape), np.int64)  # token, parent, depth, origin, via_merge
    real = np.zeros((2, *shape), np.float32)  # survival, value
    whole[1] = NONE
    for row, (tree, value) in enumerate(zip(trees, values, strict=True)):
        places = len(tree.token)
        whole[:, row, :places] = tree.token, tree.parent, tree.depth, tree.origin, tree.via_merge
        real[:, row, :places] = tree.survival, value
    sizes = np.array([tree.num_nodes for tree in trees], np.int64)
    token, parent, depth, origin, via_merge, size = send(device, *whole, sizes)
    survival, value = send(device, *real)
    return DeviceTrees(token, parent, depth, origin, via_merge.bool(), survival, value, size)


def to_host(trees: Mapping[str, np.ndarray]) -> list[FlatTree | None]:
    """Convert the fields of ``DeviceTrees``, by name, to host graphs; None for graphs without nodes."""
    fields = (
        trees["token"], trees["parent"].astype(np.int32), trees["depth"].astype(np.int32),
        trees["origin"].astype(np.int8), trees["via_merge"], trees["survival"],
    )  # fmt: skip
    sizes = enumerate(trees["size"].tolist())
    return [FlatTree(*(field[row, : 1 + count] for field in fields)) if count else None for row, count in sizes]
