"""Sampling along the graph: the accepted path of every request, drawn exactly as plain decoding draws it.

At each depth, the rows where the walks stand go through vLLM's own sampler with the requests' own parameters
and their output extended by the path so far. A request's random generator is used once per emitted token, as
without speculation, so seeded output equals plain decoding's. Only rows on accepted paths are ever sampled.
"""

from dataclasses import replace

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_gsd.engine.parallel.ranks import from_first_rank
from vllm_gsd.engine.verify.draft_tree import WalkTrees
from vllm_gsd.host import follow, step_into
from vllm_gsd.ops.topk.api import argmax_of_walks
from vllm_gsd.upstream.instances import count_thinking_as_without_speculation

PLACEHOLDER = -1  # vLLM's mark for "no token" in a padded row of sampled tokens


def walk(sampler, logits, metadata: SamplingMetadata, trees: WalkTrees, outputs: list[list[int]], stateful: bool):
    """Sample every request's accepted path and bonus token.

    Args:
        sampler: vLLM's ``Sampler``.
        logits: [num_rows, vocab], the target's logits of all rows of ``trees``.
        metadata: the batch's sampling metadata, one entry per request.
        outputs: the requests' own lists of output tokens. They are extended while walking, because penalties, bad words
            and logits processors read them, and restored before returning.
        stateful: whether logits processors index the batch by request, so that they need all its rows.

    Returns:
        SamplerOutput with int32 ``sampled_token_ids`` [num_requests, deepest walk + 1], padded with -1, and the place
        where each walk ended, int32 [num_requests].
    """
    num_requests = len(trees.starts) - 1
    places = np.zeros(num_requests, np.int32)
    logprobs: list[tuple[np.ndarray, LogprobsTensors]] = []
    original_lengths = [len(output) for output in outputs]
    starts = trees.starts[:-1]
    thinking = metadata.thinking_budget_state_holder
    if thinking is not None and thinking.has_tracked_requests():
        # Rows are one per request here, not drafts as in upstream's rejection sampler.
        count_thinking_as_without_speculation(thinking)
        metadata = replace(metadata, spec_token_ids=None)
    if not stateful and _takes_the_best(metadata):
        rows = (torch.from_numpy(part) for part in trees)
        best = from_first_rank(argmax_of_walks(logits, *rows).cpu().numpy())
        path = np.full((num_requests, int((trees.starts[1:] - trees.starts[:-1]).max())), PLACEHOLDER, np.int32)
        longest = follow(*trees, best, places, path)
        return SamplerOutput(torch.from_numpy(path[:, :longest].copy()), None), places
    active = np.ones(num_requests, np.bool_)
    columns: list[np.ndarray] = []
    while True:
        chosen = np.flatnonzero(active)
        column = np.full(num_requests, PLACEHOLDER, np.int64)
        whole = len(chosen) == num_requests or stateful
        lines = starts + places if whole else (starts + places)[chosen]
        here = logits if len(lines) == len(logits) else logits[torch.from_numpy(lines.astype(np.int64))]
        sampled = sampler(logits=here, sampling_metadata=_metadata_of(metadata, chosen, whole, num_requests))
        tokens = from_first_rank(sampled.sampled_token_ids.view(-1).cpu().numpy().astype(np.int64))
        column[chosen] = tokens[chosen] if whole else tokens
        if sampled.logprobs_tensors is not None:
            logprobs.append((np.arange(num_requests) if whole else chosen, sampled.logprobs_tensors))
        columns.append(column)
        step_into(trees.token, trees.parent, trees.starts, places, column, active)
        if not active.any():
            break
        for request in np.flatnonzero(active):
            outputs[request].append(int(column[request]))
        if thinking is not None:
            # Requests with a thinking budget have no tree: their only row was the first.
            metadata = replace(metadata, thinking_budget_state_holder=None)
        if stateful:
            for processor in metadata.logitsprocs.all:
                processor.update_state(None)
    for output, length in zip(outputs, original_lengths, strict=True):
        del output[length:]
    token_ids = torch.from_numpy(np.stack(columns, axis=1).astype(np.int32))
    return SamplerOutput(token_ids, _stack_logprobs(logprobs, num_requests, len(columns))), places


def _takes_the_best(metadata: SamplingMetadata) -> bool:
    """Whether all that is asked for is each row's best token: then one pass over all rows will do.

    Logits processors are not looked at: without ``stateful`` none of them has anything to say.
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


def _metadata_of(metadata: SamplingMetadata, chosen: np.ndarray, whole: bool, num_requests: int) -> SamplingMetadata:
    """Sampling metadata for the requests whose walk goes on."""
    if len(chosen) == num_requests:
        return metadata
    if whole:
        # Rows of ended walks are sampled again and ignored; their generators must not be touched.
        going = set(chosen.tolist())
        return replace(metadata, generators={i: g for i, g in metadata.generators.items() if i in going})
    index = torch.from_numpy(chosen)
    new_row = {int(old): new for new, old in enumerate(chosen)}

    def pick(tensor):
        return None if tensor is None else tensor[index]

    def remap(by_request):
        return {new_row[i]: value for i, value in by_request.items() if i in new_row}

    return replace(
        metadata,
        temperature=pick(metadata.temperature),
        top_p=pick(metadata.top_p),
        top_k=pick(metadata.top_k),
        generators=remap(metadata.generators),
        prompt_token_ids=pick(metadata.prompt_token_ids),
        frequency_penalties=_pick_rows(metadata.frequency_penalties, index),
        presence_penalties=_pick_rows(metadata.presence_penalties, index),
        repetition_penalties=_pick_rows(metadata.repetition_penalties, index),
        output_token_ids=[metadata.output_token_ids[i] for i in chosen] if metadata.output_token_ids else [],
        allowed_token_ids_mask=pick(metadata.allowed_token_ids_mask),
        bad_words_token_ids=remap(metadata.bad_words_token_ids),
        logprob_token_ids=remap(metadata.logprob_token_ids) if metadata.logprob_token_ids else None,
        spec_token_ids=None,
    )


def _pick_rows(tensor, index):
    # Without penalties in the batch vLLM leaves these at whatever length they have; they are not read then.
    return tensor if tensor is None or len(tensor) <= int(index.max()) else tensor[index]


def _stack_logprobs(parts, num_requests: int, depth: int) -> LogprobsTensors | None:
    """Lay the logprobs of each depth out as [num_requests * depth, ...], request by request."""
    if not parts:
        return None
    widest = max(range(len(parts)), key=lambda i: parts[i][1].logprobs.shape[-1])

    def lay_out(name):
        sample = getattr(parts[widest][1], name)
        if sample.numel() == 0:
            return sample
        result = sample.new_zeros((num_requests, depth, *sample.shape[1:]))
        for level, (requests, tensors) in enumerate(parts):
            values = getattr(tensors, name)
            if values.dim() == 1:
                result[torch.from_numpy(requests), level] = values
            else:
                result[torch.from_numpy(requests), level, : values.shape[-1]] = values
        return result.flatten(0, 1)

    return LogprobsTensors(*(lay_out(name) for name in ("logprob_token_ids", "logprobs", "selected_token_ranks")))
