"""Flattening on the device; the results equal those of ``method.flatten``, without a heap."""

from typing import NamedTuple

import torch

from vllm_gsd.method.constants import NUM_BINS, NUM_DEPTHS, NUM_SOURCES
from vllm_gsd.ops.dispatch import check_tensor, require_triton, warps_for
from vllm_gsd.ops.growth.state import DeviceGraphs

_MOST_ROWS = 4096


class DeviceTrees(NamedTuple):
    """Flattened graphs of a batch, as ``method.flatten.FlatTrees``: place 0 is the root.

    Shapes: ``[num_graphs, num_places]`` unless stated otherwise. Places beyond ``size`` hold zeros, and NONE as parent.
    """

    token: torch.Tensor  # int64
    parent: torch.Tensor  # int64, place of the parent, NONE for the root
    depth: torch.Tensor  # int64, root is 0
    origin: torch.Tensor  # int64, ORIGIN_*
    via_merge: torch.Tensor  # bool, whether the path uses a merged edge
    survival: torch.Tensor  # float32, product of conditional probabilities along the path
    value: torch.Tensor  # float32, calibrated survival, never above the parent's
    size: torch.Tensor  # int64 [num_graphs], nodes without the root

    def num_places(self) -> int:
        """The places of a graph; raises ValueError if they are too many for kernels with a program for each graph."""
        places = self.token.shape[1]
        if places > _MOST_ROWS:
            raise ValueError(f"a tree may have {places} rows, but at most {_MOST_ROWS} are possible")
        return places


def flatten_graphs(graphs: DeviceGraphs, trees: DeviceTrees, factor: torch.Tensor, trust: torch.Tensor) -> None:
    """Unroll every graph of the batch, best first.

    Args:
        graphs: as ``begin``, ``grow_level`` and ``graft_ngrams`` left them.
        trees: output, a row for each of vLLM's request slots; graphs of padding are written nowhere.
        factor: the factors of ``planner.calibration.Calibration``, float32 ``[sources, NUM_DEPTHS, NUM_BINS]``.
        trust: the result of ``SourceTrust.of``, float32 ``[num_graphs, sources]``.
    """
    from vllm_gsd.ops.flatten.triton import flatten_kernel, triton

    device, count, num_places = graphs.state.device, len(graphs.state), trees.token.shape[1]
    check_tensor("factor", factor, device, 3, torch.float32)
    check_tensor("trust", trust, device, 2, torch.float32, rows=count)
    if factor.shape != (NUM_SOURCES, NUM_DEPTHS, NUM_BINS) or trust.shape[1] != NUM_SOURCES:
        raise ValueError(f"factor and trust must be of {NUM_SOURCES} sources, not {factor.shape} and {trust.shape}")
    require_triton("flatten_graphs", trust)
    flatten_kernel[(count,)](
        *trees, graphs.nodes, graphs.chances, graphs.state, factor, trust, num_places, graphs.capacity,
        PLACES=triton.next_power_of_2(num_places), BLOCK=(block := triton.next_power_of_2(graphs.capacity)),
        num_warps=warps_for(block),
    )  # fmt: skip
