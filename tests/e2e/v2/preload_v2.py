"""Imported by nothing but the process that V2 engines are forked from."""

import interpreter

interpreter.enable()

import engine_process  # noqa: E402, F401  (imports vLLM there)
from vllm.v1.sample.ops import topk_topp_sampler  # noqa: E402

# This one kernel cannot be interpreted: it calls a method on the loop variable of tl.range, which is a Python integer
# there. Without it vLLM computes the same in PyTorch.
topk_topp_sampler.HAS_TRITON = False
