"""Piecewise CUDA graphs of the draft's forward pass: attention runs eagerly between the captured pieces."""

from collections.abc import Callable
from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager, has_compiled_submodule

from vllm_gsd.engine.draft.model import DraftModel
from vllm_gsd.engine.observe.stats import GraphStats


class DraftGraphs(CudaGraphManager):
    """CUDA graphs of the draft, for the same numbers of rows as the target's.

    Args:
        vllm_config: the engine's configuration.
        device: the engine's device.
        model: the draft model.
        layer_names: the names of the draft's attention layers.
        stats: counts the forward passes with and without a CUDA graph.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
        layer_names: list[str],
        stats: GraphStats,
    ) -> None:
        super().__init__(vllm_config, device, CUDAGraphMode.PIECEWISE, decode_query_len=1)
        self.model = model
        self.layer_names = layer_names
        self.stats = stats
        size = self.compilation_config.max_cudagraph_capture_size or 0
        self.input_ids = torch.zeros(size, dtype=torch.int32, device=device)
        self.positions = torch.zeros(size, dtype=torch.int64, device=device)
        self.slots = torch.full((size,), PAD_SLOT_ID, dtype=torch.int64, device=device)

    @staticmethod
    def possible(cudagraph_mode: CUDAGraphMode, draft: DraftModel) -> bool:
        """Whether an engine with this mode can replay this draft; drafts that read hidden states are unsupported."""
        breakable, model = is_breakable_cudagraph_enabled(), draft.model
        return (
            not draft.reads_features
            and cudagraph_mode.has_piecewise_cudagraphs()
            and (breakable or has_compiled_submodule(model))
        )

    @property
    def num_sizes(self) -> int:
        """How many sizes are captured."""
        return len(self._capture_descs.get(CUDAGraphMode.PIECEWISE, []))

    def capture_all(self) -> None:
        """Capture the draft's forward pass at every size."""
        if self.use_breakable_cg:
            self.init_breakable_cg_runner(self.model)

        def create_forward_fn(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], Any]:
            return lambda mode: self._forward(desc.num_tokens, mode, None)

        self.capture(create_forward_fn, "Capturing CUDA graphs of the draft")

    def size_for(self, num_rows: int) -> int | None:
        """The number of rows of the smallest graph with at least ``num_rows`` rows, or None."""
        desc = self.dispatch(num_rows, num_rows, None, 0)
        hit = desc.cg_mode == CUDAGraphMode.PIECEWISE
        self.stats.counts["cudagraph_hits" if hit else "cudagraph_misses"] += 1
        return desc.num_tokens if hit else None

    def replay(
        self,
        size: int,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        metadata: dict[str, Any],
    ) -> torch.Tensor:
        """Run the draft on n rows, padded to ``size``.

        Args:
            size: as returned by ``size_for``.
            input_ids: int32 [n].
            positions: int64 [n].
            slots: int64 [n], the KV slots of the rows.
            metadata: the attention metadata of the n rows, by layer.

        Returns:
            A copy of the hidden states, [n, hidden].
        """
        count = len(input_ids)
        self.input_ids[:count].copy_(input_ids)
        self.positions[:count].copy_(positions)
        self.slots[:count].copy_(slots)
        self.slots[count:size].fill_(PAD_SLOT_ID)
        # The next replay overwrites the memory of the graph.
        return self._forward(size, CUDAGraphMode.PIECEWISE, metadata)[:count].clone()

    def _forward(self, size: int, mode: CUDAGraphMode, metadata: dict[str, Any] | None) -> torch.Tensor:
        inputs = {"input_ids": self.input_ids[:size], "positions": self.positions[:size], "inputs_embeds": None}
        piecewise = mode == CUDAGraphMode.PIECEWISE
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=size,
            cudagraph_runtime_mode=mode,
            batch_descriptor=BatchDescriptor(num_tokens=size) if piecewise else None,
            slot_mapping=dict.fromkeys(self.layer_names, self.slots[:size]),
        ):
            return self.run_pw_graph(self.model, inputs) if piecewise else self.model(**inputs)
