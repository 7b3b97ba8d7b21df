"""Replaces symbols of the inventory, temporarily or permanently."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import getattr_static
from typing import Any, NamedTuple

from vllm_gsd.config import GSDConfigError
from vllm_gsd.upstream.inventory import SUPPORTED_VLLM, patch_of
from vllm_gsd.upstream.patch import Patch
from vllm_gsd.upstream.symbols import owner_of, problem_with


class Replacement(NamedTuple):
    """A symbol's location, its original value and its replacement."""

    owner: Any
    name: str
    before: Any
    after: Any

    def apply(self) -> None:
        setattr(self.owner, self.name, self.after)

    def undo(self) -> None:
        setattr(self.owner, self.name, self.before)


def prepare(patch: Patch, make: Callable[[Any], Any]) -> Replacement:
    """Create the replacement of a symbol, which ``make`` returns for the original, without applying it."""
    owner, name = owner_of(patch)
    before = getattr_static(owner, name)
    return Replacement(owner, name, before, make(before if isinstance(before, property) else getattr(owner, name)))


def replace(symbol: str, make: Callable[[Any], Any]) -> Replacement:
    """Replace an upstream symbol, given as in the inventory; ``make`` as in :func:`prepare`.

    Raises:
        GSDConfigError: the installed vLLM has no such symbol.
        KeyError: the inventory has no such symbol.
    """
    patch = patch_of(symbol)
    if (problem := problem_with(patch)) is not None:
        raise GSDConfigError(refusal_of(problem))
    replacement = prepare(patch, make)
    replacement.apply()
    return replacement


@contextmanager
def replaced(symbol: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Like :func:`replace`, but restore the original when the context ends."""
    replacement = replace(symbol, make)
    try:
        yield
    finally:
        replacement.undo()


def refusal_of(problem: str) -> str:
    """The error message for a request for gsd, given the result of ``symbols.problem_with``."""
    return (
        f'"method": "gsd" cannot be served, because {installed_vllm()} {problem}; '
        f"install vLLM {SUPPORTED_VLLM}, which this vllm-gsd supports."
    )


def installed_vllm() -> str:
    """The name and version of the installed vLLM, for messages."""
    import vllm

    return f"vLLM {getattr(vllm, '__version__', 'of an unknown version')}"
