"""CUDA graphs of the draft's forward, piecewise: attention runs between them, everything else is replayed."""

from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager, has_compiled_submodule

from vllm_gsd.engine.draft.model import DraftModel


class DraftGraphs(CudaGraphManager):
    """Graphs of the draft for the numbers of rows that the target's are captured for.

    Args:
        vllm_config, device: the engine's.
        model: the draft.
        layer_names: its attention layers.
        stats: where replays are counted, and forwards that no graph fits.
    """

    def __init__(self, vllm_config, device: torch.device, model: torch.nn.Module, layer_names: list[str], stats):
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
        """Whether an engine of this mode can replay parts of this draft: of none that reads hidden states yet."""
        breakable, model = is_breakable_cudagraph_enabled(), draft.model
        return (
            not draft.reads_features
            and cudagraph_mode.has_piecewise_cudagraphs()
            and (breakable or has_compiled_submodule(model))
        )

    @property
    def num_sizes(self) -> int:
        """Numbers of rows that are captured."""
        return len(self._capture_descs.get(CUDAGraphMode.PIECEWISE, []))

    def capture_all(self) -> None:
        """Capture every size (upstream's ``capture`` with the draft's forward)."""
        if self.use_breakable_cg:
            self.init_breakable_cg_runner(self.model)

        def create_forward_fn(desc: BatchExecutionDescriptor, warmup: bool):
            return lambda mode: self._forward(desc.num_tokens, mode, None)

        self.capture(create_forward_fn, "Capturing CUDA graphs of the draft")

    def size_for(self, num_rows: int) -> int | None:
        """Rows of the smallest graph that holds so many; None without one."""
        desc = self.dispatch(num_rows, num_rows, None, 0)
        hit = desc.cg_mode == CUDAGraphMode.PIECEWISE
        self.stats.counts["cudagraph_hits" if hit else "cudagraph_misses"] += 1
        return desc.num_tokens if hit else None

    def replay(self, size: int, input_ids, positions, slots, metadata: dict[str, Any]) -> torch.Tensor:
        """Run the draft over n rows, padded to ``size``.

        Args:
            input_ids: int32 [n]; positions, slots: int64 [n]; metadata: attention metadata by layer, of n rows.

        Returns:
            hidden states [n, hidden], the caller's own.
        """
        count = len(input_ids)
        self.input_ids[:count].copy_(input_ids)
        self.positions[:count].copy_(positions)
        self.slots[:count].copy_(slots)
        self.slots[count:size].fill_(PAD_SLOT_ID)
        # The graph's own memory is written again by the next replay.
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
