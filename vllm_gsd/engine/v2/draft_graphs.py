"""CUDA graphs of the whole draft phase, one for each of a few numbers of requests and of levels."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from vllm_gsd.engine.observe.stats import GraphStats
from vllm_gsd.engine.v2.device_drafting import DeviceDrafting


def sizes(most: int) -> list[int]:
    """Numbers of requests to capture for: 1, 2, 3, 4, 6, 8, 12... and ``most``, so that at most a third is padding."""
    powers = [2**exponent for exponent in range(most.bit_length())]
    return sorted({size for power in powers for size in (power, 3 * power) if size < most} | {most})


class DraftGraphs(CudaGraphManager):
    """CUDA graphs of ``DeviceDrafting.draft``; ``stats`` counts the draft phases with one and without."""

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, drafting: DeviceDrafting, stats: GraphStats
    ) -> None:
        super().__init__(vllm_config, device, CUDAGraphMode.FULL, decode_query_len=1)
        self.drafting = drafting
        self.stats = stats
        self.variants = {  # by requests and levels
            (size, levels): BatchExecutionDescriptor(
                CUDAGraphMode.FULL, num_tokens=size, num_reqs=size, uniform_token_count=levels
            )
            for size in sizes(drafting.most)
            for levels in drafting.variants
        }
        self._capture_descs = {CUDAGraphMode.FULL: list(reversed(self.variants.values()))}  # the largest first

    def capture_all(self) -> None:
        """Capture every variant of the draft phase."""

        def create_forward_fn(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], Any]:
            assert desc.uniform_token_count is not None
            return partial(self._draft, desc.num_tokens, desc.uniform_token_count)

        # Padding alone is drafted for, so that no request's draft KV changes.
        self.drafting.known.fill_(-1)
        self.capture(create_forward_fn, "Capturing CUDA graphs of the draft phase")

    def _draft(self, size: int, levels: int, mode: CUDAGraphMode) -> None:
        self.drafting.draft(size, levels)

    def size_for(self, count: int, levels: int) -> int | None:
        """The smallest captured number of requests, at least ``count``, that drafts ``levels`` levels, or None."""
        captured = [size for (size, depth), desc in self.variants.items() if depth == levels and desc in self.graphs]
        size = min((size for size in captured if size >= count), default=None)
        self.stats.counts["cudagraph_misses" if size is None else "cudagraph_hits"] += 1
        return size

    def replay(self, size: int, levels: int) -> None:
        """Draft for ``size`` requests, a result of ``size_for``."""
        self.run_fullgraph(self.variants[size, levels])
