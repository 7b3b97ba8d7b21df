"""Runs a Python program, a file or ``-m MODULE``, that forks where it would spawn: ``python forking.py PROGRAM ...``.

On CPUs vLLM spawns its processes, for the sake of OpenMP's threads, and each of them takes ten seconds of a processor
to import it anew; a server with two engines has eight. With one thread each, as here, they can be forked, as vLLM does
it elsewhere.
"""

import gc
import multiprocessing
import runpy
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).with_name("plugins")))
import waiting_ranks

upstream = multiprocessing.get_context


def get_context(method: str | None = None):
    """See the standard library."""
    return upstream("fork" if method == "spawn" else method)


def import_vllm() -> None:
    """Do what every engine does, in a process that engines are forked from."""
    gc.disable()
    import vllm.entrypoints.llm
    import vllm.model_executor.layers.quantization.online.base
    import vllm.model_executor.models.llama
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    # vLLM would start a process that imports the model's class and describes it, for ten seconds the first time.
    registry._run_in_subprocess = lambda inspect: inspect()
    if not HAS_TRITON:
        import vllm.v1.worker.cpu_worker  # noqa: F401

        # It looks for Triton's kernels in all modules, to replace them.
        current_platform.register_triton_kernel_overrides()
        type(current_platform).register_triton_kernel_overrides = lambda platform: None
    # An engine collects garbage nine times from its start to its end. Each time it would look at all objects of vLLM.
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None  # which engines call as they end
    gc.enable()


def run(arguments: list[str]) -> None:
    """Run the program that the arguments name."""
    multiprocessing.get_context = get_context
    waiting_ranks.register()
    module = arguments[0] == "-m"
    sys.argv = arguments[module:]
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    run(sys.argv[1:])
