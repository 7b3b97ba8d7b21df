"""What a worker builds in the place of vLLM's own: model runners, the speculator, logits processors, attention."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm_gsd.upstream.patching import replaced


@contextmanager
def building_v1_runner(runner: type) -> Iterator[None]:
    """While a CPU worker sets up its device: its V1 model runner is ``runner``, with all logits processors."""
    with (
        replaced("vllm.v1.worker.cpu_worker:CPUModelRunner", lambda upstream: runner),
        replaced("vllm.v1.worker.gpu_model_runner:build_logitsprocs", _with_all_processors),
    ):
        yield


@contextmanager
def building_v2_cpu_runner(runner: type) -> Iterator[None]:
    """While a CPU worker sets up its device: its V2 model runner is ``runner``."""
    with replaced("vllm.v1.worker.cpu.model_runner:CPUModelRunner", lambda upstream: runner):
        yield


@contextmanager
def building_speculator(build: Callable[..., Any]) -> Iterator[None]:
    """While a V2 model runner is made: its speculator is ``build(vllm_config, device)``."""

    def init_speculator(vllm_config, device, req_states):
        return build(vllm_config, device)

    with replaced("vllm.v1.worker.gpu.model_runner:init_speculator", lambda upstream: init_speculator):
        yield


@contextmanager
def attention_backends(paths: Mapping[Any, str]) -> Iterator[None]:
    """While a model's layers are built: their attention backends are ours; before and after, other engines' stay.

    vLLM remembers for the whole process which class it chose for a layer's shape, so that is forgotten at both ends.

    Args:
        paths: dotted paths of backend classes by ``AttentionBackendEnum``.
    """
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import register_backend

    before = {backend: backend.get_path() for backend in paths if backend.is_overridden()}
    for backend, path in paths.items():
        register_backend(backend, path)
    selector._cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        for backend in paths:
            backend.clear_override()
            if backend in before:
                register_backend(backend, before[backend])
        selector._cached_get_attn_backend.cache_clear()


def _with_all_processors(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """``build_logitsprocs`` as without speculation: with min_p, logit_bias and custom processors."""

    @functools.wraps(upstream)
    def build_logitsprocs(vllm_config, *args, **kwargs):
        vllm_config = copy.copy(vllm_config)
        vllm_config.speculative_config = None
        return upstream(vllm_config, *args, **kwargs)

    return build_logitsprocs
