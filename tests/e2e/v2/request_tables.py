"""Ends requests in various ways, and reports the sizes of our tables; functions run in the engine's process."""

from engine_process import Params, model_runner, scheduler

PARAMS = {"temperature": 0, "max_tokens": 14, "ignore_eos": True}


def end_requests(llm, prompts, how: str) -> int:
    """Run prompts with a cache salt until all requests have ended.

    Args:
        how: "finish" lets them finish. "abort" aborts all after three steps. "preempt" also lets them finish, in an
            engine with too few blocks, which preempts and resumes them. "preempt and abort" aborts preempted requests.

    Returns:
        The number of requests that were preempted.
    """
    from vllm.v1.request import RequestStatus

    engine, seen, steps = llm.llm_engine, set(), 0
    for index, prompt in enumerate(prompts):
        engine.add_request(f"r{index}", {"prompt_token_ids": prompt, "cache_salt": "mine"}, Params(PARAMS).build())
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
        requests = scheduler(llm).requests
        preempted = {name for name, request in requests.items() if request.status == RequestStatus.PREEMPTED}
        seen |= preempted
        ended = preempted if how == "preempt and abort" else set(requests) if how == "abort" and steps == 3 else set()
        if ended:
            engine.abort_request([name.split("-")[0] for name in ended])
    engine.step()  # tells the worker which requests ended last
    return len(seen)


def tables(llm) -> dict[str, int]:
    """Sizes of all tables that have an entry for each request."""
    speculator = model_runner(llm).speculator
    speculation = speculator.speculation
    return {
        "requests": len(speculator.requests),
        "slots": len(speculator.slots),
        "parents": len(speculator.parents),
        "late": len(speculator.late.queue),
        "salts": sum(map(len, speculation.copies.tables())),
        "trees": len(speculation.trees),
        "known": len(speculation.admitted),
        "trust": len(speculation.trust.seen),
        "draft_kv_blocks": len(speculation.draft_kv.blocks),
        "draft_kv_length": len(speculation.draft_kv.length),
        "draft_kv_shared": len(speculation.draft_kv.shared),
        "kept": len(scheduler(llm).kept),
    }
