"""Sampling along the graph without asking the device: the accepted path of every request, level by level.

At each depth the rows where the walks stand, one per request, go through vLLM's own sampler with the path so far
counted as output, so that every parameter means what it means in plain decoding. V2 draws its noise by seed and
position, and rows have positions by depth: what is sampled is what plain decoding samples, seeded or not.

Shapes depend on how many rows were scheduled, never on what the device proposed or accepts: nothing waits for it.
"""

from typing import NamedTuple

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_gsd.runtime.draft_tree import FOREIGN
from vllm_gsd.runtime.v2.device_step import DeviceStep


class Paths(NamedTuple):
    """Where the walks of a step went, on the device."""

    place: (
        torch.Tensor
    )  # int64 [num_requests, levels], of the node at each depth; the depth itself once a walk has ended
    accepted: torch.Tensor  # int64 [num_requests], nodes


class GraphSampler:
    """In the place of upstream's ``RejectionSampler``.

    Args:
        sampler: upstream's, whose request states are used.
    """

    def __init__(self, sampler: Sampler):
        self.sampler = sampler
        self.step: DeviceStep | None = None  # to be verified next
        self.paths: Paths | None = None  # of the step verified last

    def __call__(self, logits, input_batch: InputBatch, draft_logits=None, invalid_drafts=None) -> SamplerOutput:
        """Sample every request's accepted path and bonus token.

        Args:
            logits: [num_rows, vocab], grammar masks applied.
            draft_logits: upstream's; nodes are chosen, not sampled, so there are none.
            invalid_drafts: bool [num_rows], rows that no grammar has judged; None for none.
        """
        assert self.step is not None
        sampler, step = self.sampler, self.step
        token, parent = step.token, step.parent
        if invalid_drafts is not None:
            parent = parent.masked_fill(invalid_drafts[step.lines()], FOREIGN)
        num_requests, levels = input_batch.num_reqs, 1 + step.deepest
        first = input_batch.cu_num_logits[:num_requests].long()
        place = torch.zeros_like(first)
        active = torch.ones_like(first, dtype=torch.bool)
        history = _History(sampler, input_batch)
        tokens = place.new_zeros((num_requests, levels))
        places = torch.arange(levels, device=first.device).repeat(num_requests, 1)
        accepted = torch.zeros_like(first)
        scores: list[LogprobsTensors] = []
        for level in range(levels):
            sampled, score = self._sample(logits[first + place], input_batch, first + place)
            tokens[:, level] = sampled
            scores += [] if score is None else [score]
            if level + 1 == levels:
                break
            child = (parent == place[:, None]) & (token == sampled[:, None])
            active = active & child.any(dim=1)
            place = torch.where(active, child.int().argmax(dim=1), place)
            places[:, level + 1] = torch.where(active, place, places[:, level + 1])
            accepted += active
            history.append(sampled, active)
        history.restore()
        self.paths = Paths(places, accepted)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            (accepted + 1).to(torch.int32),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            sampler.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=_stack(scores, num_requests),
            num_nans=get_num_nans(logits) if sampler.compute_nans else None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _sample(self, logits, input_batch: InputBatch, lines) -> tuple[torch.Tensor, LogprobsTensors | None]:
        """Sample one row of each request, as if it were the only one."""
        sampler, slots = self.sampler, input_batch.idx_mapping
        rows = input_batch.logits_indices[lines]
        dims = sampler.get_logprobs_dims(input_batch.idx_mapping_np)
        sampled, processed = sampler.sample(
            logits,
            slots,
            slots,
            input_batch.idx_mapping_np,
            input_batch.positions[rows],
            input_batch.input_ids[rows],
            torch.zeros_like(slots, dtype=torch.int32),
            input_batch.seq_lens_cpu_upper_bound.numpy(),
            return_logprobs=dims is not None,
        )
        if dims is None:
            return sampled, None
        return sampled, compute_topk_scores(
            processed if sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES else logits,
            dims[0],
            sampled,
            None,
            logprob_token_ids_state=sampler.logprob_token_ids_state,
            expanded_idx_mapping=slots,
            max_per_req_token_ids=dims[1],
            logits_mode=sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )


class _History:
    """Lets penalties, bad words and custom processors see the path so far as if it were committed.

    They read the requests' own states, which are extended while walking and restored after it: upstream commits what
    was accepted itself.
    """

    def __init__(self, sampler: Sampler, input_batch: InputBatch):
        # Known on the host: nobody reads it where no logits are processed.
        self.read = bool(np.any(sampler.needs_logits_processing[input_batch.idx_mapping_np]))
        self.slots = input_batch.idx_mapping
        self.token_ids = sampler.req_states.all_token_ids.gpu
        self.length = sampler.req_states.total_len.gpu
        self.counts = sampler.penalties_state.output_bin_counts
        self.appended: list[tuple[torch.Tensor, torch.Tensor]] = []

    def append(self, sampled: torch.Tensor, active: torch.Tensor) -> None:
        """Extend the requests whose walk goes on by the token that was sampled."""
        if not self.read:
            return
        more = active.to(self.length.dtype)
        end = self.length[self.slots].long().clamp(max=self.token_ids.shape[1] - 1)
        # What lies beyond the length is nobody's.
        self.token_ids[self.slots, end] = sampled.to(self.token_ids.dtype)
        self.length[self.slots] += more
        self.counts[self.slots, sampled] += more
        self.appended.append((sampled, more))

    def restore(self) -> None:
        """Take everything back."""
        for sampled, more in self.appended:
            self.length[self.slots] -= more
            self.counts[self.slots, sampled] -= more


def _stack(scores: list[LogprobsTensors], num_requests: int) -> LogprobsTensors | None:
    """Scores of all levels, request by request."""
    if not scores:
        return None
    names = ("logprob_token_ids", "logprobs", "selected_token_ranks")
    stacked = [torch.stack([getattr(score, name) for score in scores], dim=1).flatten(0, 1) for name in names]
    starts = (np.arange(num_requests + 1) * len(scores)).tolist()
    return LogprobsTensors(*stacked, cu_num_generated_tokens=starts)
