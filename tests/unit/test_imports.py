"""Modules that must not import vLLM do not, and importing the plugin stays cheap."""

import fnmatch
import json
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_gsd.method
import vllm_gsd.ops
import vllm_gsd.planner

FREE_OF_VLLM = [
    "vllm_gsd",
    "vllm_gsd.config",
    "vllm_gsd.tools.models",
    "vllm_gsd.tools.cli.main",
    *[
        module.name
        for package in (vllm_gsd.method, vllm_gsd.planner, vllm_gsd.ops)
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
        if not module.name.endswith("triton")  # operators import their kernels when they launch them
    ],
]
REPOSITORY = Path(__file__).parents[2]
LIGHT = ["vllm_gsd", "vllm_gsd.config"]


def loaded_by(module: str) -> set[str]:
    """Top-level packages that a new interpreter has loaded after importing a module."""
    code = (
        f"import importlib, json, sys; importlib.import_module({module!r}); "
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_no_vllm_in_any_of_them_together():
    # One interpreter imports all modules. Most import torch, so one interpreter each would take a minute.
    code = "import importlib, sys\n" + "".join(f"importlib.import_module({name!r})\n" for name in FREE_OF_VLLM)
    code += "print([name for name in sys.modules if name.split('.')[0] == 'vllm'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_ops_need_torch_alone():
    """Ops run on a GPU machine with only torch. An op imports Triton when it needs it."""
    code = "import importlib, sys\n" + "".join(
        f"importlib.import_module({name!r})\n" for name in FREE_OF_VLLM if name.startswith("vllm_gsd.ops")
    )
    code += "print(sorted({'vllm', 'pydantic', 'numba', 'transformers', 'triton', 'xformers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_load_neither_vllm_nor_torch(module):
    assert not loaded_by(module) & {"vllm", "torch", "transformers", "huggingface_hub"}


@pytest.mark.parametrize(
    ("file", "planted"),
    [
        (None, ""),
        ("method/graph.py", "import torch"),
        ("planner/costs.py", "from vllm_gsd.config import GSDConfig"),
        ("ops/walk/api.py", "import vllm"),
        ("cpu/linear.py", "from vllm_gsd.engine import speculation"),
        ("engine/speculation.py", "from vllm_gsd.tools import models"),
    ],
)
def test_import_linter_finds_what_crosses_a_wall(tmp_path, file, planted):
    shutil.copytree(
        REPOSITORY / "vllm_gsd", tmp_path / "vllm_gsd", ignore=lambda _, names: fnmatch.filter(names, "data")
    )
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    if file:
        with (tmp_path / "vllm_gsd" / file).open("a") as source:
            source.write(f"\n{planted}\n")
    command = [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert (done.returncode == 0) == (file is None), done.stdout
    assert ("BROKEN" in done.stdout) == (file is not None), done.stdout
