"""The walk on Model Runner V2: samples the accepted path of every request without synchronizing with the device.

V2 derives sampling noise from seed and position, and a row's position follows from its depth. A row is therefore
sampled exactly as plain decoding samples it, with or without a seed. All rows are sampled at once, and one kernel walks
the trees. Temperature, top-k, top-p, min-p, logit bias, allowed tokens, minimum lengths and grammar masks depend on the
row alone.

Penalties, bad words, thinking budgets and custom logits processors depend on the path. Their requests, and no others,
are sampled again level by level: one row per request goes through vLLM's sampler, and the path so far counts as output.

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

from vllm_gsd.engine.v2.verified_rows import DeviceStep
from vllm_gsd.engine.verify.staging import send
from vllm_gsd.ops.walk.api import Accepted, accept_walk

# Numbers for one call of vLLM's sampler, which copies them to float32: 1 GiB, as in vLLM's own rejection sampler.
MOST_LOGITS = 1 << 28
BUILT_IN = (LogitBiasState, PenaltiesState, BadWordsState)  # the processors of upstream's sampler that are not custom


class _Rows(NamedTuple):
    """Rows for vLLM's sampler, and the requests that they belong to."""

    lines: torch.Tensor | None  # int64 [n], places among the verified rows; None for all of them
    slots: torch.Tensor  # int64 [n], the request slot of each row
    requests: torch.Tensor  # int64, the request slots of the batch
    requests_np: np.ndarray  # the slots of the requests whose parameters apply
    lengths: np.ndarray  # int32, upper bounds on the sequence lengths of these requests


class _Scores(NamedTuple):
    """Log probabilities of all verified rows; the fields of ``LogprobsTensors`` with one row more, for what is lost."""

    logprob_token_ids: torch.Tensor
    logprobs: torch.Tensor
    selected_token_ranks: torch.Tensor


class GraphSampler:
    """Replaces vLLM's ``RejectionSampler``; uses the request states of vLLM's ``Sampler``."""

    # vLLM's rejection sampler may verify fewer drafts to save time; our planner makes this decision.
    enable_adaptive_verification = False

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.custom = any(not isinstance(processor, BUILT_IN) for processor in sampler.logits_processors)
        self.step: DeviceStep | None = None  # the step to verify next
        self.accepted: Accepted | None = None  # the paths of the step verified last

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
            draft_logits: unused, because nodes are chosen rather than sampled.
            invalid_drafts: bool [num_rows], rows that the request's grammar has not checked; None if there are none.
        """
        sampler, by_level = self.sampler, self._by_level(input_batch.idx_mapping_np)
        rows = _Rows(
            None,
            input_batch.expanded_idx_mapping,
            input_batch.idx_mapping,
            input_batch.idx_mapping_np[~by_level],
            input_batch.seq_lens_cpu_upper_bound.numpy()[: len(by_level)][~by_level],
        )
        sampled, scores = None, None
        if len(rows.requests_np):
            sampled, scores = self._sample_all(logits, input_batch, rows)
        if by_level.any():
            path_sampler = _PathSampler(self, logits, input_batch, invalid_drafts)
            sampled, scores = path_sampler.run(np.flatnonzero(by_level), sampled, scores)
        assert sampled is not None
        self.accepted = accepted = self.walk(sampled, input_batch, invalid_drafts)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            accepted.count,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            sampler.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=accepted.tokens,
            logprobs_tensors=None if scores is None else _along(scores, accepted.rows),
            num_nans=sum_along(get_num_nans(logits), accepted) if sampler.compute_nans else None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def walk(
        self,
        sampled: torch.Tensor,
        input_batch: InputBatch,
        invalid_drafts: torch.Tensor | None,
        max_steps: int | None = None,
    ) -> Accepted:
        """Walk the step's trees by the tokens sampled at their rows; see ``accept_walk``."""
        step = self.step
        assert step is not None and step.trees is not None
        return accept_walk(
            step.trees, sampled, input_batch.cu_num_logits, input_batch.query_start_loc, step.slot_mapping,
            invalid_drafts, max_steps,
        )  # fmt: skip

    def _by_level(self, slots: np.ndarray) -> np.ndarray:
        """Whether what a request samples at a row depends on the path to it, bool [num_requests]."""
        sampler = self.sampler
        if self.custom:  # upstream does not tell which processors a request uses
            return sampler.needs_logits_processing[slots]
        found = sampler.penalties_state.use_penalty[slots]
        for processor in sampler.logits_processors:
            if isinstance(processor, BadWordsState):
                found = found | (processor.num_bad_words.np[slots] > 0)
        budget = sampler.thinking_budget_state
        return found | budget.use_thinking_budget[slots] if budget.enabled else found

    def _sample_all(
        self, logits: torch.Tensor, input_batch: InputBatch, rows: _Rows
    ) -> tuple[torch.Tensor, LogprobsTensors | None]:
        """Sample all rows as ``_sample`` does, in as many calls as their logits take."""
        most = max(1, MOST_LOGITS // logits.shape[1])
        if len(logits) <= most:
            return self._sample(logits, input_batch, rows)
        parts: list[tuple[torch.Tensor, LogprobsTensors | None]] = []
        for lines in torch.arange(len(logits), device=logits.device).split(most):
            part = slice(most * len(parts), most * len(parts) + len(lines))
            parts.append(self._sample(logits[part], input_batch, rows._replace(lines=lines, slots=rows.slots[part])))
        tokens, scores = zip(*parts, strict=True)
        if scores[0] is None:
            return torch.cat(tokens), None
        fields = ([getattr(part, name) for part in scores] for name in _Scores._fields)
        return torch.cat(tokens), LogprobsTensors(*map(torch.cat, fields))

    def _sample(
        self, logits: torch.Tensor, input_batch: InputBatch, rows: _Rows
    ) -> tuple[torch.Tensor, LogprobsTensors | None]:
        """Sample some rows, whose logits are [n, vocab], as decoding without drafts does.

        Returns:
            The sampled tokens, [n], and their log probabilities if any request of the batch asks for them.
        """
        sampler, places = self.sampler, input_batch.logits_indices
        if rows.lines is not None:
            places = places[rows.lines]
        local = input_batch.expanded_local_pos
        dims = sampler.get_logprobs_dims(input_batch.idx_mapping_np)
        sampled, processed = sampler.sample(
            logits,
            rows.slots,
            rows.requests,
            rows.requests_np,
            input_batch.positions[places],
            input_batch.input_ids[places],
            local if rows.lines is None else torch.zeros_like(rows.slots, dtype=torch.int32),
            rows.lengths,
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
            expanded_idx_mapping=rows.slots,
            max_per_req_token_ids=dims[1],
            logits_mode=sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )


class _PathSampler:
    """Samples the requests whose distribution depends on the path, one row per request and level."""

    def __init__(
        self,
        graph_sampler: GraphSampler,
        logits: torch.Tensor,
        input_batch: InputBatch,
        invalid_drafts: torch.Tensor | None,
    ) -> None:
        self.graph_sampler, self.logits, self.batch = graph_sampler, logits, input_batch
        self.invalid = invalid_drafts
        self.history = _History(graph_sampler.sampler)

    def run(
        self, requests_np: np.ndarray, sampled: torch.Tensor | None, scores: LogprobsTensors | None
    ) -> tuple[torch.Tensor, LogprobsTensors | None]:
        """Sample along the paths of some requests.

        Args:
            requests_np: int64 [n], these requests' places in the batch.
            sampled: int64 [num_rows], the tokens sampled at all rows; None if there are none yet.
            scores: the log probabilities of all rows, if any request asks for them; None if there are none yet.

        Returns:
            ``sampled`` and ``scores`` with the rows along these requests' paths replaced.
        """
        own, num_rows = self.graph_sampler, len(self.logits)
        # One row more, for what is sampled where a walk has ended.
        whole = self.batch.input_ids.new_zeros(num_rows + 1, dtype=torch.int64)
        if sampled is not None:
            whole[:num_rows] = sampled
        kept = None if scores is None else _widened(scores)
        (requests,) = send(self.logits.device, requests_np)
        drawn: torch.Tensor | None = None
        assert own.step is not None
        for level in range(int(own.step.sizes[requests_np].max())):
            walked = own.walk(whole[:num_rows], self.batch, self.invalid, level)
            active = walked.count[requests] == level + 1
            if own.custom:
                going = active.nonzero().squeeze(1)
                if not len(going):
                    break
                requests, requests_np, active = requests[going], requests_np[going.cpu().numpy()], active[going]
                drawn = None if drawn is None else drawn[going]
            if drawn is not None:
                self.history.append(self.batch.idx_mapping[requests], drawn, active)
            lines = walked.rows[requests, level]
            drawn, found = self._sample(lines, requests, requests_np)
            target = torch.where(active, lines, num_rows)
            whole[target] = drawn
            if found is not None:
                kept = _widened(found, num_rows) if kept is None else kept
                for values, name in zip(kept, _Scores._fields, strict=True):
                    values[target] = getattr(found, name)
        self.history.restore()
        done = None if kept is None else LogprobsTensors(*(values[:num_rows] for values in kept))
        return whole[:num_rows], done

    def _sample(
        self, lines: torch.Tensor, requests: torch.Tensor, requests_np: np.ndarray
    ) -> tuple[torch.Tensor, LogprobsTensors | None]:
        batch = self.batch
        slots = batch.idx_mapping[requests]
        lengths = batch.seq_lens_cpu_upper_bound.numpy()[requests_np]
        rows = _Rows(lines, slots, slots, batch.idx_mapping_np[requests_np], lengths)
        return self.graph_sampler._sample(self.logits[lines], batch, rows)


class _History:
    """Shows the path so far to penalties, bad words and custom processors as if it were committed.

    These read vLLM's request states. The walk extends the states and restores them afterwards, because vLLM commits the
    accepted tokens itself.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.token_ids = sampler.req_states.all_token_ids.gpu
        self.length = sampler.req_states.total_len.gpu
        self.counts = sampler.penalties_state.output_bin_counts
        self.appended: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def append(self, slots: torch.Tensor, sampled: torch.Tensor, active: torch.Tensor) -> None:
        """Append a token to each of some slots' requests if its walk continues."""
        more = active.to(self.length.dtype)
        end = self.length[slots].long().clamp(max=self.token_ids.shape[1] - 1)
        # Writing is harmless where a walk has ended, because tokens beyond the length are never read.
        self.token_ids[slots, end] = sampled.to(self.token_ids.dtype)
        self.length[slots] += more
        self.counts[slots, sampled] += more
        self.appended.append((slots, sampled, more))

    def restore(self) -> None:
        """Undo all calls of ``append``."""
        for slots, sampled, more in self.appended:
            self.length[slots] -= more
            self.counts[slots, sampled] -= more


def _widened(scores: LogprobsTensors, num_rows: int | None = None) -> _Scores:
    """The scores with one row more; zeros for ``num_rows`` rows and one more if a number is given."""
    parts = (getattr(scores, name) for name in _Scores._fields)
    if num_rows is not None:
        return _Scores(*(part.new_zeros((num_rows + 1, *part.shape[1:])) for part in parts))
    return _Scores(*(torch.cat([part, part[:1]]) for part in parts))


def sum_along(counts: torch.Tensor, accepted: Accepted) -> torch.Tensor:
    """The sum of the rows' ``counts`` [num_rows] along each path, [num_requests]."""
    lost = torch.arange(accepted.rows.shape[1], device=counts.device) >= accepted.count[:, None]
    return counts[accepted.rows].masked_fill(lost, 0).sum(1, dtype=counts.dtype)


def _along(scores: LogprobsTensors, rows: torch.Tensor) -> LogprobsTensors:
    """The log probabilities along the paths, ordered by request and then by level."""
    kept = (getattr(scores, name)[rows.flatten()] for name in _Scores._fields)
    starts = (np.arange(len(rows) + 1) * rows.shape[1]).tolist()
    return LogprobsTensors(*kept, cu_num_generated_tokens=starts)
