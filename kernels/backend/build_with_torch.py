"""The build backend: setuptools' own, with the torch that will load the kernels.

Compiled code fits one release of torch only. pip builds in an isolated environment, which hides the torch of the
environment that it installs into. This backend makes that torch visible. If there is none, the build requires vLLM's.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

TORCH = "torch==2.13.0"  # of vLLM 0.32; a build for another device (+cpu, +cu130) has the same interface
# Printed by a Python that sees what is installed: where it looks for modules, or nothing if torch is not among them.
_LOOK = "import importlib.util, json, sys; print(json.dumps(sys.path if importlib.util.find_spec('torch') else []))"
_PIPS_OWN = ("PYTHONPATH", "PYTHONNOUSERSITE")  # how pip hides what is installed


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """What setuptools requires, and torch if none is installed."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_torch_to_install()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """What setuptools requires, and torch if none is installed."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *_torch_to_install()]


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Build with the installed torch if there is one."""
    with _installed_in_sight():
        return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Build with the installed torch if there is one."""
    with _installed_in_sight():
        return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)


def _torch_to_install() -> list[str]:
    without = os.environ.get("VLLM_GSD_NO_EXTENSION") == "1"
    return [] if without or _folders_with_torch() else [TORCH]


@contextmanager
def _installed_in_sight() -> Iterator[None]:
    """Let modules of the environment that is installed into be imported, after those that the build requires."""
    before = list(sys.path)
    sys.path.extend(folder for folder in _folders_with_torch() if folder not in before)
    try:
        yield
    finally:
        sys.path[:] = before


def _folders_with_torch() -> list[str]:
    """``sys.path`` of the environment that is installed into, empty if it has no torch."""
    environment = {name: value for name, value in os.environ.items() if name not in _PIPS_OWN}
    done = subprocess.run(
        [sys.executable, "-P", "-c", _LOOK], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)
