"""Commands that take their options from a dataclass."""

import functools
import inspect
import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import typer


def flag(name: str) -> str:
    """How a user writes an option."""
    return "--" + name.replace("_", "-")


def finite(value: float | None) -> float | None:
    """The callback of an option that may be neither infinite nor nan, which its bounds let pass."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number.")
    return value


def positive(value: float | None) -> float | None:
    """The callback of an option that must be a finite number above 0."""
    if (value := finite(value)) is not None and value <= 0:
        raise typer.BadParameter(f"{value:g} is not above 0.")
    return value


def takes(options: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the fields of a dataclass to a command as options. It receives them as keyword arguments.

    The types of the fields are ``Annotated[..., typer.Option(...)]``.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        both = chain.from_iterable(
            inspect.signature(one, eval_str=True).parameters.values() for one in (command, options)
        )
        parameters = [one.replace(kind=one.KEYWORD_ONLY) for one in both if one.kind is not one.VAR_KEYWORD]

        @functools.wraps(command)
        def with_options(**given: Any) -> None:
            command(**given)

        # Typer reads both.
        with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {one.name: one.annotation for one in parameters}
        return with_options

    return decorate
