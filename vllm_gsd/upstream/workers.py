"""What a worker builds in the place of vLLM's own: model runners, the speculator, logits processors, attention."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
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


def take_over_attention(backends: dict[str, str]) -> None:
    """Register attention backends under the names of vLLM's own.

    Args:
        backends: dotted paths of classes by the names of ``AttentionBackendEnum``.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, path in backends.items():
        register_backend(AttentionBackendEnum[name], path)


def _with_all_processors(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """``build_logitsprocs`` as without speculation: with min_p, logit_bias and custom processors."""

    @functools.wraps(upstream)
    def build_logitsprocs(vllm_config, *args, **kwargs):
        vllm_config = copy.copy(vllm_config)
        vllm_config.speculative_config = None
        return upstream(vllm_config, *args, **kwargs)

    return build_logitsprocs
