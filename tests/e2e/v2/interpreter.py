"""Model Runner V2 on the CPU: vLLM's Triton kernels under Triton's interpreter.

Slow, but the real engine: what vLLM runs on GPUs, kernel by kernel. ``enable`` must come before vLLM is imported, so
these engines are forked from a process of their own.
"""

import os
import sys

# vLLM's own switch. A user needs none: with a real Triton backend vLLM takes V2 by itself.
SETTINGS = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}


def enable() -> None:
    """Let vLLM find a Triton backend for the CPU, and take Model Runner V2."""
    assert "vllm" not in sys.modules, "vLLM has looked for Triton already"
    os.environ.update(SETTINGS)
    from triton.backends import Backend, backends
    from triton.backends.compiler import BaseBackend
    from triton.backends.driver import DriverBase

    class InterpretedDriver(DriverBase):
        @classmethod
        def is_active(cls) -> bool:
            return True

    # Interpreted kernels are never compiled: any class will do.
    backends["cpu"] = Backend(BaseBackend, InterpretedDriver)


def turn_on_async_scheduling() -> None:
    """Schedule a step while the one before runs: vLLM's CPU platform turns that off after everything else."""
    from vllm.platforms import current_platform

    upstream = current_platform.check_and_update_config

    def check_and_update_config(vllm_config):
        upstream(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    type(current_platform).check_and_update_config = staticmethod(check_and_update_config)
