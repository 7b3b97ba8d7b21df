"""Applies the changes of the inventory when the plugin is loaded: all of them, or none."""

import importlib
import logging
import multiprocessing
from collections.abc import Callable
from typing import Any

from vllm_gsd.config import GSDConfigError
from vllm_gsd.upstream import refusal
from vllm_gsd.upstream.inventory import SUPPORTED_VLLM, patches
from vllm_gsd.upstream.patch import Patch, When
from vllm_gsd.upstream.patching import Replacement, installed_vllm, prepare, refusal_of
from vllm_gsd.upstream.symbols import problem_with

logger = logging.getLogger("vllm.gsd")


def install() -> None:
    """Teach vLLM ``"method": "gsd"``, or make vLLM reject it if the installed version lacks a symbol that we wrap."""
    replacements: list[Replacement] = []
    for patch in patches("load"):
        problem = problem_with(patch)
        if problem is None:
            try:
                replacements.append(prepare(patch, _maker(patch)))
            except Exception as error:  # another symbol that the replacement uses is missing
                problem = f"has a {patch.dotted} that cannot be replaced ({type(error).__name__}: {error})"
        if problem is not None:
            _stay_out(problem)
            return
    for replacement in replacements:
        replacement.apply()


def check_engine_symbols(*when: When) -> None:
    """Check, before a model is loaded, that every symbol exists that an engine with gsd will replace.

    The values ``when`` of ``Patch.when`` apply in addition to "engine".

    Raises:
        GSDConfigError: names the missing symbol, the installed vLLM version and the supported versions.
    """
    for patch in patches("engine", *when):
        if (problem := problem_with(patch, load=False)) is not None:
            raise GSDConfigError(refusal_of(problem))


def _stay_out(problem: str) -> None:
    if multiprocessing.parent_process() is None:  # one process reports it for all
        logger.warning(
            "gsd is off, because %s %s; this vllm-gsd supports vLLM %s. vLLM itself works as usual.",
            installed_vllm(),
            problem,
            SUPPORTED_VLLM,
        )
    refusal.install(refusal_of(problem))


def _maker(patch: Patch) -> Callable[[Any], Any]:
    module, _, name = patch.by.split()[0].partition(".")
    maker: Callable[[Any], Any] = getattr(importlib.import_module(f"vllm_gsd.upstream.{module}"), name)
    return maker
