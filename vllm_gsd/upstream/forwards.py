"""Looks on while a V1 model runner of this process runs its target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def watch(runner: Any, begun: Callable[[], None], forward: Callable[..., None], done: Callable[..., None]) -> bool:
    """Call what is given at every step, until :func:`unwatch`.

    Args:
        begun: before a step.
        forward: with the positions and the hidden states of a forward.
        done: with the step's ``SchedulerOutput``.

    Returns:
        False where the runner has no such method to look at.
    """
    if not hasattr(runner, "_model_forward"):
        return False
    upstream_forward, upstream_execute = runner._model_forward, runner.execute_model

    def model_forward(*args, **kwargs):
        output = upstream_forward(*args, **kwargs)
        forward(kwargs["positions"] if "positions" in kwargs else args[1], output)
        return output

    def execute_model(scheduler_output, *args, **kwargs):
        begun()
        result = upstream_execute(scheduler_output, *args, **kwargs)
        done(scheduler_output)
        return result

    runner._model_forward, runner.execute_model = model_forward, execute_model
    return True


def unwatch(runner: Any) -> None:
    """Let the runner's class have its methods again."""
    del runner._model_forward, runner.execute_model
