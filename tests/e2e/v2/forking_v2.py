"""Runs a program that starts engines, such as ``vllm``, with an interpreted Model Runner V2.

Usage: ``forking_v2.py PROGRAM ...``. The program's processes are forked from this one.
"""

import sys

import preload_v2  # noqa: F401  (before vLLM is imported)
from forking import run
from interpreter import leave_costs_out

leave_costs_out()

if __name__ == "__main__":
    run(sys.argv[1:])
