"""Runs a Python program (a file or ``-m MODULE``) that forks its processes instead of spawning them.

Usage: ``python forking.py PROGRAM ...``.

On CPUs, vLLM spawns its processes because of OpenMP's threads. Each spawned process imports vLLM again, which takes ten
seconds of CPU time, and a server with two engines has eight processes. The tests' processes have one thread each, so
they can be forked safely, as vLLM does on other platforms.
"""

import gc
import logging.config
import multiprocessing
import runpy
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).with_name("plugins")))
import waiting_ranks

upstream = multiprocessing.get_context


def get_context(method: str | None = None):
    """``multiprocessing.get_context`` that returns the fork context for "spawn"."""
    return upstream("fork" if method == "spawn" else method)


def handle_existing_loggers(*args, handle=logging.config._handle_existing_loggers) -> None:
    """``logging.config``'s function, which clears the caches of all loggers hundreds of times, clearing them once."""
    manager = logging.Logger.manager
    manager._clear_cache = lambda: None
    try:
        handle(*args)
    finally:
        del manager._clear_cache
        manager._clear_cache()


def import_vllm() -> None:
    """Import vLLM and do other work that all engines share, in the process from which engines are forked."""
    gc.disable()
    logging.config._handle_existing_loggers = handle_existing_loggers  # every process configures its logging
    import vllm.entrypoints.launchers.cli_args
    import vllm.entrypoints.llm
    import vllm.model_executor.layers.quantization.online.base
    import vllm.model_executor.models.llama
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    # vLLM would start a process to import and inspect the model's class, which takes ten seconds the first time.
    registry._run_in_subprocess = lambda inspect: inspect()
    if not HAS_TRITON:
        import vllm.v1.worker.cpu_worker  # noqa: F401

        # This searches all modules for Triton kernels to replace. Do it once, here.
        current_platform.register_triton_kernel_overrides()
        type(current_platform).register_triton_kernel_overrides = lambda platform: None
        import vllm_gsd.engine.v1.worker  # noqa: F401  (changes nothing of vLLM, which the plugin's hooks do)
    # An engine collects garbage nine times. Freezing vLLM's objects keeps each collection from scanning them all.
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None  # engines call it at shutdown
    gc.enable()


def run(arguments: list[str]) -> None:
    """Run the program given by the command-line arguments."""
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
