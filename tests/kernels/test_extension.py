"""With and without the compiled extension: the same answers, and never vLLM."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_gsd.ops import HAVE_EXTENSION

PROGRAM = """
import sys
if {why!r} == "missing":
    sys.modules["vllm_gsd._C"] = None  # importing it now fails
sys.path.insert(0, {folder!r})
import torch
from tree_cases import plain, tree_case
from vllm_gsd import ops
from vllm_gsd.ops.kv_move.cpu import move_kv
from vllm_gsd.ops.state_rows.api import read_rows
from vllm_gsd.ops.topk.api import argmax_of_walks, topk_softmax
from vllm_gsd.ops.attention.cpu import tree_attention, tree_attention_reference

assert not ({why!r} and ops.HAVE_EXTENSION)
case = tree_case()
torch.testing.assert_close(case.run(tree_attention), case.run(tree_attention_reference))
kv_cache = torch.arange(64.0).view(1, 1, 4, 16)
move_kv([kv_cache], plain(4, 8), torch.tensor([3]), torch.tensor([0]))
assert kv_cache[0, 0, 0, 0] == 24
assert topk_softmax(torch.tensor([[0.0, 1.0]]), 1)[1].tolist() == [[1]]
walk = torch.tensor([0]), torch.tensor([-1], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
assert argmax_of_walks(torch.tensor([[0.0, 1.0]]), *walk).tolist() == [1]
assert read_rows(torch.tensor([[0.0], [1.0]]), torch.tensor([1])).tolist() == [[1.0]]
assert not any(name == "vllm" or name.startswith("vllm.") for name in sys.modules), "vLLM was imported"
"""


@pytest.mark.parametrize("why", ["", "missing", "off"])
def test_ops_work(why):
    """With the extension, and without it for a reason."""
    program = PROGRAM.format(why=why, folder=str(Path(__file__).parent))
    environment = {**os.environ, "VLLM_GSD_NO_EXTENSION": "1" if why == "off" else ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_was_to_be_built_is_there():
    """Else every test of a kernel would be skipped, or would test the code that stands in for it."""
    if os.environ.get("VLLM_GSD_NO_EXTENSION") == "1":
        pytest.skip("VLLM_GSD_NO_EXTENSION=1 asks for no compiled kernels")
    assert HAVE_EXTENSION, "vllm_gsd._C is missing or does not load; run scripts/setup"
    assert importlib.util.find_spec("vllm_gsd._core"), "vllm_gsd._core is missing; run scripts/setup"
