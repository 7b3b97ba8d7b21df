"""Observes the forward passes of a V1 model runner in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


def watch(runner: Any, begun: Callable[[], None], forward: Callable[..., Any], done: Callable[..., None]) -> bool:
    """Call the given functions at every step until :func:`unwatch`.

    Args:
        begun: called before a step.
        forward: called after each forward pass with its positions and the model's output. The runner gets what it
            returns.
        done: called after a step with its ``SchedulerOutput``.

    Returns:
        False if the runner is not a V1 runner and cannot be observed.
    """
    if not hasattr(runner, "_model_forward"):
        return False
    upstream_forward, upstream_execute = runner._model_forward, runner.execute_model

    def model_forward(*args: Any, **kwargs: Any) -> Any:
        output = upstream_forward(*args, **kwargs)
        return forward(kwargs["positions"] if "positions" in kwargs else args[1], output)

    def execute_model(scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        begun()
        result = upstream_execute(scheduler_output, *args, **kwargs)
        done(scheduler_output)
        return result

    runner._model_forward, runner.execute_model = model_forward, execute_model
    return True


def unwatch(runner: Any) -> None:
    """Restore the methods of the runner's class."""
    del runner._model_forward, runner.execute_model
