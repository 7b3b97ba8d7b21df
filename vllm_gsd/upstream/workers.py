"""Replaces what a worker builds: the model runner, speculator, logits processors and attention backends."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from vllm_gsd.upstream.patching import replaced

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.worker.gpu.states import RequestState


@contextmanager
def building_v1_runner(runner: type) -> Iterator[None]:
    """Make a CPU worker build ``runner`` as its V1 model runner, with all logits processors."""
    with (
        replaced("vllm.v1.worker.cpu_worker:CPUModelRunner", lambda upstream: runner),
        replaced("vllm.v1.worker.gpu_model_runner:build_logitsprocs", _with_all_processors),
    ):
        yield


def building_v2_cpu_runner(runner: type) -> AbstractContextManager[None]:
    """Make a CPU worker build ``runner`` as its V2 model runner."""
    return replaced("vllm.v1.worker.cpu.model_runner:CPUModelRunner", lambda upstream: runner)


def building_speculator(build: Callable[..., Any]) -> AbstractContextManager[None]:
    """Make a V2 model runner build its speculator with ``build(vllm_config, device)``."""

    def init_speculator(vllm_config: VllmConfig, device: torch.device, req_states: RequestState) -> Any:
        return build(vllm_config, device)

    return replaced("vllm.v1.worker.gpu.model_runner:init_speculator", lambda upstream: init_speculator)


@contextmanager
def attention_backends(paths: Mapping[AttentionBackendEnum, str]) -> Iterator[None]:
    """Build the layers of a model with our attention backends; other engines of the process keep theirs.

    ``paths`` are dotted paths of our backend classes, by the backend that each replaces. vLLM caches its choice of
    backend for the whole process, so the cache is cleared when the context starts and ends.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import register_backend

    before = {backend: backend.get_path() for backend in paths if backend.is_overridden()}
    for backend, path in paths.items():
        register_backend(backend, path)
    selector._cached_get_attn_backend.cache_clear()
    try:
        with preferred(paths) if current_platform.is_cuda() else nullcontext():
            yield
    finally:
        for backend in paths:
            backend.clear_override()
            if backend in before:
                register_backend(backend, before[backend])
        selector._cached_get_attn_backend.cache_clear()


def preferred(backends: Container[AttentionBackendEnum]) -> AbstractContextManager[None]:
    """Make vLLM's automatic choice on NVIDIA GPUs prefer these attention backends to all others, in its own order."""

    def make(upstream: Callable[..., list[AttentionBackendEnum]]) -> Callable[..., list[AttentionBackendEnum]]:
        def priorities(*args: Any, **kwargs: Any) -> list[AttentionBackendEnum]:
            return sorted(upstream(*args, **kwargs), key=lambda backend: backend not in backends)

        return priorities

    return replaced("vllm.platforms.cuda:_get_backend_priorities", make)


def _with_all_processors(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``build_logitsprocs`` to include min_p, logit_bias and custom processors despite speculative decoding."""

    @functools.wraps(upstream)
    def build_logitsprocs(vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
        vllm_config = copy.copy(vllm_config)
        vllm_config.speculative_config = None
        return upstream(vllm_config, *args, **kwargs)

    return build_logitsprocs
