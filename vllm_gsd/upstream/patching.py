"""Replaces what the inventory names, for a while or for good."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import getattr_static
from typing import Any, NamedTuple

from vllm_gsd.config import GSDConfigError
from vllm_gsd.upstream.inventory import SUPPORTED_VLLM, Patch, patch_of
from vllm_gsd.upstream.symbols import owner_of, problem_with


class Replacement(NamedTuple):
    """What is to stand in the place of a symbol, and what stood there."""

    owner: Any
    name: str
    before: Any
    after: Any

    def apply(self) -> None:
        setattr(self.owner, self.name, self.after)

    def undo(self) -> None:
        setattr(self.owner, self.name, self.before)


def prepare(patch: Patch, make: Callable[[Any], Any]) -> Replacement:
    """Make what is to stand in the place of a symbol.

    Args:
        make: takes what stands there (a function that can be called, or a property) and returns what is to.
    """
    owner, name = owner_of(patch)
    before = getattr_static(owner, name)
    return Replacement(owner, name, before, make(before if isinstance(before, property) else getattr(owner, name)))


def replace(symbol: str, make: Callable[[Any], Any]) -> Replacement:
    """Put something of ours in the place of an upstream symbol.

    Args:
        symbol: of the inventory.
        make: of :func:`prepare`.

    Raises:
        GSDConfigError: the installed vLLM has no such symbol.
    """
    patch = patch_of(symbol)
    if (problem := problem_with(patch)) is not None:
        raise GSDConfigError(refusal_of(problem))
    replacement = prepare(patch, make)
    replacement.apply()
    return replacement


@contextmanager
def replaced(symbol: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """See :func:`replace`; in the end everything is as it was."""
    replacement = replace(symbol, make)
    try:
        yield
    finally:
        replacement.undo()


def refusal_of(problem: str) -> str:
    """The sentence for whoever asks for gsd, where a symbol is missing.

    Args:
        problem: of ``symbols.problem_with``.
    """
    return (
        f'"method": "gsd" cannot be served, because {installed_vllm()} {problem}; '
        f"install vLLM {SUPPORTED_VLLM}, which this vllm-gsd supports."
    )


def installed_vllm() -> str:
    """Its name and version."""
    import vllm

    return f"vLLM {getattr(vllm, '__version__', 'of an unknown version')}"
