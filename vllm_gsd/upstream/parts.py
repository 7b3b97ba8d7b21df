"""Wraps the parts of a step on the live objects of an engine of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Function = Callable[..., Any]

# Methods of vLLM's scheduler and V1 model runner, and the parts of a step that they are.
SCHEDULER = ("schedule", "update_from_output", "get_grammar_bitmask", "update_draft_token_ids")
RUNNER = {
    "_model_forward": "target forward",
    "propose_draft_token_ids": "draft",
    "_sample": "walk",
    "_compact": "compaction",  # ours
}
# Of our own draft model; upstream's proposers are "draft" as a whole.
DRAFT = ("_call", "most_probable")


def runner_of(llm: Any) -> Any:
    """An engine's model runner; None where it is in another process."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    worker = getattr(getattr(core, "model_executor", None), "driver_worker", None)
    return getattr(getattr(worker, "worker", None), "model_runner", None)


def wrap_parts(llm: Any, wrapper: Callable[[Function, str, str], Function]) -> bool:
    """Put ``wrapper(method, its name, its part)`` in the place of every method that is a part of a step.

    Returns:
        False where they run in other processes.
    """
    runner = runner_of(llm)
    if runner is None:
        return False
    for owner, name, part in _methods(llm, runner):
        method = getattr(owner, name, None)
        if method is not None:  # else this engine's step has no such part
            setattr(owner, name, wrapper(method, name, part))
    return True


def _methods(llm: Any, runner: Any) -> Iterator[tuple[Any, str, str]]:
    yield llm.llm_engine, "step", "other"
    for name in SCHEDULER:
        yield llm.llm_engine.engine_core.engine_core.scheduler, name, "scheduler"
    for name, part in RUNNER.items():
        yield runner, name, part
    yield runner.model, "compute_logits", "target forward"
    draft_model = getattr(getattr(getattr(runner, "drafter", None), "drafter", None), "model", None)
    for name in DRAFT:
        yield draft_model, name, "draft forward"
    for layer in runner.compilation_config.static_forward_context.values():
        yield getattr(layer, "impl", None), "forward", "attention"
