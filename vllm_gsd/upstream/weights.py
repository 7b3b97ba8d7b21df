"""Makes vLLM's layers use our CPU kernel for matrix products."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from vllm_gsd.cpu.linear import linear, pack_weight, read_columns
from vllm_gsd.upstream.patching import replaced


@contextmanager
def packing(packs: Callable[[torch.Tensor], bool]) -> Iterator[Iterable[torch.nn.Module]]:
    """Pack the weights that ``packs`` accepts, of models loaded inside this context, for ``vllm_gsd.cpu.linear``.

    Yields:
        The embeddings and LM heads, for :func:`pack_lm_heads`; their own weights stay unpacked in this context.
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
    """Store only the packed weights of the LM heads among ``packing``'s embeddings, and of those tied to them."""
    sharing: dict[int, list[torch.nn.Module]] = {}
    for layer in embeddings:
        if type(layer.quant_method) is UnquantizedEmbeddingMethod:
            sharing.setdefault(id(layer.weight), []).append(layer)
    for layers in sharing.values():
        if any(isinstance(layer, ParallelLMHead) for layer in layers):
            store_packed(layers)


def store_packed(layers: Sequence[torch.nn.Module]) -> None:
    """Replace the weight that some layers share by a packed copy."""
    packed = torch.nn.Parameter(pack_weight(layers[0].weight.detach()), requires_grad=False)
    for layer in layers:
        layer.weight, layer.cpu_linear, layer.quant_method = packed, linear, _PackedEmbedding()


class _PackedEmbedding(UnquantizedEmbeddingMethod):
    """The embedding method of layers whose ``weight`` is packed."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack a weight that was read again."""
        store_packed([layer])

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        return read_columns(layer.weight, input_)


class _PackedOnce:
    """The ``cpu_linear`` of an embedding, which keeps its original weight for row lookups.

    It packs the weight at the first matrix product, because few embeddings are used for one.
    """

    packed: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.packed is None:
            self.packed = pack_weight(weight.detach())
        return linear(x, self.packed, bias)
