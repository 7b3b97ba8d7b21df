"""Which of the scheduled draft tokens are a graph of ours."""

import numpy as np

from vllm_gsd.engine.verify.draft_tree import DraftTree
from vllm_gsd.engine.verify.step import VerifyStep, lay_out
from vllm_gsd.upstream import wire


def plan_step(runner, scheduler_output, proposed: dict[str, DraftTree]) -> VerifyStep:
    """Match the scheduled draft tokens with the graphs that were proposed.

    The scheduler may have cut a list; it may also hold tokens that are not ours (placeholders for a request that
    resumes). A list that is not a prefix of the request's graph is verified as nothing: only its root is sampled.
    """
    scheduled = scheduler_output.scheduled_spec_decode_tokens
    kept = wire.kept_of(scheduler_output)
    request_ids = runner.input_batch.req_ids
    num_requests = len(request_ids)
    sizes = np.ones(num_requests, np.int64)
    matched: list[DraftTree | None] = [None] * num_requests
    has_placeholders = False
    for index, request_id in enumerate(request_ids):
        tokens = scheduled.get(request_id)
        if not tokens:
            continue
        sizes[index] += len(tokens)
        tree = proposed.get(request_id)
        if tree is not None and request_id in kept:
            tree = tree.select(kept[request_id])
        if tree is not None and tree.token[: len(tokens)].tolist() == tokens:
            matched[index] = tree
        else:
            has_placeholders = has_placeholders or min(tokens) < 0
    batch_ends = runner.query_start_loc.np[1 : num_requests + 1].astype(np.int64)
    step = lay_out(matched, sizes, batch_ends)
    step.has_placeholders = has_placeholders
    if runner.masks_chains:  # lone rows too: by another kernel they would be other bits
        step.mask_all(runner.query_start_loc.np[: num_requests + 1].astype(np.int32))
    return step
