"""Has vLLM's layers multiply by our kernel on a CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from vllm_gsd.ops.linear import linear, pack_weight, read_columns
from vllm_gsd.upstream.patching import replaced


@contextmanager
def packing(packs: Callable[[torch.Tensor], bool]) -> Iterator[Iterable[torch.nn.Module]]:
    """While a model is loaded: weights that ``packs`` wants are packed for :func:`vllm_gsd.ops.linear.linear`.

    Yields:
        The embeddings and LM heads that are in use in the end; their weights are as they were.
    """
    embeddings: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def make(upstream: Callable[..., None]) -> Callable[..., None]:
        def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
            if not packs(layer.weight):
                upstream(layer, remove_weight)
                return
            if remove_weight:
                layer.weight = torch.nn.Parameter(pack_weight(layer.weight.detach()), requires_grad=False)
                layer.cpu_linear = linear
            else:
                layer.cpu_linear = _PackedOnce()
                embeddings.add(layer)

        return dispatch

    with replaced("vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm", make):
        yield embeddings


def pack_lm_heads(embeddings: Iterable[torch.nn.Module]) -> None:
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
