"""Has vLLM multiply by our kernel, where that is the faster one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from vllm_gsd.ops.linear import linear, pack_weight, packing, packs, read_columns

# Beside our options in ``VllmConfig.additional_config``, and so in the name of vLLM's cache of compiled code. What is
# compiled has the layout of packed weights in it, and vLLM drops the guards that would notice another one.
PACKED_KEY = "gsd_packed_weights"


class PacksWeights:
    """A CPU worker whose models' bfloat16 matrices are packed for :func:`vllm_gsd.ops.linear.linear`."""

    vllm_config: Any

    def load_model(self, **kwargs: Any) -> None:
        """Load the target, and with it the draft."""
        packs_here = packs_weights(torch.empty(16, 2, dtype=torch.bfloat16))
        self.vllm_config.additional_config[PACKED_KEY] = packing() if packs_here else None
        with _packing() as embeddings:
            super().load_model(**kwargs)  # type: ignore[misc]
        model = self.vllm_config.model_config
        if model.head_dtype == model.dtype:  # else upstream multiplies by the LM head's weight itself
            _pack_lm_heads(embeddings)


@contextmanager
def _packing() -> Iterator[Iterable[torch.nn.Module]]:
    """Upstream packs weights for oneDNN in a function that its layers look up by name; there is no hook.

    Yields:
        The embeddings and LM heads that are in use in the end; their weights are as they were.
    """
    upstream = utils.dispatch_cpu_unquantized_gemm
    embeddings: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        if not packs_weights(layer.weight):
            upstream(layer, remove_weight)
            return
        if remove_weight:
            layer.weight = torch.nn.Parameter(pack_weight(layer.weight.detach()), requires_grad=False)
            layer.cpu_linear = linear
        else:
            layer.cpu_linear = _PackedOnce()
            embeddings.add(layer)

    utils.dispatch_cpu_unquantized_gemm = dispatch
    try:
        yield embeddings
    finally:
        utils.dispatch_cpu_unquantized_gemm = upstream


def _pack_lm_heads(embeddings: Iterable[torch.nn.Module]) -> None:
    """Keep the weights of LM heads packed only, and with them the embeddings tied to them: rows are read from there."""
    sharing: dict[int, list[torch.nn.Module]] = {}
    for layer in embeddings:
        if type(layer.quant_method) is UnquantizedEmbeddingMethod:
            sharing.setdefault(id(layer.weight), []).append(layer)
    for layers in sharing.values():
        if any(isinstance(layer, ParallelLMHead) for layer in layers):
            packed = torch.nn.Parameter(pack_weight(layers[0].weight.detach()), requires_grad=False)
            for layer in layers:
                layer.weight, layer.cpu_linear, layer.quant_method = packed, linear, _PackedEmbedding()


class _PackedEmbedding(UnquantizedEmbeddingMethod):
    """Of layers whose ``weight`` is packed."""

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        return read_columns(layer.weight, input_)


class _PackedOnce:
    """``cpu_linear`` of an embedding, whose weight stays for those who read rows of it.

    Packed when it is first multiplied by, as few are.
    """

    packed: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.packed is None:
            self.packed = pack_weight(weight.detach())
        return linear(x, self.packed, bias)


def packs_weights(weight: torch.Tensor) -> bool:
    """Whether to pack a weight for our kernel.

    Not where there are matrix units (AMX), nor beside AMD's own library, which vLLM takes where it is installed.
    """
    upstream_is_better = torch.cpu._is_amx_tile_supported() or hasattr(torch.ops.zentorch, "zentorch_linear_unary")
    return not upstream_is_better and packs(weight)
