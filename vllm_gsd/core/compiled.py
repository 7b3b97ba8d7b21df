"""What makes the core's loops fast: their twins in C++ (``kernels/cpu/core``), or numba where those are not built.

Both do the same to the last bit (``tests/unit/test_core_twins.py``): on the ranks of one engine they may meet. The
twins are preferred because numba takes some 120 MiB of memory, and seconds of the first start.
"""

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

# As in kernels/cpu/core/module.cpp: to be raised in both when a function comes, goes, or takes something else.
INTERFACE = 4
_EXTENSION = "vllm_gsd._core"


def _load_twins() -> ModuleType | None:
    """The extension; None where there is none, loudly if it should have worked."""
    if os.environ.get("VLLM_GSD_NO_EXTENSION") == "1" or importlib.util.find_spec(_EXTENSION) is None:
        return None
    try:
        twins = importlib.import_module(_EXTENSION)
        if twins.INTERFACE != INTERFACE:
            raise ImportError(f"it was built from other sources: interface {twins.INTERFACE}, not {INTERFACE}")
    except ImportError as error:
        logging.getLogger(__name__).warning(
            "vllm_gsd: the compiled core does not load (%s); numba is used instead", error
        )
        return None
    return twins


_TWINS = _load_twins()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function's twin, the function of its name in the extension; without the extension, compiled by numba."""
    return _by_numba(function) if _TWINS is None else getattr(_TWINS, function.__name__)


def compiled_helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that only compiled ones call: beside their twins it needs none, and is left as it is."""
    return _by_numba(function) if _TWINS is None else function


def _by_numba(function: Callable[..., Any]) -> Callable[..., Any]:
    import numba

    return numba.njit(cache=True)(function)
