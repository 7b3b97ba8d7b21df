"""A kernel that gets no memory raises; its threads must not end the process."""

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_gsd.ops import HAVE_EXTENSION

# Threads are there and small calls have been made when the limit comes. What a call gives back is made before it, so
# that scratch is all that it has to allocate; no list of the system's allocator holds a piece that large.
PROGRAM = """
import resource, sys
sys.path.insert(0, {folder!r})
import torch
from tree_cases import plain, tree_case
from vllm_gsd.ops.kv_move.cpu import move_kv
from vllm_gsd.ops.topk.api import topk_softmax
from vllm_gsd.ops.attention.cpu import tree_attention

def attend(case):
    output = torch.zeros_like(case.query)
    return lambda: tree_attention(output, case.query, case.kv_cache, case.layout, case.rows, case.scale)

def move(slots):
    caches = [torch.zeros(slots // 16, 2, 16, 256) for _ in range(4)]
    layout, sources = plain(16, 128), torch.arange(slots)
    return lambda: move_kv(caches, layout, sources, sources.flip(0))

def top(width):
    logits = torch.zeros(1, width)
    return lambda: topk_softmax(logits, 256)

torch.set_num_threads(4)
kind, sizes = {{"tree_attention": (attend, [tree_case(rows=(9,)), tree_case(rows=(200,), prefixes=(900,), words=4,
                                                                     head_size=8192, kv_heads=2, num_heads=8)]),
               "move_kv": (move, [16, 1 << 14]), "topk_softmax": (top, [256, 1 << 24])}}[{op!r}]
small, large = map(kind, sizes)
small()
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 16), resource.RLIM_INFINITY))
try:
    large()
    print("it had memory")
except (MemoryError, RuntimeError) as error:
    print("raised:", error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
large()
print("done")
"""


@pytest.mark.skipif(not HAVE_EXTENSION or sys.platform != "linux", reason="needs the kernels, and Linux's limits")
@pytest.mark.parametrize("op", ["tree_attention", "move_kv", "topk_softmax"])
def test_raises(op):
    program = PROGRAM.format(op=op, folder=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("raised:") and done.stdout.endswith("done\n"), done.stdout
