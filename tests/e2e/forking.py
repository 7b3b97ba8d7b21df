"""Runs a Python program, a file or ``-m MODULE``, that forks where it would spawn: ``python forking.py PROGRAM ...``.

On CPUs vLLM spawns its processes, for the sake of OpenMP's threads, and each of them takes ten seconds of a processor
to import it anew; a server with two engines has eight. With one thread each, as here, they can be forked, as vLLM does
it elsewhere.
"""

import contextlib
import gc
import multiprocessing
import runpy
import sys

upstream = multiprocessing.get_context


def get_context(method: str | None = None):
    """See the standard library."""
    return upstream("fork" if method == "spawn" else method)


@contextlib.contextmanager
def frozen():
    """Leave what is made meanwhile out of all garbage collections, in this process and in those forked from it.

    From its start to its end an engine collects garbage nine times, and would look at all objects of vLLM each time.
    """
    gc.disable()
    yield
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None  # which engines call as they end
    gc.enable()


def run(arguments: list[str]) -> None:
    """Run the program that the arguments name."""
    multiprocessing.get_context = get_context
    module = arguments[0] == "-m"
    sys.argv = arguments[module:]
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    run(sys.argv[1:])
