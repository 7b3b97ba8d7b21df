"""Sampling along the graph without asking the device: the accepted path of every request.

V2 draws its noise by seed and position, and rows have positions by depth: what is sampled is what plain decoding
samples, seeded or not. Where earlier tokens matter to the sampler (penalties, bad words...), the rows where the
walks stand, one per request, go through vLLM's own at each depth with the path so far counted as output, so that every
parameter means what it means in plain decoding. Elsewhere all rows go through it at once.

Shapes depend on how many rows were scheduled, never on what the device proposed or accepts: nothing waits for it.
Custom logits processors are the exception. They may keep state that goes on whenever they see a request's row, so at
each depth they see those requests alone whose walk goes on, which the host has to ask for.
"""

from typing import NamedTuple

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_gsd.engine.v2.device_step import DeviceStep
from vllm_gsd.engine.verify.draft_tree import FOREIGN
from vllm_gsd.ops.walk.api import accept_walk

BUILT_IN = (LogitBiasState, PenaltiesState, BadWordsState)  # what upstream's sampler has beside custom processors


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

    # Upstream's verifies fewer drafts where they are not worth it; our planner decides that.
    enable_adaptive_verification = False

    def __init__(self, sampler: Sampler):
        self.sampler = sampler
        self.custom = any(not isinstance(processor, BUILT_IN) for processor in sampler.logits_processors)
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
        history = _History(sampler, input_batch)
        scores: list[LogprobsTensors] = []
        if history.read or sampler.get_logprobs_dims(input_batch.idx_mapping_np) is not None:
            tokens, self.paths = self._by_level(logits, input_batch, token, parent, history, scores)
        else:
            tokens, self.paths = self._at_once(logits, input_batch, token, parent)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            (self.paths.accepted + 1).to(torch.int32),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            sampler.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=_stack(scores, input_batch.num_reqs),
            num_nans=get_num_nans(logits) if sampler.compute_nans else None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _at_once(self, logits, input_batch: InputBatch, token, parent) -> tuple[torch.Tensor, Paths]:
        """Sample all rows, then walk: where no row's sample depends on the path before it but through the model.

        Args:
            token, parent: int64 [num_requests, most rows], as of ``DeviceStep``.

        Returns:
            int64 [num_requests, levels], sampled along each path; zeros behind it.
        """
        assert self.step is not None
        sampler, rows = self.sampler, input_batch.logits_indices
        sampled, _ = sampler.sample(
            logits,
            input_batch.expanded_idx_mapping,
            input_batch.idx_mapping,
            input_batch.idx_mapping_np,
            input_batch.positions[rows],
            input_batch.input_ids[rows],
            input_batch.expanded_local_pos,
            input_batch.seq_lens_cpu_upper_bound.numpy(),
        )
        count, most = token.shape
        walked = accept_walk(
            token.flatten(),
            parent.flatten().int(),
            sampled[self.step.lines()].flatten(),
            torch.arange(count + 1, dtype=torch.int32, device=token.device) * most,
            max_depth=most - 1,
            max_nodes=most,
        )
        places = torch.nn.functional.pad(walked.path.long(), (1, 0))
        places = torch.where(places < 0, torch.arange(most, device=token.device), places)
        return walked.tokens.clamp(min=0), Paths(places, walked.length.long())

    def _by_level(
        self, logits, input_batch: InputBatch, token, parent, history: "_History", scores: list[LogprobsTensors]
    ) -> tuple[torch.Tensor, Paths]:
        """Sample the rows where the walks stand, level by level; ``_at_once`` otherwise.

        Args:
            history, scores: updated; ``history`` is restored.
        """
        num_requests, levels = token.shape
        first = input_batch.cu_num_logits[:num_requests].long()
        place = torch.zeros_like(first)
        active = torch.ones_like(first, dtype=torch.bool)
        tokens = place.new_zeros((num_requests, levels))
        places = torch.arange(levels, device=first.device).repeat(num_requests, 1)
        accepted = torch.zeros_like(first)
        for level in range(levels):
            if self.custom and history.read:
                going = active.nonzero().squeeze(1)
                if len(going) == 0:
                    break
                sampled, score = self._sample_some(logits, input_batch, first + place, going)
            else:
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
        return tokens, Paths(places, accepted)

    def _sample_some(
        self, logits, input_batch: InputBatch, lines, requests
    ) -> tuple[torch.Tensor, LogprobsTensors | None]:
        """``_sample`` of some requests, int64 [n], as if the others were not there; these get zeros."""
        sampled, score = self._sample(logits[lines[requests]], input_batch, lines[requests], requests)

        def spread(part: torch.Tensor) -> torch.Tensor:
            return part.new_zeros((len(lines), *part.shape[1:])).index_copy(0, requests, part)

        names = ("logprob_token_ids", "logprobs", "selected_token_ranks")
        if score is not None:
            score = LogprobsTensors(*(spread(getattr(score, name)) for name in names))
        return spread(sampled), score

    def _sample(
        self, logits, input_batch: InputBatch, lines, requests=None
    ) -> tuple[torch.Tensor, LogprobsTensors | None]:
        """Sample one row of each request (of ``requests`` only, int64 [n]), as if it were the only one."""
        sampler, slots, slots_np = self.sampler, input_batch.idx_mapping, input_batch.idx_mapping_np
        lengths = input_batch.seq_lens_cpu_upper_bound.numpy()
        rows = input_batch.logits_indices[lines]
        dims = sampler.get_logprobs_dims(slots_np)
        if requests is not None:
            chosen = requests.cpu().numpy()
            slots, slots_np, lengths = slots[requests], slots_np[chosen], lengths[chosen]
        sampled, processed = sampler.sample(
            logits,
            slots,
            slots,
            slots_np,
            input_batch.positions[rows],
            input_batch.input_ids[rows],
            torch.zeros_like(slots, dtype=torch.int32),
            lengths,
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
