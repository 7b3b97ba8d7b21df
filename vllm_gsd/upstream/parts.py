"""Wraps the methods that make up a step on the live objects of an engine in this process."""

from collections.abc import Callable, Iterator
from typing import Any

Function = Callable[..., Any]

# Methods of vLLM's scheduler and V1 model runner, and the part of a step that each belongs to.
SCHEDULER = ("schedule", "update_from_output", "get_grammar_bitmask", "update_draft_token_ids")
RUNNER = {
    "_model_forward": "target forward",
    "propose_draft_token_ids": "draft",
    "_sample": "walk",
    "_compact": "compaction",  # a method of our model runner
}
# Methods of our draft model. Upstream's proposers are timed as a whole, as "draft".
DRAFT = ("_call", "most_probable")


def runner_of(llm: Any) -> Any:
    """The model runner of an ``LLM``, or None if it runs in another process."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    worker = getattr(getattr(core, "model_executor", None), "driver_worker", None)
    return getattr(getattr(worker, "worker", None), "model_runner", None)


def wrap_parts(llm: Any, wrapper: Callable[[Function, str, str], Function]) -> bool:
    """Replace every method of a step with ``wrapper(method, method name, part of the step)``.

    Returns:
        False if the engine runs in other processes or on Model Runner V2; nothing is replaced then.
    """
    runner = runner_of(llm)
    if runner is None or not hasattr(runner, "_model_forward"):  # V2's has other methods
        return False
    for owner, name, part in _methods(llm, runner):
        method = getattr(owner, name, None)
        if method is not None:  # not every engine has every part
            setattr(owner, name, wrapper(method, name, part))
    return True


def _methods(llm: Any, runner: Any) -> Iterator[tuple[Any, str, str]]:
    yield llm.llm_engine, "step", "other"
    for name in SCHEDULER:
        yield llm.llm_engine.engine_core.engine_core.scheduler, name, "scheduler"
    for name, part in RUNNER.items():
        yield runner, name, part
    yield runner.model, "compute_logits", "target forward"
    speculation = getattr(getattr(runner, "drafter", None), "speculation", None)  # upstream's proposers have none
    if speculation is not None and speculation.drafter is not None:
        for name in DRAFT:
            yield speculation.drafter.model, name, "draft forward"
    for layer in runner.compilation_config.static_forward_context.values():
        yield getattr(layer, "impl", None), "forward", "attention"
