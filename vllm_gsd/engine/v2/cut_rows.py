"""Drops the rows of nodes that a plan leaves out, from copies of what the scheduler sends."""

import copy
from collections.abc import Callable

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

from vllm_gsd.upstream import structured


def cut_rows(scheduled: SchedulerOutput, share_of: Callable[[str], int]) -> SchedulerOutput:
    """Leave each request as many rows for nodes as ``share_of`` allows; the same object if all have room."""
    drafts = scheduled.scheduled_spec_decode_tokens
    # Upstream pads a prompt of one token with rows, and would return what they predict among its ``prompt_logprobs``.
    scored = {
        request.req_id
        for request in scheduled.scheduled_new_reqs
        if request.sampling_params is not None and request.sampling_params.prompt_logprobs is not None
    }
    left = {name: rows[: 0 if name in scored else share_of(name)] for name, rows in drafts.items()}
    tokens = dict(scheduled.num_scheduled_tokens)
    for request_id, rows in drafts.items():
        tokens[request_id] -= len(rows) - len(left[request_id])
    if tokens == scheduled.num_scheduled_tokens:
        return scheduled
    cut = copy.copy(scheduled)
    cut.scheduled_spec_decode_tokens = {request_id: rows for request_id, rows in left.items() if len(rows)}
    cut.num_scheduled_tokens, cut.total_num_scheduled_tokens = tokens, sum(tokens.values())
    return cut


def cut_masks(output: GrammarOutput, whole: SchedulerOutput, cut: SchedulerOutput) -> GrammarOutput:
    """The masks of the rows that are left of a step, given the step as it was scheduled and as ``cut_rows`` left it."""
    before, after = whole.scheduled_spec_decode_tokens, cut.scheduled_spec_decode_tokens
    rows = [
        (1 + len(before.get(request_id, ())), 1 + len(after.get(request_id, ())))
        for request_id in output.structured_output_request_ids
    ]
    return structured.first_masks(output, rows)
