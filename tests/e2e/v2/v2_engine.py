"""Engines with Model Runner V2; see ``interpreter``."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import interpreter
import start_probes
from engine_process import Engine, measure_briefly
from forking_server import ForkingServer

# Small limits, because the time of interpreted kernels grows with the size of their buffers.
OPTIONS = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 1 << 24,
    "skip_tokenizer_init": True,
}
# scripts/setup puts Triton here, where vLLM for the CPU does not find it.
TRITON = Path(sys.prefix) / "triton"
HAVE_TRITON = find_spec("triton") is not None or TRITON.is_dir()
WITHOUT_TRITON = "Model Runner V2 needs Triton, which scripts/setup installs"


def variables_of_programs() -> dict[str, str]:
    """Environment variables of programs that ``forking_v2`` runs."""
    here = Path(__file__).parent
    path = (here, here.parent, here.parents[1], TRITON, os.environ.get("PYTHONPATH"))
    return {**interpreter.SETTINGS, "PYTHONPATH": os.pathsep.join(str(folder) for folder in path if folder)}


class V2Engine(Engine):
    """An ``LLM`` with Model Runner V2 in its own process.

    Args:
        model: as for ``Engine``.
        speculative_config: as for ``Engine``.
        async_scheduling: whether to schedule asynchronously, as on GPUs; vLLM's CPU platform turns it off.
        gpu_attention: whether to use the Triton attention kernels, KV layout and worker start of GPUs.
        cuda_graphs: whether to emulate CUDA graphs; needs ``gpu_attention``.
        split_groups: whether every layer has its own attention group.
        costs: whether to measure costs. Otherwise, every level is drafted and every node verified.
        first: functions that the engine's process calls before vLLM is configured.
        options: more arguments for ``LLM``.
    """

    server = ForkingServer("v2", "preload_v2", **variables_of_programs())

    def __init__(
        self,
        model,
        speculative_config=None,
        async_scheduling: bool = False,
        gpu_attention: bool = False,
        cuda_graphs: bool = False,
        split_groups: bool = False,
        costs: bool = False,
        first: tuple = (),
        **options,
    ):
        before = [measure_briefly if costs else interpreter.leave_costs_out, *first]
        before += [interpreter.turn_on_async_scheduling] if async_scheduling else []
        before += [interpreter.attend_as_on_gpus] if gpu_attention else []
        before += [interpreter.emulate_cuda_graphs] if cuda_graphs else []
        before += [interpreter.split_attention_groups] if split_groups else []
        before += [interpreter.start_as_on_gpus] if gpu_attention else []
        after = [uses_v2, start_probes.remember_start] if gpu_attention else [uses_v2]
        with mock.patch.dict(os.environ, variables_of_programs()):
            super().__init__(model, speculative_config, after, before, **{**OPTIONS, **options})


def uses_v2(llm) -> None:
    """Check that the engine uses Model Runner V2."""
    assert llm.llm_engine.vllm_config.use_v2_model_runner
