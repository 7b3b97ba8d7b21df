"""The command ``vllm`` with Model Runner V2 interpreted on the CPU. Its processes are forked from this one."""

import sys

import preload_v2  # noqa: F401  (before vLLM is imported)
from forking import run

if __name__ == "__main__":
    run(sys.argv[1:])
