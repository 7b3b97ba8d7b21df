"""The walk on Model Runner V2: samples the accepted path of every request without synchronizing with the device.

V2 derives sampling noise from seed and position, and a row's position follows from its depth. The walk therefore
samples exactly what plain decoding samples, with or without a seed. If the sampler depends on earlier tokens
(penalties, bad words and the like), the walk proceeds level by level: at each depth, one row per request goes through
vLLM's sampler, and the path so far counts as output. Otherwise all rows are sampled at once.

All shapes depend only on the number of scheduled rows, so the host never waits for the device. Custom logits processors
are the exception: they may update their state whenever they see a row of a request. At each depth they may see only the
requests whose walk continues, and the host must ask the device which these are.
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

BUILT_IN = (LogitBiasState, PenaltiesState, BadWordsState)  # the processors of upstream's sampler that are not custom


class Paths(NamedTuple):
    """The accepted paths of a step, on the device."""

    # int64 [num_requests, levels], the row of the accepted node at each depth; the depth itself after the path's end
    place: torch.Tensor
    accepted: torch.Tensor  # int64 [num_requests], the number of accepted nodes


class GraphSampler:
    """Replaces vLLM's ``RejectionSampler``.

    Args:
        sampler: vLLM's sampler, whose request states are used.
    """

    # vLLM's rejection sampler may verify fewer drafts to save time; our planner makes this decision.
    enable_adaptive_verification = False

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.custom = any(not isinstance(processor, BUILT_IN) for processor in sampler.logits_processors)
        self.step: DeviceStep | None = None  # the step to verify next
        self.paths: Paths | None = None  # the paths of the step verified last

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Sample every request's accepted path and bonus token.

        Args:
            logits: [num_rows, vocab], with grammar masks applied.
            input_batch: the batch.
            draft_logits: unused, because nodes are chosen rather than sampled.
            invalid_drafts: bool [num_rows], rows that the request's grammar has not checked; None if there are none.
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

    def _at_once(
        self, logits: torch.Tensor, input_batch: InputBatch, token: torch.Tensor, parent: torch.Tensor
    ) -> tuple[torch.Tensor, Paths]:
        """Sample all rows at once, then walk. This requires a sampler that does not read earlier tokens.

        Args:
            logits: [num_rows, vocab].
            input_batch: the batch.
            token: int64 [num_requests, most rows], as in ``DeviceStep``.
            parent: int64 [num_requests, most rows], as in ``DeviceStep``.

        Returns:
            The tokens sampled along each path, int64 [num_requests, levels], padded with zeros; and the paths.
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
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        token: torch.Tensor,
        parent: torch.Tensor,
        history: "_History",
        scores: list[LogprobsTensors],
    ) -> tuple[torch.Tensor, Paths]:
        """Sample and walk level by level, one row per request and level. Otherwise like ``_at_once``.

        Args:
            logits: [num_rows, vocab].
            input_batch: the batch.
            token: int64 [num_requests, most rows], as in ``DeviceStep``.
            parent: int64 [num_requests, most rows], as in ``DeviceStep``.
            history: extended along the paths, and restored at the end.
            scores: the log probabilities of each level are appended to it, if a request asks for them.
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
        self, logits: torch.Tensor, input_batch: InputBatch, lines: torch.Tensor, requests: torch.Tensor
    ) -> tuple[torch.Tensor, LogprobsTensors | None]:
        """Like ``_sample``, for the requests with indices ``requests``, int64 [n], only; all others get zeros."""
        sampled, score = self._sample(logits[lines[requests]], input_batch, lines[requests], requests)

        def spread(part: torch.Tensor) -> torch.Tensor:
            return part.new_zeros((len(lines), *part.shape[1:])).index_copy(0, requests, part)

        names = ("logprob_token_ids", "logprobs", "selected_token_ranks")
        if score is not None:
            score = LogprobsTensors(*(spread(getattr(score, name)) for name in names))
        return spread(sampled), score

    def _sample(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        lines: torch.Tensor,
        requests: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, LogprobsTensors | None]:
        """Sample one row of each request, as decoding without drafts does.

        Args:
            logits: [n, vocab], the logits of these rows.
            input_batch: the batch.
            lines: int64 [n], the indices of the rows among all rows to verify.
            requests: int64 [n], the indices of the requests; None for all requests.

        Returns:
            The sampled tokens, [n], and their log probabilities if any request of the batch asks for them.
        """
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
    """Shows the path so far to penalties, bad words and custom processors as if it were committed.

    These read vLLM's request states. The walk extends the states and restores them afterwards, because vLLM commits the
    accepted tokens itself.
    """

    def __init__(self, sampler: Sampler, input_batch: InputBatch) -> None:
        # Whether any logits processor reads the states; the host knows this without asking the device.
        self.read = bool(np.any(sampler.needs_logits_processing[input_batch.idx_mapping_np]))
        self.slots = input_batch.idx_mapping
        self.token_ids = sampler.req_states.all_token_ids.gpu
        self.length = sampler.req_states.total_len.gpu
        self.counts = sampler.penalties_state.output_bin_counts
        self.appended: list[tuple[torch.Tensor, torch.Tensor]] = []

    def append(self, sampled: torch.Tensor, active: torch.Tensor) -> None:
        """Append each request's sampled token if its walk continues."""
        if not self.read:
            return
        more = active.to(self.length.dtype)
        end = self.length[self.slots].long().clamp(max=self.token_ids.shape[1] - 1)
        # Writing is harmless where a walk has ended, because tokens beyond the length are never read.
        self.token_ids[self.slots, end] = sampled.to(self.token_ids.dtype)
        self.length[self.slots] += more
        self.counts[self.slots, sampled] += more
        self.appended.append((sampled, more))

    def restore(self) -> None:
        """Undo all calls of ``append``."""
        for sampled, more in self.appended:
            self.length[self.slots] -= more
            self.counts[self.slots, sampled] -= more


def _stack(scores: list[LogprobsTensors], num_requests: int) -> LogprobsTensors | None:
    """Combine the log probabilities of all levels, ordered by request and then by level."""
    if not scores:
        return None
    names = ("logprob_token_ids", "logprobs", "selected_token_ranks")
    stacked = [torch.stack([getattr(score, name) for score in scores], dim=1).flatten(0, 1) for name in names]
    starts = (np.arange(num_requests + 1) * len(scores)).tolist()
    return LogprobsTensors(*stacked, cu_num_generated_tokens=starts)
