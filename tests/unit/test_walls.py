"""``scripts/check_walls.py`` finds code outside ``upstream/`` that changes vLLM or its libraries."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from check_walls import LIBRARIES, foreign_imports, main, violations  # noqa: E402

PLANTED = {
    "a module's function": "from vllm.v1.worker import cpu_worker\ncpu_worker.CPUModelRunner = object\n",
    "a module by its path": "import vllm.distributed.parallel_state\nvllm.distributed.parallel_state._TP = None\n",
    "a class's method": "from vllm.engine.arg_utils import EngineArgs\nEngineArgs.add_cli_args = staticmethod(print)\n",
    "a module of the standard library": "import sys\ndef f():\n    sys.excepthook = print\n",
    "an element": "import sys\nsys.modules['vllm'] = None\n",
    "setattr": "from ray import util\nsetattr(util, 'a', 1)\n",
    "delattr": "def f(runner):\n    delattr(runner, 'execute_model')\n",
    "a parameter": "def f(layer):\n    layer.weight = 1\n",
    "a parameter's part": "def f(vllm_config):\n    vllm_config.scheduler_config.scheduler_cls = 'x'\n",
    "a parameter under another name": "def f(worker):\n    runner = worker.model_runner\n    runner.x = 1\n",
    "a record": "def f(vllm_config):\n    vllm_config.additional_config['a'] = 1\n",
    "del": "def f(runner):\n    del runner.execute_model\n",
    "in place": "def f(stats):\n    stats.num_draft_tokens += 1\n",
    "unpacked": "def f(layer):\n    a, layer.weight = 1, 2\n",
    "a loop": "def f(layers):\n    for layer in layers:\n        layer.weight = 1\n",
    "a function's value": "from vllm.model_loader import get_model\nm = get_model()\nm.x = 1\n",
    "getattr": "import vllm\ndef f():\n    getattr(vllm, 'envs').X = 1\n",
    "what a class inherits": "from vllm import R\nclass C(R):\n    def f(self):\n        self.model_state.g = 1\n",
    "an attribute of theirs": "from vllm import g\nclass C:\n  def f(self):\n    self.m = g()\n    self.m.x = 1\n",
    "a registry": "from vllm.x import register_backend\nregister_backend(1, 'x')\n",
    "a hidden import": "import importlib\nimportlib.import_module('vllm_gsd.engine.draft')\n",
    "a hidden import of vLLM": "from importlib import import_module\nvllm = import_module('vllm.envs')\n",
    "the built-in import": "vllm = __import__('vllm')\n",
    "a hidden import by another name": "from importlib import import_module as load\nload('vllm.envs')\n",
    "a hidden import of a computed name": "import importlib\ndef f(a):\n    importlib.import_module(f'vllm.{a}')\n",
    "a hidden import of a constant": "import importlib\nNAME = 'vllm.envs'\nimportlib.import_module(NAME)\n",
    "a hidden object": "import pkgutil\npkgutil.resolve_name('vllm.envs:X')\n",
    "mock": "from unittest import mock\n",
    "mock by its module": "import unittest\n",
    "pytest's patches": "from pytest import MonkeyPatch\n",
    "setattr under another name": "put = setattr\ndef f(runner):\n    put(runner, 'x', 1)\n",
    "setattr of a module": "import builtins\ndef f(runner):\n    builtins.setattr(runner, 'x', 1)\n",
    "setattr in a partial": "from functools import partial\nput = partial(setattr)\n",
    "setattr imported": "from builtins import setattr as put\ndef f(runner):\n    put(runner, 'x', 1)\n",
    "setitem": "import operator, sys\noperator.setitem(sys.modules, 'vllm', None)\n",
    "a module's alias": "import vllm.envs as envs\nenvs.X = 1\n",
    "an import in a function": "def f():\n    from vllm import envs\n    envs.X = 1\n",
    "a module of sys.modules": "import sys\nsys.modules['vllm.envs'].X = 1\n",
    "__setattr__": "def f(runner):\n    object.__setattr__(runner, 'x', 1)\n",
    "__setitem__": "import sys\nsys.modules.__setitem__('vllm', None)\n",
    "__dict__": "def f(runner):\n    runner.__dict__['x'] = 1\n",
    "__dict__ in a call": "def f(runner):\n    runner.__dict__.update(x=1)\n",
    "vars": "def f(runner):\n    vars(runner)['x'] = 1\n",
    "vars in a call": "import vllm\nvars(vllm).update(x=1)\n",
    "its type": "def f(runner):\n    type(runner).execute_model = print\n",
    "its class": "def f(runner):\n    runner.__class__.execute_model = print\n",
    "a record in a call": "def f(vllm_config):\n    vllm_config.additional_config.update(a=1)\n",
    "a table": "from vllm.envs import environment_variables\nenvironment_variables.update(x=1)\n",
    "modules in a call": "import sys\nsys.modules.pop('vllm')\n",
    "a method that registers": "from vllm import ModelRegistry\nModelRegistry.register_model('x', 1)\n",
    "an asynchronous function": "async def f(runner):\n    runner.x = 1\n",
    "an asynchronous loop": "async def f(layers):\n    async for layer in layers:\n        layer.x = 1\n",
    "enumerated": "def f(layers):\n    for i, layer in enumerate(layers):\n        layer.x = i\n",
    "zipped": "def f(layers, values):\n    for layer, value in zip(layers, values):\n        layer.x = value\n",
    "chosen": "def f(runner, other):\n    (runner or other).x = 1\n    a = runner if other else None\n",
    "listed": "def f(model):\n    layers = [layer for layer in model.layers]\n    layers[0].x = 1\n",
    "unpacked from a pair": "def f(runner):\n    a, b = runner, 1\n    a.x = 1\n",
    "starred": "def f(layer):\n    a, *layer.weight = 1, 2\n",
    "a context": "from vllm import running\ndef f():\n    with running() as engine:\n        engine.x = 1\n",
    "a comprehension": "def f(layer):\n    return [0 for layer.weight in (1, 2)]\n",
    "a walrus": "def f(worker):\n    if runner := worker.model_runner:\n        runner.x = 1\n",
    "a class's path": "WORKER = 'vllm_gsd.engine.v1.worker.GraphCPUWorker'\n",
    "an attribute's name": "def f(metadata):\n    return getattr(metadata, 'gsd_tree_rows', None)\n",
    "an attribute": "def f(output):\n    return output.gsd_stats\n",
    "a request's key": "ASKING = {'gsd_trace': True}\n",
}
FINE = {
    "its own": "from vllm import R\nclass C(R):\n    def f(self):\n        self.x = 1\n        self.x.y = 2\n",
    "a class of ours": "from vllm_gsd.step import Step\ndef f(step: Step | None):\n    step.x = 1\n",
    "what we make": "from vllm_gsd.step import lay_out\ns = lay_out()\ns.x = 1\n",
    "an object that we make": "from transformers import Layer\nlayer = Layer(1)\nlayer.norm = None\n",
    "a copy": "import copy\ndef f(config):\n    config = copy.copy(config)\n    config.x = 1\n",
    "arrays": "import numpy as np\ndef f(out):\n    out[0] = 1\n    a = np.zeros(3)\n    a[1] = 2\n",
    "arrays of one's own": "import numpy\nclass C:\n  def f(self):\n    self.a = numpy.zeros(3)\n    self.a[0] = 1\n",
    "a class of the module": "class C:\n    idle = False\nC.idle = True\n",
    "a compiled module": "import importlib\ncore = importlib.import_module('vllm_gsd._core')\n",
    "its own attributes": "class C:\n  def f(self):\n    vars(self).update(x=1)\n    setattr(self, 'x', 1)\n",
    "the attributes of ours": "from vllm_gsd.method import constants\nnames = vars(constants)\n",
    "a compiled module by a constant": "import importlib\nCORE = 'vllm_gsd._core'\nimportlib.import_module(CORE)\n",
    "any compiled module": "import importlib\ndef f(name):\n    importlib.import_module(f'vllm_gsd._{name}')\n",
    "a container of ours": "def f(layers):\n    found = []\n    found.append(layers[0])\n    found[0] = 1\n",
    "logging": "import logging\nlogger = logging.getLogger('vllm_gsd.tools.models')\n",
}


def test_the_package_keeps_to_it():
    done = subprocess.run([sys.executable, ROOT / "scripts/check_walls.py"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_violation_is_found(case):
    assert violations(PLANTED[case]), case


@pytest.mark.parametrize("case", FINE)
def test_what_is_ours_may_be_changed(case):
    assert not violations(FINE[case]), case


@pytest.mark.parametrize(
    "source",
    [
        "import torch\n",
        "from scipy.stats import norm\n",
        "def f():\n    import vllm.envs\n",
        "def f():\n    from ray import util\n",
    ],
)
def test_the_specification_may_import_numpy_only(source, tmp_path, capsys):
    assert foreign_imports(source, LIBRARIES["method"])
    assert not foreign_imports("import heapq\nimport numpy as np\nfrom vllm_gsd.method import graph\n", {"numpy"})
    (tmp_path / "vllm_gsd/method").mkdir(parents=True)
    (tmp_path / "vllm_gsd/method/graph.py").write_text(source)
    assert main(tmp_path) == 1
    assert "which this package must not need" in capsys.readouterr().out


def test_a_violation_fails_the_check_but_in_upstream(tmp_path, capsys):
    for folder, expected in (("upstream", 0), ("engine", 1)):
        (tmp_path / "vllm_gsd" / folder).mkdir(parents=True)
        (tmp_path / "vllm_gsd" / folder / "patch.py").write_text("import vllm\n\nvllm.x = 1\n")
        assert main(tmp_path) == expected
    assert capsys.readouterr().out.startswith("vllm_gsd/engine/patch.py:3: vllm.x = ...")


def test_files_and_functions_are_short():
    for file in (ROOT / "vllm_gsd").rglob("*.py"):
        source = file.read_text("utf-8")
        assert source.count("\n") < 500, file
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno + 1 < 60, (file, node.name)
