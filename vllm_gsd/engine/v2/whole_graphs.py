"""A dummy batch in which every request verifies a full graph: the largest batch that the sampler can get."""

from dataclasses import replace

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers


def whole_graphs(buffers: InputBuffers, max_requests: int, max_tokens: int, rows: int) -> InputBatch:
    """Make a dummy batch of as many requests with full graphs of ``rows`` rows as a step can have."""
    count = max(1, min(max_requests, max_tokens // rows))
    batch = InputBatch.make_dummy(count, count * rows, buffers)
    device = batch.idx_mapping.device
    starts = np.arange(count + 1, dtype=np.int32) * rows
    return replace(
        batch,
        num_draft_tokens=count * (rows - 1),
        num_draft_tokens_per_req=np.full(count, rows - 1, np.int32),
        logits_indices=torch.arange(count * rows, device=device),
        cu_num_logits=torch.from_numpy(starts).to(device),
        cu_num_logits_np=starts,
        expanded_idx_mapping=batch.idx_mapping.repeat_interleave(rows),
        expanded_local_pos=torch.arange(rows, dtype=torch.int32, device=device).repeat(count),
    )
