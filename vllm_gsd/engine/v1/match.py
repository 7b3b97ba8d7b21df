"""Match the scheduled draft tokens with the proposed trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_gsd.engine.verify.draft_tree import FlatTree
from vllm_gsd.engine.verify.step import VerifyStep, lay_out
from vllm_gsd.upstream import wire

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_gsd.engine.v1.model_runner import GraphModelRunner


def match_step(runner: GraphModelRunner, scheduler_output: SchedulerOutput) -> VerifyStep:
    """Match the scheduled draft tokens with the proposed trees, and lay the trees out.

    The scheduler may cut a tree's list of tokens. If the scheduled tokens are not a prefix of the request's tree, only
    its root is sampled.
    """
    scheduled = scheduler_output.scheduled_spec_decode_tokens
    kept = wire.kept_of(scheduler_output)
    request_ids = runner.input_batch.req_ids
    num_requests = len(request_ids)
    sizes = np.ones(num_requests, np.int64)
    matched: list[FlatTree | None] = [None] * num_requests
    for index, request_id in enumerate(request_ids):
        tokens = scheduled.get(request_id)
        if not tokens:
            continue
        sizes[index] += len(tokens)
        tree = runner.speculation.trees.get(request_id)
        if tree is not None and request_id in kept:
            tree = tree.select(kept[request_id])
        if tree is not None and tree.drafts[: len(tokens)] == tokens:
            matched[index] = tree
    batch_ends = runner.query_start_loc.np[1 : num_requests + 1].astype(np.int64)
    step = lay_out(matched, sizes, batch_ends)
    if runner.masks_chains:  # lone rows too: another kernel would give them other bits
        step.batch_starts = runner.query_start_loc.np[: num_requests + 1].astype(np.int32)
    return step
