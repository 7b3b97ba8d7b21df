"""Imported only by the process from which V2 engines are forked."""

import interpreter

interpreter.enable()

from vllm.v1.sample.ops import topk_topp_sampler  # noqa: E402

# This kernel cannot be interpreted, because it calls a method on the loop variable of tl.range, which is a Python
# integer in the interpreter. Without the kernel, vLLM computes the same in PyTorch.
topk_topp_sampler.HAS_TRITON = False
