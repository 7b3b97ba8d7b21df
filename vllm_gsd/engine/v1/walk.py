"""Sampling along flattened token graphs: each request's accepted path is drawn exactly as plain decoding draws it.

At each depth, vLLM's own sampler samples the row that each walk has reached. It uses the request's own parameters and
its output extended by the path so far. A request's random generator is used once per emitted token, as without
speculation, so seeded output equals that of plain decoding. Only rows on accepted paths are sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_gsd.engine.parallel.ranks import from_first_rank
from vllm_gsd.engine.schedule.text_end import ends_text
from vllm_gsd.engine.v1.processors import CustomProcessors
from vllm_gsd.engine.verify.draft_tree import Paths, WalkTrees
from vllm_gsd.host import follow, step_into
from vllm_gsd.ops.topk.api import argmax_of_walks
from vllm_gsd.upstream.instances import count_thinking_as_without_speculation

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.sample.sampler import Sampler

Value = TypeVar("Value")

PLACEHOLDER = -1  # vLLM's mark for "no token" in a padded row of sampled tokens


def walk(
    sampler: Sampler,
    logits: torch.Tensor,
    metadata: SamplingMetadata,
    trees: WalkTrees,
    outputs: list[list[int]],
    stateful: bool,
    params: Iterable[SamplingParams] = (),
) -> tuple[SamplerOutput, Paths]:
    """Sample every request's accepted path and bonus token.

    Args:
        logits: [num_rows, vocab], the target's logits for all rows of ``trees``.
        metadata: the batch's sampling metadata, one entry per request.
        outputs: the requests' lists of output tokens. Penalties, bad words and logits processors read them, so they are
            extended during the walk and restored before returning.
        stateful: whether a built-in logits processor is active. These index the batch by request and need all its rows.
        params: the sampling parameters of each request, which say where its text ends. For positions after that, custom
            logits processors are not called, and the generators of seeded requests, with which a session of streaming
            input goes on, are not used.

    Returns:
        vLLM's record of the sampled tokens, int32 [num_requests, deepest walk + 1] padded with -1, and ours.
    """
    thinking = metadata.thinking_budget_state_holder
    if thinking is not None and thinking.has_tracked_requests():
        # There is one row per request here, unlike in upstream's rejection sampler, which has one per draft token.
        count_thinking_as_without_speculation(thinking)
        metadata = replace(metadata, spec_token_ids=None)
    custom = CustomProcessors(metadata.logitsprocs)
    stateful = stateful or bool(custom)
    if not stateful and _only_argmax(metadata):
        return _walk_greedily(logits, trees)
    ends = list(params) if custom or metadata.generators else []  # empty if no text's end matters
    original_lengths = [len(output) for output in outputs]
    walked = _walk_by_depth(_RowSampler(sampler, logits, metadata, stateful, custom), trees, outputs, ends)
    for output, length in zip(outputs, original_lengths, strict=True):
        del output[length:]
    return walked


def _records(tokens: np.ndarray, places: np.ndarray, logprobs: LogprobsTensors | None) -> tuple[SamplerOutput, Paths]:
    """The results of ``walk`` from int32 tokens, padded with -1, and the places at which the walks ended."""
    paths = Paths(tokens, (tokens != PLACEHOLDER).sum(axis=1), places)
    return SamplerOutput(torch.from_numpy(tokens), logprobs), paths


def _walk_greedily(logits: torch.Tensor, trees: WalkTrees) -> tuple[SamplerOutput, Paths]:
    """Walk along the argmax of each row; arguments and results as in ``walk``."""
    num_requests = len(trees.starts) - 1
    rows = (torch.from_numpy(part) for part in trees)
    best = from_first_rank(argmax_of_walks(logits, *rows).cpu().numpy())
    path = np.full((num_requests, int((trees.starts[1:] - trees.starts[:-1]).max())), PLACEHOLDER, np.int32)
    places = np.zeros(num_requests, np.int32)
    longest = follow(*trees, best, places, path)
    return _records(path[:, :longest].copy(), places, None)


def _walk_by_depth(
    sampler: _RowSampler, trees: WalkTrees, outputs: list[list[int]], ends: list[SamplingParams]
) -> tuple[SamplerOutput, Paths]:
    """Sample one token per active walk at each depth; arguments and results as in ``walk``. Extends ``outputs``."""
    num_requests = len(trees.starts) - 1
    places = np.zeros(num_requests, np.int32)
    active = np.ones(num_requests, np.bool_)
    columns: list[np.ndarray] = []
    while True:
        column = sampler.sample(trees.starts[:-1] + places, np.flatnonzero(active))
        columns.append(column)
        stood = places.copy()
        step_into(trees.token, trees.parent, trees.starts, places, column, active)
        if sampler.custom or ends:  # some walks must not take another step
            for request in np.flatnonzero(active) if ends else ():
                active[request] = not ends_text(ends[request], outputs[request], int(column[request]))
            if sampler.custom.in_step:
                active &= active.all()
            places = np.where(active, places, stood)
        if not active.any():
            break
        for request in np.flatnonzero(active):
            outputs[request].append(int(column[request]))
        sampler.descend()
    tokens = np.stack(columns, axis=1).astype(np.int32)
    return _records(tokens, places, _stack_logprobs(sampler.logprobs, num_requests, len(columns)))


@dataclass
class _RowSampler:
    """Samples the rows that walks have reached; if ``stateful``, a row of every request. Fields as in ``walk``."""

    sampler: Sampler
    logits: torch.Tensor
    metadata: SamplingMetadata
    stateful: bool
    custom: CustomProcessors
    logprobs: list[tuple[np.ndarray, LogprobsTensors]] = field(default_factory=list)  # and the requests, by depth

    def sample(self, rows: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Sample for the requests ``chosen``, int64, whose walks continue.

        Args:
            rows: int [num_requests], the row that each walk has reached.

        Returns:
            int64 [num_requests], the tokens; PLACEHOLDER for the other requests.
        """
        num_requests = len(rows)
        sampling = np.arange(num_requests) if self.stateful else chosen
        all_rows = len(sampling) == len(self.logits)
        logits = self.logits if all_rows else self.logits[torch.from_numpy(rows[sampling].astype(np.int64))]
        metadata = _metadata_of(self.metadata, chosen, self.stateful, num_requests)
        with self.custom.only_for(chosen):
            sampled = self.sampler(logits=logits, sampling_metadata=metadata)
        tokens = from_first_rank(sampled.sampled_token_ids.view(-1).cpu().numpy().astype(np.int64))
        column = np.full(num_requests, PLACEHOLDER, np.int64)
        column[chosen] = tokens[chosen] if self.stateful else tokens
        if sampled.logprobs_tensors is not None:
            self.logprobs.append((sampling, sampled.logprobs_tensors))
        return column

    def descend(self) -> None:
        """Prepare for the next depth, after the outputs of the walks that continue were extended."""
        if self.metadata.thinking_budget_state_holder is not None:
            # Requests with a thinking budget have no tree, so their walks have ended.
            self.metadata = replace(self.metadata, thinking_budget_state_holder=None)
        if self.stateful:
            for processor in self.metadata.logitsprocs.all:
                processor.update_state(None)


def _only_argmax(metadata: SamplingMetadata) -> bool:
    """Whether each row's argmax is all that is needed, so that one pass over all rows suffices.

    The caller has already checked that no logits processor is active.
    """
    thinking = metadata.thinking_budget_state_holder
    return (
        metadata.all_greedy
        and metadata.no_penalties
        and metadata.max_num_logprobs is None
        and metadata.allowed_token_ids_mask is None
        and not metadata.bad_words_token_ids
        and not metadata.logprob_token_ids
        and (thinking is None or not thinking.has_tracked_requests())
    )


def _metadata_of(metadata: SamplingMetadata, chosen: np.ndarray, all_rows: bool, num_requests: int) -> SamplingMetadata:
    """Sampling metadata for the requests ``chosen``, whose walks continue.

    Args:
        chosen: int64, indices of these requests.
        all_rows: whether the rows of all requests are sampled.
    """
    if len(chosen) == num_requests:
        return metadata
    if all_rows:
        # Rows of ended walks are sampled again and ignored, without using their generators.
        active = set(chosen.tolist())
        return replace(metadata, generators={i: g for i, g in metadata.generators.items() if i in active})
    index = torch.from_numpy(chosen)
    new_row = {int(old): new for new, old in enumerate(chosen)}

    def pick(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[index]

    def remap(by_request: Mapping[int, Value]) -> dict[int, Value]:
        return {new_row[i]: value for i, value in by_request.items() if i in new_row}

    return replace(
        metadata,
        temperature=pick(metadata.temperature),
        top_p=pick(metadata.top_p),
        top_k=pick(metadata.top_k),
        generators=remap(metadata.generators),
        prompt_token_ids=pick(metadata.prompt_token_ids),
        frequency_penalties=pick(metadata.frequency_penalties),
        presence_penalties=pick(metadata.presence_penalties),
        repetition_penalties=pick(metadata.repetition_penalties),
        output_token_ids=[metadata.output_token_ids[i] for i in chosen] if metadata.output_token_ids else [],
        allowed_token_ids_mask=pick(metadata.allowed_token_ids_mask),
        bad_words_token_ids=remap(metadata.bad_words_token_ids),
        logprob_token_ids=remap(metadata.logprob_token_ids) if metadata.logprob_token_ids else None,
        spec_token_ids=None,
    )


def _stack_logprobs(
    parts: list[tuple[np.ndarray, LogprobsTensors]], num_requests: int, depth: int
) -> LogprobsTensors | None:
    """Stack each depth's requests and logprobs as [num_requests * depth, ...], request by request."""
    if not parts:
        return None
    widest = max(range(len(parts)), key=lambda i: parts[i][1].logprobs.shape[-1])

    def lay_out(name: str) -> torch.Tensor:
        sample = getattr(parts[widest][1], name)
        if sample.numel() == 0:
            return sample
        nothing = -torch.inf if sample.is_floating_point() else 0  # as vLLM fills columns that a row has no token for
        result = sample.new_full((num_requests, depth, *sample.shape[1:]), nothing)
        for level, (requests, tensors) in enumerate(parts):
            values = getattr(tensors, name)
            if values.dim() == 1:
                result[torch.from_numpy(requests), level] = values
            else:
                result[torch.from_numpy(requests), level, : values.shape[-1]] = values
        return result.flatten(0, 1)

    return LogprobsTensors(*(lay_out(name) for name in ("logprob_token_ids", "logprobs", "selected_token_ranks")))
