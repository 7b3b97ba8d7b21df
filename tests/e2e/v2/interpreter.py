"""Model Runner V2 on the CPU: vLLM's Triton kernels run in Triton's interpreter.

This is slow, but it is the real engine with all kernels that vLLM runs on GPUs. ``enable`` must be called before vLLM
is imported, so these engines are forked from their own server process.
"""

import os
import sys

import faster_interpreter

# vLLM's own switches. Users do not need them: with a real Triton backend, vLLM chooses V2 by itself.
SETTINGS = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}


def enable() -> None:
    """Let vLLM find a Triton backend for the CPU, and choose Model Runner V2."""
    assert "vllm" not in sys.modules, "vLLM must not be imported before Triton is set up"
    os.environ.update(SETTINGS)
    from triton.backends import Backend, backends
    from triton.backends.compiler import BaseBackend
    from triton.backends.driver import DriverBase

    class InterpretedDriver(DriverBase):
        @classmethod
        def is_active(cls) -> bool:
            return True

    # Interpreted kernels are never compiled, so any class works.
    backends["cpu"] = Backend(BaseBackend, InterpretedDriver)
    faster_interpreter.make_faster()


def leave_costs_out() -> None:
    """Draft every level and verify every node, because the costs of interpreted kernels are not realistic."""
    from vllm_gsd.engine.observe import measure_phases

    measure_phases.measure_costs = lambda runner: None


def turn_on_async_scheduling() -> None:
    """Turn on asynchronous scheduling, which vLLM's CPU platform turns off at the end of its configuration."""
    from vllm.platforms import current_platform

    upstream = current_platform.check_and_update_config

    def check_and_update_config(vllm_config):
        upstream(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    type(current_platform).check_and_update_config = staticmethod(check_and_update_config)


def attend_as_on_gpus() -> None:
    """Use vLLM's Triton attention backend, extended by our attention along graphs, and the KV layout of GPUs."""
    import torch
    from vllm.platforms import current_platform

    backend = "vllm_gsd.engine.attention.cuda.TreeTritonAttentionBackend"
    type(current_platform).get_attn_backend_cls = classmethod(lambda *_, **__: backend)
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # only launch parameters depend on it


def split_attention_groups() -> None:
    """Give every layer its own attention group, as vLLM does for layers with different shapes."""
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.utils import AttentionGroup

    upstream = model_runner.init_attn_backend

    def init_attn_backend(kv_cache_config, vllm_config, device, **options):
        whole, support, block_sizes = upstream(kv_cache_config, vllm_config, device, **options)
        split = [
            [
                AttentionGroup(group.backend, [name], group.kv_cache_spec, number)
                for group in groups
                for name in group.layer_names
            ]
            for number, groups in enumerate(whole)
        ]
        for number, groups in enumerate(split):
            for group in groups:
                group.create_metadata_builders(vllm_config, device, block_sizes[number])
        return split, support, block_sizes

    model_runner.init_attn_backend = init_attn_backend


def emulate_cuda_graphs() -> None:
    """Emulate the bookkeeping of full and piecewise CUDA graphs.

    Replaying a full graph calls the captured function with the tensors that it had at capture. As on a GPU, new values
    reach it only if they are written into these tensors. Of piecewise graphs, only the padding is emulated.
    """
    from vllm.config import CUDAGraphMode, VllmConfig
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu import cudagraph_utils, model_runner

    upstream = current_platform.check_and_update_config

    def check_and_update_config(vllm_config):
        upstream(vllm_config)
        compilation, rows = vllm_config.compilation_config, vllm_config.num_speculative_tokens + 1
        compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
        # A batch of three requests needs the full graph for four.
        compilation.cudagraph_capture_sizes = [2, 4, rows, 2 * rows, 4 * rows]
        compilation.max_cudagraph_capture_size = 4 * rows

    class Recorded:
        def __init__(self, forward):
            self.forward = forward

        def replay(self):
            self.forward(CUDAGraphMode.NONE)

    def capture(self, create_forward_fn, *_):
        for mode, descs in self._capture_descs.items():
            for desc in descs:
                create_forward_fn(desc, warmup=True)(CUDAGraphMode.NONE)
                if mode == CUDAGraphMode.FULL:
                    self.graphs[desc] = Recorded(create_forward_fn(desc, warmup=False))
                    self.graphs[desc].replay()
        self._graphs_captured = True

    VllmConfig._normalize_piecewise_cudagraph_mode = lambda *_, **__: None  # no model is compiled here
    cudagraph_utils.CudaGraphManager.capture = capture
    cudagraph_utils.has_compiled_submodule = model_runner.has_compiled_submodule = lambda model: True
    type(current_platform).check_and_update_config = staticmethod(check_and_update_config)
    type(current_platform).get_global_graph_pool = type(current_platform).graph_pool_handle = lambda self: None
    model_runner.lock_workspace = lambda: None


def start_as_on_gpus() -> None:
    """Profile memory, warm up kernels and capture CUDA graphs at start, which vLLM's CPU worker does not do.

    The worker's attribute ``start`` records the numbers of rows and calls, and memory pools.
    """
    from start_probes import Start
    from vllm.v1.worker.cpu_worker import CPUWorker

    from vllm_gsd.engine.v2.worker import V2Worker

    load, available = V2Worker.load_model, CPUWorker.determine_available_memory
    warm_up = CPUWorker.compile_or_warm_up_model

    def load_model(self, **kwargs):
        self.start = Start()
        with self.start.watch_pools(self):
            load(self, **kwargs)

    def determine_available_memory(self):
        if not hasattr(self, "start"):  # an engine without gsd
            self.start = Start()
        with self.start.watch_profile(self.model_runner):
            self.model_runner.profile_run()
        self.model_runner.profile_cudagraph_memory()
        return available(self)

    def compile_or_warm_up_model(self):
        from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup, warmup_kernels

        times = warm_up(self)
        arguments = self.model_runner, self.execute_model, self.sample_tokens
        with self.start.watch_warm_up(self.model_runner):
            assert run_mixed_prefill_decode_warmup(*arguments, num_tokens=16)
            warmup_kernels(*arguments)
        if self.model_runner.needs_cudagraph_capture():
            self.model_runner.capture_model()
        return times

    V2Worker.load_model = load_model
    CPUWorker.determine_available_memory = determine_available_memory
    CPUWorker.compile_or_warm_up_model = compile_or_warm_up_model
